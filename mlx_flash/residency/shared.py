"""Room for the parts of a prompt that share a pass over the weights.

Memory for parts that wait holds weights between prompts (``residency/lent.py``), so a token that is decoded reads no
more for it. A prompt reads a little more in each of its passes, and takes fewer of them.
"""

from __future__ import annotations

from dataclasses import replace

from mlx_flash.residency.candidates import fastest_like
from mlx_flash.residency.costs import Reserve, Task, parts_bytes
from mlx_flash.residency.plan import ResidencyPlan

PARTS_SHARE = 0.75
"""Share of their memory that pinned weights leave to parts at most: lent memory is copied to, and read again later."""


def with_room_for_parts(task: Task, plan: ResidencyPlan) -> ResidencyPlan:
    """Return a plan with the room in which a prompt of the planned length reads least.

    Pinned weights leave that room. The predicted time of a token stays: the room is lent then. A pool of experts leaves
    none, since a GPU's cannot grow into it again.

    Args:
        task: what the plan was made for.
        plan: the fastest plan for a token.
    """
    step, context = plan.prefill_step_size, plan.context_length
    is_apart = plan.kv.num_on_disk or plan.prefix_bytes or plan.pool is not None
    if is_apart or not task.config.lend_reserves or not plan.streaming.num_units or not plan.pinned_bytes:
        return plan
    same_cut, num_parts = (task, *task.finer)[plan.streaming.cut], -(-context // step)
    free = plan.budget_bytes - plan.peak_bytes + plan.spare_bytes
    choices = []
    for num_together in {-(-num_parts // num_passes) for num_passes in range(1, plan.prompt_passes(context))}:
        reserve = Reserve(step, context, num_together)
        taken = max(0, parts_bytes(same_cut, reserve) - free)
        if taken <= PARTS_SHARE * plan.pinned_bytes:
            choices.append((-(-num_parts // num_together) * (plan.read_bytes + taken), reserve))
    for _, reserve in sorted(choices, key=lambda choice: choice[0]):
        found = fastest_like(same_cut, plan, reserve)
        if found is not None and found.prompt_read_bytes(context) < plan.prompt_read_bytes(context):
            saved = max(0.0, found.weights_seconds - plan.weights_seconds)
            return replace(
                found, minimum_bytes=plan.minimum_bytes, opening_seconds=plan.opening_seconds, lent_seconds=saved
            )
    return plan
