"""Changing what a module does by changing its class, and changing it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

STATE = "_flash_state"
"""Attribute with the state of a module that :func:`swap_class` was given."""

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, set)


class SwappedClass:
    """Base of the mixins whose ``__call__`` answers in place of the module's own."""

    _flash_state: Any
    """As :func:`swap_class` was given it."""


def swap_class(module: nn.Module, mixin: type[SwappedClass], state: object) -> None:
    """Give a module a subclass of its own class, whose calls the mixin answers. :func:`restore_class` undoes it."""
    object.__setattr__(module, STATE, state)
    kinds: Any = type(module), mixin
    object.__setattr__(module, "__class__", mixed_class(*kinds))


def restore_class(module: nn.Module) -> None:
    """Give a module its own class back and forget the state. Harmless when repeated."""
    if isinstance(module, SwappedClass):
        object.__setattr__(module, "__class__", type(module).__bases__[1])
    vars(module).pop(STATE, None)


def own_class(module: Any) -> Any:
    """The class a module had before :func:`swap_class`, or has now if it was not swapped."""
    return type(module).__bases__[1] if isinstance(module, SwappedClass) else type(module)


def remember(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Notes what modules hold, and returns what puts it back.

    What calls leave in a module goes: a compiled function, for one, holds the arrays that it saw first. So does what
    they add to a dict, a list or a set of it. Flags and numbers that were set in between stay.
    """
    before = [(module, dict(module), dict(vars(module))) for module in modules]
    values = [value for _, items, attributes in before for value in (*items.values(), *attributes.values())]
    contents: list[Any] = [(value, value.copy()) for value in values if type(value) in _CONTAINERS]

    def put_back() -> None:
        for value, kept in contents:
            value.clear()
            value.extend(kept) if isinstance(value, list) else value.update(kept)
        for module, items, attributes in before:
            dict.clear(module)
            dict.update(module, items)
            found = vars(module)
            for key, value in attributes.items():
                if key not in found or not isinstance(found[key], _PLAIN):
                    found[key] = value
            for key in found.keys() - attributes.keys():  # None in the place of an array would hide it
                if key == STATE or key in items or not isinstance(found[key], _PLAIN):
                    del found[key]

    return put_back


def holdings(module: nn.Module) -> object:
    """Return a value that changes when a call leaves something in a module or those below it.

    Arrays and modules count by their keys, other objects by their identity, dicts and the like by their size too; flags
    and numbers do not count.
    """
    return [
        (id(part), key, None if isinstance(value, mx.array) else (id(value), _size(value)))
        for part in module.modules()
        for key, value in (*part.items(), *vars(part).items())
        if not isinstance(value, _PLAIN)
    ]


def _size(value: Any) -> int:
    return len(value) if type(value) in _CONTAINERS else 0


def clone_with(module: nn.Module, arrays: dict[str, mx.array]) -> nn.Module:
    """A module of the same own class and settings that holds other arrays."""
    attributes = {key: value for key, value in vars(module).items() if key != STATE}
    kind = own_class(module)
    clone = cast(nn.Module, kind.__new__(kind))
    dict.update(clone, {**module, **arrays})
    vars(clone).update(attributes)
    return clone


def clone_tree(module: nn.Module, arrays: Mapping[tuple[int, Any], mx.array]) -> nn.Module:
    """A copy of a module and those below it that holds other arrays, by ``id`` of their module, and key.

    Settings and other arrays are shared.
    """
    clone = clone_with(module, {key: array for (owner, key), array in arrays.items() if owner == id(module)})
    dict.update(clone, {key: _copied(value, arrays) for key, value in clone.items()})
    return clone


def _copied(value: Any, arrays: Mapping[tuple[int, Any], mx.array]) -> Any:
    # Inside clone_tree() it would refer to itself, and hold the arrays until Python's collector comes.
    if isinstance(value, nn.Module):
        return clone_tree(value, arrays)
    return [_copied(item, arrays) for item in value] if isinstance(value, list) else value


@cache
def mixed_class(cls: Any, mixin: Any) -> Any:
    """Return a class with the calls of a mixin, and else as another one, whose name it has."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
