"""What a pool of experts holds and does, in numbers: from what an engine told, and from the growth of its counters."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mlx_flash.monitor.state import count
from mlx_flash.telemetry import Json


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool at one moment. None for what was not told.

    Attributes:
        num_resident: experts in it.
        num_experts: of all layers.
        nbytes: its size.
    """

    num_resident: float | None
    num_experts: float | None
    nbytes: float | None

    @classmethod
    def of(cls, state: Json) -> Pool | None:
        """The pool in the published state, or None when the engine has none."""
        if not isinstance(state.get("experts"), dict):
            return None
        resident, total, slots, each = (
            count(state, "experts", key) for key in ("num_resident", "num_experts", "num_slots", "slot_bytes")
        )
        return cls(resident, total, None if slots is None or each is None else slots * each)


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Counters of a pool: since the start, or what they grew by. None for what was not told.

    Attributes:
        num_routed: experts that calls needed.
        num_hits: of those, in the pool when the call came.
        num_predicted: experts read by look-ahead.
        num_predicted_right: of those, needed by the call they were read for.
        read_bytes: bytes of experts read.
        wait_seconds: time that calls waited for experts.
    """

    num_routed: float | None = None
    num_hits: float | None = None
    num_predicted: float | None = None
    num_predicted_right: float | None = None
    read_bytes: float | None = None
    wait_seconds: float | None = None

    @classmethod
    def of(cls, state: Json) -> ExpertCounts:
        """The counters in the published state."""
        return cls(*(count(state, "experts", key) for key in _COUNTERS))

    def since(self, before: ExpertCounts) -> ExpertCounts:
        """What they grew by. None also where a counter went back."""
        return ExpertCounts(*(_growth(getattr(before, key), getattr(self, key)) for key in _COUNTERS))


_COUNTERS = tuple(counter.name for counter in fields(ExpertCounts))


@dataclass(frozen=True, slots=True)
class ExpertRates:
    """How well a pool does now. None where there is nothing to tell from.

    Tokens are all that calls worked on, those of prompts too.

    Attributes:
        hit_rate: the share of the experts needed that were in the pool when the call came.
        predicted_right: the share of those read by look-ahead that the next call needed.
        read_per_token: experts read, by look-ahead too.
        reused_per_token: experts needed that had been in the pool before that.
        read_bytes_per_token: bytes of experts read.
        wait_share: the share of the time in which calls waited for experts.
    """

    hit_rate: float | None = None
    predicted_right: float | None = None
    read_per_token: float | None = None
    reused_per_token: float | None = None
    read_bytes_per_token: float | None = None
    wait_share: float | None = None


def expert_rates(calls: ExpertCounts, num_tokens: float, lately: ExpertCounts, seconds: float) -> ExpertRates:
    """Rates from the growth of counters.

    Args:
        calls: over the last calls, or, before the first one has ended, lately.
        num_tokens: worked on meanwhile; 0 when that is not known.
        lately: over the last seconds.
        seconds: how many.
    """
    missed = _growth(calls.num_hits, calls.num_routed)
    read = None if missed is None or calls.num_predicted is None else missed + calls.num_predicted
    return ExpertRates(
        hit_rate=_share(calls.num_hits, calls.num_routed),
        predicted_right=_share(calls.num_predicted_right, calls.num_predicted),
        read_per_token=_each(read, num_tokens),
        reused_per_token=_each(_growth(calls.num_predicted_right, calls.num_hits), num_tokens),
        read_bytes_per_token=_each(calls.read_bytes, num_tokens),
        wait_share=None if lately.wait_seconds is None or seconds <= 0 else min(1.0, lately.wait_seconds / seconds),
    )


def _growth(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None or now < before else now - before


def _share(part: float | None, whole: float | None) -> float | None:
    """At most 1: a counter of parts may move a little later than that of the whole."""
    return None if part is None or whole is None or whole < 1 else min(1.0, part / whole)


def _each(total: float | None, num_tokens: float) -> float | None:
    return None if total is None or num_tokens <= 0 else total / num_tokens
