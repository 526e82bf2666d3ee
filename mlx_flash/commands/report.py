"""Measurements of a run and of a plan, as JSON."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_flash import __version__
from mlx_flash.engine.status import PassCounters
from mlx_flash.experts.slots import ExpertStats
from mlx_flash.kv.stats import KVUsage
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, ResidencyPlan
from mlx_flash.storage.ranges import ReadStats

Json = dict[str, Any]

PROMPT_LENGTHS = (100, 2_000, 16_000)
"""Prompts for which the time to the first token is predicted."""

BATCH_SIZES = (1, 4, 8, 16)
"""Numbers of sequences for which the speed is predicted."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Clock and counters at one moment of a run.

    Attributes:
        seconds: the clock.
        read, experts, kv, passes: counters of the reader, of experts read one by one, of KV caches and of calls.
        wait_seconds: time that computing waited for weights, keys and values.
        lent_bytes: streamed weights that were in memory, so that a pass did not read them.
    """

    seconds: float
    read: ReadStats
    experts: ExpertStats
    kv: KVUsage
    passes: PassCounters
    wait_seconds: float
    lent_bytes: int


class Recorder:
    """Recorder of one run.

    Args:
        model: the loaded model.
        num_prompt_tokens: length of the prompt.
        load_seconds: duration of loading.

    Attributes:
        plan: the model's plan; None when mlx-lm alone runs it.
        forecast: the gain of a larger budget; None when mlx-lm alone runs it.
        texts, tokens: the output so far.
        finish_reason: mlx-lm's, or ``"interrupted"``.
        start, first, last: marks at the start of prefill, at the first token and at the last one.
    """

    def __init__(self, model: nn.Module, num_prompt_tokens: int, load_seconds: float) -> None:
        self._engine = model.engine if isinstance(model, FlashLLM) else None
        self._kv = model.kv if isinstance(model, FlashLLM) else None
        self._counters = model.counters if isinstance(model, FlashLLM) else PassCounters()
        self.forecast = model.forecast if isinstance(model, FlashLLM) else None
        experts = self._engine.experts if self._engine is not None else None
        self._experts = experts.pool.stats if experts is not None else ExpertStats()  # the engine drops its own
        self.plan: ResidencyPlan | None = model.plan if isinstance(model, FlashLLM) else None
        self.num_prompt_tokens = num_prompt_tokens
        self.load_seconds = load_seconds
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason = "interrupted"
        self.start = self.first = self.last = self.mark()

    def add(self, response: Any) -> None:
        """Record a response of ``mlx_lm.stream_generate``."""
        self.last = self.mark()
        if not self.tokens:
            self.first = self.last
        self.tokens.append(response.token)
        self.texts.append(response.text)
        self.finish_reason = response.finish_reason or self.finish_reason

    def mark(self) -> Mark:
        """Return the clock and the counters now."""
        engine, experts, passes = self._engine, replace(self._experts), replace(self._counters)
        kv = KVUsage() if self._kv is None else self._kv.usage
        read = ReadStats() if engine is None else engine.reader.stats
        waited = experts.wait_seconds + kv.wait_seconds + (0.0 if engine is None else engine.stream.stats.wait_seconds)
        lent = 0 if engine is None else engine.loans.saved_bytes
        return Mark(time.perf_counter(), read, experts, kv, passes, waited, lent)


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """Measurements of a run, in base units. None where a number does not apply.

    Attributes:
        finish_reason: ``"stop"``, ``"length"`` or ``"interrupted"``.
        prompt_tokens_per_second: over the time to the first token, as mlx-lm counts it.
        generation_tokens_per_second: over the tokens after the first one.
        prefill_step_size: prompt tokens in a forward call.
        prefill_as_mlx_lm: mlx-lm cuts this prompt in the same way by default.
        peak_memory_bytes: peak memory of the process.
        load_bytes_read, prompt_bytes_read, generation_bytes_read: bytes read before prefill, from there to the first
            token, and from there to the last one. Prefetched bytes count when they are read.
        bytes_read: bytes read for the prompt and for generation.
        bytes_read_per_token: bytes read per generated token after the first.
        prompt_passes, generation_passes: passes over the weights to the first token, and from there to the last one.
        passes_per_token: passes per generated token after the first.
        guessed_tokens, guessed_tokens_right: tokens that were guessed and computed, and those that were right.
        lent_bytes: streamed weights that were in reserved memory at the last token, so that no pass read them.
        read_bytes_per_second: ``bytes_read`` over the wall time of prompt and generation, as flash-monitor shows it.
        reading_bytes_per_second: bytes over the time with at least one read in flight, loading excluded.
        disk_bytes_per_second: speed of the disk in its probe.
        disk_speed_share: ``reading_bytes_per_second`` over ``disk_bytes_per_second``.
        cached_read_share: share of these bytes that came through the page cache, in which free memory holds them.
        prompt_wait_share, generation_wait_share: share of the time spent waiting for weights, keys and values.
        generation_read_share: share of the time of generation with at least one read in flight.
        more_budget_bytes, more_tokens_per_second: what so much more budget is predicted to give; None where nothing.
        kv_bytes_read, kv_bytes_written: keys and values of prompt and generation, from and to disk.
        expert_hit_rate: share of the experts needed in generation that were in memory or in flight.
        expert_bytes_read_per_token: bytes of experts in ``bytes_read_per_token``.
        expert_predictions: experts prefetched in generation.
        expert_prediction_rate: share of the prefetched experts that were needed.
    """

    model: str
    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    prompt_tokens_per_second: float | None
    generation_tokens: int
    generation_tokens_per_second: float | None
    time_to_first_token_seconds: float
    generation_seconds: float
    load_seconds: float
    prefill_step_size: int
    prefill_as_mlx_lm: bool
    peak_memory_bytes: int
    budget_bytes: int | None = None
    within_budget: bool | None = None
    load_bytes_read: int | None = None
    prompt_bytes_read: int | None = None
    generation_bytes_read: int | None = None
    bytes_read: int | None = None
    bytes_read_per_token: float | None = None
    prompt_passes: int | None = None
    generation_passes: int | None = None
    passes_per_token: float | None = None
    guessed_tokens: int | None = None
    guessed_tokens_right: int | None = None
    lent_bytes: int | None = None
    read_bytes_per_second: float | None = None
    reading_bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None
    disk_speed_share: float | None = None
    cached_read_share: float | None = None
    prompt_wait_share: float | None = None
    generation_wait_share: float | None = None
    generation_read_share: float | None = None
    more_budget_bytes: int | None = None
    more_tokens_per_second: float | None = None
    kv_bytes_read: int | None = None
    kv_bytes_written: int | None = None
    expert_hit_rate: float | None = None
    expert_bytes_read_per_token: float | None = None
    expert_predictions: int | None = None
    expert_prediction_rate: float | None = None
    plan: ResidencyPlan | None = None

    def to_json(self) -> Json:
        """Return all fields, the parts of the plan, and the versions of the software."""
        report = {field.name: getattr(self, field.name) for field in fields(self)}
        plan = None if self.plan is None else plan_to_json(self.plan)
        return {**report, "mode": "streamed" if plan else "resident", "plan": plan, **surroundings()}


def make_report(run: Recorder, model: str, prefill_step_size: int) -> GenerationReport:
    """Return the report of a run. Call it after the model is closed, when every read is counted.

    Args:
        run: the records, of one token at least.
        model: the user's name of the model.
        prefill_step_size: the value given to mlx-lm.
    """
    to_first, to_last = run.first.seconds - run.start.seconds, run.last.seconds - run.first.seconds
    after_first = len(run.tokens) - 1
    longest = run.num_prompt_tokens - 1  # mlx-lm leaves the last one to the first step of generation
    return GenerationReport(
        model=model,
        text="".join(run.texts),
        tokens=run.tokens,
        finish_reason=run.finish_reason,
        prompt_tokens=run.num_prompt_tokens,
        prompt_tokens_per_second=ratio(run.num_prompt_tokens, to_first),
        generation_tokens=len(run.tokens),
        generation_tokens_per_second=ratio(after_first, to_last) if after_first else None,
        time_to_first_token_seconds=to_first,
        generation_seconds=to_last,
        load_seconds=run.load_seconds,
        prefill_step_size=prefill_step_size,
        prefill_as_mlx_lm=min(prefill_step_size, longest) == min(DEFAULT_PREFILL_STEP_SIZE, longest),
        peak_memory_bytes=peak_footprint(),
        **({} if run.plan is None else _disk_numbers(run, run.plan)),
        **({} if run.plan is None or run.plan.pool is None else _expert_numbers(run)),
    )


def _disk_numbers(run: Recorder, plan: ResidencyPlan) -> Json:
    start, first, last, end = run.start, run.first, run.last, run.mark()
    nbytes, cached = end.read.nbytes - start.read.nbytes, end.read.cached_bytes - start.read.cached_bytes
    speed = ratio(nbytes, end.read.busy_seconds - start.read.busy_seconds)
    generated = last.read.nbytes - first.read.nbytes
    return {
        "budget_bytes": plan.budget_bytes,
        "within_budget": peak_footprint() <= plan.budget_bytes,
        "load_bytes_read": start.read.nbytes,
        "prompt_bytes_read": first.read.nbytes - start.read.nbytes,
        "generation_bytes_read": generated,
        "bytes_read": last.read.nbytes - start.read.nbytes,
        "bytes_read_per_token": ratio(generated, len(run.tokens) - 1),
        "prompt_passes": first.passes.num_passes - start.passes.num_passes,
        "generation_passes": last.passes.num_passes - first.passes.num_passes,
        "passes_per_token": ratio(last.passes.num_passes - first.passes.num_passes, len(run.tokens) - 1),
        "guessed_tokens": end.passes.num_guessed - start.passes.num_guessed,
        "guessed_tokens_right": end.passes.num_right - start.passes.num_right,
        "lent_bytes": last.lent_bytes,
        "read_bytes_per_second": ratio(last.read.nbytes - start.read.nbytes, last.seconds - start.seconds),
        "reading_bytes_per_second": speed,
        "disk_bytes_per_second": plan.disk_bytes_per_second,
        "disk_speed_share": speed and ratio(speed, plan.disk_bytes_per_second),
        "cached_read_share": ratio(cached, nbytes),
        "prompt_wait_share": ratio(first.wait_seconds - start.wait_seconds, first.seconds - start.seconds),
        "generation_wait_share": ratio(last.wait_seconds - first.wait_seconds, last.seconds - first.seconds),
        "generation_read_share": _share(last.read.busy_seconds - first.read.busy_seconds, last.seconds - first.seconds),
        **_more(run),
        "kv_bytes_read": last.kv.read_bytes - start.kv.read_bytes,
        "kv_bytes_written": last.kv.written_bytes - start.kv.written_bytes,
        "plan": plan,
    }


def _share(part: float, whole: float) -> float | None:
    """Return a share of a time. Clocks are read one after another, so that parts may exceed the whole a little."""
    found = ratio(part, whole)
    return None if found is None else min(found, 1.0)


def _more(run: Recorder) -> Json:
    found = None if run.forecast is None else run.forecast.outlook()
    speed = ratio(len(run.tokens) - 1, run.last.seconds - run.first.seconds)
    if found is None or speed is None:
        return {}
    return {"more_budget_bytes": found.more_bytes, "more_tokens_per_second": speed * found.times}


def _expert_numbers(run: Recorder) -> Json:
    first, last = run.first.experts, run.last.experts
    predicted = last.num_predicted - first.num_predicted
    return {
        "expert_hit_rate": ratio(last.num_hits - first.num_hits, last.num_routed - first.num_routed),
        "expert_bytes_read_per_token": ratio(last.read_bytes - first.read_bytes, len(run.tokens) - 1),
        "expert_predictions": predicted,
        "expert_prediction_rate": ratio(last.num_predicted_right - first.num_predicted_right, predicted),
    }


def plan_to_json(plan: ResidencyPlan) -> Json:
    """Return every field of a plan, and its derived numbers."""
    kv = asdict(plan.kv)
    if plan.kv.options is not None:
        kv["options"]["directory"] = None if plan.kv.options.directory is None else str(plan.kv.options.directory)
    return {
        **asdict(plan),
        "kv": kv,
        "kv_bytes": plan.kv_bytes,
        "peak_bytes": plan.peak_bytes,
        "parts": [{"name": name, "bytes": nbytes} for name, nbytes in plan.parts()],
        "seconds_to_first_token": [
            {"prompt_tokens": number, "seconds": plan.seconds_to_first_token(number)} for number in PROMPT_LENGTHS
        ],
        "batches": [{"sequences": n, "tokens_per_second": plan.tokens_per_second(n)} for n in BATCH_SIZES],
        "seconds_per_token": plan.opening_seconds,
        "tokens_per_second": ratio(1, plan.opening_seconds),
    }


def planning_to_json(model: str, layout: ModelLayout, plan: ResidencyPlan) -> Json:
    """Return the output of ``mlx-flash plan --json``."""
    return {"model": model, "num_layers": len(layout.layers), **plan_to_json(plan), **surroundings()}


def surroundings() -> Json:
    """Return versions, platform and device."""
    packages = {"mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "mlx_flash": __version__}
    return {
        "versions": {"python": platform.python_version(), **packages},
        "platform": platform.platform(),
        "device": str(mx.default_device()),
    }


def ratio(part: float, whole: float) -> float | None:
    """Return the quotient, or None when the divisor is not above 0."""
    return part / whole if whole > 0 else None
