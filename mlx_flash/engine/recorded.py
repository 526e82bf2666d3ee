"""The layers that MLX may record ahead of a GPU, whose intermediate results it keeps until they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.headroom import needed
from mlx_flash.engine.lane import Lane
from mlx_flash.residency.plan import ResidencyPlan

_LITTLE_BYTES = 16_000_000
"""Less than what plans set aside for what running adds to a process. Nearly all calls for one token take less."""


def layers_at_once(plan: ResidencyPlan, calls: Sequence[ForwardCall], num_layers: int) -> int | None:
    """Return the number of layers whose intermediate results fit the budget together; None if those of all do.

    Args:
        plan: the plan of the model. Every check before a pass counts one layer.
        calls: those of the pass. Several wait for each other, so each of their layers is waited for.
        num_layers: layers that nothing else waits for.
    """
    if num_layers < 2:
        return None
    if len(calls) > 1:
        return 1
    (call,) = calls
    sizes, lane = replace(plan.activations, logits_per_token=0), Lane(call)
    if call.is_decode and sizes.scores_per_pair < sizes.unfused_per_pair:
        sizes = replace(sizes, scores_per_pair=0)  # the kernels for a single token store no scores
    each = lane.active_bytes(sizes)
    if (num_layers - 1) * each <= _LITTLE_BYTES:
        return None
    found = 1 + max(0, plan.budget_bytes - needed(plan, [lane]).total) // each
    return None if found >= num_layers else found
