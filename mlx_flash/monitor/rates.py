"""The last minute of one engine: speeds and shares of time, from the growth of published counters."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from mlx_flash.memory.pagecache import pressure
from mlx_flash.telemetry import SHORTEST, Facts, Json, Published, Sample, find, ratio, read


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """Memory of the machine, in bytes."""

    total: int
    available: int
    swap_total: int
    swap_used: int
    pressure: float  # share of ten seconds in which tasks waited for memory; on macOS 0.0, 0.3 or 1.0 for a level


def system_memory() -> SystemMemory:
    """Return the memory now."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return SystemMemory(int(memory.total), int(memory.available), int(swap.total), int(swap.used), pressure())


class Watcher:
    """The running engines, and the one that ended last."""

    def __init__(self) -> None:
        self._known: dict[Path, History] = {}
        self._chosen: Path | None = None
        self._is_picked = False  # by the user
        self.histories: list[History] = []  # of the engines running now, by process and number
        self.ended: History | None = None  # the engine that ended last, until another one starts
        self.system: SystemMemory = system_memory()

    @property
    def chosen(self) -> int:
        """Index of the engine to show: the one that the user chose, or one that is not idle, or the first."""
        keys = list(self._known)
        return keys.index(self._chosen) if self._chosen in keys else 0

    def look(self) -> None:
        """Read what engines published since the last look."""
        running: dict[Path, History] = {}
        for published in find():
            history = running[published.path] = self._known.get(published.path) or History(published)
            history.add(published)
        gone = [history for key, history in self._known.items() if key not in running]
        if gone:
            self.ended = gone[-1]
            self.ended.ended = time.time()
        elif running.keys() - self._known.keys():
            self.ended = None
        self._known = running
        self._is_picked &= self._chosen in running
        busy = [key for key, history in running.items() if not history.is_idle()]
        if busy and self._chosen not in busy and not self._is_picked:
            self._chosen = busy[0]
        self.histories = list(running.values())
        self.system = system_memory()

    def choose_next(self) -> None:
        """Choose the next engine of the list."""
        keys = list(self._known)
        if keys:
            self._chosen, self._is_picked = keys[(self.chosen + 1) % len(keys)], True

    def to_json(self) -> list[Json]:
        """Return one JSON object for each running engine."""
        found = []
        for history in self.histories:
            envelope, rates = asdict(history.latest), asdict(history.rates)
            del envelope["path"]
            more = {"idle": history.is_idle(), "rates": rates, "system": asdict(self.system)}
            found.append({**envelope.pop("state"), **envelope, **more})
        return found


MINUTE = 60.0
WINDOW_SECONDS = 4.0
"""Length of "now": enough for a few reads of a large model, and short enough to show a change."""

IDLE_SECONDS = 2.0
"""An engine is idle after this time without a call, and after several times the mean call."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time; they add up to 1."""

    disk: float  # waiting for weights, keys and values
    compute: float  # from the arrival of a unit's weights to their release, without such waits
    calls: float  # the rest of forward calls, which is not streamed
    between: float  # between calls, such as sampling; everything when idle


