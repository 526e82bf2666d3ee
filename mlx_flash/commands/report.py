"""Measurements of a run and of a plan, as JSON."""

from __future__ import annotations

import platform
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from typing import Any, TextIO

import mlx.core as mx
import mlx.nn as nn
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from mlx_flash import __version__
from mlx_flash.config import GB
from mlx_flash.experts.slots import ExpertStats
from mlx_flash.facts import FACTS, Facts, Sample
from mlx_flash.kv.kvpool import KVUsage
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.model import FlashLLM
from mlx_flash.monitor.words import ALL_CACHED, DISK_LIMITS, SLOW, counted, duration, rate, size, speed
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, MB, Pool, ResidencyPlan, in_mb
from mlx_flash.storage.codec import Compression, num_cores

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


LONG_SECONDS = 60.0
"""A predicted time to the first token above this gets a warning."""


def render_generation(report: GenerationReport) -> RenderableType:
    """Return the summary of a run."""
    return labelled_lines(_generation_lines(report))


def _generation_lines(report: GenerationReport) -> Iterator[tuple[str, str]]:
    yield (
        "Prompt:",
        (
            f"{report.prompt_tokens} tokens{_at(report.prompt_tokens_per_second)}, "
            f"first token after {report.time_to_first_token_seconds:.2f} s"
        ),
    )
    speed = _at(report.generation_tokens_per_second)
    yield "Generation:", f"{report.generation_tokens} tokens{speed}, ended by: {report.finish_reason}"
    if report.guessed_tokens:
        guesses = f"{report.guessed_tokens_right} of {report.guessed_tokens} guessed tokens right"
        yield "Speculation:", f"{report.generation_passes} passes after the first token; {guesses}"
    yield "Loading:", f"{report.load_seconds:.2f} s"
    yield "Peak memory:", _against_budget(report)
    yield from _disk_lines(report)
    if report.kv_bytes_written:
        read, written = report.kv_bytes_read or 0, report.kv_bytes_written
        yield "KV cache:", f"{size(written)} written to the disk, {size(read)} read"
    if report.expert_hit_rate is not None:
        yield "Experts:", _experts_used(report, report.expert_hit_rate)
    if not report.prefill_as_mlx_lm:
        step = report.prefill_step_size
        yield "Prefill:", f"{step} tokens a call; the output equals mlx-lm's with --prefill-step-size {step}"


def _against_budget(report: GenerationReport) -> str:
    peak = f"{report.peak_memory_bytes / GB:.3f} GB"
    if report.budget_bytes is None:
        return f"{peak}, the whole model in memory"
    return f"{peak}, {'within' if report.within_budget else 'OVER'} the budget of {report.budget_bytes / GB:.3f} GB"


def _experts_used(report: GenerationReport, hit_rate: float) -> str:
    text = f"{hit_rate:.0%} in memory when they were needed"
    if report.expert_bytes_read_per_token is not None:
        text += f", {size(report.expert_bytes_read_per_token)} read per token"
    if report.expert_prediction_rate is not None:
        text += f"; {report.expert_prediction_rate:.0%} of {report.expert_predictions} predicted ones right"
    return text


def _disk_lines(report: GenerationReport) -> Iterator[tuple[str, str]]:
    if not report.bytes_read:
        return
    per_token = report.bytes_read_per_token
    words = size(report.bytes_read) + (f", {size(per_token)} per token" if per_token is not None else "")
    yield "Read:", words + (f", {report.read_bytes_per_second / GB:.2f} GB/s" if report.read_bytes_per_second else "")
    yield from roofline(report)


def roofline(report: GenerationReport) -> Iterator[tuple[str, str]]:
    """Yield the speed of reading, and the shares of the generation time."""
    if report.reading_bytes_per_second and report.disk_bytes_per_second:
        words = f"{report.reading_bytes_per_second / GB:.2f} GB/s while reading"
        if report.cached_read_share:
            words += f", {report.cached_read_share:.0%} of it through the page cache"
        yield "Disk:", f"{words}; probed: {report.disk_bytes_per_second / GB:.2f} GB/s"
    waiting, reading = report.generation_wait_share, report.generation_read_share
    if waiting is not None and reading is not None:
        source = "the page cache" if (report.cached_read_share or 0.0) >= ALL_CACHED else "the disk"
        limit = source if waiting >= DISK_LIMITS else "computing"
        shares = f"reading {reading:.0%}, computing {1 - waiting:.0%}, waiting for {source} {waiting:.0%}"
        yield "Time:", f"{shares} of the generation: limited by {limit}"


def render_plan(model: str, layout: ModelLayout, plan: ResidencyPlan) -> RenderableType:
    """Return the plan of a model: the contents of memory, and the reads of every pass."""
    memory = Table("In memory", box=box.SIMPLE_HEAD)
    memory.add_column("MB", justify="right")
    for name, nbytes in plan.parts():
        memory.add_row(name, f"{nbytes / MB:.1f}")
    memory.add_section()
    memory.add_row("predicted peak", f"{plan.peak_bytes / MB:.1f}")
    memory.add_row("budget", f"{plan.budget_bytes / MB:.1f}")
    memory.add_row("smallest workable budget", in_mb(plan.minimum_bytes))
    heading = f"{model}: {size(plan.model_bytes)} of weights"
    return Group(heading, memory, Padding(labelled_lines(_plan_lines(layout, plan)), (0, 0, 0, 2), expand=False))


