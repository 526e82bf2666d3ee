"""A model in two halves: its body, which ends with the final norm, and its head, which makes logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.layout.swap import SwappedClass, restore_class, swap_class


def body_of(model: nn.Module) -> nn.Module | None:
    """Return the module that a model calls for the hidden states after its final norm; None if there is no such module.

    It is the smallest one below the model that has its layers and the table of embeddings.
    """
    layers: Any = getattr(model, "layers", None) or [None]
    here, below = model, _part_with(layers[0], model)
    while below is not None:
        here, below = below, _part_with(layers[0], below)
    parameters = [*inspect.signature(type(here).__call__).parameters.values()][2:]
    needed = {each.name for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD}
    return here if here is not model and needed <= {"cache"} else None


def _part_with(layer: object, module: nn.Module) -> nn.Module | None:
    """Return the part of a module that has a layer and a table of embeddings."""
    for part in module.values():
        if isinstance(part, nn.Module):
            modules = part.modules()
            has_table = any(isinstance(each, nn.Embedding | nn.QuantizedEmbedding) for each in modules)
            if has_table and any(each is layer for each in modules):
                return part
    return None


class _Passing(SwappedClass):
    """A body whose next call returns states that are known."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        states: mx.array = self._flash_state
        restore_class(cast(nn.Module, self))
        return states


def head_of(model: Any, body: nn.Module) -> Callable[[mx.array], Any]:
    """Return a function that makes the logits of hidden states, as the model's own code makes them of its body's."""

    def head(states: mx.array) -> Any:
        swap_class(body, _Passing, states)  # it is called before anything waits, and another call begins
        try:
            return model(mx.zeros(states.shape[:2], mx.int32))
        finally:
            restore_class(body)

    return head