@dataclass(frozen=True, slots=True)
class ExpertRates:
    """Rates of a pool of experts. None where they are unknown. Tokens include those of prompts."""

    hit_rate: float | None = None  # share of the needed experts that were in the pool when the call came
    predicted_right: float | None = None  # share of the prefetched experts that the next call needed
    read_per_token: float | None = None  # experts read, prefetched ones included
    reused_per_token: float | None = None  # needed experts that were in the pool already
    read_bytes_per_token: float | None = None
    wait_share: float | None = None  # share of the time that calls waited for experts


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds now. None where they are unknown yet.

    Mean speeds are tokens over the time of their calls and of the evaluation after them.
    """

    tokens_per_second: float | None = None  # in the last seconds or, in a slow model, the last tokens; 0 when idle
    mean_tokens_per_second: float | None = None
    mean_prompt_tokens_per_second: float | None = None
    read_bytes_per_second: float | None = None  # in the last seconds, over their wall time
    reading_bytes_per_second: float | None = None  # all, over the time with a read in flight, loading included
    cached_share: float | None = None  # part of the bytes read in the last seconds that came through the page cache
    shares: Shares | None = None  # of the last seconds
    reading_share: float | None = None  # share of the last seconds with a read in flight
    experts: ExpertRates | None = None  # None without a pool of experts


@dataclass(slots=True)
class History:
    """Samples of the last minute, the last published state, its numbers, and the speeds at that moment."""

    latest: Published
    ended: float | None = None  # when the engine was found gone, in seconds since the epoch
    facts: Facts = field(default_factory=Facts)
    rates: Rates = field(default_factory=Rates)
    _samples: deque[Sample] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.add(self.latest)

    def add(self, published: Published) -> None:
        """Add a published state, unless it was added before."""
        self.latest, self.facts = published, read(published.state)
        if self._samples and published.clock - self._samples[-1].clock < SHORTEST:
            return
        under_way = max(0.0, published.clock - self.facts.get("passes.began", published.clock))
        in_calls = self.facts["passes.pass_seconds"] + under_way
        sample = Sample(published.clock, Facts({**self.facts, "passes.pass_seconds": in_calls}))
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.clock - self._samples[0].clock > MINUTE:
            self._samples.popleft()
        self.rates = self._rates_now()
        speeds = {"tokens": self.rates.tokens_per_second, "read": self.rates.read_bytes_per_second}
        sample.facts.update({name: speed for name, speed in speeds.items() if speed is not None})

    def is_idle(self) -> bool:
        """Return True when no call is under way, and none is likely to follow soon."""
        passes = self.facts["passes.num_passes"]
        mean = self.facts["passes.pass_seconds"] / passes if passes else 0.0
        since = self.latest.clock - self.facts["passes.last_ended"]
        return "passes.began" not in self.facts and since > max(IDLE_SECONDS, 2 * mean)

    def series(self, name: str, num_cells: int) -> list[float | None]:
        """Return means over equal parts of the last minute, the oldest first; None where no sample lies.

        ``name`` is that of a fact, or ``"tokens"`` or ``"read"`` for the speeds.
        """
        found: list[list[float]] = [[] for _ in range(num_cells)]
        now = self._samples[-1].clock
        for clock, facts in self._samples:
            if now - clock <= MINUTE and (value := facts.get(name)) is not None:
                found[max(0, num_cells - 1 - int((now - clock) / MINUTE * num_cells))].append(value)
        return [sum(cell) / len(cell) if cell else None for cell in found]

    def _rates_now(self) -> Rates:
        facts, now, before = self.facts, self._samples[-1], self._window_start()
        seconds = now.clock - before.clock
        busy, in_decoding = facts["read.busy_seconds"], facts["passes.decode_seconds"]
        decode = in_decoding + facts["passes.decode_gap_seconds"]
        given = facts["passes.num_tokens_in"] - facts["passes.num_tokens_out"]
        prompt = facts.get("passes.num_prompt_tokens", given)
        prefill = facts["passes.pass_seconds"] - in_decoding + facts["passes.prompt_gap_seconds"]
        nbytes = max(0.0, now.since(before, "read.nbytes"))
        return Rates(
            tokens_per_second=self._tokens_per_second(),
            mean_tokens_per_second=ratio(facts["passes.num_tokens_out"], decode),
            mean_prompt_tokens_per_second=ratio(prompt, prefill) if prompt > 0 else None,
            read_bytes_per_second=nbytes / seconds if seconds > 0 else None,
            reading_bytes_per_second=ratio(facts["read.nbytes"], busy),
            cached_share=ratio(now.since(before, "read.cached_bytes"), nbytes, 1),
            shares=_shares(before, now) if seconds > 0 else None,
            reading_share=ratio(now.reading(before), seconds, 1),
            experts=self._expert_rates(before) if self.latest.state.get("experts") else None,
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
        if (calls := self._calls()) is None:
            return None
        start, end = calls
        return ratio(end.since(start, "passes.num_tokens_out"), end.last_ended - start.last_ended)

    def _expert_rates(self, before: Sample) -> ExpertRates:
        """Return rates over whole calls, so that all layers count alike; over the last seconds until two have ended."""
        now = self._samples[-1]
        waited = ratio(now.since(before, "experts.wait_seconds"), now.clock - before.clock, 1)
        start, end, num_tokens = before, now, 0.0
        if (calls := self._calls()) is not None:
            start, end = calls
            lasted, tokens = end.last_ended - start.last_ended, end.since(start, "passes.num_tokens_in")
            # The very first sample may lie anywhere within a call, so its counters grew for another time.
            if tokens >= 1 and lasted > SHORTEST:
                num_tokens = tokens * (end.clock - start.clock) / lasted
        routed, hits, predicted, right, nbytes = (
            end.since(start, f"experts.{name}")
            for name in ("num_routed", "num_hits", "num_predicted", "num_predicted_right", "read_bytes")
        )
        return ExpertRates(
            hit_rate=ratio(hits, routed, 1),
            predicted_right=ratio(right, predicted, 1),
            read_per_token=ratio(routed - hits + predicted, num_tokens),
            reused_per_token=ratio(hits - right, num_tokens),
            read_bytes_per_token=ratio(nbytes, num_tokens),
            wait_share=waited,
        )

    def _calls(self) -> tuple[Sample, Sample] | None:
        """Return the first samples after two ends of calls: the earliest in the window, or the last but one; the last.

        None until two calls have ended.
        """
        ends: list[Sample] = []
        for sample in self._samples:
            if sample.last_ended > (ends[-1].last_ended if ends else 0.0):
                ends.append(sample)
        if len(ends) < 2:
            return None
        *earlier, end = ends
        within = (sample for sample in earlier if end.last_ended - sample.last_ended <= WINDOW_SECONDS)
        return next(within, earlier[-1]), end


def _shares(before: Sample, now: Sample) -> Shares:
    """Return the shares of the time. Counters move at ends, so a share can be too large: cut it to fit."""
    seconds = now.clock - before.clock
    waited = now.waited(before)
    within = waited - max(0.0, now.since(before, "stream.wait_seconds"))  # for experts, keys and values of a unit
    disk = _cut(waited, seconds)
    compute = _cut(now.since(before, "stream.held_seconds") - within, seconds - disk)
    in_calls = _cut(now.since(before, "passes.pass_seconds"), seconds)
    calls = _cut(in_calls - disk - compute, seconds - disk - compute)
    return Shares(disk / seconds, compute / seconds, calls / seconds, (seconds - disk - compute - calls) / seconds)


def _cut(value: float, most: float) -> float:
    return min(max(value, 0.0), max(most, 0.0))
