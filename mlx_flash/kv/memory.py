"""Keys and values of one layer in memory, in one buffer for attention.

New rows are assigned to a slice of the buffer. MLX does that in place while nothing else refers to the buffer, and
copies it otherwise. So pending computations keep the values that they were given.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import RowLayout


class MemoryRows:
    """The arrays of one layer's cache, each ``(batch, heads, tokens, width)``, and the number of tokens in them.

    Attributes:
        arrays: the buffers, with room behind the tokens; none before the first tokens.
        capacity: number of tokens that they have room for.
        had_capacity: the same before they were shortened. MLX's kernels on CUDA depend on it, so it comes back where it
            fits.
        layout: of the rows; None before the first ones.
        length: number of tokens.
    """

    def __init__(self, options: KVOptions, arrays: Sequence[mx.array] = (), length: int = 0) -> None:
        self._options = options
        self.length = length
        self.expected = 0  # as in DiskRows
        mx.eval(arrays)
        self._replace(RowLayout.of(arrays, options.step) if arrays else None, arrays)

    def _replace(self, layout: RowLayout | None, arrays: Sequence[mx.array]) -> None:
        self.layout, self.arrays = layout, [*arrays]
        self.capacity = self.had_capacity = int(arrays[0].shape[2]) if arrays else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum([array.nbytes for array in self.arrays])

    def append(self, new: Sequence[mx.array]) -> None:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each buffer."""
        end = self.length + new[0].shape[2]
        if end > self.capacity:
            self.grow(new)
        place = ..., slice(self.length, end), slice(None)
        for array, rows in zip(self.arrays, new, strict=True):
            array[place] = rows
        self.length = end

    def grow(self, new: Sequence[mx.array]) -> None:
        """Make room for new tokens."""
        length, num_new = self.length, new[0].shape[2]
        layout = self.layout or RowLayout.of(new, self._options.step)
        capacity = self._options.capacity_after(length, self.capacity, num_new)
        if length + num_new <= self.had_capacity:
            capacity = min(capacity, self.had_capacity)
        self._replace(layout, self._copies(capacity) if length else [c.zeros(capacity) for c in layout.components])

    def _copies(self, capacity: int) -> list[mx.array]:
        """Return copies of the buffers with room for so many tokens."""
        length, half = self.length, self.length // 2  # MLX would not copy one part alone
        components = self.layout.components if self.layout is not None else ()
        parts = [
            [array[..., :half, :], array[..., half:length, :], component.zeros(capacity - length)]
            for array, component in zip(self.arrays, components, strict=True)
        ]
        return [mx.concatenate(each, axis=2) for each in parts]

    def fork(self) -> MemoryRows:
        """Return an evaluated copy in buffers of its own."""
        return MemoryRows(self._options, self._copies(self.had_capacity), self.length)

    def shorten(self) -> None:
        """Give back the room behind the tokens, until others come."""
        if self.length:
            self.arrays, self.capacity = [shortened(array, self.length) for array in self.arrays], self.length

    def fetch(self) -> list[mx.array]:
        """Return all tokens, without the room behind them."""
        return [*self.arrays] if self.length == self.capacity else self.read(0, self.length)

    def read(self, start: int, stop: int) -> list[mx.array]:
        """Return the rows of some tokens."""
        return [array[..., start:stop, :] for array in self.arrays]

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on."""
        self.length = length


def append_pair(store: MemoryRows, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Add keys and values to a layer, and return all.

    Called for nearly every token and layer: loops over two arrays would take a tenth of its time.
    """
    start = store.length
    end = start + keys.shape[2]
    if end > store.capacity:
        store.grow([keys, values])
    capacity = store.capacity
    all_keys, all_values = store.arrays
    place = ..., slice(start, end), slice(None)
    all_keys[place] = keys
    all_values[place] = values
    store.length = end
    if end == capacity:
        return all_keys, all_values
    place = ..., slice(end), slice(None)
    return all_keys[place], all_values[place]


def shortened(array: mx.array, length: int) -> mx.array:
    """Return a copy of the first rows, ``(batch, heads, tokens, width)``; it is evaluated."""
    found = mx.contiguous(array[..., :length, :])
    mx.eval(found)
    return found
