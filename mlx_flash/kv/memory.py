"""Keys and values of one layer in memory: in one buffer for attention, or parked.

New rows are assigned to a slice of the buffer. MLX does that in place while nothing else refers to the buffer, and
copies it otherwise. So pending computations keep the values that they were given.

A parked sequence is a list of immutable parts that its copies share. It gets a buffer of its own when tokens come.

An interrupt may end any method at any point. While there are parts, they alone count; otherwise the number of tokens
decides how much of the buffers does. Each method changes these last.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_flash.kv.options import GROWTH, KVOptions
from mlx_flash.kv.shared import Part, Parts, SharedRows, cut, num_tokens, slices
from mlx_flash.memory.pagecache import round_up


class MemoryRows:
    """The arrays of one layer's cache, each ``(batch, heads, tokens, width)``, and the number of tokens in them.

    Args:
        options: the form of the cache, and its growth.
        arrays: the buffers to begin with, which are evaluated.
        length: number of tokens in them.
        num_forgotten: number of tokens that were dropped from between them.

    Attributes:
        arrays: the buffers, with room behind the tokens; empty before the first tokens and while parked.
        parts: the tokens while parked.
        num_forgotten: as given.
    """

    def __init__(
        self, options: KVOptions, arrays: Sequence[mx.array] = (), length: int = 0, num_forgotten: int = 0
    ) -> None:
        mx.eval(arrays)
        self.arrays = list(arrays)
        self.parts: Parts = ()
        self.num_forgotten = num_forgotten
        self._length = length
        self._options = options

    @property
    def length(self) -> int:
        """Number of tokens."""
        return num_tokens(self.parts) if self.parts else self._length

    @property
    def capacity(self) -> int:
        """Number of tokens that the buffers have room for."""
        return int(self.arrays[0].shape[2]) if self.arrays else 0

    @property
    def examples(self) -> Sequence[mx.array]:
        """Arrays with the same types, and shapes except for tokens; empty before the first tokens."""
        return self.parts[0].rows.arrays if self.parts else self.arrays

    def capacity_after(self, num_new: int) -> int:
        """Return the capacity after new tokens came."""
        end = self.length + num_new
        if self.arrays and not self.parts and end <= self.capacity:
            return self.capacity
        if self._options.form == "step":
            return self.length + round_up(num_new, self._options.step)
        if end <= self._options.reserved_tokens:
            return self._options.reserved_tokens
        return round_up(max(end, self.capacity + self.capacity // GROWTH), self._options.step)

    def takes_more(self, num_new: int) -> bool:
        """Return whether so many new tokens take more memory. Called for each token."""
        return bool(self.parts) or not self.arrays or self._length + num_new > self.capacity

    @property
    def held(self) -> int:
        """Bytes of the buffers, without parts."""
        return sum(array.nbytes for array in self.arrays)

    def append(self, new: Sequence[mx.array]) -> None:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each buffer."""
        end = self.length + new[0].shape[2]
        if self.takes_more(new[0].shape[2]):
            self._grow(new)
        for array, rows in zip(self.arrays, new, strict=True):
            array[..., self._length : end, :] = rows
        self._length = end

    def _grow(self, new: Sequence[mx.array]) -> None:
        capacity, parts, length = self.capacity_after(new[0].shape[2]), self.parts, self.length
        if parts:
            old = slices(parts, 0, length)
        else:
            old = [[array[..., :length, :]] for array in self.arrays] if length else [[] for _ in new]
        examples = self.examples or new
        arrays = [_longer(pieces, capacity, like) for pieces, like in zip(old, examples, strict=True)]
        if parts:
            mx.eval(arrays)  # frees unshared parts now, instead of after all layers have grown
        self.arrays, self._length, self.parts = arrays, length, ()

    def fetch(self) -> list[mx.array]:
        """Return all tokens, without the room behind them. Copy them if parked."""
        if self.arrays and not self.parts and self._length == self.capacity:
            return list(self.arrays)
        return self.read(0, self.length)

    def read(self, start: int, stop: int) -> list[mx.array]:
        """Return the rows of some tokens. Copy them if parked."""
        if self.parts:
            found = slices(self.parts, start, stop)
            return [_joined(pieces, like) for pieces, like in zip(found, self.examples, strict=True)]
        return [array[..., start:stop, :] for array in self.arrays]

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on."""
        if self.parts:
            self.park(cut(self.parts, length))
        else:
            self._length = length

    def without(self, start: int, stop: int) -> MemoryRows:
        """Return the rows without some tokens; those behind them move up. Evaluate them."""
        if not self.parts:
            kept = [mx.concatenate([a[..., :start, :], a[..., stop : self.length, :]], axis=2) for a in self.arrays]
            return MemoryRows(self._options, kept, self.length - stop + start, self.num_forgotten + stop - start)
        other = MemoryRows(self._options, num_forgotten=self.num_forgotten + stop - start)
        rest = self.length - stop
        behind = (Part(SharedRows(self.read(stop, self.length)), rest),) if rest else ()
        other.park((*cut(self.parts, start), *behind), self.examples)
        return other

    def as_parts(self, known: Parts) -> Parts:
        """Return all tokens as parts. Copy and evaluate those that are in none.

        Args:
            known: parts with the same first tokens; not used while parked.
        """
        length = num_tokens(known)
        if self.parts or length == self.length:
            return self.parts or known
        return (*known, Part(SharedRows(self.read(length, self.length)), self.length - length))

    def park(self, parts: Parts, examples: Sequence[mx.array] = ()) -> None:
        """Replace the buffers by parts.

        Args:
            parts: all tokens.
            examples: arrays with the same shapes except for tokens, if there were no tokens before.
        """
        if parts:
            self.parts = parts
            self.arrays = []
        else:  # buffers without room keep the shapes
            none = [mx.zeros((*a.shape[:2], 0, a.shape[3]), a.dtype) for a in examples or self.examples]
            self._length, self.arrays, self.parts = 0, none, ()


def _joined(pieces: Sequence[mx.array], like: mx.array) -> mx.array:
    if not pieces:
        return like[..., :0, :]
    return mx.concatenate(list(pieces), axis=2) if len(pieces) > 1 else pieces[0]


def _longer(pieces: Sequence[mx.array], capacity: int, like: mx.array) -> mx.array:
    """Return some pieces with room behind them."""
    batch, heads, _, width = like.shape
    length = sum(piece.shape[2] for piece in pieces)
    room = mx.zeros((batch, heads, capacity - length, width), like.dtype)
    return mx.concatenate([*pieces, room], axis=2) if length else room
