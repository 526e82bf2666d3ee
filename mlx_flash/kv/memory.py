"""Keys and values of one layer in memory: in one buffer for attention, or parked.

New rows are assigned to a slice of the buffer. MLX does that in place while nothing else refers to the buffer, and
copies it otherwise. So pending computations keep the values that they were given.

A parked sequence is a list of immutable pages that its copies share. It gets a buffer of its own when tokens come.
While there are pages, they alone count; otherwise the number of tokens decides how much of the buffers does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_flash.kv.kvledger import Layer
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import Component, InMemory, MemoryPages, Page, RowLayout, cut, num_tokens, slices


class Buffers(NamedTuple):
    """The memory of a layer, with its sizes."""

    arrays: list[mx.array]  # with room behind the tokens; none before the first tokens and while parked
    pages: MemoryPages  # the tokens while parked
    layout: RowLayout | None  # of the rows; None before the first tokens
    capacity: int  # number of tokens that the arrays have room for
    nbytes: int  # of the arrays

    @classmethod
    def of(cls, layout: RowLayout | None, arrays: Sequence[mx.array] = (), pages: MemoryPages = ()) -> Buffers:
        """Return buffers, or pages, with their sizes, to be a layer's memory."""
        capacity = int(arrays[0].shape[2]) if arrays else 0
        return cls(list(arrays), pages, layout, capacity, sum([array.nbytes for array in arrays]))


NO_BUFFERS = Buffers.of(None)
"""The buffers of a layer that never held a token."""


class MemoryRows:
    """The arrays of one layer's cache, each ``(batch, heads, tokens, width)``, and the number of tokens in them."""

    def __init__(
        self, options: KVOptions, arrays: Sequence[mx.array] = (), length: int = 0, num_forgotten: int = 0
    ) -> None:
        self.buffers = NO_BUFFERS  # replaced as a whole
        if arrays:
            mx.eval(arrays)
            self.buffers = Buffers.of(RowLayout.of(arrays, options.step), arrays)
        self.num_forgotten = num_forgotten  # tokens that were dropped from between the others
        self.num_rows = length  # in the buffers; it does not count while parked
        self._options = options

    @property
    def arrays(self) -> list[mx.array]:
        """The buffers, with room behind the tokens; empty before the first tokens and while parked."""
        return self.buffers.arrays

    @property
    def pages(self) -> MemoryPages:
        """The tokens while parked."""
        return self.buffers.pages

    @property
    def layout(self) -> RowLayout | None:
        """Layout of the rows; None before the first ones."""
        return self.buffers.layout

    @property
    def length(self) -> int:
        """Number of tokens."""
        pages = self.buffers.pages
        return num_tokens(pages) if pages else self.num_rows

    @property
    def in_numbers(self) -> Layer:
        """The layer as the ledger sees it."""
        buffers, layout = self.buffers, self.buffers.layout
        pages = tuple([(id(page.where), page.where.nbytes) for page in buffers.pages])
        return Layer(layout.widths if layout is not None else (), self.length, buffers.capacity, pages)

    def takes_more(self, num_new: int) -> bool:
        """Return whether so many new tokens take more memory. Called for each token."""
        capacity = self.buffers.capacity
        return not capacity or self.num_rows + num_new > capacity

    def append(self, new: Sequence[mx.array]) -> None:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each buffer."""
        num_new = new[0].shape[2]
        if self.takes_more(num_new):
            length = self.length
            grown = self._grown(new, length)
            self.num_rows = length
            self.buffers = grown
        end = self.num_rows + num_new
        place = ..., slice(self.num_rows, end), slice(None)
        for array, rows in zip(self.buffers.arrays, new, strict=True):
            array[place] = rows
        self.num_rows = end

    def begin(self, new: Sequence[mx.array]) -> None:
        """Make room for the first tokens."""
        self.buffers = self._grown(new, 0)

    def _grown(self, new: Sequence[mx.array], length: int) -> Buffers:
        """Return buffers with all tokens, so many, and room for new ones."""
        old = self.buffers
        layout = old.layout or RowLayout.of(new, self._options.step)
        room = self._options.capacity_after(length, old.capacity, new[0].shape[2]) - length
        arrays = [component.zeros(room) for component in layout.components]
        if length:
            pieces = slices(old.pages, 0, length) if old.pages else [[array[..., :length, :]] for array in old.arrays]
            arrays = [mx.concatenate([*some, rest], axis=2) for some, rest in zip(pieces, arrays, strict=True)]
        if old.pages:
            mx.eval(arrays)  # frees unshared pages now, instead of after all layers have grown
        return Buffers.of(layout, arrays)

    def fetch(self) -> list[mx.array]:
        """Return all tokens, without the room behind them. Copy them if parked."""
        arrays, length = self.buffers.arrays, self.num_rows
        if not arrays:
            return self.read(0, self.length)
        return [*arrays] if length == self.buffers.capacity else [array[..., :length, :] for array in arrays]

    def read(self, start: int, stop: int) -> list[mx.array]:
        """Return the rows of some tokens. Copy them if parked."""
        if self.arrays or self.layout is None:
            return [array[..., start:stop, :] for array in self.arrays]
        pieces = slices(self.pages, start, stop)
        return [_joined(pieces[i] if pieces else (), c) for i, c in enumerate(self.layout.components)]

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on."""
        if self.pages:
            self.hold(cut(self.pages, length))
        else:
            self.num_rows = length

    def without(self, start: int, stop: int) -> MemoryRows:
        """Return the rows without some tokens; those behind them move up. Evaluate them."""
        if not self.pages:
            kept = [mx.concatenate([a[..., :start, :], a[..., stop : self.length, :]], axis=2) for a in self.arrays]
            return MemoryRows(self._options, kept, self.length - stop + start, self.num_forgotten + stop - start)
        other = MemoryRows(self._options, num_forgotten=self.num_forgotten + stop - start)
        other.hold((*cut(self.pages, start), *self.copied(stop)), self.layout)
        return other

    def copied(self, start: int) -> MemoryPages:
        """Return a page with copies of the tokens from ``start`` on; none if there are none."""
        rest = self.length - start
        return (Page(InMemory(self.read(start, self.length)), rest),) if rest else ()

    def hold(self, pages: MemoryPages, layout: RowLayout | None = None) -> None:
        """Hold pages with all tokens instead of buffers. They have this layout if there were no tokens before."""
        if not pages:
            self.num_rows = 0
        self.buffers = Buffers.of(layout or self.layout, pages=pages)


def append_within(store: MemoryRows, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array] | None:
    """Add keys and values to a layer whose buffers have room for them, and return all; None where they have no room.

    Called for nearly every token and layer: loops over two arrays would take a tenth of its time.
    """
    start, buffers = store.num_rows, store.buffers
    end = start + keys.shape[2]
    if end > buffers.capacity:  # which is 0 while parked
        return None
    all_keys, all_values = buffers.arrays
    place = ..., slice(start, end), slice(None)
    all_keys[place] = keys
    all_values[place] = values
    store.num_rows = end
    if end == buffers.capacity:
        return all_keys, all_values
    place = ..., slice(end), slice(None)
    return all_keys[place], all_values[place]


def shortened(array: mx.array, length: int) -> mx.array:
    """Return a copy of the first rows, ``(batch, heads, tokens, width)``; it is evaluated."""
    found = mx.contiguous(array[..., :length, :])
    mx.eval(found)
    return found


def _joined(pieces: Sequence[mx.array], component: Component) -> mx.array:
    if not pieces:
        return component.zeros(0)
    return mx.concatenate(list(pieces), axis=2) if len(pieces) > 1 else pieces[0]
