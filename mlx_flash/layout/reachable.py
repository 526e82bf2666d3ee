"""The arrays that a call can have an effect on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

_LEAVES = (int, float, str, bytes, type(None), mx.Dtype, np.ndarray, nn.Module)
_MAX_DEPTH = 8


class Opaque:
    """Base of classes whose objects hold no arrays. Some raise when they are asked for them."""


def arrays_in(*roots: Any) -> list[mx.array]:
    """Every array reachable from some objects through dicts, sequences, and attributes, modules excepted.

    A call's effects are in its result and in what it was given: caches, shared dicts, objects of any class.
    """
    found: list[mx.array] = []
    _collect(roots, found, set(), 0)
    return found


def nbytes_in(*roots: Any) -> int:
    """Return the bytes of all arrays reachable from some objects. An array that several hold counts once.

    A slice counts with its own size, though it keeps the memory of the array that it was cut from.
    """
    return sum({id(array): int(array.nbytes) for array in arrays_in(*roots)}.values())


def _collect(value: Any, found: list[mx.array], seen: set[int], depth: int) -> None:
    if isinstance(value, Opaque):  # first: it refuses to be asked for another class
        return
    if isinstance(value, mx.array):
        found.append(value)
        return
    if isinstance(value, _LEAVES) or depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children: Any = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        children = value
    else:
        children = _attributes(value)
    for child in children:
        _collect(child, found, seen, depth + 1)


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)
