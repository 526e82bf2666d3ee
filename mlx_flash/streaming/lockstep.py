"""Lockstep: several forward calls of one model that share a pass over the streamed weights.

Each call runs as a greenlet until it needs a streamed unit. The unit is acquired once, the calls that wait for it run
on it one after another, each at its own shape, and the unit is released. Every call computes what it would compute
alone.

Calls of one lane share a prompt cache and run in order at each unit. Lanes know nothing of each other.

Where ranks exchange something, each call has a message of its own, and all ranks must send and receive them in one
order, although each has other units in between. So the calls of a group meet there, on all ranks. The ranks agree on
those that have failed, and the others go on in their order. Groups meet in turn: while one rank computes a group, the
next rank computes the one before it. A unit is held until all groups have been there, so that it is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from mlx_flash import enginethread
from mlx_flash.errors import FlashError
from mlx_flash.ranks import HAND_ON, HAND_OVER
from mlx_flash.streaming.stream import Place, WeightStream

Task = Callable[[], Any]

Results = list[list[Any] | Exception]
"""For each lane the results of its tasks, or what one of them raised."""

CALL_ERRORS = (FlashError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of one call, which its lane ends with: no room on the disk, a token that the embedding does not have, a cache
of another model. Other exceptions, such as Ctrl-C, end the pass."""


@dataclass(slots=True)
class _Call:
    """A task on its way: its number over all lanes, and the place that it waits for; None before it starts."""

    number: int
    lane: int
    greenlet: greenlet
    place: Place | None = None
    num_turns: int = 0

    @property
    def meeting(self) -> str | None:
        """The place where it waits for other ranks, ``HAND_ON`` or ``HAND_OVER``; None where it does not."""
        name = self.place[0] if isinstance(self.place, tuple) and not self.greenlet.dead else None
        return name if name in (HAND_ON, HAND_OVER) else None


class _Group:
    """Calls that meet other ranks together; lanes are whole."""

    def __init__(self, calls: Sequence[_Call]) -> None:
        self.calls = calls
        self.lanes = sorted({call.lane for call in calls})

    @property
    def going(self) -> list[_Call]:
        return [call for call in self.calls if not call.greenlet.dead]

    @property
    def live(self) -> list[_Call]:
        """The running calls that do not wait for other ranks."""
        return [call for call in self.going if call.meeting is None]

    @property
    def sends(self) -> bool:
        """True if other ranks wait for what the group has computed here."""
        return any(call.meeting == HAND_ON for call in self.going)


@dataclass
class Lockstep:
    """One pass over the weights for several calls.

    ``before`` and ``after`` are called with the number of a task around each of its runs, and ``progress`` with the
    number of runs so far: a caller may leave while many calls run on a unit. ``agree`` takes the results so far of a
    group of lanes where all its tasks wait for other ranks, and at the end; it returns them with the errors of lanes
    that failed on other ranks. The number of groups is the same on all ranks.
    """

    stream: WeightStream
    before: Callable[[int], None]
    after: Callable[[int], None]
    progress: Callable[[int], None]
    agree: Callable[[Results], Results] = lambda results: results
    num_groups: int = 1
    _results: Results = field(default_factory=list)
    _held: int | None = None
    _to_come: list[_Group] = field(default_factory=list)
    _num_runs: int = 0

    def run(self, lanes: Sequence[Sequence[Task]]) -> Results:
        """Return for each lane the results of its tasks, or what one of them raised. The others go on then.

        At each unit the tasks of a lane run in their order, and none overtakes another, so that one may depend on what
        those before it did there. Raises: ReadError, with which all tasks end.
        """
        self._results = [[None] * len(tasks) for tasks in lanes]
        calls: list[_Call] = []
        for lane, tasks in enumerate(lanes):
            for index, task in enumerate(tasks):
                calls.append(_Call(len(calls), lane, greenlet(self._runner(lane, index, task))))
        self.stream.wait_turn = getcurrent().switch
        try:
            self._run([_Group([c for c in calls if c.lane % self.num_groups == i]) for i in range(self.num_groups)])
        finally:
            self._let_go()
            self.stream.wait_turn = None
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

    def _run(self, groups: list[_Group]) -> None:
        while groups:
            group = groups[0]  # the next one to meet other ranks
            places = [(other, _next_place(live)) for other in groups if (live := other.live)]
            # Groups whose next unit is not the held one let the other groups use the held one first.
            free = [one for one in places if not isinstance(one[1], int) or self._held in (None, one[1])]
            if not group.live and (group.sends or not free):
                groups = groups[1:] + [group] * self._meet(group)
            elif free:
                self._visit(*free[0], groups)
            else:
                self._let_go()

    def _meet(self, group: _Group) -> bool:
        """Let calls exchange something with other ranks. Return whether any goes on, which is so on all ranks."""
        agreed = self.agree([self._results[lane] for lane in group.lanes])
        for lane, result in zip(group.lanes, agreed, strict=True):
            self._results[lane] = result
        for call in group.calls:
            if isinstance(self._results[call.lane], Exception):
                _end(call)
        going = group.going
        if going:
            self._take_turns(going, _next_place(going))
        return bool(going)

    def _visit(self, group: _Group, place: Place | None, groups: Sequence[_Group]) -> None:
        """Let the calls of a group go on at a place. A unit is held until all groups have been there."""
        enginethread.check()
        if isinstance(place, int) and self._held is None:
            self.stream.acquire(place)
            self._held, self._to_come = place, list(groups)
        self._take_turns(group.live, place)
        if place == self._held:
            self._to_come = [other for other in self._to_come if other is not group]
            if not self._to_come:
                self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self.stream.release(held)

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
        self.before(call.number)
        call.place = call.greenlet.switch()
        call.num_turns += 1
        if isinstance(self._results[call.lane], Exception):
            for other in calls:
                if other.lane == call.lane and (other is call or other.meeting is None):
                    _end(other)
            return
        self.after(call.number)
        self._num_runs += 1
        self.progress(self._num_runs)


def _next_place(calls: Sequence[_Call]) -> Place | None:
    """Return where the first call of a lane goes on of which a call has had the fewest turns: nobody falls behind."""
    slowest = min(calls, key=lambda call: call.num_turns)
    return next(call.place for call in calls if call.lane == slowest.lane)


def _end(call: _Call) -> None:
    if not call.greenlet.dead:
        call.greenlet.throw(GreenletExit)
