"""Keys and values of one layer in memory: in one buffer for attention, or parked.

New rows are assigned to a slice of the buffer. MLX does that in place while nothing else refers to the buffer, and
copies it otherwise. So pending computations keep the values that they were given.

A parked sequence is a list of immutable pages that its copies share. It gets a buffer of its own when tokens come.
While there are pages, they alone count; otherwise the number of tokens decides how much of the buffers does.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_flash.kv.kvledger import Layer
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import Component, InMemory, MemoryPages, Page, RowLayout, cut, num_tokens, slices


class MemoryRows:
    """The arrays of one layer's cache, each ``(batch, heads, tokens, width)``, and the number of tokens in them.

    Attributes:
        arrays: the buffers, with room behind the tokens; none before the first tokens and while parked.
        capacity: number of tokens that they have room for.
        had_capacity: the same before it was parked. MLX's kernels on CUDA depend on it, so it comes back where it fits.
        pages: the tokens while parked.
        layout: of the rows; None before the first ones.
        num_rows: tokens in the buffers; it does not count while parked.
    """

    def __init__(self, options: KVOptions, arrays: Sequence[mx.array] = (), length: int = 0) -> None:
        self._options = options
        self.num_rows, self.had_capacity = length, 0
        mx.eval(arrays)
        self._replace(RowLayout.of(arrays, options.step) if arrays else None, arrays)

    def _replace(self, layout: RowLayout | None, arrays: Sequence[mx.array] = (), pages: MemoryPages = ()) -> None:
        self.layout, self.arrays, self.pages = layout, [*arrays], pages
        self.capacity = int(arrays[0].shape[2]) if arrays else 0
        self.had_capacity = self.capacity or self.had_capacity

    @property
    def length(self) -> int:
        """Number of tokens."""
        return num_tokens(self.pages) if self.pages else self.num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum([array.nbytes for array in self.arrays])

    @property
    def in_numbers(self) -> Layer:
        """The layer as the ledger sees it."""
        pages = tuple([(id(page.where), page.where.nbytes) for page in self.pages])
        return Layer(self.layout.token_bytes if self.layout is not None else 0, self.length, self.capacity, pages)

    def takes_more(self, num_new: int) -> bool:
        """Return whether so many new tokens take more memory. Called for each token."""
        return not self.capacity or self.num_rows + num_new > self.capacity

    def append(self, new: Sequence[mx.array]) -> None:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each buffer."""
        num_new = new[0].shape[2]
        if self.takes_more(num_new):
            self.grow(new)
        end = self.num_rows + num_new
        place = ..., slice(self.num_rows, end), slice(None)
        for array, rows in zip(self.arrays, new, strict=True):
            array[place] = rows
        self.num_rows = end

    def grow(self, new: Sequence[mx.array]) -> None:
        """Make room for new tokens, in buffers if the others are parked."""
        length, pages = self.length, self.pages
        layout = self.layout or RowLayout.of(new, self._options.step)
        capacity = self._options.capacity_after(length, self.capacity, new[0].shape[2])
        if length + new[0].shape[2] <= self.had_capacity:
            capacity = min(capacity, self.had_capacity)
        arrays = [component.zeros(capacity - length) for component in layout.components]
        if length:
            pieces = slices(pages, 0, length) if pages else [[array[..., :length, :]] for array in self.arrays]
            arrays = [mx.concatenate([*some, rest], axis=2) for some, rest in zip(pieces, arrays, strict=True)]
        if pages:
            mx.eval(arrays)  # frees unshared pages now, instead of after all layers have grown
        self.num_rows = length
        self._replace(layout, arrays)

    def fetch(self) -> list[mx.array]:
        """Return all tokens, without the room behind them. Copy them if parked."""
        arrays, length = self.arrays, self.num_rows
        if not arrays:
            return self.read(0, self.length)
        return [*arrays] if length == self.capacity else [array[..., :length, :] for array in arrays]

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

    def copied(self, start: int) -> MemoryPages:
        """Return a page with copies of the tokens from ``start`` on; none if there are none."""
        rest = self.length - start
        return (Page(InMemory(self.read(start, self.length)), rest),) if rest else ()

    def hold(self, pages: MemoryPages, layout: RowLayout | None = None) -> None:
        """Hold pages with all tokens instead of buffers. They have this layout if there were no tokens before."""
        if not pages:
            self.num_rows = 0
        self._replace(layout or self.layout, pages=pages)


def append_within(store: MemoryRows, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array] | None:
    """Add keys and values to a layer whose buffers have room for them, and return all; None where they have no room.

    Called for nearly every token and layer: loops over two arrays would take a tenth of its time.
    """
    start, capacity = store.num_rows, store.capacity
    end = start + keys.shape[2]
    if end > capacity:  # which is 0 while parked
        return None
    all_keys, all_values = store.arrays
    place = ..., slice(start, end), slice(None)
    all_keys[place] = keys
    all_values[place] = values
    store.num_rows = end
    if end == capacity:
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
