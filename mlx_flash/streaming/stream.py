"""The ring: which unit's weights are in which slot, what is read next, the modules and the calls that wait for it.

A unit is bound to one slot for good. A slot is refilled only after it was released, so reading ahead can never
overwrite weights in use, whatever the number of units and slots. What follows what is learned from the calls
themselves; a wrong guess costs one read that was not asked for, never a wrong result.

A module is changed by giving it a subclass of its own class, and changed back by giving it its class back. Attribute
access, ``isinstance``, parameter names and the model's own forward loop, masks and caches stay what they were; no
forward pass is written again here.

In lockstep, several forward calls share a pass over the weights. Each call runs as a greenlet until it needs a streamed
unit. The unit is acquired once, the calls that wait for it run on it one after another, each at its own shape, and the
unit is released. Every call computes what it would compute alone. Calls of one lane share a prompt cache and run in
order at each unit. Lanes know nothing of each other.

Where ranks exchange something, each call has a message of its own, and all ranks must send and receive them in one
order, although each has other units in between. So the calls of a group meet there, on all ranks. The ranks agree on
those that have failed, and the others go on in their order. Groups meet in turn: while one rank computes a group, the
next rank computes the one before it. A unit is held until all groups have been there, so that it is read once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from mlx_flash import enginethread
from mlx_flash.errors import FlashError, ReadError
from mlx_flash.layout.parts import Parameter, Unit
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import (
    SwappedClass,
    clone_with,
    holdings,
    restore_class,
    swap_class,
)
from mlx_flash.memory.arena import Arena
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.footprint import release_freed_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.ranks import HAND_ON, HAND_OVER
from mlx_flash.storage.placement import Piece, Placement, Segment, without
from mlx_flash.storage.prefetcher import GOLDEN, BackgroundPrefetcher, Reads, Ticket
from mlx_flash.storage.safetensors import TensorRecord

POISON = 0xFF
"""NaN in every floating-point dtype."""

_PATIENCE = 7 / 8
"""Share of the time that a unit was computed for, in which the next one's weights may come. That time has been measured
with this wait in it. A share of 1 would keep one that was too long for good, and with it slots that could be filled."""

Place = int | tuple[str, int]
"""A unit by its number, or another place where calls in lockstep wait for each other, by name and number."""

UnitState = Literal["waiting", "reading", "resident", "computing", "done"]
"""State of a unit: not read yet, in flight, in its slot, in use, computed."""


class GuessEndedError(Exception):
    """A speculative router call reached weights that are not resident."""


@dataclass(slots=True)
class StreamStats:
    """Counters of the ring."""

    num_acquired: int = 0  # units that were waited for
    num_unpredicted: int = 0  # those whose read had not been started ahead
    wait_seconds: float = 0.0  # time spent waiting for their bytes, with reads in flight
    # time from there to their release, in which the model computes with them. Time in which two units are held counts
    # once.
    held_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Slot:
    """A buffer and the unit in it, or on its way there: then it has a ticket."""

    arena: Arena
    unit: StreamedUnit | None = None
    ticket: Ticket | None = None
    held: bool = False
    ready_at: float = 0.0

    def empty(self) -> None:
        """Forget the unit, and wait until nothing writes to the slot."""
        if self.ticket is not None:
            self.ticket.cancel()
        self.unit, self.ticket, self.held = None, None, False


@dataclass(slots=True, eq=False)
class StreamedUnit:
    """A unit of the ring."""

    number: int
    name: str  # for people
    reads: Reads  # fill a slot with the unit's weights
    slot: _Slot  # the slot it lives in
    successor: int = 0  # number of the unit that followed last time
    released_at: float = -math.inf
    seconds: float = 0.0  # for which it was computed, where units compute ahead

    @property
    def is_in_slot(self) -> bool:
        """True if the unit's weights are in its slot, or on their way there."""
        return self.slot.unit is self


