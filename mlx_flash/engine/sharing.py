"""The memory of the further parts of a pass, beside the one that computes."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.lane import Lane
from mlx_flash.kv.checkpoints import kept_bytes
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.sizes import CACHE_STEP


def costs(plan: ResidencyPlan, parts: Sequence[ForwardCall]) -> list[int]:
    """Return the bytes that each part after the first takes: what waits, and its keys and values."""
    growths = [part.num_tokens * plan.kv_bytes_per_token for part in parts[1:]]
    return [max(1, a + b) for a, b in zip(_waiting(plan, parts), growths, strict=True)]


def waiting_bytes(plan: ResidencyPlan, parts: Sequence[ForwardCall]) -> int:
    """Return the bytes of the parts after the first that wait while another one computes."""
    return sum(_waiting(plan, parts))


def _waiting(plan: ResidencyPlan, parts: Sequence[ForwardCall]) -> list[int]:
    found, num_before = [], parts[0].num_tokens
    for part in parts[1:]:
        kept = () if part.checkpoints is None else (kept_bytes(entry) for entry in entries_of(part.cache or ()))
        waiting = plan.activations.waiting_bytes(part.num_tokens)
        found.append(waiting + sum(kept) + _copied_bytes(plan, part, num_before))
        num_before += part.num_tokens
    return found


def _copied_bytes(plan: ResidencyPlan, part: ForwardCall, num_before: int) -> int:
    """Return the bytes of the keys and values of a layer that a part takes.

    Where units are smaller than layers, the part before waits inside its attention, with its keys and values. So MLX
    copies them when a part adds to them, instead of writing in place.
    """
    if not plan.streaming.cut:
        return 0
    tokens = Lane(part).context + num_before // part.batch_size + CACHE_STEP
    return plan.cache.largest_row * tokens * part.batch_size
