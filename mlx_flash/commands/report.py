"""Measurements of a run and of a plan, as JSON."""

from __future__ import annotations

import platform
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from typing import Any, TextIO

import mlx.core as mx
import mlx.nn as nn

from mlx_flash import __version__
from mlx_flash.experts.slots import ExpertStats
from mlx_flash.facts import FACTS, Facts, Sample
from mlx_flash.kv.kvpool import KVUsage
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, ResidencyPlan

Json = dict[str, Any]

PROMPT_LENGTHS = (100, 2_000, 16_000)
"""Prompts for which the time to the first token is predicted."""

BATCH_SIZES = (1, 4, 8, 16)
"""Numbers of sequences for which the speed is predicted."""


class Recorder:
    """Recorder of one run.

    Args:
        model: the loaded model.
        num_prompt_tokens: length of the prompt.
        load_seconds: duration of loading.

    Attributes:
        plan: the model's plan; None when mlx-lm alone runs it.
        texts, tokens: the output so far.
        finish_reason: mlx-lm's, or ``"interrupted"``.
        start, first, last: samples at the start of prefill, at the first token and at the last one.
    """

    def __init__(self, model: nn.Module, num_prompt_tokens: int, load_seconds: float) -> None:
        self._model = own = model if isinstance(model, FlashLLM) else None
        self._engine = None if own is None else own.engine
        experts = None if self._engine is None else self._engine.experts
        self._experts = ExpertStats() if experts is None else experts.pool.stats  # the engine drops its own
        self.plan: ResidencyPlan | None = None if own is None else own.plan
        self.num_prompt_tokens = num_prompt_tokens
        self.load_seconds = load_seconds
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason = "interrupted"
        self.start = self.first = self.last = self.sample()

    def add(self, response: Any) -> None:
        """Record a response of ``stream_generate``. mlx-vlm's last one may have no token of its own."""
        self.texts.append(response.text)
        self.finish_reason = response.finish_reason or self.finish_reason
        if response.generation_tokens <= len(self.tokens):
            return
        self.last = self.sample()
        if not self.tokens:
            self.first = self.last
        self.tokens.append(response.token)

    def sample(self) -> Sample:
        """Return the clock and the counters now."""
        found, model, engine = Facts(), self._model, self._engine
        if model is not None and engine is not None:
            kv = KVUsage() if model.kv is None else model.kv.usage
            sections = {"passes": model.counters, "read": engine.reader.stats, "stream": engine.stream.stats}
            numbers: Any
            for section, numbers in {**sections, "experts": self._experts, "kv": kv}.items():
                places = _places(section, type(numbers))  # type: ignore[arg-type]
                values = ((name, getattr(numbers, key)) for name, key in places)
                found.update({name: value for name, value in values if value is not None})
            found["loans.saved_bytes"] = engine.loans.saved_bytes
        return Sample(time.perf_counter(), found)


@cache
def _places(section: str, numbers: Any) -> list[tuple[str, str]]:
    """Return the names of the facts that the fields of a class of counters are."""
    return [(name, field.name) for field in fields(numbers) if (name := f"{section}.{field.name}") in FACTS]


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """Measurements of a run, in base units. None where a number does not apply."""

    model: str
    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "interrupted"
    prompt_tokens: int
    prompt_tokens_per_second: float | None  # over the time to the first token, as mlx-lm counts it
    generation_tokens: int
    generation_tokens_per_second: float | None  # over the tokens after the first one
    time_to_first_token_seconds: float
    generation_seconds: float
    load_seconds: float
    prefill_step_size: int  # prompt tokens in a forward call
    prefill_as_mlx_lm: bool  # mlx-lm cuts this prompt in the same way by default
    peak_memory_bytes: int  # of the process
    budget_bytes: int | None = None
    within_budget: bool | None = None
    load_bytes_read: int | None = None  # before prefill; prefetched bytes count when they are read
    prompt_bytes_read: int | None = None  # from there to the first token
    generation_bytes_read: int | None = None  # from there to the last token
    bytes_read: int | None = None  # for the prompt and for generation
    bytes_read_per_token: float | None = None  # for each token after the first
    prompt_passes: int | None = None  # passes over the weights to the first token
    generation_passes: int | None = None  # from there to the last token
    passes_per_token: float | None = None  # for each token after the first
    guessed_tokens: int | None = None  # guessed and computed
    guessed_tokens_right: int | None = None
    lent_bytes: int | None = None  # streamed weights in reserved memory at the last token, so that no pass read them
    read_bytes_per_second: float | None = None  # over the wall time of prompt and generation, as in flash-monitor
    reading_bytes_per_second: float | None = None  # over the time with a read in flight, loading excluded
    disk_bytes_per_second: float | None = None  # of the disk in its probe
    disk_speed_share: float | None = None  # reading_bytes_per_second over disk_bytes_per_second
    cached_read_share: float | None = None  # share of these bytes that came through the page cache
    prompt_wait_share: float | None = None  # share of the time spent waiting for weights, keys and values
    generation_wait_share: float | None = None
    generation_read_share: float | None = None  # share of the time with a read in flight
    kv_bytes_read: int | None = None  # keys and values of prompt and generation, from disk
    kv_bytes_written: int | None = None
    expert_hit_rate: float | None = None  # share of the experts needed in generation that were in memory or in flight
    expert_bytes_read_per_token: float | None = None  # bytes of experts in bytes_read_per_token
    expert_predictions: int | None = None  # experts prefetched in generation
    expert_prediction_rate: float | None = None  # share of them that was needed
    plan: ResidencyPlan | None = None

    def to_json(self) -> Json:
        """Return all fields, the parts of the plan, and the versions of the software."""
        report = {field.name: getattr(self, field.name) for field in fields(self)}
        plan = None if self.plan is None else plan_to_json(self.plan)
        return {**report, "mode": "streamed" if plan else "resident", "plan": plan, **surroundings()}


