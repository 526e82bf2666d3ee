"""Threads that run tasks."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from interrupt_points import Operation, interrupted_in, total_points
from mlx_flash.workers import InOrder, Job, Workers, joined_to_the_end

FILES = (str(threading.__file__), "workers.py")


def run_one(workers: Workers) -> None:
    """Run a task in a pool, and wait for it."""
    job = Job(int)
    workers.submit(job.run)
    job.result()


def test_workers_go_on_after_an_interrupted_submit() -> None:
    workers = Workers(1, "mlx-flash-test")
    for _ in range(4):
        run_one(workers)

    def program(run: Callable[[Operation], bool]) -> None:
        run(lambda: workers.submit(Job(int).run))
        for _ in range(2):
            run_one(workers)

    for number in range(total_points(program, FILES)):
        assert interrupted_in(program, number, FILES) is None or len(workers._threads) == 1
    workers.shutdown()
    assert not names_of_threads()


def test_threads_start_after_an_interrupted_submit() -> None:
    """One that waited for a lock of its starter kept the process from ending."""

    def program(run: Callable[[Operation], bool]) -> None:
        workers = Workers(1, "mlx-flash-test")
        run(lambda: workers.submit(Job(int).run))
        run_one(workers)
        workers.shutdown()
        wait_until(lambda: not names_of_threads())

    for number in range(total_points(program, FILES)):
        interrupted_in(program, number, FILES)


def test_threads_of_a_forgotten_pool_end() -> None:
    workers = Workers(2, "mlx-flash-test")
    run_one(workers)
    del workers
    wait_until(lambda: not names_of_threads())


def test_a_pool_starts_no_more_threads_than_work() -> None:
    workers, go_on = Workers(3, "mlx-flash-test"), threading.Event()
    for _ in range(3):
        run_one(workers)
    assert len(names_of_threads()) == 1
    jobs = [Job(go_on.wait, 10) for _ in range(5)]
    for job in jobs:
        workers.submit(job.run)
    assert len(names_of_threads()) == 3
    go_on.set()
    workers.shutdown()
    assert all(job.done() for job in jobs) and not names_of_threads()
    with pytest.raises(RuntimeError, match="mlx-flash-test have ended"):
        workers.submit(Job(int).run)


def test_a_wait_for_a_job_ends_with_it_or_at_its_moment() -> None:
    workers, go_on = Workers(2, "mlx-flash-test"), threading.Event()
    job = Job(go_on.wait, 10)
    workers.submit(job.run)
    began = time.perf_counter()
    assert not job.done_by(began) and not job.done_by(began + 0.02)
    assert time.perf_counter() - began >= 0.02
    workers.submit(Job(lambda: time.sleep(0.02) or go_on.set()).run)  # type: ignore[func-returns-value]
    assert job.done_by(began + 10)
    assert time.perf_counter() - began < 5
    workers.shutdown()


def names_of_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "mlx-flash-test" in each.name and each.is_alive()]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.0001)


def test_jobs_end_after_an_interrupted_use() -> None:
    workers = Workers(1, "mlx-flash-test")

    def use(job: Job) -> None:
        job.done()
        if not job.cancel():
            job.result()

    def program(run: Callable[[Operation], bool]) -> None:
        jobs = [Job(time.sleep, 0.001) for _ in range(2)]
        for job in jobs:
            workers.submit(job.run)
            run(lambda job=job: use(job))  # type: ignore[misc]
        run_one(workers)
        assert all(job.done() for job in jobs)

    for number in range(total_points(program, FILES)):
        interrupted_in(program, number, FILES)
    workers.shutdown()


def test_a_job_tells_its_error_and_whether_it_was_cancelled() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    job, cancelled = Job(fail), Job(fail)
    job.run()
    with pytest.raises(ZeroDivisionError):
        job.result()
    assert job.done() and not job.cancel()
    assert cancelled.cancel() and cancelled.cancel() and cancelled.done()
    cancelled.run()
    with pytest.raises(CancelledError):
        cancelled.result()


def test_jobs_run_in_order_after_errors_and_interrupts() -> None:
    thread, done = InOrder("mlx-flash-test"), list[int]()

    def work(number: int) -> None:
        time.sleep(0.001)
        done.append(number)
        if number == 1:
            raise ZeroDivisionError

    def program(run: Callable[[Operation], bool]) -> None:
        done.clear()
        jobs = [Job(work, number) for number in range(4)]
        for job in jobs[:2]:
            thread.submit(job)
        run(lambda: thread.submit(jobs[2]))
        thread.submit(jobs[3])
        assert jobs[3].error() is None and isinstance(jobs[1].error(), ZeroDivisionError)
        assert done in ([0, 1, 2, 3], [0, 1, 3])  # the interrupt may have come first

    for number in range(total_points(program, FILES)):
        interrupted_in(program, number, FILES)
    begun, late = Job(time.sleep, 0.1), Job(work, 9)
    thread.submit(begun)
    thread.submit(late)
    while begun._call is not None:
        time.sleep(0.001)
    thread.close()
    assert begun.error() is None and isinstance(late.error(), CancelledError) and 9 not in done


def test_jobs_run_after_an_interrupted_submit_of_one_that_fails() -> None:
    """Its error ended the only task, and who waited for the next job waited for ever."""

    def fail() -> None:
        raise ZeroDivisionError

    thread = InOrder("mlx-flash-test")

    def program(run: Callable[[Operation], bool]) -> None:
        first, jobs, found = Job(int), [Job(fail), Job(int)], list[BaseException | None]()
        thread.submit(first)
        first.result()
        run(lambda: thread.submit(jobs[0]))
        threads = waiting_for(jobs[1], found, 1)
        thread.submit(jobs[1])
        assert have_ended(threads) and found == [None]

    for number in range(total_points(program, FILES)):
        interrupted_in(program, number, FILES)
    thread.close()


def waiting_for(job: Job, found: list[BaseException | None], number: int = 2) -> list[threading.Thread]:
    """Return threads that wait for a job."""
    threads = [threading.Thread(target=lambda: found.append(job.error()), daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    while len(job._waiting) < number:
        time.sleep(0.0001)
    return threads


def have_ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(0.3)
    return not any(thread.is_alive() for thread in threads)


def test_close_wakes_threads_that_wait_for_cancelled_jobs() -> None:
    thread, go_on, found = InOrder("mlx-flash-test"), threading.Event(), list[BaseException | None]()
    late = Job(int)
    thread.submit(Job(go_on.wait, 10))
    thread.submit(late)
    threads = waiting_for(late, found)
    threading.Timer(0.01, go_on.set).start()
    thread.close()
    assert have_ended(threads) and [type(error) for error in found] == [CancelledError] * 2


def test_waiting_threads_end_after_an_interrupted_cancel() -> None:
    """The thread that would have run the job wakes them then."""

    def program(run: Callable[[Operation], bool]) -> None:
        job, found = Job(int), list[BaseException | None]()
        threads = waiting_for(job, found)
        run(job.cancel)
        job.run()
        assert have_ended(threads) and len({type(error) for error in found}) == 1

    for number in range(total_points(program, ("workers.py",))):
        interrupted_in(program, number, ("workers.py",))


def test_waiting_threads_end_after_an_interrupted_close() -> None:
    def program(run: Callable[[Operation], bool]) -> None:
        thread, go_on, found = InOrder("mlx-flash-test"), threading.Event(), list[BaseException | None]()
        jobs = [Job(int) for _ in range(2)]
        for job in (Job(go_on.wait, 10), *jobs):
            thread.submit(job)
        threads = [each for job in jobs for each in waiting_for(job, found, 1)]
        timer = threading.Timer(0.001, go_on.set)
        timer.start()
        run(thread.close)
        assert have_ended(threads)
        thread.close()

    for number in range(total_points(program, ("workers.py",))):
        interrupted_in(program, number, ("workers.py",))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_a_join_waits_for_what_a_library_does_at_the_end_of_a_thread() -> None:
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0
    thread = threading.Thread(target=libc.pthread_setspecific, args=(key, ctypes.c_void_p(200_000)))
    with joined_to_the_end():
        thread.start()
        thread.join()
        assert not Path(f"/proc/self/task/{thread.native_id}").exists()
    libc.pthread_key_delete(key)
