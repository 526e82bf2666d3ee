"""What the command line tells about a run and a plan, for people and as JSON."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from mlx_flash import __version__
from mlx_flash.config import GB
from mlx_flash.experts.slots import ExpertStats
from mlx_flash.kv.stats import KVUsage
from mlx_flash.layout.load import ModelLayout, Unit
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, MB, Pool, ResidencyPlan, in_mb

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """Clock and counters at one moment of a run.

    Attributes:
        seconds: the clock.
        nbytes: bytes read since the model's files were opened.
        busy_seconds: time during which the disk was read.
        wait_seconds: time that computing waited for weights.
        experts: what experts that are read one by one did.
        kv_read_bytes, kv_written_bytes: of keys and values, from and to the disk.
    """

    seconds: float
    nbytes: int
    busy_seconds: float
    wait_seconds: float
    experts: ExpertStats
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0


class Recorder:
    """Notes what a run does while it does it.

    Args:
        model: the model, just loaded.
        num_prompt_tokens: length of its prompt.
        load_seconds: how long loading took.

    Attributes:
        plan: the model's, or None when it is in memory whole.
        texts, tokens: what came so far.
        finish_reason: mlx-lm's, or ``"interrupted"``.
        start, first, last: marks at the start of prefill, at the first token and at the last one.
    """

    def __init__(self, model: nn.Module, num_prompt_tokens: int, load_seconds: float) -> None:
        self._engine = model.engine if isinstance(model, FlashLLM) else None
        self._kv = model.kv if isinstance(model, FlashLLM) else None
        experts = self._engine.experts if self._engine is not None else None
        self._experts = experts.pool.stats if experts is not None else ExpertStats()  # the engine lets go of its own
        self.plan: ResidencyPlan | None = model.plan if isinstance(model, FlashLLM) else None
        self.num_prompt_tokens = num_prompt_tokens
        self.load_seconds = load_seconds
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason = "interrupted"
        self.start = self.first = self.last = self.mark()

    def add(self, response: Any) -> None:
        """Notes a response of ``mlx_lm.stream_generate``."""
        self.last = self.mark()
        if not self.tokens:
            self.first = self.last
        self.tokens.append(response.token)
        self.texts.append(response.text)
        self.finish_reason = response.finish_reason or self.finish_reason

    def mark(self) -> Mark:
        """Now."""
        if self._engine is None:
            return Mark(time.perf_counter(), 0, 0.0, 0.0, ExpertStats())
        read, stream, experts = self._engine.reader.stats, self._engine.stream.stats, replace(self._experts)
        waited = stream.wait_seconds + experts.wait_seconds
        kv = KVUsage() if self._kv is None else self._kv.usage
        waited += kv.wait_seconds
        now = time.perf_counter()
        return Mark(now, read.nbytes, read.busy_seconds, waited, experts, kv.read_bytes, kv.written_bytes)


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """A run in numbers, in base units. What does not apply to it is None.

    Attributes:
        finish_reason: ``"stop"``, ``"length"`` or ``"interrupted"``.
        prompt_tokens_per_second: over the time to the first token, as mlx-lm counts it.
        generation_tokens_per_second: over the tokens after the first one.
        prefill_step_size: prompt tokens in a forward call.
        prefill_as_mlx_lm: whether mlx-lm cuts this prompt in the same way when it is not told how.
        peak_memory_bytes: the most that the process ever held.
        load_bytes_read, prompt_bytes_read, generation_bytes_read: up to the start of prefill, from there to the first
            token, and from there to the last one. Reading ahead counts where it happens.
        bytes_read: of the prompt and of generation.
        bytes_read_per_token: of generation.
        read_bytes_per_second: while at least one read was in flight, loading excluded.
        disk_bytes_per_second: what the disk was probed to give.
        disk_speed_share: of that, what reading reached.
        prompt_wait_share, generation_wait_share: of the time, what was spent waiting for weights, keys and values.
        kv_bytes_read, kv_bytes_written: keys and values of the prompt and of generation, from and to the disk.
        expert_hit_rate: of the experts that generation needed, the share that was in memory, or on its way.
        expert_bytes_read_per_token: of generation; part of ``bytes_read_per_token``.
        expert_predictions: experts read early in generation because the next layer was expected to need them.
        expert_prediction_rate: the share of them that it did need.
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
    read_bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None
    disk_speed_share: float | None = None
    prompt_wait_share: float | None = None
    generation_wait_share: float | None = None
    kv_bytes_read: int | None = None
    kv_bytes_written: int | None = None
    expert_hit_rate: float | None = None
    expert_bytes_read_per_token: float | None = None
    expert_predictions: int | None = None
    expert_prediction_rate: float | None = None
    plan: ResidencyPlan | None = None

    def to_json(self) -> Json:
        """Everything, with the plan's parts and the versions of what ran."""
        report = {field.name: getattr(self, field.name) for field in fields(self)}
        plan = None if self.plan is None else plan_to_json(self.plan)
        return {**report, "mode": "streamed" if plan else "resident", "plan": plan, **_surroundings()}