def take_turns(num_units: int, num_slots: int) -> list[int]:
    """The slot of each unit, so that neighbours are in different ones, the last unit and the first included.

    Units and slots need not divide: then some rounds leave the last slot out. A slot comes back after
    ``num_slots - 1`` units at the earliest, unless there are too few units.
    """
    if not num_slots:
        return []
    num_short = -num_units % num_slots
    if num_short * (num_slots - 1) > num_units - num_slots:
        return [i % num_slots for i in range(num_units)]
    whole = num_units - num_short * (num_slots - 1)
    return [i % num_slots for i in range(whole)] + [i % (num_slots - 1) for i in range(num_units - whole)]


class WeightStream:
    """Fills slots ahead of the calls that need them."""

    def __init__(self, slots: Sequence[Arena], reader: BackgroundPrefetcher, poison: bool, num_units: int) -> None:
        self.stats = StreamStats()
        # A unit may be called before the one before it is computed. Only in a pass, which ends with release_computed().
        self.computes_ahead = False
        self.is_guessing = False  # nothing is to be waited for now: calls end with GuessEndedError
        # MLX lets go of intermediate results some time after the results are there.
        self.lets_go_late = has_own_memory()
        # While several calls share a pass, returns when a call may go on at a place. A unit is acquired then.
        self.wait_turn: Callable[[Place], None] | None = None
        # Called with the reads of each unit that is about to be released, and the memory of its slot.
        self.before_release: Callable[[Sequence[Segment], memoryview], None] | None = None
        # Called once with that memory, by number of the unit.
        self.to_copy_out: dict[int, Callable[[memoryview], None]] = {}
        self.units: list[StreamedUnit] = []
        self._slots = [_Slot(arena) for arena in slots]
        self._reader = reader
        self._poison = poison
        self._turns = take_turns(num_units, len(slots))
        self._last: StreamedUnit | None = None
        self._computing: tuple[StreamedUnit, Callable[[], None]] | None = None
        self._last_release = 0.0

    def add(self, name: str, placement: Placement) -> tuple[int, Arena]:
        """Add a unit after the others. Return its number, and the memory for it. The first follows the last."""
        index = len(self.units)
        slot = self._slots[self._turns[index]]
        self.units.append(StreamedUnit(index, name, self._reader.prepare(placement.segments), slot))
        if index:
            self.units[index - 1].successor = index
        return index, slot.arena

    def start(self) -> None:
        for unit in self.units[: len(self._slots)]:
            unit.slot.ticket, unit.slot.unit = self._reader.start(unit.reads, unit.slot.arena.memory), unit

    def acquire(self, index: int, inputs: Sequence[mx.array] = ()) -> None:
        """Wait until the unit's weights are in its slot; they stay until :meth:`release`. Raises: ReadError.

        Meanwhile its inputs are computed. A unit whose release waits is released before, unless the weights are there
        while it is still computed.
        """
        unit = self.units[index]
        slot = unit.slot
        if self._last is not None:
            self._last.successor = index
        if self._computing is not None:
            before = self._computing[0]
            began = max(self._last_release, before.slot.ready_at)
            # MLX does not tell whether something is computed. So weights may come while that is expected to go on.
            end = began + _PATIENCE * before.seconds
            if slot.unit is not unit or slot.held or not (slot.ticket is None or slot.ticket.done_by(end)):
                self.release_computed()
        self.stats.num_acquired += 1
        self._last = unit  # in this order: see unit_states()
        ticket = slot.ticket
        if slot.unit is not unit:
            mx.async_eval(inputs)
            self.stats.num_unpredicted += 1
            self._read_now(unit)
        elif ticket is not None and not ticket.has_come:
            mx.async_eval(inputs)
            try:
                self.stats.wait_seconds += ticket.wait()
            except ReadError:  # of a read ahead: the disk may work again since
                self._read_now(unit)
        slot.ready_at = time.perf_counter()
        slot.ticket, slot.held = None, True

    def _read_now(self, unit: StreamedUnit) -> None:
        slot = unit.slot
        slot.empty()
        ticket = slot.ticket = self._reader.start(unit.reads, slot.arena.memory)
        slot.unit = unit
        try:
            self.stats.wait_seconds += ticket.wait()
        except ReadError:
            slot.empty()
            raise

    def release(self, index: int, wait: Callable[[], None] | None = None) -> None:
        """Give the unit's slot back, and start the next read into it; the unit before it first.

        ``wait`` returns once everything that reads the slot is evaluated. It is called when the next unit is released
        or has to be waited for, or by :meth:`release_computed`. None where that is evaluated.
        """
        if self._computing is not None:
            self.release_computed()
        unit = self.units[index]
        if wait is not None:
            self._computing = unit, wait
            return
        slot = unit.slot
        if self.before_release is not None:
            self.before_release(unit.reads.segments, slot.arena.memory)
        if index in self.to_copy_out:
            self.to_copy_out.pop(index)(slot.arena.memory)
        now = unit.released_at = time.perf_counter()
        seconds = now - max(slot.ready_at, self._last_release)
        unit.seconds = seconds if self.computes_ahead else 0.0
        self._last_release = now
        self.stats.held_seconds += seconds
        slot.held, slot.unit = False, None
        if self._poison:
            slot.arena.fill(POISON)
        upcoming = unit
        for _ in self.units:
            upcoming = self.units[upcoming.successor]
            if upcoming.slot is slot:
                slot.ticket = self._reader.start(upcoming.reads, slot.arena.memory)
                slot.unit = upcoming  # in this order: a slot with a unit counts as read, or as being read
                break

    def release_computed(self) -> None:
        """Wait for what a unit still computes, and release it. Call it at the end of a pass."""
        if self._computing is not None:
            (unit, wait), self._computing = self._computing, None
            wait()  # after an exception the slot stays held, up to :meth:`recover`
            self.release(unit.number)

    @property
    def holds_units(self) -> bool:
        """True between :meth:`acquire` and :meth:`release` of any unit."""
        return any(slot.held for slot in self._slots)

    def change_reads(self, index: int, placement: Placement) -> None:
        """Fill the unit's slot with other reads from the next time on."""
        self.units[index].reads = self._reader.prepare(placement.segments)

    def recover(self) -> None:
        """Let go of what an interrupted pass held, between passes."""
        self.computes_ahead = False
        self.release_computed()
        for slot in self._slots:
            if slot.held:
                slot.empty()

    def close(self) -> None:
        """Wait until nothing writes to a slot any more."""
        self._computing = None
        for slot in self._slots:
            slot.empty()