def _plan_lines(layout: ModelLayout, plan: ResidencyPlan) -> Iterator[tuple[str, str]]:
    yield "Streamed layers:", _streamed_layers(layout, plan)
    if plan.pool is not None:
        yield "Experts:", _experts(plan.pool)
    for unit in layout.heads:
        yield "Head:", f"{unit.name} {_residence(unit, plan)}"
    for unit in layout.embeddings:
        yield "Embedding:", f"{unit.name} {_residence(unit, plan)}"
    if layout.towers:
        yield "Towers:", _towers(layout)
    yield "Read per token:", f"{size(plan.read_bytes)}, through {counted(plan.streaming.num_slots, 'slot')}"
    yield (
        "Disk:",
        (
            f"{plan.disk_bytes_per_second / GB:.2f} GB/s probed, "
            f"{counted(plan.queue_depth, 'read')} of {size(plan.read_size)} in flight"
        ),
    )
    if plan.compression is not None:
        yield "Compressed:", f"to {plan.compression.ratio:.0%} of the bytes: {compression_in_words(plan.compression)}"
    yield "Prediction:", _planned_speed(plan)
    if batch_speeds(plan) and plan.weights_seconds > 0:
        yield "Batches:", _batches(plan)
    yield "First token:", _first_token(plan)
    if long := [n for n in PROMPT_LENGTHS if plan.seconds_to_first_token(n) > LONG_SECONDS]:
        hint = "Hint: raise ram_budget_gb, or set a larger prefill_step_size."
        if long[0] * plan.prompt_seconds_per_token >= plan.seconds_to_first_token(long[0]) / 2:
            hint = "Computing takes most of it, which no budget shortens. Hint: kv_prefixes keeps computed prompts."
        yield (
            "Warning:",
            f"prompts of {_thousands(long[0])} tokens and more wait over a minute for the first token. {hint}",
        )
    if plan.kv.num_on_disk:
        yield "KV cache:", _kv_on_disk(plan)
    yield "Prefill:", f"{plan.prefill_step_size} tokens a call, {plan.context_length} tokens of context"
    yield "MLX cache limit:", size(plan.cache_limit)


def compression_in_words(found: Compression) -> str:
    """Return the gain of compression and the speeds that decide it."""
    cores = counted(num_cores(), "core")
    speeds = (
        f"disk {found.disk_bytes_per_second / GB:.2f} GB/s, a core decodes {found.decode_bytes_per_second / GB:.2f} "
        f"GB/s, MLX computes {found.compute_bytes_per_second / GB:.2f} GB/s, {cores}"
    )
    verdict = "pays" if found.pays else "does not pay"
    return f"it {verdict} here, with {found.gain:.2f} times the speed of an uncompressed copy ({speeds})"


def _planned_speed(plan: ResidencyPlan) -> str:
    """Return the predicted speed of generation in a short context."""
    text, seconds = f"{plan.opening_seconds:.3g} s per token", plan.opening_seconds
    text += _at(1 / seconds) if 0 < seconds < 1 / SLOW else ""
    return text if plan.is_measured else f"{text}, from a short probe; up to {plan.seconds_range[1]:.3g} s are likely"


def _batches(plan: ResidencyPlan) -> str:
    rates = ", ".join(f"{number}: {rate(speed)}" for number, speed in batch_speeds(plan).items())
    return f"tokens/s of sequences that share passes, in a context of {plan.context_length} tokens, {rates}"


def _first_token(plan: ResidencyPlan) -> str:
    waits = [f"{_thousands(n)} tokens {duration(plan.seconds_to_first_token(n))}" for n in PROMPT_LENGTHS]
    return f"predicted for a prompt of {', '.join(waits)}"


def _thousands(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _kv_on_disk(plan: ResidencyPlan) -> str:
    kv = plan.kv
    return (
        f"on disk for {kv.num_on_disk} of {len(kv.rows)} layers at {plan.context_length} tokens, where "
        f"{size(kv.disk_bytes)} are read and a token takes {plan.seconds:.3g} s"
    )


def _experts(pool: Pool) -> str:
    return (
        f"{pool.num_slots} of {pool.num_experts} in memory, {pool.hit_rate:.0%} of those a token needs expected there, "
        f"{size(pool.read_bytes)} read for each token"
    )


def _streamed_layers(layout: ModelLayout, plan: ResidencyPlan) -> str:
    streaming = plan.streaming
    streamed = streaming.parameters(layout)
    shares = [[parameter.name in streamed for parameter in unit.large] for unit in layout.layers]
    text = f"{sum(map(any, shares))} of {len(layout.layers)}"
    if any(unit.name in dict(streaming.heads) for unit in layout.cut(streaming.cut)):
        return f"{text}, their parts in tiles of rows"
    partly = sum(any(share) and not all(share) for share in shares)
    text += f", {partly} of them in part" if partly else ""
    return text + (f", cut into {counted(len(streaming.layers), 'unit')}" if streaming.cut else "")


def _towers(layout: ModelLayout) -> str:
    nbytes = sum(unit.nbytes for unit in layout.towers)
    return (
        f"{counted(len(layout.towers), 'unit')}, {size(nbytes)} read for each prompt with pictures or sound, one after "
        f"another in {size(layout.tower_bytes)} of memory"
    )


def _residence(unit: Unit, plan: ResidencyPlan) -> str:
    rows = dict(plan.streaming.heads).get(unit.name)
    places = ["rows read on demand"] if unit.name in plan.streaming.tables else []
    places += [f"computed in tiles of {rows} rows"] if rows is not None else []
    return ", ".join(places) or "in memory"


def labelled_lines(lines: Iterator[tuple[str, str]]) -> Table:
    """Return a table of labels and texts."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for label, text in lines:
        table.add_row(label, text)
    return table


def _at(tokens_per_second: float | None) -> str:
    """Return a speed as the end of a phrase; nothing when it is unknown."""
    return "" if tokens_per_second is None else f", {speed(tokens_per_second)}"
