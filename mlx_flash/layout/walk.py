"""Walks through the modules of a model. Those of MLX take some twenty calls of Python for each module."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

_CONTAINERS = (dict, list)


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what ``module.named_modules()`` does, in its order. A module that several hold is there several times."""
    found = list[tuple[str, nn.Module]]()
    left: list[tuple[str, Any]] = [("", module)]
    while left:
        path, container = left.pop()
        if isinstance(container, nn.Module):
            found.append((path, container))
        items: Any = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if isinstance(value, _CONTAINERS):
                left.append((f"{path}.{key}" if path else key, value))
    return found


def named_arrays(module: nn.Module) -> dict[str, mx.array]:
    """Return the arrays of ``module.parameters()`` by their paths: those that are not private to a module."""
    found = dict[str, mx.array]()
    left: list[tuple[str, Any]] = [("", module)]
    while left:
        path, container = left.pop()
        is_module = isinstance(container, nn.Module)
        items: Any = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if not (is_module and key.startswith("_")):
                name = f"{path}.{key}" if path else key
                if isinstance(value, mx.array):
                    found[name] = value
                elif isinstance(value, _CONTAINERS):
                    left.append((name, value))
    return found


def iter_parameters(module: nn.Module) -> list[tuple[str, Any, Any, mx.array]]:
    """Every array in a module's tree, private constants included, once: (name, container, key, array)."""
    found, seen = list[tuple[str, Any, Any, mx.array]](), {id(module)}
    under_way: list[tuple[str, Any, Any]] = [("", module, iter(module.items()))]
    while under_way:
        path, container, items = under_way[-1]
        for key, value in items:
            name = f"{path}.{key}" if path else str(key)
            if isinstance(value, mx.array):
                if not isinstance(container, tuple):  # which holds it for good
                    found.append((name, container, key, value))
            elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
                seen.add(id(value))
                inner = value.items() if isinstance(value, dict) else enumerate(value)
                under_way.append((name, value, iter(inner)))
                break
        else:
            under_way.pop()
    return found