def unit_states(stream: WeightStream, since: float) -> list[UnitState]:
    """Return the state of each unit of a stream: done, if it was released since a time of ``time.perf_counter()``.

    Any thread may ask at any time, and may get slightly stale states.
    """
    while True:
        before = stream.stats.num_acquired
        found: list[UnitState] = ["done" if unit.released_at >= since else "waiting" for unit in stream.units]
        for slot in stream._slots:
            unit, ticket = slot.unit, slot.ticket
            if unit is not None:
                is_there = ticket is None or ticket.done()
                found[unit.number] = "computing" if slot.held else "resident" if is_there else "reading"
        if stream._last is not None and found.count("computing") > 1:
            found[stream._last.number] = "resident"  # until the unit before it is computed
        if stream.stats.num_acquired == before:  # else a unit and its successor may both seem to be computing
            return found


class StreamedLayer(SwappedClass):
    """A layer or tile that runs once its weights have arrived and lets them go when its effects are computed.

    The outputs alone are not enough: a recurrent state or an indexer's keys do not feed them, and would later be
    computed from whatever the slot holds by then. Where the stream computes ahead, a layer's effects are waited for
    once the next unit has begun.

    Its state is its number in the stream, the stream, its own class, and the name of the method that computes. The
    method is looked up in each call, since ``verify`` replaces it later.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (work := enginethread.here.call) is None:
            return hand_in(self, *args, **kwargs)
        if work.is_to_end:
            enginethread.check()
        index, stream, kind, method = self._flash_state
        if stream.is_guessing:
            raise GuessEndedError
        if stream.wait_turn is not None:
            compute(args, kwargs)  # now, or the pinned layers of all calls would take memory at once
            stream.wait_turn(index)
            result = getattr(kind, method)(self, *args, **kwargs)
            compute(result, args, kwargs)
            return result
        # What comes before is computed while we wait. MLX holds what is evaluated until it is computed, and copies a
        # cache that it holds when a layer adds to it. So caches are left out.
        is_matrix = len(args) == 1 and not kwargs and isinstance(args[0], mx.array)
        inputs = args if is_matrix else [each for each in (*args, *kwargs.values()) if isinstance(each, mx.array)]
        stream.acquire(index, inputs)
        wait: Callable[[], None] | None = None
        try:
            result = getattr(kind, method)(self, *args, **kwargs)
            if is_matrix and isinstance(result, mx.array):
                effects = [result, *inputs]  # a search takes too long
            else:
                effects = arrays_in(result, args, kwargs)
            if stream.computes_ahead:
                mx.async_eval(effects)
                wait = partial(mx.eval, effects)
            else:
                mx.eval(effects)
                if stream.lets_go_late:
                    mx.synchronize()
        finally:
            stream.release(index, wait)
        return result


def hand_in(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module in the engine thread: a program calls it alone."""
    compute(args, kwargs)  # only this thread can

    def call() -> Any:
        result = module(*args, **kwargs)
        compute(result)
        return result

    return enginethread.run(call)