def make_report(run: Recorder, model: str, prefill_step_size: int) -> GenerationReport:
    """Adds a run up. The model is closed by now: only then has every read ended and been counted.

    Args:
        run: what was noted; one token at least.
        model: what the user calls the model.
        prefill_step_size: as given to mlx-lm.
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
        prompt_tokens_per_second=_ratio(run.num_prompt_tokens, to_first),
        generation_tokens=len(run.tokens),
        generation_tokens_per_second=_ratio(after_first, to_last) if after_first else None,
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
    speed = _ratio(end.nbytes - start.nbytes, end.busy_seconds - start.busy_seconds)
    generated = last.nbytes - first.nbytes
    return {
        "budget_bytes": plan.budget_bytes,
        "within_budget": peak_footprint() <= plan.budget_bytes,
        "load_bytes_read": start.nbytes,
        "prompt_bytes_read": first.nbytes - start.nbytes,
        "generation_bytes_read": generated,
        "bytes_read": last.nbytes - start.nbytes,
        "bytes_read_per_token": _ratio(generated, len(run.tokens) - 1),
        "read_bytes_per_second": speed,
        "disk_bytes_per_second": plan.disk_bytes_per_second,
        "disk_speed_share": speed and _ratio(speed, plan.disk_bytes_per_second),
        "prompt_wait_share": _ratio(first.wait_seconds - start.wait_seconds, first.seconds - start.seconds),
        "generation_wait_share": _ratio(last.wait_seconds - first.wait_seconds, last.seconds - first.seconds),
        "kv_bytes_read": last.kv_read_bytes - start.kv_read_bytes,
        "kv_bytes_written": last.kv_written_bytes - start.kv_written_bytes,
        "plan": plan,
    }


def _expert_numbers(run: Recorder) -> Json:
    first, last = run.first.experts, run.last.experts
    predicted = last.num_predicted - first.num_predicted
    return {
        "expert_hit_rate": _ratio(last.num_hits - first.num_hits, last.num_routed - first.num_routed),
        "expert_bytes_read_per_token": _ratio(last.read_bytes - first.read_bytes, len(run.tokens) - 1),
        "expert_predictions": predicted,
        "expert_prediction_rate": _ratio(last.num_predicted_right - first.num_predicted_right, predicted),
    }


def plan_to_json(plan: ResidencyPlan) -> Json:
    """Every field of a plan, and what follows from them."""
    kv = asdict(plan.kv)
    if plan.kv.options is not None:
        kv["options"]["directory"] = None if plan.kv.options.directory is None else str(plan.kv.options.directory)
    return {
        **asdict(plan),
        "kv": kv,
        "kv_bytes": plan.kv_bytes,
        "peak_bytes": plan.peak_bytes,
        "parts": [{"name": name, "bytes": nbytes} for name, nbytes in plan.parts()],
        "seconds_per_token": plan.seconds,
        "tokens_per_second": _ratio(1, plan.seconds),
    }


def planning_to_json(model: str, layout: ModelLayout, plan: ResidencyPlan) -> Json:
    """What ``mlx-flash plan`` finds."""
    return {"model": model, "num_layers": len(layout.layers), **plan_to_json(plan), **_surroundings()}


def _surroundings() -> Json:
    packages = {"mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "mlx_flash": __version__}
    return {
        "versions": {"python": platform.python_version(), **packages},
        "platform": platform.platform(),
        "device": str(mx.default_device()),
    }


def render_generation(report: GenerationReport) -> RenderableType:
    """The summary of a run."""
    return _lines(_generation_lines(report))


def _generation_lines(report: GenerationReport) -> Iterator[tuple[str, str]]:
    yield (
        "Prompt:",
        (
            f"{report.prompt_tokens} tokens{_speed(report.prompt_tokens_per_second)}, "
            f"first token after {report.time_to_first_token_seconds:.2f} s"
        ),
    )
    speed = _speed(report.generation_tokens_per_second)
    yield "Generation:", f"{report.generation_tokens} tokens{speed}, ended by: {report.finish_reason}"
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
        yield "Prefill:", f"{step} tokens a call; the output is mlx-lm's own for --prefill-step-size {step}"


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
    yield "Read:", size(report.bytes_read) + (f", {size(per_token)} per token" if per_token is not None else "")
    if report.read_bytes_per_second and report.disk_bytes_per_second and report.disk_speed_share:
        speed, probed = report.read_bytes_per_second / GB, report.disk_bytes_per_second / GB
        yield "Disk:", f"{speed:.2f} GB/s, {report.disk_speed_share:.0%} of the {probed:.2f} GB/s it was probed to give"
    if report.generation_wait_share is not None:
        yield "Waiting:", f"for the disk in {report.generation_wait_share:.0%} of the generation time"


def render_plan(model: str, layout: ModelLayout, plan: ResidencyPlan) -> RenderableType:
    """The plan of a model: what is in memory, and what is read on every pass."""
    memory = Table("In memory", box=box.SIMPLE_HEAD)
    memory.add_column("MB", justify="right")
    for name, nbytes in plan.parts():
        memory.add_row(name, f"{nbytes / MB:.1f}")
    memory.add_section()
    memory.add_row("predicted peak", f"{plan.peak_bytes / MB:.1f}")
    memory.add_row("budget", f"{plan.budget_bytes / MB:.1f}")
    memory.add_row("smallest workable budget", in_mb(plan.minimum_bytes))
    heading = f"{model}: {size(plan.model_bytes)} of weights"
    return Group(heading, memory, Padding(_lines(_plan_lines(layout, plan)), (0, 0, 0, 2), expand=False))


def _plan_lines(layout: ModelLayout, plan: ResidencyPlan) -> Iterator[tuple[str, str]]:
    yield "Streamed layers:", _streamed_layers(layout, plan)
    if plan.pool is not None:
        yield "Experts:", _experts(plan.pool)
    for unit in layout.heads:
        yield "Head:", f"{unit.name} {_residence(unit, plan)}"
    for unit in layout.embeddings:
        yield "Embedding:", f"{unit.name} {_residence(unit, plan)}"
    yield "Read per token:", f"{size(plan.read_bytes)}, through {_count(plan.streaming.num_slots, 'slot')}"
    yield (
        "Disk:",
        (
            f"{plan.disk_bytes_per_second / GB:.2f} GB/s probed, "
            f"{_count(plan.queue_depth, 'read')} of {size(plan.read_size)} in flight"
        ),
    )
    yield "Prediction:", f"{plan.weights_seconds:.3g} s per token{_speed(_ratio(1, plan.weights_seconds))}"
    if plan.kv.num_on_disk:
        yield "KV cache:", _kv_on_disk(plan)
    yield "Prefill:", f"{plan.prefill_step_size} tokens a call, {plan.context_length} tokens of context"
    yield "MLX cache limit:", size(plan.cache_limit)


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
    names = [name for _, names in plan.streaming.layers for name in names]
    units = {*dict(plan.streaming.layers), *dict(plan.streaming.heads)} - {unit.name for unit in layout.heads}
    touched = [unit for unit in layout.layers if any(_is_inside(name, unit.name) for name in units)]
    partly = sum(not {p.name for p in unit.large} <= set(names) for unit in touched)
    cut = units - {unit.name for unit in layout.layers} - {unit.name for unit in layout.embeddings}
    text = f"{len(touched)} of {len(layout.layers)}"
    if any(dict(plan.streaming.heads).get(name) for name in cut):
        return f"{text}, their parts in tiles of rows"
    text += f", {partly} of them in part" if partly else ""
    return text + (f", cut into {_count(len(cut), 'unit')}" if cut else "")


def _is_inside(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")


def _residence(unit: Unit, plan: ResidencyPlan) -> str:
    rows = dict(plan.streaming.heads).get(unit.name)
    places = ["rows read on demand"] if unit.name in plan.streaming.tables else []
    places += [f"computed in tiles of {rows} rows"] if rows is not None else []
    return ", ".join(places) or "in memory"


def size(nbytes: float) -> str:
    """Bytes for people, in decimal units."""
    return f"{nbytes / GB:.3f} GB" if nbytes >= GB else f"{nbytes / MB:.1f} MB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _speed(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f", {tokens_per_second:.3f} tokens-per-sec"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _lines(lines: Iterator[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for label, text in lines:
        table.add_row(label, text)
    return table


class ProgressBar:
    """A bar on stderr, there from the first report to the last.

    Args:
        words: what is under way.
        column: how far it is, in its units.
        shown: whether there is a terminal to draw on.
    """

    def __init__(self, words: str, column: ProgressColumn, shown: bool) -> None:
        self._words = words
        self._columns = (TextColumn("{task.description}"), BarColumn(), column)
        self._shown = shown
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Draws the bar; takes it away when all is done."""
        if done >= total or not self._shown:
            self.close()
            return
        if self._progress is None:
            self._progress = Progress(*self._columns, console=Console(file=sys.stderr), transient=True)
            self._progress.add_task(self._words)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total)

    def close(self) -> None:
        """Takes the bar away. Harmless when repeated."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
