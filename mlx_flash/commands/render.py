"""Summaries of runs and plans for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from mlx_flash.commands.report import PROMPT_LENGTHS, GenerationReport, batch_speeds
from mlx_flash.config import GB
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.monitor.words import ALL_CACHED, DISK_LIMITS, SLOW, counted, duration, rate, size, speed
from mlx_flash.residency.plan import MB, Pool, ResidencyPlan, in_mb
from mlx_flash.storage.codec import Compression, num_cores

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
