"""Keys and values of one layer in memory: in one buffer for attention, or parked.

New rows are assigned to a slice of the buffer. MLX does that in place while nothing else refers to the buffer, and
copies it otherwise. So pending computations keep the values that they were given.

A parked sequence is a list of immutable pages that its copies share. It gets a buffer of its own when tokens come.

An interrupt may end any method at any point. While there are pages, they alone count; otherwise the number of tokens
decides how much of the buffers does. Each method changes these last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import ClassVar, NamedTuple

import mlx.core as mx

from mlx_flash.kv.layout import RowLayout
from mlx_flash.kv.ledger import Layer
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import InMemory, MemoryPages, Page, cut, num_tokens, slices

_changes = count(1)


class Changes:
    """The number of the last change of any layer's memory. Sums over layers hold until there is another one."""

    last: ClassVar[int] = 0

    @classmethod
    def note(cls) -> None:
        """Note that a layer is about to change."""
        cls.last = next(_changes)


class Buffers(NamedTuple):
    """The memory of a layer, with its sizes.

    Attributes:
        arrays: the buffers, with room behind the tokens; empty before the first tokens and while parked.
        pages: the tokens while parked.
        capacity: number of tokens that the buffers have room for.
        nbytes: bytes of the buffers, without pages.
        widths: bytes of a token in each array; none before the first tokens.
    """

    arrays: list[mx.array]
    pages: MemoryPages
    capacity: int
    nbytes: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Sequence[mx.array], pages: MemoryPages = ()) -> Buffers:
        """Return buffers, or pages, with their sizes, to be a layer's memory."""
        Changes.note()
        capacity = int(arrays[0].shape[2]) if arrays else 0
        examples = pages[0].where.arrays if pages else arrays
        widths = tuple([_token_bytes(array) for array in examples])
        return cls(list(arrays), pages, capacity, sum([array.nbytes for array in arrays]), widths)


class MemoryRows:
    """The arrays of one layer's cache, each ``(batch, heads, tokens, width)``, and the number of tokens in them.

    Args:
        options: the form of the cache, and its growth.
        arrays: the buffers to begin with, which are evaluated.
        length: number of tokens in them.
        num_forgotten: number of tokens that were dropped from between them.

    Attributes:
        buffers: its memory, which is replaced as a whole.
        num_forgotten: as given.
    """

    def __init__(
        self, options: KVOptions, arrays: Sequence[mx.array] = (), length: int = 0, num_forgotten: int = 0
    ) -> None:
        mx.eval(arrays)
        self.buffers = Buffers.of(arrays)
        self.num_forgotten = num_forgotten
        self._length = length
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
    def length(self) -> int:
        """Number of tokens."""
        pages = self.buffers.pages
        return num_tokens(pages) if pages else self._length

    @property
    def examples(self) -> Sequence[mx.array]:
        """Arrays with the same types, and shapes except for tokens; empty before the first tokens."""
        return self.pages[0].where.arrays if self.pages else self.arrays

    @property
    def layout(self) -> RowLayout | None:
        """Layout of the rows; None before the first ones."""
        return RowLayout.of(self.examples, self._options.step) if self.examples else None

    @property
    def in_numbers(self) -> Layer:
        """The layer as the ledger sees it."""
        buffers = self.buffers
        pages = tuple([(id(page.where), page.where.nbytes) for page in buffers.pages])
        return Layer(buffers.widths, self.length, buffers.capacity, pages)

    def takes_more(self, num_new: int) -> bool:
        """Return whether so many new tokens take more memory. Called for each token."""
        buffers = self.buffers
        return bool(buffers.pages) or not buffers.arrays or self._length + num_new > buffers.capacity

    def append(self, new: Sequence[mx.array]) -> None:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each buffer."""
        end = self.length + new[0].shape[2]
        if self.takes_more(new[0].shape[2]):
            length, grown = self.length, _grown(self, new, self._options)
            self._length = length
            self.buffers = grown
        for array, rows in zip(self.arrays, new, strict=True):
            array[..., self._length : end, :] = rows
        self._length = end

    def fetch(self) -> list[mx.array]:
        """Return all tokens, without the room behind them. Copy them if parked."""
        if self.arrays and self._length == self.buffers.capacity:
            return list(self.arrays)
        return self.read(0, self.length)

    def read(self, start: int, stop: int) -> list[mx.array]:
        """Return the rows of some tokens. Copy them if parked."""
        if self.pages:
            found = slices(self.pages, start, stop)
            return [_joined(pieces, like) for pieces, like in zip(found, self.examples, strict=True)]
        return [array[..., start:stop, :] for array in self.arrays]

    def truncate(self, length: int) -> None:
        """Remove the tokens from ``length`` on."""
        if self.pages:
            self.park(cut(self.pages, length))
        else:
            self._length = length

    def without(self, start: int, stop: int) -> MemoryRows:
        """Return the rows without some tokens; those behind them move up. Evaluate them."""
        if not self.pages:
            kept = [mx.concatenate([a[..., :start, :], a[..., stop : self.length, :]], axis=2) for a in self.arrays]
            return MemoryRows(self._options, kept, self.length - stop + start, self.num_forgotten + stop - start)
        other = MemoryRows(self._options, num_forgotten=self.num_forgotten + stop - start)
        rest = self.length - stop
        behind = (Page(InMemory(self.read(stop, self.length)), rest),) if rest else ()
        other.park((*cut(self.pages, start), *behind), self.examples)
        return other

    def as_pages(self, known: MemoryPages) -> MemoryPages:
        """Return all tokens as pages. Copy and evaluate those that are in none.

        Args:
            known: pages with the same first tokens; not used while parked.
        """
        length = num_tokens(known)
        if self.pages or length == self.length:
            return self.pages or known
        return (*known, Page(InMemory(self.read(length, self.length)), self.length - length))

    def park(self, pages: MemoryPages, examples: Sequence[mx.array] = ()) -> None:
        """Replace the buffers by pages.

        Args:
            pages: all tokens.
            examples: arrays with the same shapes except for tokens, if there were no tokens before.
        """
        if pages:
            self.buffers = Buffers.of([], pages)
        else:  # buffers without room keep the shapes
            none = [mx.zeros((*a.shape[:2], 0, a.shape[3]), a.dtype) for a in examples or self.examples]
            self._length = 0
            self.buffers = Buffers.of(none)


def shortened(array: mx.array, length: int) -> mx.array:
    """Return a copy of the first rows, ``(batch, heads, tokens, width)``; it is evaluated."""
    found = mx.contiguous(array[..., :length, :])
    mx.eval(found)
    return found


def _token_bytes(array: mx.array) -> int:
    batch, heads, _, width = array.shape
    return int(batch * heads * width * array.itemsize)


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


def _grown(rows: MemoryRows, new: Sequence[mx.array], options: KVOptions) -> Buffers:
    """Return buffers with all tokens, and room for new ones."""
    length = rows.length
    capacity = options.capacity_after(length, rows.buffers.capacity, new[0].shape[2])
    old = slices(rows.pages, 0, length) if rows.pages else [[a[..., :length, :]] for a in rows.arrays if length]
    arrays = [
        _longer(pieces, capacity, like)
        for pieces, like in zip(old or [[] for _ in new], rows.examples or new, strict=True)
    ]
    if rows.pages:
        mx.eval(arrays)  # frees unshared pages now, instead of after all layers have grown
    return Buffers.of(arrays)
