"""Stacks of experts."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import cache, partial
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP

from mlx_flash.compat.require import require, require_that

SORTED_SIZE = 64
"""Number of indices from which mlx-lm sorts them; kernels of GPUs then choose by the number of experts."""

StackCall = Callable[[mx.array, mx.array], mx.array]
"""Computes tokens with the experts that are chosen for them."""


class StackKinds:
    """Classes of stacks of experts, and of their matrices, of mlx-lm and of libraries that have their own."""

    stacks: tuple[type[nn.Module], ...] = ()
    linears: tuple[type[nn.Module], ...] = (SwitchLinear,)
    callers: ClassVar[dict[type[nn.Module], Callable[..., mx.array]]] = {}

    @classmethod
    def add(cls, stack: type[nn.Module], caller: Callable[..., mx.array] | None = None) -> None:
        """Add a class of stacks. ``caller`` answers calls that have more than tokens and indices."""
        call = require(stack, "__call__", "x", "indices")  # calls are answered in their place
        sorts = any(
            each.opname.startswith("LOAD") and each.argval == SORTED_SIZE for each in dis.get_instructions(call)
        )
        require_that(sorts, f"{stack.__name__} does not sort from {SORTED_SIZE} indices on")
        cls.stacks += (stack,)
        if caller is not None:
            cls.callers[stack] = caller


for _kind in (SwitchGLU, SwitchMLP):
    StackKinds.add(_kind)


def answered_by(module: nn.Module, run: StackCall) -> Callable[..., mx.array]:
    """Return what answers calls of a stack, if ``run`` computes tokens with their experts."""
    caller = next((found for stack, found in StackKinds.callers.items() if isinstance(module, stack)), None)
    return run if caller is None else partial(caller, module, run)


def is_expert_stack(module: nn.Module) -> bool:
    """Return whether a module is a known stack of experts, or of a class derived from one."""
    return isinstance(module, StackKinds.stacks)


def computes_as_expert_stack(module: nn.Module) -> bool:
    """Return whether a module computes what known stacks do; derived classes may compute something else."""
    return is_expert_stack(module) and any(type(module).__call__ is kind.__call__ for kind in StackKinds.stacks)


@cache
def multiplies_experts(dtype: mx.Dtype) -> bool:
    """Return whether MLX can multiply by experts here: its CPU back end does in float32 only."""
    x = mx.ones((1, 1, 1), dtype)
    try:
        mx.eval(mx.gather_mm(x, x, rhs_indices=mx.array([0])))
    except RuntimeError:
        return False
    return True
