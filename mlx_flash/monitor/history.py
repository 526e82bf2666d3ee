"""The last minute of one engine: speeds and shares of time, from differences between published states."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_flash.monitor.experts import Counts, ExpertRates, expert_counts, expert_rates, growth
from mlx_flash.monitor.state import number, optional
from mlx_flash.telemetry import Published

MINUTE = 60.0
WINDOW_SECONDS = 4.0
"""Length of "now": enough for a few reads of a large model, and short enough to show a change."""

SHORTEST_SECONDS = 1e-6
"""Shorter times give no rate."""

IDLE_SECONDS = 2.0
"""An engine is idle after this time without a call, and after several times the mean call."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time; they add up to 1.

    Attributes:
        disk: waiting for weights, experts included.
        compute: from the arrival of a unit's weights to their release, without waits for experts.
        calls: the rest of forward calls, which is not streamed.
        between: between calls, such as sampling; everything when idle.
    """

    disk: float
    compute: float
    calls: float
    between: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds now. None where they are unknown yet.

    Attributes:
        tokens_per_second: tokens generated in the last seconds or, in a slow model, the last tokens; 0 when idle.
        mean_tokens_per_second: generated tokens over the time of their calls and of the evaluation after them.
        mean_prompt_tokens_per_second: prompt tokens over the time of their calls and of the evaluation after them.
        read_bytes_per_second: bytes read in the last seconds over their wall time.
        reading_bytes_per_second: all bytes over the time with at least one read in flight, loading included.
        cached_share: the part of the bytes read in the last seconds that came through the page cache.
        shares: shares of the last seconds.
        reading_share: share of the last seconds with at least one read in flight.
        experts: rates over the last seconds or, in a slow model, the last calls; None without a pool of experts.
    """

    tokens_per_second: float | None = None
    mean_tokens_per_second: float | None = None
    mean_prompt_tokens_per_second: float | None = None
    read_bytes_per_second: float | None = None
    reading_bytes_per_second: float | None = None
    cached_share: float | None = None
    shares: Shares | None = None
    reading_share: float | None = None
    experts: ExpertRates | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment of the engine's clock, as in the published state."""

    clock: float
    tokens_in: float
    tokens_out: float
    last_ended: float
    nbytes: float
    cached_bytes: float
    busy_seconds: float
    wait_seconds: float
    held_seconds: float
    pass_seconds: float
    experts: Counts

    @classmethod
    def of(cls, published: Published) -> Sample:
        """Return the sample of a published state."""
        state = published.state
        began = optional(state, "passes", "began")
        under_way = 0.0 if began is None else max(0.0, published.clock - began)
        return cls(
            clock=published.clock,
            tokens_in=number(state, "passes", "num_tokens_in"),
            tokens_out=number(state, "passes", "num_tokens_out"),
            last_ended=number(state, "passes", "last_ended"),
            nbytes=number(state, "read", "nbytes"),
            cached_bytes=number(state, "read", "cached_bytes"),
            busy_seconds=number(state, "read", "busy_seconds"),
            wait_seconds=number(state, "stream", "wait_seconds"),
            held_seconds=number(state, "stream", "held_seconds"),
            pass_seconds=number(state, "passes", "pass_seconds") + under_way,
            experts=expert_counts(state),
        )