def compute(*roots: Any) -> None:
    """Compute the arrays in some objects, and wait until MLX has let go of their intermediate results.

    On CUDA, MLX lets go of them some time after the results are there, and the next layer's would come meanwhile.
    """
    mx.eval(arrays_in(*roots))
    if has_own_memory():
        mx.synchronize()


class PinnedLayers:
    """The layers in memory that calls may have to wait for, on a GPU that MLX records work for far ahead.

    MLX keeps the intermediate results of recorded work until it is done: those of all layers, if nobody waits.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.num_at_once: int | None = None  # layers that are computed before the next one begins; None for all

    def compute_at_once(self, number: int | None) -> None:
        """Change :attr:`num_at_once`. Layers that nobody waits for are as they were."""
        if number == self.num_at_once:
            return
        for position, module in enumerate(self.modules, 1):
            is_last = number is not None and position % number == 0
            if is_last and not isinstance(module, ComputedModule):
                swap_class(module, ComputedModule, None)
            elif not is_last and isinstance(module, ComputedModule):
                restore_class(module)
        self.num_at_once = number


class ComputedModule(SwappedClass):
    """A module that is computed, and those before it, before the next one begins."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        compute(result, args, kwargs)
        return result


@dataclass(slots=True)
class HeadState:
    """A head that is computed tile by tile."""

    tiles: Sequence[nn.Module]  # modules that have some of its rows, each a :class:`StreamedLayer`
    whole: nn.Module  # the module with its lazily loaded arrays
    # whether the outputs of the calls to come are not looked at. Then they are not computed: what is returned could be,
    # by MLX alone, reading the whole head.
    is_dropped: bool = False

    def apply(self, method: Callable[[nn.Module, mx.array], mx.array], x: mx.array) -> mx.array:
        """Compute the head with a method of its class. Return the outputs of all tiles, ``(..., rows)``."""
        if self.is_dropped:
            return method(self.whole, x)
        return mx.concatenate([cast(Any, tile)(x) for tile in self.tiles], axis=-1)


class TiledLinear(SwappedClass):
    """A linear layer whose output rows pass through the slots, tile by tile."""

    def __call__(self, x: mx.array) -> mx.array:
        if not enginethread.check():
            return cast(mx.array, hand_in(self, x))
        state: HeadState = self._flash_state
        return state.apply(cast(Any, type(state.whole).__call__), x)


