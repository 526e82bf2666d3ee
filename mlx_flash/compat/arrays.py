"""Parts of MLX that its documentation does not promise: array memory, module internals, functions that are wrapped."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat.require import require, require_that

TRAINING_FLAG = "_training"
"""Attribute of a module that ``train()`` and ``eval()`` set; no part of a model's identity."""

require_that(issubclass(nn.Module, dict), "mlx.nn.Module is no dict")  # arrays are exchanged without its __setattr__
require(mx, "export_to_dot")
require(nn.Module(), TRAINING_FLAG)
require(nn.Module, "valid_parameter_filter", "module", "key", "value")  # tells parameters from private constants

CHANGING = ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")))
"""Methods after which an array is the same object with other contents."""

_WRAPPED = {
    **dict.fromkeys(("stack", "concatenate", "split", "contiguous"), mx),
    **dict.fromkeys(("view", "reshape", "flatten", *CHANGING), mx.array),
}
"""Functions with which mlx-lm's ``sanitize`` rearranges tensors, and what they are attributes of."""

for _name, _owner in _WRAPPED.items():
    require(_owner, _name)


@contextmanager
def wrapped_functions(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the functions of MLX that rearrange arrays while a block runs."""
    originals = [(owner, name, getattr(owner, name)) for name, owner in _WRAPPED.items()]
    try:
        for owner, name, original in originals:
            setattr(owner, name, wrap(name, original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def num_nodes(*outputs: mx.array) -> int:
    """Return the number of operations that are recorded for some arrays and not computed yet."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return text.getvalue().count("shape=rectangle")


def memory_of(array: mx.array) -> memoryview:
    """Return the bytes of an array, writable and shared with it.

    MLX's stubs lack the buffer protocol, and nothing promises that the memory is the array's own:
    :mod:`mlx_flash.memory.arena` checks that for its views.
    """
    return memoryview(cast(Any, array)).cast("B") if array.size else memoryview(bytearray())


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of memory that is writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def array_over(memory: memoryview, shape: tuple[int, int]) -> mx.array:
    """Return an array of bytes over memory that MLX has not allocated. It must stay mapped for good.

    MLX copies memory of others on the CPU, ``from_dlpack`` included. But its strided views have no bounds.
    """
    anchor = mx.zeros((1,), mx.uint8)
    mx.eval(anchor)
    start = address_of(memory)
    array = mx.as_strided(anchor, shape, (shape[1], 1), (start - address_of(memory_of(anchor))) % 2**64)
    mx.eval(array)
    if address_of(memory_of(array)) != start:
        raise AssertionError("MLX copied a strided view: it does not share the memory")
    return array
