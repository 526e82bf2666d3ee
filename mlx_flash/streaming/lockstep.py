"""Lockstep: several forward calls of one model that share a pass over the streamed weights.

Each call runs as a greenlet until it needs a streamed unit. The unit is acquired once, the calls that wait for it run
on it one after another, each at its own shape, and the unit is released. Every call computes what it would compute
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from mlx_flash.streaming.stream import WeightStream

Task = Callable[[], Any]


class Lockstep:
    """One pass over the weights for several calls.

    Args:
        stream: the weights.
        before: called with the number of a task each time before it runs.
        after: called with the number of a task each time after it ran.
        progress: called after each unit with the number of units so far. What it raises ends the pass.
    """

    def __init__(
        self,
        stream: WeightStream,
        before: Callable[[int], None],
        after: Callable[[int], None],
        progress: Callable[[int], None],
    ) -> None:
        self._stream = stream
        self._before = before
        self._after = after
        self._progress = progress
        self._hub = getcurrent()

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Return the results of all tasks.

        At each unit the tasks run in their order, and none overtakes another, so that one may depend on what those
        before it did there.

        Raises:
            ReadError: weights could not be read. What a task raises is raised too; no task goes on then.
        """
        results: list[Any] = [None] * len(tasks)

        def runner(number: int) -> Task:
            def run() -> None:
                results[number] = tasks[number]()

            return run

        greenlets = [greenlet(runner(number)) for number in range(len(tasks))]
        self._stream.wait_turn = self._hub.switch
        try:
            num_units = 0
            waiting = {number: self._resume(number, greenlets) for number in range(len(tasks))}
            while live := [number for number in waiting if not greenlets[number].dead]:
                unit = waiting[live[0]]
                self._stream.acquire(unit)
                try:
                    for number in live:
                        if waiting[number] != unit:
                            break
                        waiting[number] = self._resume(number, greenlets)
                finally:
                    self._stream.release(unit)
                num_units += 1
                self._progress(num_units)
        finally:
            self._stream.wait_turn = None
            for task in greenlets:
                if not task.dead:
                    task.throw(GreenletExit)
        return results

    def _resume(self, number: int, greenlets: Sequence[greenlet]) -> Any:
        """Run a task until it needs a unit. Return the unit, or None at its end."""
        self._before(number)
        unit = greenlets[number].switch()
        self._after(number)
        return unit