class TableState:
    """An embedding table on disk; ``head`` is set when it serves as the output head too."""

    def __init__(
        self, module: nn.Module, parameters: Sequence[Parameter], reader: BackgroundPrefetcher, head: HeadState | None
    ) -> None:
        self.head = head
        self.whole = {parameter.key: parameter.array for parameter in parameters}
        self.rows = clone_with(module, {})  # of the table's own class: it computes with the rows that a call looks up
        self._reader = reader
        self._records = [record for parameter in parameters for record in parameter.records]

    def look_up(self, wanted: Sequence[int], ids: mx.array) -> mx.array:
        """Compute what the table makes of some ids, which count in the rows that are ``wanted``, in ascending order."""
        tickets, arenas = list[Ticket](), list[Arena]()
        for record, array in zip(self._records, self.whole.values(), strict=True):
            row_bytes = record.nbytes // array.shape[0]
            arenas.append(Arena(len(wanted) * row_bytes))
            segments = _row_segments(record, row_bytes, wanted, self._reader.queue_depth)
            tickets.append(self._reader.submit(segments, arenas[-1].memory, caching="kept"))
        for ticket in tickets:
            ticket.wait()
        try:
            for arena, (key, array) in zip(arenas, self.whole.items(), strict=True):
                dict.__setitem__(self.rows, key, arena.view(0, (len(wanted), *array.shape[1:]), array.dtype))
            return cast(mx.array, cast(Any, self.rows)(ids))
        finally:
            dict.update(self.rows, self.whole)  # the result alone keeps the rows


class EmbeddingRows(SwappedClass):
    """An embedding that reads just the rows it looks up."""

    def __call__(self, ids: mx.array) -> mx.array:
        if not enginethread.check():
            return cast(mx.array, hand_in(self, ids))
        state: TableState = self._flash_state
        num_rows = state.rows["weight"].shape[0]
        # negative ones count from the end
        found = np.array(ids).astype(np.int64)
        found = np.where(found < 0, found + num_rows, found)
        if found.size and not (0 <= found.min() and found.max() < num_rows):  # MLX would read what lies there
            raise IndexError(
                f"token ids from {found.min()} to {found.max()}: the embedding has rows 0 to {num_rows - 1}"
            )
        wanted, positions = np.unique(found, return_inverse=True)
        return state.look_up(wanted.tolist(), mx.array(positions.reshape(ids.shape).astype(np.uint32)))

    def as_linear(self, x: mx.array) -> mx.array:
        if not enginethread.check():
            return cast(mx.array, hand_in(self.as_linear, x))
        state: TableState = self._flash_state
        own: Any = type(state.rows)
        if state.head is None:
            return cast(mx.array, own.as_linear(self, x))
        return state.head.apply(own.as_linear, x)


