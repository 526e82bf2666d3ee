"""Threads that run tasks."""

from __future__ import annotations

import concurrent.futures.thread
import threading
from collections.abc import Callable

from interrupt_points import Operation, interrupted_in, total_points
from mlx_flash.workers import Workers

FILES = (str(threading.__file__), str(concurrent.futures.thread.__file__), "workers.py")


def test_workers_go_on_after_an_interrupted_submit() -> None:
    with Workers(1, "mlx-flash-test") as workers:
        assert [workers.submit(int).result(10) for _ in range(4)] == [0] * 4

        def program(run: Callable[[Operation], bool]) -> None:
            run(lambda: workers.submit(int))
            assert [workers.submit(int).result(10) for _ in range(2)] == [0, 0]

        for number in range(total_points(program, FILES)):
            assert interrupted_in(program, number, FILES) is None or len(workers._threads) == 1
    assert not [thread for thread in threading.enumerate() if "mlx-flash-test" in thread.name]