@dataclass(slots=True)
class History:
    """Samples of the last minute.

    Attributes:
        latest: the last published state.
        rates: the speeds at that moment.
        ended: when the engine was found gone, in seconds since the epoch; None while it runs.
    """

    latest: Published
    ended: float | None = None
    rates: Rates = field(default_factory=Rates)
    _samples: deque[Sample] = field(default_factory=deque)
    _values: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.add(self.latest)

    def add(self, published: Published) -> None:
        """Add a published state, unless it was added before."""
        self.latest = published
        if self._samples and published.clock - self._samples[-1].clock < SHORTEST_SECONDS:
            return
        sample = Sample.of(published)
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.clock - self._samples[0].clock > MINUTE:
            self._samples.popleft()
        self.rates = self._rates_now()
        values = {
            "tokens": self.rates.tokens_per_second,
            "read": self.rates.read_bytes_per_second,
            "footprint": optional(published.state, "memory", "footprint"),
        }
        self._values.append((sample.clock, {key: value for key, value in values.items() if value is not None}))
        while sample.clock - self._values[0][0] > MINUTE:
            self._values.popleft()

    def is_idle(self) -> bool:
        """Return True when no call is under way, and none is likely to follow soon."""
        state = self.latest.state
        passes = number(state, "passes", "num_passes")
        mean = number(state, "passes", "pass_seconds") / passes if passes else 0.0
        since = self.latest.clock - number(state, "passes", "last_ended")
        return optional(state, "passes", "began") is None and since > max(IDLE_SECONDS, 2 * mean)

    def series(self, name: str, num_cells: int) -> list[float | None]:
        """Return means over equal parts of the last minute, the oldest first; None where no sample lies.

        Args:
            name: ``"tokens"``, ``"read"`` or ``"footprint"``.
            num_cells: number of parts.
        """
        found: dict[int, list[float]] = {}
        now = self._samples[-1].clock
        for clock, values in self._values:
            if name in values:
                cell = max(0, num_cells - 1 - int((now - clock) / MINUTE * num_cells))
                found.setdefault(cell, []).append(values[name])
        cells: list[float | None] = [None] * num_cells
        for cell, numbers in found.items():
            cells[cell] = sum(numbers) / len(numbers)
        return cells

    def _rates_now(self) -> Rates:
        state, now, before = self.latest.state, self._samples[-1], self._window_start()
        seconds = now.clock - before.clock
        in_decoding, busy = number(state, "passes", "decode_seconds"), number(state, "read", "busy_seconds")
        decode = in_decoding + number(state, "passes", "decode_gap_seconds")
        evaluated = optional(state, "passes", "num_prompt_tokens")
        prompt = now.tokens_in - now.tokens_out if evaluated is None else evaluated
        nbytes = max(0.0, now.nbytes - before.nbytes)
        prefill = number(state, "passes", "pass_seconds") - in_decoding + number(state, "passes", "prompt_gap_seconds")
        return Rates(
            tokens_per_second=self._tokens_per_second(),
            mean_tokens_per_second=now.tokens_out / decode if decode > SHORTEST_SECONDS else None,
            mean_prompt_tokens_per_second=prompt / prefill if prompt > 0 and prefill > SHORTEST_SECONDS else None,
            read_bytes_per_second=nbytes / seconds if seconds > 0 else None,
            reading_bytes_per_second=now.nbytes / busy if busy > SHORTEST_SECONDS else None,
            cached_share=_cut(now.cached_bytes - before.cached_bytes, nbytes) / nbytes if nbytes > 0 else None,
            shares=_shares(before, now) if seconds > 0 else None,
            reading_share=_cut(now.busy_seconds - before.busy_seconds, seconds) / seconds if seconds > 0 else None,
            experts=self._expert_rates(before) if isinstance(state.get("experts"), dict) else None,
        )

    def _window_start(self) -> Sample:
        """Return the oldest sample in the window, or the last but one where samples are further apart."""
        now = self._samples[-1]
        within = (sample for sample in self._samples if now.clock - sample.clock <= WINDOW_SECONDS)
        start = next(within)
        return self._samples[-2] if start is now and len(self._samples) > 1 else start

    def _tokens_per_second(self) -> float | None:
        """Return the rate between ends of calls, which is exact even when they are rare."""
        if self.is_idle():
            return 0.0
        now = self._samples[-1]
        start: Sample | None = None
        for sample in (s for s in reversed(self._samples) if s.tokens_out < now.tokens_out and s.last_ended > 0):
            if start is not None and now.last_ended - sample.last_ended > WINDOW_SECONDS:
                break
            start = sample
        if start is None or now.last_ended - start.last_ended < SHORTEST_SECONDS:
            return None
        return (now.tokens_out - start.tokens_out) / (now.last_ended - start.last_ended)

    def _expert_rates(self, before: Sample) -> ExpertRates:
        """Return rates over whole calls, so that all layers count alike; over the last seconds until two have ended."""
        now, calls = self._samples[-1], self._calls()
        lately, seconds = growth(before.experts, now.experts), now.clock - before.clock
        if calls is None:
            return expert_rates(lately, 0.0, lately, seconds)
        start, end = calls
        lasted, num_tokens = end.last_ended - start.last_ended, end.tokens_in - start.tokens_in
        # The very first sample may lie anywhere within a call, so its counters grew for another time.
        is_known = num_tokens >= 1 and lasted > SHORTEST_SECONDS
        num_tokens *= (end.clock - start.clock) / lasted if is_known else 0.0
        return expert_rates(growth(start.experts, end.experts), num_tokens, lately, seconds)

    def _calls(self) -> tuple[Sample, Sample] | None:
        """Return the samples after the ends of two calls: the earliest in the window, and the last one."""
        ends = self._call_ends()
        end, start = next(ends, None), None
        if end is None:
            return None
        for sample in ends:
            if start is not None and end.last_ended - sample.last_ended > WINDOW_SECONDS:
                break
            start = sample
        return None if start is None else (start, end)

    def _call_ends(self) -> Iterator[Sample]:
        """Yield the first sample after each end of a call, the newest first."""
        samples = list(self._samples)
        for earlier, sample in reversed(list(zip([None, *samples[:-1]], samples, strict=True))):
            if sample.last_ended > 0 and (earlier is None or earlier.tokens_in != sample.tokens_in):
                yield sample


def _shares(before: Sample, now: Sample) -> Shares:
    """Return the shares of the time. Counters move at ends, so a share can be too large: cut it to fit."""
    seconds = now.clock - before.clock
    experts = growth(before.experts, now.experts)["wait_seconds"]
    experts = 0.0 if math.isnan(experts) else experts
    disk = _cut(now.wait_seconds - before.wait_seconds + experts, seconds)
    compute = _cut(now.held_seconds - before.held_seconds - experts, seconds - disk)
    in_calls = _cut(now.pass_seconds - before.pass_seconds, seconds)
    calls = _cut(in_calls - disk - compute, seconds - disk - compute)
    return Shares(disk / seconds, compute / seconds, calls / seconds, (seconds - disk - compute - calls) / seconds)


def _cut(value: float, most: float) -> float:
    return min(max(value, 0.0), max(most, 0.0))
