"""Loans: memory that the plan reserves, and that nothing uses yet, holds weights that would be streamed otherwise.

A loan is made when a unit is released: the weights are copied out of its slot, so no byte is read for it. From then on
the unit's reads leave these weights out. A loan is recalled between calls; it frees its memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.layout.swap import holdings
from mlx_flash.memory.arena import Arena
from mlx_flash.memory.footprint import release_freed_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up
from mlx_flash.storage.placement import Placement, without
from mlx_flash.storage.prefetcher import GOLDEN
from mlx_flash.streaming.stream import WeightStream


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


@dataclass(slots=True)
class _Unit:
    module: nn.Module
    holdings: object
    placement: Placement


class Loans:
    """The weights of one model that are in memory for as long as nothing else needs it."""

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream
        self._units: dict[int, _Unit] = {}
        self._order: list[Lendable] = []
        self._lent: dict[Lendable, Arena] = {}
        self._least = 0

    @property
    def nbytes(self) -> int:
        """Memory of all loans in bytes."""
        return sum([array.nbytes for array in self._lent])

    @property
    def saved_bytes(self) -> int:
        """Bytes of weights that a pass need not read, because they are lent."""
        return sum([array.view.nbytes for array in self._lent])

    def add(self, module: nn.Module, placement: Placement, arrays: Sequence[Lendable]) -> None:
        """Add the arrays of a unit that may be lent, what computes with them, and the reads of all its weights."""
        self._units.update((array.unit, _Unit(module, holdings(module), placement)) for array in arrays[:1])
        self._order += arrays

    def settle(self) -> None:
        """Spread the arrays that are lent first over all units, so that reading stays even. Call after the last add."""
        ranks = {id(array): rank * GOLDEN % 1.0 for rank, array in enumerate(self._order)}
        self._order.sort(key=lambda array: ranks[id(array)])
        self._least = min([array.nbytes for array in self._order], default=0)

    def lend(self, nbytes: int) -> int:
        """Allow so much more memory for loans; the units take it as they are released. Replaces the last call's.

        Returns:
            The bytes that no weight has use for.
        """
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
        for array in sorted(self._lent, key=lambda array: self._stream.is_in_slot(array.unit)):
            if nbytes <= 0:
                break
            nbytes -= array.nbytes
            self._end(array)
        release_freed_memory()

    def close(self) -> None:
        """Forget everything; the caller binds the arrays."""
        for forgotten in (self._units, self._order, self._stream.to_copy_out, self._lent):
            forgotten.clear()

    def _copy_out(self, index: int, arrays: Sequence[Lendable], memory: memoryview) -> None:
        """Copy arrays out of a slot that is about to be released."""
        unit = self._units[index]
        if holdings(unit.module) != unit.holdings:
            # A call left something in the module, which may refer to arrays in the slot.
            self._order = [array for array in self._order if array.unit != index]
            return
        for array in arrays:
            arena = Arena(array.view.nbytes, is_read_into=False)
            arena.memory[:] = memory[array.start : array.start + array.view.nbytes]
            array.bind(arena.view(0, array.view.shape, array.view.dtype))
            self._lent[array] = arena
        self._change_reads(index)

    def _end(self, array: Lendable) -> None:
        """Read an array with its unit again, and copy it back to the slot if the unit is there."""
        arena = self._lent.pop(array)

        def put_back(memory: memoryview) -> None:
            memory[array.start : array.start + array.view.nbytes] = arena.memory

        self._change_reads(array.unit)
        self._stream.complete(array.unit, put_back)
        array.bind(array.view)

    def _change_reads(self, index: int) -> None:
        lent = [range(array.start, array.start + array.view.nbytes) for array in self._lent if array.unit == index]
        self._stream.change_reads(index, without(self._units[index].placement, lent))
