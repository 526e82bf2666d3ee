"""mlx-lm's stacks of experts."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP

from mlx_flash.compat.require import require, require_that

SORTED_SIZE = 64
"""Number of indices from which mlx-lm sorts them; kernels of GPUs then choose by the number of experts."""

_STACKS = (SwitchGLU, SwitchMLP)

for _kind in _STACKS:
    _call = require(_kind, "__call__", "x", "indices")  # calls are answered in their place
    _sorts = SORTED_SIZE in _call.__code__.co_consts
    require_that(_sorts, f"{_kind.__name__} does not sort from {SORTED_SIZE} indices on")


def is_expert_stack(module: nn.Module) -> bool:
    """Return whether a module is one of mlx-lm's stacks of experts, or of a class derived from them."""
    return isinstance(module, _STACKS)


def computes_as_expert_stack(module: nn.Module) -> bool:
    """Return whether a module computes what mlx-lm's stacks do; derived classes may compute something else."""
    return is_expert_stack(module) and any(type(module).__call__ is kind.__call__ for kind in _STACKS)


def has_kernel(module: nn.Module) -> bool:
    """Return whether MLX can compute a module here: its CPU back end multiplies by experts in float32 only."""
    return not isinstance(module, SwitchLinear) or _multiplies_experts(module.weight.dtype)


@cache
def _multiplies_experts(dtype: mx.Dtype) -> bool:
    x = mx.ones((1, 1, 1), dtype)
    try:
        mx.eval(mx.gather_mm(x, x, rhs_indices=mx.array([0])))
    except RuntimeError:
        return False
    return True
