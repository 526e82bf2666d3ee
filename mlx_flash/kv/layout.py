"""The layout of a layer's rows in files and in slots. Numbers only.

In a slot the tokens of each head are contiguous, with room for more behind them. A file has chunks of many pages. In a
chunk the tokens of each head are contiguous too, so that reads are large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up

CHUNK_TOKENS = 8192
"""Tokens of a chunk: 2 MiB for each head of 128 numbers of 16 bits."""

RowBytes = Sequence["np.ndarray[Any, np.dtype[np.uint8]]"]
"""Rows of tokens as bytes, ``(heads, tokens, bytes)`` for each array of a layer."""


@dataclass(frozen=True, slots=True)
class Component:
    """One array of a layer's cache.

    Attributes:
        shape: (batch, heads).
        width: items of a head's row.
        dtype: of the items.
    """

    shape: tuple[int, int]
    width: int
    dtype: mx.Dtype

    @property
    def heads(self) -> int:
        """Heads of all sequences."""
        return self.shape[0] * self.shape[1]

    @property
    def width_bytes(self) -> int:
        """Bytes of a head's row."""
        return self.width * int(self.dtype.size)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Positions of rows.

    Attributes:
        components: the arrays of the layer.
        step: tokens of a page.
    """

    components: tuple[Component, ...]
    step: int

    @classmethod
    def of(cls, arrays: Sequence[mx.array], step: int) -> RowLayout:
        """Return the layout of arrays ``(batch, heads, tokens, width)``."""
        return cls(tuple(Component((a.shape[0], a.shape[1]), a.shape[3], a.dtype) for a in arrays), step)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all arrays."""
        return sum(self.widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a token in each array."""
        return tuple([component.heads * component.width_bytes for component in self.components])

    @property
    def chunk_pages(self) -> int:
        """Pages of a chunk."""
        return -(-CHUNK_TOKENS // self.step)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in a file."""
        return sum(component.heads * self._region(component) for component in self.components)

    def _region(self, component: Component) -> int:
        return round_up(self.chunk_pages * self.step * component.width_bytes, DIRECT_ALIGNMENT)

    def slot_offsets(self, capacity: int) -> list[int]:
        """Return the offset of each array in a slot for so many tokens."""
        offsets, cursor = [], 0
        for component in self.components:
            offsets.append(cursor)
            cursor += round_up(component.heads * capacity * component.width_bytes, DIRECT_ALIGNMENT)
        return offsets

    def slot_bytes(self, capacity: int) -> int:
        """Return the size of a slot for so many tokens."""
        return sum(round_up(c.heads * capacity * c.width_bytes, DIRECT_ALIGNMENT) for c in self.components)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from a head of each array to the next one, in a file."""
        return tuple([self._region(component) for component in self.components])

    def file_offsets(self, page: int) -> tuple[int, ...]:
        """Return the offsets of each array's first head in the page of this number of a file."""
        chunk, within = divmod(page, self.chunk_pages)
        at, found = chunk * self.chunk_bytes, list[int]()
        for component in self.components:
            found.append(at + within * self.step * component.width_bytes)
            at += component.heads * self._region(component)
        return tuple(found)

    def to_arrays(self, rows: RowBytes) -> list[mx.array]:
        """Return rows as arrays ``(batch, heads, tokens, width)``, copied."""
        return [
            mx.array(part).view(c.dtype).reshape(*c.shape, part.shape[1], c.width)
            if part.size
            else mx.zeros((*c.shape, part.shape[1], c.width), c.dtype)
            for part, c in zip(rows, self.components, strict=True)
        ]
