"""The errors for calls that do not fit the budget."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_flash.engine.lane import Lane
from mlx_flash.errors import BudgetError, ConfigError
from mlx_flash.residency.ledger import Need
from mlx_flash.residency.plan import MB, ResidencyPlan


def too_large(plan: ResidencyPlan, lanes: Sequence[Lane], need: Need, missing: int) -> BudgetError:
    """Return the error for a pass that takes so many bytes more than the budget."""
    num_tokens, context = _sizes(lanes)
    total = plan.budget_bytes + missing
    kv = total - need.process - need.in_use - need.activations
    all_logits = any(x.call.wants_logits and x.call.num_tokens > x.call.batch_size for x in lanes)
    hint = _hint(plan, max(x.tokens.num_at_once for x in lanes), context, all_logits)
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} would take "
        f"the process to {total / MB:.1f} MB: {need.process / MB:.0f} MB for the process itself, "
        f"{need.in_use / MB:.0f} MB in arrays now, {need.activations / MB:.0f} MB of activations, {kv / MB:.0f} MB of "
        f"KV cache; the budget is {plan.budget_bytes / MB:.1f} MB. {hint}",
        total,
    )


def no_room_for_kv(plan: ResidencyPlan, lanes: Sequence[Lane], needed: int) -> BudgetError:
    """Return the error for a call that fits the budget, but not the share of it that the user gave the KV cache."""
    (num_tokens, context), limit = _sizes(lanes), plan.kv.limit or 0
    held = plan.ledger.held(context, max(lane.call.length for lane in lanes))
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} needs "
        f"{needed / MB:.1f} MB for the keys and values of {held} tokens; kv_ram_gb "
        f"allows {limit / MB:.1f} MB. "
        f"Hint: raise kv_ram_gb to at least {-(-needed // 1000) / 1e6:.6f}, to more for a longer context, or set a "
        "smaller kv_max_tokens.",
        plan.budget_bytes + needed - limit,
    )


def of_several_pools(num_pools: int) -> ConfigError:
    """Return the error for a pass with caches whose memory is not counted together."""
    return ConfigError(
        f"the layers of a prompt cache are of {num_pools} models, or were made with as many different settings, so "
        "that their memory is not counted together. Hint: take all layers from one make_prompt_cache(model)."
    )


def _sizes(lanes: Sequence[Lane]) -> tuple[int, int]:
    """Return the new tokens of all calls, and the longest context."""
    return sum(lane.call.num_tokens for lane in lanes), max(lane.tokens.context for lane in lanes)


def _hint(plan: ResidencyPlan, num_tokens: int, context: int, all_logits: bool) -> str:
    if num_tokens > plan.prefill_step_size:
        return f"Hint: pass prefill_step_size={plan.prefill_step_size} to mlx_lm, or raise ram_budget_gb."
    if context > plan.context_length:
        return f"Hint: load the model with FlashConfig(context_length={2 * context}), or raise ram_budget_gb."
    if all_logits:
        return (
            "Hint: ask for the logits of fewer tokens at a time; for several sequences at once load the model with a "
            "larger context_length, which counts tokens over all of them; or raise ram_budget_gb."
        )
    return (
        "Hint: raise ram_budget_gb; let go of other arrays and models in this process; for several sequences at once "
        "ask for a larger context_length, which counts tokens over all of them."
    )
