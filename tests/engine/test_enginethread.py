"""The engine thread: whoever asks may be interrupted, or go, at any instruction; the work is done or undone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

from interrupt_points import Tracer
from mlx_flash import enginethread, load_model
from mlx_flash.enginethread import CallEndedError, check, run, tell, whole
from models import LLAMA, same_bits, save, stock
from streamed import config
from waiting import eventually


class Struck(Exception):
    """What the handler of a signal raises."""


@contextmanager
def signal_after(seconds: float) -> Iterator[None]:
    """Send a signal to this process during a block; its handler raises."""

    def handler(*_: Any) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, handler)
    begun = threading.Event()  # starting a thread may take longer than the signal waits
    thread = threading.Thread(target=lambda: (begun.wait(), time.sleep(seconds), os.kill(os.getpid(), signal.SIGUSR1)))
    thread.start()
    begun.set()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def working(
    done: list[str], name: str, seconds: float = 10.0, put_back: Callable[[], object] = lambda: time.sleep(0.05)
) -> Callable[[], str]:
    """Return work that looks often whether it is to end, puts back what it has changed, and notes how it ended."""

    def work() -> str:
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                check()
                time.sleep(0.001)
        except CallEndedError:
            put_back()
            done.append(f"{name} undone")
            raise
        done.append(f"{name} done")
        return name

    return work


def test_work_is_done_in_one_thread_in_the_order_of_callers() -> None:
    names, done = set[str](), list[int]()

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        done.append(number)
        return run(lambda: number)  # at once, or it would wait for itself

    found = list[int]()
    threads = [threading.Thread(target=lambda i=i: found.append(run(lambda: work(i)))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(done) == [*range(20)]
    assert names == {"mlx-flash-engine"}


def test_an_interrupt_at_any_line_leaves_the_thread_alone_and_nothing_under_way() -> None:
    """Also in the lines of Python's own modules: an interrupted `is_alive` made Python 3.11 take it for stopped."""
    thread, handing_in = run(threading.current_thread), enginethread._Call.hand_in.__code__
    begun = list[str]()

    def work() -> None:
        begun.append("work")
        time.sleep(0.002)
        begun.pop()

    for at in range(1, 100):
        left = at

        def strike(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            left -= event == "line" and frame.f_code is not handing_in  # a handler runs before no line of it
            if left == 0:
                sys.settrace(None)
                raise Struck
            return strike

        sys.settrace(strike)
        try:
            run(work)
        except Struck:
            assert not begun, at
        finally:
            sys.settrace(None)
        assert run(threading.current_thread) is thread, at
        if left > 0:
            break
    assert at > 10 and left > 0


def test_an_interrupt_of_its_start_leaves_no_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started, threads = list[threading.Thread](), list[Any]()

    class Noted(enginethread._EngineThread):
        def run(self) -> None:
            started.append(self)
            while self.calls.get() is not None:
                pass

    monkeypatch.setattr(enginethread, "_EngineThread", Noted)
    monkeypatch.setattr(enginethread, "_threads", threads)
    monkeypatch.setattr(enginethread.atexit, "register", lambda *_: None)
    for number in range(100):
        is_struck = Tracer(number, ("enginethread.py",)).strike(enginethread._thread)
        for thread in threads:
            thread.end()
        threads.clear()
        eventually(lambda: not any(thread.is_alive() for thread in started))
        if not is_struck:
            break
    assert len(started) > 3 and not is_struck


def test_further_interrupts_come_after_the_work_was_undone() -> None:
    done = list[str]()

    def put_back() -> None:
        for _ in range(10):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)

    with signal_after(0.05), pytest.raises(Struck):
        try:
            run(working(done, "first", put_back=put_back))
        finally:
            assert done == ["first undone"]


def test_a_second_interrupt_leaves_and_what_is_asked_next_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes too long to undo the work."""
    monkeypatch.setattr(enginethread, "UNDONE_SECONDS", 0.01)
    done, has_left = list[str](), threading.Event()

    def put_back() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # by now the first one has come
        has_left.wait(20)

    with signal_after(0.05), pytest.raises(Struck):
        run(working(done, "first", put_back=put_back))
    assert done == []
    has_left.set()
    assert run(working(done, "second", 0.0)) == "second"
    assert done == ["first undone", "second done"]


def test_what_cannot_be_put_back_goes_on_to_its_end() -> None:
    done = list[str]()

    def work() -> None:
        with whole():
            working(done, "first", 0.2)()
        check()

    with signal_after(0.05), pytest.raises(Struck):
        run(work)
    assert done == ["first done"]


def test_what_is_told_may_raise_and_use_the_thread() -> None:
    done = list[str]()

    def use() -> None:
        assert threading.current_thread() is threading.main_thread()  # which waits
        run(working(done, "within", 0.0))

    def work() -> None:
        tell(use)
        working(done, "first", 0.1)()

    run(work)
    assert done == ["first done", "within done"]  # it has the thread to itself

    def fail() -> None:
        raise Struck

    def failing() -> None:
        tell(fail)
        working(done, "second")()

    with pytest.raises(Struck):
        run(failing)
    assert done[2:] == ["second undone"]


PROGRAM = """
import os, signal, sys, threading, time
from mlx_flash.enginethread import check, run, whole

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        time.sleep(0.01)

run(lambda: None)
"""


UNDER_WAY = """
threading.Thread(target=lambda: run(lambda: work(1000)), daemon=True).start()
time.sleep(0.2)
print("end")
"""

LATE = "import atexit, mlx_flash.enginethread as e; atexit.register(lambda: print(e.run(lambda: e.run(e.check))))"

INTERRUPTED = """
begun, struck = threading.Event(), threading.Event()

def work():
    with whole():
        begun.set()
        struck.wait()
        time.sleep(0.2)

def interrupt(*_):
    struck.set()
    raise KeyboardInterrupt

threading.Thread(target=lambda: run(work), daemon=True).start()
begun.wait()
signal.signal(signal.SIGALRM, interrupt)
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.2)
"""

FORKED = """
child = os.fork()
if not child:
    print(run(lambda: threading.current_thread().name), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(run(lambda: "parent"))
"""

PROGRAMS = {
    "ends with work that nobody waits for": (PROGRAM + UNDER_WAY, "end\n", ""),
    "has registered use before the thread began": (LATE + PROGRAM, "True\n", ""),
    "waits for a pass as it ends": (LATE + PROGRAM + INTERRUPTED, "True\n", "KeyboardInterrupt"),
    "forks a child with a thread of its own": (PROGRAM + FORKED, "mlx-flash-engine\nparent\n", ""),
}
"""Programs, what they print, and a part of their errors."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    text, printed, error = PROGRAMS[name]
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, printed), found.stderr
    assert error in found.stderr and bool(error) == bool(found.stderr)


def test_a_layer_that_a_program_calls_alone(tmp_path: Path) -> None:
    """From any thread, with an input that nobody has computed."""
    folder = save(tmp_path / "model", LLAMA, mx.float32)
    x = mx.random.normal((1, 4, LLAMA["hidden_size"]))
    expected = stock(folder).layers[1](x)
    mx.eval(expected)
    with load_model(folder, config(ram_budget_gb="min"))[0] as model:
        model.start()
        found = list[mx.array]()

        def call() -> None:
            found.append(model.layers[1](x * 1))
            mx.eval(found[-1])  # it may have parts that are not streamed

        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert not enginethread.check()
        assert same_bits(found, [expected, expected])
