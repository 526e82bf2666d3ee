"""Memory that MLX computes from and threads read files into.

An arena is one evaluated ``mx.array`` of bytes. Its memory, seen as a writable ``memoryview``, is what the reader
fills; typed arrays that are views of it are what a model's modules hold. Nothing is copied between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_flash.checkpoint.layout import Parameter
from mlx_flash.residency.memory import use_huge_pages
from mlx_flash.storage.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import Placement


class Arena:
    """A page-aligned buffer of bytes and typed views of it.

    Args:
        nbytes: the size that can be used.

    Attributes:
        memory: the writable bytes; their address is a multiple of ``DIRECT_ALIGNMENT``.
    """

    def __init__(self, nbytes: int) -> None:
        # Rows of one page: MLX's dimensions are 32-bit, a flat array would end at 2 GiB.
        pages = -(-nbytes // DIRECT_ALIGNMENT) + 1  # MLX's CPU allocator aligns to 16 bytes only
        self._array = mx.zeros((pages, DIRECT_ALIGNMENT), dtype=mx.uint8)
        mx.eval(self._array)
        everything = _memory(self._array).cast("B")
        self._start = -_address(everything) % DIRECT_ALIGNMENT
        self.nbytes = nbytes
        self.memory = everything[self._start : self._start + nbytes]
        use_huge_pages(self.memory)

    def view(self, offset: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """An evaluated array whose memory begins ``offset`` bytes into the arena.

        Args:
            offset: a multiple of the item size.
            shape: of the array.
            dtype: of the array.
        """
        size = math.prod(shape)
        first = self._start + offset
        page, within = divmod(first, DIRECT_ALIGNMENT)
        last_page = -(-(first + size * dtype.size) // DIRECT_ALIGNMENT)
        flat = self._array[page:last_page].view(dtype).reshape(-1)
        index = within // dtype.size
        array = flat[index : index + size].reshape(*shape)
        mx.eval(array)
        if size and _address(_memory(array)) != _address(self.memory) + offset:
            raise AssertionError(f"MLX copied a view of {array.nbytes} bytes at {offset}: it does not share the arena")
        return array

    def fill(self, byte: int) -> None:
        """Writes one value to every byte; 255 makes NaN in every floating-point dtype."""
        np.frombuffer(self.memory, np.uint8)[:] = byte


def bind(parameters: Sequence[Parameter], placement: Placement, arena: Arena) -> None:
    """Makes modules hold views of an arena.

    Args:
        parameters: what to bind, in the order in which ``placement`` was made.
        placement: where each one lies.
        arena: the memory.
    """
    for parameter, offset in zip(parameters, placement.offsets, strict=True):
        parameter.bind(arena.view(offset, parameter.array.shape, parameter.array.dtype))


def kernel_alignment() -> int:
    """The address alignment MLX's kernels may count on, in bytes.

    GPU kernels and the libraries behind them choose by alignment, and so might give other bits; the CPU's do not.
    """
    return 16 if mx.default_device() == mx.gpu else 1


def _memory(array: mx.array) -> memoryview:
    return memoryview(cast(Any, array))  # MLX's stubs do not say that arrays have the buffer protocol


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer.cast("B"), np.uint8).ctypes.data)
