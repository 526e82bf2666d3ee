"""The memory of the further parts of a pass, beside the one that computes."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_flash.compat.caches import entries_of
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.lane import Lane
from mlx_flash.kv.checkpoints import kept_bytes
from mlx_flash.residency.plan import ResidencyPlan


def costs(plan: ResidencyPlan, parts: Sequence[ForwardCall]) -> list[int]:
    """Return the bytes that each part after the first takes: what waits, and its keys and values."""
    growths = [part.num_tokens * plan.kv_bytes_per_token for part in parts[1:]]
    return [max(1, a + b) for a, b in zip(_waiting(plan, parts), growths, strict=True)]


def waiting_bytes(plan: ResidencyPlan, parts: Sequence[ForwardCall]) -> int:
    """Return the bytes of the parts after the first that wait while another one computes."""
    return sum(_waiting(plan, parts))


def _waiting(plan: ResidencyPlan, parts: Sequence[ForwardCall]) -> list[int]:
    found: list[int] = []
    num_before = parts[0].num_tokens
    for part in parts[1:]:
        kept = () if part.checkpoints is None else (kept_bytes(entry) for entry in entries_of(part.cache or ()))
        context = Lane(part).tokens.context + num_before // part.batch_size
        each = plan.ledger.part_waiting(part.num_tokens, part.batch_size, context, is_first=not found)
        found.append(sum(kept) + each)
        num_before += part.num_tokens
    return found