def _row_segments(record: TensorRecord, row_bytes: int, rows: Sequence[int], num_tasks: int) -> list[Segment]:
    """Return reads that put some rows of a table one after another, in about ``num_tasks`` tasks."""
    pieces = [
        Piece(record.name, record.offset + row * row_bytes, row_bytes, i * row_bytes) for i, row in enumerate(rows)
    ]
    step = max(1, -(-len(pieces) // num_tasks))
    groups = [tuple(pieces[i : i + step]) for i in range(0, len(pieces), step)]
    return [Segment(record.path, group[0].offset, group[-1].end - group[0].offset, None, group) for group in groups]


def tile_module(unit: Unit, start: int, stop: int, views: dict[str, mx.array]) -> nn.Module:
    """The part of a linear layer or embedding that has rows ``start`` to ``stop``: ``views`` of the large parameters,
    slices of the small ones that have a value a row (a bias)."""
    num_rows = unit.module["weight"].shape[0]
    small = {p.key: p.array for p in unit.small if p.array.ndim and p.array.shape[0] == num_rows}
    arrays = {key: array[start:stop] for key, array in small.items()}
    mx.eval(arrays)
    return clone_with(unit.module, {**arrays, **views})


@dataclass(frozen=True, slots=True, eq=False)
class Lendable:
    """One array of a unit that may stay in memory."""

    unit: int  # number of the unit in the stream
    start: int  # first byte of the array in the unit's slot
    view: mx.array  # the array in the slot
    bind: Callable[[mx.array], None]  # makes the unit's module use another array of the same shape and dtype
    nbytes: int = field(init=False)  # memory of a loan in bytes: the array, and the pages around it

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", round_up(self.view.nbytes, DIRECT_ALIGNMENT) + DIRECT_ALIGNMENT)


class Loans:
    """The weights of one model that are in memory, which the plan reserves, for as long as nothing else needs it.

    A loan is made when a unit is released: the weights are copied out of its slot, so no byte is read for it. From then
    on the unit's reads leave these weights out. A loan is recalled between calls; it frees its memory at once.
    """

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream
        self._units: dict[int, tuple[nn.Module, object, Placement]] = {}  # by number, with what modules held
        self._order: list[Lendable] = []
        self._lent: dict[Lendable, Arena] = {}
        self._least = 0

    @property
    def nbytes(self) -> int:
        return sum([array.nbytes for array in self._lent])

    @property
    def saved_bytes(self) -> int:
        """Bytes of weights that a pass need not read, because they are lent."""
        return sum([array.view.nbytes for array in self._lent])

    def add(self, module: nn.Module, placement: Placement, arrays: Sequence[Lendable]) -> None:
        """Add the arrays of a unit that may be lent, what computes with them, and the reads of all its weights."""
        self._units.update((array.unit, (module, holdings(module), placement)) for array in arrays[:1])
        self._order += arrays

    def settle(self) -> None:
        """Spread the arrays that are lent first over all units, so that reading stays even. Call after the last add."""
        ranks = {id(array): rank * GOLDEN % 1.0 for rank, array in enumerate(self._order)}
        self._order.sort(key=lambda array: ranks[id(array)])
        self._least = min([array.nbytes for array in self._order], default=0)

    def lend(self, nbytes: int) -> int:
        """Allow so much memory for more loans, in place of the last call's. Return the rest."""
        self._stream.to_copy_out.clear()
        if nbytes < self._least:
            return nbytes
        promised: dict[int, list[Lendable]] = {}
        for array in self._order:
            if array.nbytes <= nbytes and array not in self._lent:
                nbytes -= array.nbytes
                promised.setdefault(array.unit, []).append(array)
        self._stream.to_copy_out.update((unit, partial(self._copy_out, unit, promised[unit])) for unit in promised)
        return nbytes

    def recall(self, nbytes: int) -> None:
        """Free at least so much memory, or all that is lent. Units that are not in a slot now give first."""
        self._stream.to_copy_out.clear()
        if nbytes <= 0 or not self._lent:
            return
        for array in sorted(self._lent, key=lambda array: self._stream.units[array.unit].is_in_slot):
            if nbytes <= 0:
                break
            nbytes -= array.nbytes
            del self._lent[array]
            self._change_reads(array.unit)
            if (unit := self._stream.units[array.unit]).is_in_slot:
                unit.slot.empty()  # it lacks the array
            array.bind(array.view)
        release_freed_memory()

    def close(self) -> None:
        """Forget everything; the caller binds the arrays."""
        for forgotten in (self._units, self._order, self._stream.to_copy_out, self._lent):
            forgotten.clear()

    def _copy_out(self, index: int, arrays: Sequence[Lendable], memory: memoryview) -> None:
        module, held, _ = self._units[index]
        if holdings(module) != held:
            # A call left something in the module, which may refer to arrays in the slot.
            self._order = [array for array in self._order if array.unit != index]
            return
        for array in arrays:
            arena = Arena(array.view.nbytes, is_read_into=False)
            arena.memory[:] = memory[array.start : array.start + array.view.nbytes]
            array.bind(arena.view(0, array.view.shape, array.view.dtype))
            self._lent[array] = arena
        self._change_reads(index)

    def _change_reads(self, index: int) -> None:
        lent = [range(array.start, array.start + array.view.nbytes) for array in self._lent if array.unit == index]
        self._stream.change_reads(index, without(self._units[index][2], lent))


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
