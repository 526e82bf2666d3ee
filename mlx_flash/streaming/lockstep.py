"""Lockstep: several forward calls of one model that share a pass over the streamed weights.

Each call runs as a greenlet until it needs a streamed unit. The unit is acquired once, the calls that wait for it run
on it one after another, each at its own shape, and the unit is released. Every call computes what it would compute
alone.

Calls of one lane share a prompt cache and run in order at each unit. Lanes know nothing of each other.

Where ranks exchange something, each call has a message of its own, and all ranks must send and receive them in one
order, although each has other units in between. So all calls meet there, on all ranks. The ranks agree on those that
have failed, and the others go on in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from mlx_flash.errors import FlashError
from mlx_flash.streaming.stream import HAND_OVER, Place, WeightStream

Task = Callable[[], Any]

Results = list[list[Any] | Exception]
"""For each lane the results of its tasks, or what one of them raised."""

CALL_ERRORS = (FlashError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of one call, which its lane ends with: no room on the disk, a token that the embedding does not have, a cache
of another model. Other exceptions, such as Ctrl-C, end the pass."""


@dataclass(slots=True)
class _Call:
    """A task on its way: its number over all lanes, and the place that it waits for."""

    number: int
    lane: int
    greenlet: greenlet
    place: Place | None = None
    num_turns: int = 0


class Lockstep:
    """One pass over the weights for several calls.

    Args:
        stream: the weights.
        before: called with the number of a task each time before it runs.
        after: called with the number of a task each time after it ran.
        progress: called after each unit with the number of units so far. What it raises ends the pass.
        agree: called with the results so far where all tasks wait for other ranks, and at the end. Returns them with
            the errors of lanes that failed on other ranks. The lists in it stay what they are.
    """

    def __init__(
        self,
        stream: WeightStream,
        before: Callable[[int], None],
        after: Callable[[int], None],
        progress: Callable[[int], None],
        agree: Callable[[Results], Results] = lambda results: results,
    ) -> None:
        self._stream = stream
        self._before = before
        self._after = after
        self._progress = progress
        self._agree = agree
        self._results: Results = []

    def run(self, lanes: Sequence[Sequence[Task]]) -> Results:
        """Return for each lane the results of its tasks, or what one of them raised. The others go on then.

        At each unit the tasks of a lane run in their order, and none overtakes another, so that one may depend on what
        those before it did there.

        Raises:
            ReadError: weights of a unit could not be read. No task goes on then.
        """
        self._results = [[None] * len(tasks) for tasks in lanes]
        calls: list[_Call] = []
        for lane, tasks in enumerate(lanes):
            for index, task in enumerate(tasks):
                calls.append(_Call(len(calls), lane, greenlet(self._runner(lane, index, task))))
        self._stream.wait_turn = getcurrent().switch
        try:
            self._run(calls)
        finally:
            self._stream.wait_turn = None
            for call in calls:
                _end(call)
                del call.greenlet  # in a traceback it would outlive its thread, which crashes Python's collector
        return self._results

    def _runner(self, lane: int, index: int, task: Task) -> Task:
        def run() -> None:
            results = self._results[lane]
            assert isinstance(results, list)
            try:
                results[index] = task()
            except CALL_ERRORS as error:
                if self._results[lane] is results:
                    self._results[lane] = error

        return run

    def _run(self, calls: list[_Call]) -> None:
        for call in calls:
            self._resume(call, calls)
        num_units = 0
        while True:
            live = [call for call in calls if not call.greenlet.dead and not _waits_for_ranks(call)]
            if not live:
                live = self._agreed(calls)
            if not live:
                return
            first = min(live, key=lambda call: call.num_turns)  # nobody falls behind
            place = next(call.place for call in live if call.lane == first.lane)
            with ExitStack() as held:
                if isinstance(place, int):
                    self._stream.acquire(place)
                    held.callback(self._stream.release, place)
                self._take_turns(live, place)
            num_units += isinstance(place, int)
            self._progress(num_units)

    def _agreed(self, calls: Sequence[_Call]) -> list[_Call]:
        """Return the calls that go on, on all ranks."""
        self._results = self._agree(self._results)
        for call in calls:
            if isinstance(self._results[call.lane], Exception):
                _end(call)
        return [call for call in calls if not call.greenlet.dead]

    def _take_turns(self, live: Sequence[_Call], place: Place | None) -> None:
        """Let the first calls of each lane go on that wait for a unit."""
        blocked: set[int] = set()
        for call in live:
            if call.place != place:
                blocked.add(call.lane)
            elif call.lane not in blocked:
                self._resume(call, live)

    def _resume(self, call: _Call, calls: Sequence[_Call]) -> None:
        """Run a task until it needs a unit. When it has failed, end its lane, once each task has got its message."""
        if call.greenlet.dead:
            return
        self._before(call.number)
        call.place = call.greenlet.switch()
        call.num_turns += 1
        if isinstance(self._results[call.lane], Exception):
            for other in calls:
                if other.lane == call.lane and (other is call or not _waits_for_ranks(other)):
                    _end(other)
            return
        self._after(call.number)


def _waits_for_ranks(call: _Call) -> bool:
    return isinstance(call.place, tuple) and call.place[0] == HAND_OVER


def _end(call: _Call) -> None:
    if not call.greenlet.dead:
        call.greenlet.throw(GreenletExit)
