"""The arrays that a call can have an effect on."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class Opaque:
    """Base of classes whose objects are not searched for arrays: they hold others' or none. Some raise when asked."""


_LEAVES = (int, float, str, bytes, type(None), mx.Dtype, np.ndarray, nn.Module, Opaque)
_SEQUENCES = (list, tuple, set, frozenset)
_MAX_DEPTH = 8


def arrays_in(*roots: Any) -> list[mx.array]:
    """Every array reachable from some objects through dicts, sequences, and attributes, modules excepted.

    A call's effects are in its result and in what it was given: caches, shared dicts, objects of any class.
    """
    found: list[mx.array] = []
    seen: set[int] = set()
    path = [iter(roots)]
    while path:
        for value in path[-1]:
            kind = type(value)  # some objects refuse to be asked for their class
            if issubclass(kind, mx.array):
                found.append(value)
            elif len(path) <= _MAX_DEPTH and not issubclass(kind, _LEAVES) and id(value) not in seen:
                seen.add(id(value))
                if issubclass(kind, dict):
                    children = value.values()
                else:
                    children = value if issubclass(kind, _SEQUENCES) else _attributes(value)
                path.append(iter(children))
                break
        else:
            path.pop()
    return found


def nbytes_in(*roots: Any) -> int:
    """Return the bytes of all arrays reachable from some objects. An array that several hold counts once.

    A slice counts with its own size, though it keeps the memory of the array that it was cut from.
    """
    return sum({id(array): int(array.nbytes) for array in arrays_in(*roots)}.values())


def _attributes(value: Any) -> list[Any]:
    slots = [getattr(value, name, None) for name in _slots(cast(Hashable, type(value)))]
    return [*getattr(value, "__dict__", {}).values(), *slots]


@cache
def _slots(kind: Hashable) -> list[str]:
    """Return the names of the slots of a class and those that it is derived from."""
    slots = [base.__dict__.get("__slots__", ()) for base in cast(type, kind).__mro__]
    return [name for names in slots for name in ((names,) if isinstance(names, str) else names)]