def follow(responses: Generator[Any, None, None], run: Recorder, out: TextIO | None) -> KeyboardInterrupt | None:
    """Record responses as they come, and write their text. Return the interrupt that ends them, if one does."""
    try:
        with closing(responses):
            for response in responses:
                run.add(response)
                if out is not None:
                    print(response.text, end="", file=out, flush=True)
    except KeyboardInterrupt as interrupt:
        return interrupt
    finally:
        if out is not None and run.tokens:
            print(file=out, flush=True)
    return None


def make_report(run: Recorder, model: str, prefill_step_size: int) -> GenerationReport:
    """Return the report of a run. Call it after the model is closed, when every read is counted.

    Args:
        run: the records, of one token at least.
        model: the user's name of the model.
        prefill_step_size: the value given to mlx-lm.
    """
    to_first, to_last = run.first.clock - run.start.clock, run.last.clock - run.first.clock
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
    start, first, last, end, after_first = run.start, run.first, run.last, run.sample(), len(run.tokens) - 1
    nbytes, generated = int(last.since(start, "read.nbytes")), int(last.since(first, "read.nbytes"))
    passes = int(last.since(first, "passes.num_passes"))
    speed = ratio(end.since(start, "read.nbytes"), end.since(start, "read.busy_seconds"))
    return {
        "budget_bytes": plan.budget_bytes,
        "within_budget": peak_footprint() <= plan.budget_bytes,
        "load_bytes_read": start.facts["read.nbytes"],
        "prompt_bytes_read": first.since(start, "read.nbytes"),
        "generation_bytes_read": generated,
        "bytes_read": nbytes,
        "bytes_read_per_token": ratio(generated, after_first),
        "prompt_passes": first.since(start, "passes.num_passes"),
        "generation_passes": passes,
        "passes_per_token": ratio(passes, after_first),
        "guessed_tokens": end.since(start, "passes.num_guessed"),
        "guessed_tokens_right": end.since(start, "passes.num_right"),
        "lent_bytes": last.facts["loans.saved_bytes"],
        "read_bytes_per_second": ratio(nbytes, last.clock - start.clock),
        "reading_bytes_per_second": speed,
        "disk_bytes_per_second": plan.disk_bytes_per_second,
        "disk_speed_share": speed and ratio(speed, plan.disk_bytes_per_second),
        "cached_read_share": ratio(end.since(start, "read.cached_bytes"), end.since(start, "read.nbytes")),
        "prompt_wait_share": _share(first.waited(start), first.clock - start.clock),
        "generation_wait_share": _share(last.waited(first), last.clock - first.clock),
        "generation_read_share": _share(last.reading(first), last.clock - first.clock),
        "kv_bytes_read": last.since(start, "kv.read_bytes"),
        "kv_bytes_written": last.since(start, "kv.written_bytes"),
        "plan": plan,
    }


def _share(part: float, whole: float) -> float | None:
    """Return a share of a time. Clocks are read one after another, so that parts may exceed the whole a little."""
    found = ratio(part, whole)
    return None if found is None else min(found, 1.0)


def _expert_numbers(run: Recorder) -> Json:
    first, last = run.first, run.last
    predicted = last.since(first, "experts.num_predicted")
    # Experts count when they are asked for, other bytes when they have come: look-ahead may be in flight at the end.
    asked, generated = last.since(first, "experts.read_bytes"), last.since(first, "read.nbytes")
    return {
        "expert_hit_rate": ratio(last.since(first, "experts.num_hits"), last.since(first, "experts.num_routed")),
        "expert_bytes_read_per_token": ratio(min(asked, generated), len(run.tokens) - 1),
        "expert_predictions": predicted,
        "expert_prediction_rate": ratio(last.since(first, "experts.num_predicted_right"), predicted),
    }


def batch_speeds(plan: ResidencyPlan) -> dict[int, float | None]:
    """Return predicted tokens a second by the number of sequences. Empty with all weights in memory.

    There sequences share no reads, and most are computed by mlx-lm's batches.
    """
    return {number: plan.tokens_per_second(number) for number in BATCH_SIZES} if plan.read_bytes else {}


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
        "batches": [{"sequences": n, "tokens_per_second": speed} for n, speed in batch_speeds(plan).items()],
        "seconds_per_token": plan.opening_seconds,
        "tokens_per_second": ratio(1, plan.opening_seconds),
    }


def planning_to_json(model: str, layout: ModelLayout, plan: ResidencyPlan) -> Json:
    """Return the output of ``mlx-flash plan --json``."""
    towers = {
        "num_units": len(layout.towers),
        "bytes": sum(unit.nbytes for unit in layout.towers),
        "memory_bytes": layout.tower_bytes,
    }
    about = {"model": model, "num_layers": len(layout.layers), "towers": towers if layout.towers else None}
    return {**about, **plan_to_json(plan), **surroundings()}


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
