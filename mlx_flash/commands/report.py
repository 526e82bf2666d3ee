"""Measurements of a run and of a plan, as JSON."""

from __future__ import annotations

import platform
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, TextIO

import mlx.core as mx
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from mlx_flash import __version__
from mlx_flash.commands.common import labelled
from mlx_flash.config import GB
from mlx_flash.experts.pool import ExpertStats
from mlx_flash.kv.kvpool import KVUsage
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.model import FlashLLM
from mlx_flash.monitor.words import counted, duration, filled, limit, size
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, MB, PROBE_OPTIMISM, ResidencyPlan, in_mb
from mlx_flash.storage.blocks import Compression, num_cores
from mlx_flash.telemetry import Json, Sample, ratio, read

Responses = Generator[Any, None, None]
"""Yields results of ``stream_generate``."""

PROMPT_LENGTHS = (100, 2_000, 16_000)
"""Prompts for which the time to the first token is predicted."""


class Recorder:
    """Recorder of one run: its output so far, and samples at the start of prefill, the first and the last token."""

    def __init__(self, model: FlashLLM, num_prompt_tokens: int, load_seconds: float) -> None:
        assert model.engine is not None
        self._model, self._engine, self.plan = model, model.engine, model.plan
        experts = self._engine.experts
        self._experts = ExpertStats() if experts is None else experts.pool.stats  # the engine drops its own
        self.num_prompt_tokens = num_prompt_tokens
        self.load_seconds = load_seconds
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason = "interrupted"
        self.interrupt: KeyboardInterrupt | None = None
        self.start = self.first = self.last = self.sample()

    def add(self, response: Any) -> None:
        """Record a response of ``stream_generate``. mlx-vlm's last one may have no token of its own."""
        self.texts.append(response.text)
        self.finish_reason = response.finish_reason or self.finish_reason
        if response.generation_tokens <= len(self.tokens):
            return
        self.add_token(response.token)

    def add_token(self, token: int) -> None:
        """Record a token."""
        self.last = self.sample()
        if not self.tokens:
            self.first = self.last
        self.tokens.append(token)

    def sample(self) -> Sample:
        """Return the clock and the counters now."""
        model, engine = self._model, self._engine
        sections = {
            "passes": asdict(model.counters),
            "read": asdict(engine.reader.stats),
            "stream": asdict(engine.stream.stats),
            "experts": asdict(self._experts),
            "kv": asdict(KVUsage() if model.kv is None else model.kv.usage),
            "loans": {"saved_bytes": engine.loans.saved_bytes},
        }
        return Sample(time.perf_counter(), read(sections))


def follow(responses: Responses, run: Recorder, out: TextIO | None) -> None:
    """Record responses as they come, and write their text. An interrupt ends them, and is recorded."""
    try:
        with closing(responses):
            for response in responses:
                run.add(response)
                if out is not None:
                    print(response.text, end="", file=out, flush=True)
    except KeyboardInterrupt as interrupt:
        run.interrupt = interrupt
    finally:
        if out is not None and run.tokens:
            print(file=out, flush=True)


def make_report(run: Recorder, model: str) -> Json:
    """Return the measurements of a run in base units, None where one does not apply, its plan, and its surroundings.

    Call it after the model is closed, when every read is counted.
    """
    plan, start, first, last = run.plan, run.start, run.first, run.last
    to_first, to_last, after_first = first.clock - start.clock, last.clock - first.clock, len(run.tokens) - 1
    step, longest = plan.prefill_step_size, run.num_prompt_tokens - 1  # the last one is left to the first token's call
    return {
        "model": model,
        "text": "".join(run.texts),
        "tokens": run.tokens,
        "finish_reason": run.finish_reason,  # "stop", "length" or "interrupted"
        "prompt_tokens": run.num_prompt_tokens,
        "prompt_tokens_per_second": ratio(run.num_prompt_tokens, to_first),  # as mlx-lm counts it
        "generation_tokens": len(run.tokens),
        "generation_tokens_per_second": ratio(after_first, to_last) if after_first else None,  # after the first one
        "time_to_first_token_seconds": to_first,
        "generation_seconds": to_last,
        "load_seconds": run.load_seconds,
        "prefill_step_size": step,  # prompt tokens in a forward call
        "prefill_as_mlx_lm": min(step, longest) == min(DEFAULT_PREFILL_STEP_SIZE, longest),
        "peak_memory_bytes": peak_footprint(),  # of the process
        **_disk_numbers(run),
        **(_expert_numbers(run) if plan.pool is not None else dict.fromkeys(_expert_numbers(run))),
        "plan": plan_to_json(plan),
        **surroundings(),
    }


def _disk_numbers(run: Recorder) -> Json:
    start, first, last, end, after_first = run.start, run.first, run.last, run.sample(), len(run.tokens) - 1
    budget, disk = run.plan.budget_bytes, run.plan.disk_bytes_per_second
    nbytes, generated = last.since(start, "read.nbytes"), last.since(first, "read.nbytes")
    passes, busy = last.since(first, "passes.num_passes"), end.since(start, "read.busy_seconds")
    reading = ratio(end.since(start, "read.nbytes"), busy)
    cached = ratio(end.since(start, "read.cached_bytes"), end.since(start, "read.nbytes"))
    waiting = ratio(last.waited(first), last.clock - first.clock, 1)
    return {
        "budget_bytes": budget,
        "within_budget": peak_footprint() <= budget,
        "load_bytes_read": start.facts["read.nbytes"],  # before prefill; prefetched bytes count when they are read
        "prompt_bytes_read": first.since(start, "read.nbytes"),  # from there to the first token
        "generation_bytes_read": generated,  # from there to the last token
        "bytes_read": nbytes,  # for the prompt and for generation
        "bytes_read_per_token": ratio(generated, after_first),  # for each token after the first
        "prompt_passes": first.since(start, "passes.num_passes"),  # passes over the weights to the first token
        "generation_passes": passes,  # from there to the last token
        "passes_per_token": ratio(passes, after_first),  # for each token after the first
        "guessed_tokens": end.since(start, "passes.num_guessed"),  # guessed and computed
        "guessed_tokens_right": end.since(start, "passes.num_right"),
        "lent_bytes": last.facts["loans.saved_bytes"],  # streamed weights in reserved memory, which no pass reads
        "read_bytes_per_second": ratio(nbytes, last.clock - start.clock),  # over the wall time, as in flash-monitor
        "reading_bytes_per_second": reading,  # over the time with a read in flight, loading excluded
        "disk_bytes_per_second": disk,  # of the disk in its probe
        "disk_speed_share": reading and ratio(reading, disk),
        "cached_read_share": cached,  # share of these bytes that came through the page cache
        # waiting for weights and the like
        "prompt_wait_share": ratio(first.waited(start), first.clock - start.clock, 1),
        "generation_wait_share": waiting,
        "generation_read_share": ratio(last.reading(first), last.clock - first.clock, 1),  # with a read in flight
        "generation_compute_share": None if waiting is None else 1 - waiting,
        "limited_by": None if waiting is None else limit(waiting, cached)[0],
        "kv_bytes_read": last.since(start, "kv.read_bytes"),  # keys and values of prompt and generation, from disk
        "kv_bytes_written": last.since(start, "kv.written_bytes"),
    }


def _expert_numbers(run: Recorder) -> Json:
    first, last = run.first, run.last
    predicted = last.since(first, "experts.num_predicted")
    # Experts count when they are asked for, other bytes when they have come: look-ahead may be in flight at the end.
    asked, generated = last.since(first, "experts.read_bytes"), last.since(first, "read.nbytes")
    return {
        # share of the experts needed in generation that were in memory or in flight
        "expert_hit_rate": ratio(last.since(first, "experts.num_hits"), last.since(first, "experts.num_routed")),
        "expert_bytes_read_per_token": ratio(min(asked, generated), len(run.tokens) - 1),
        "expert_predictions": predicted,  # experts prefetched in generation
        # share of them that were needed
        "expert_prediction_rate": ratio(last.since(first, "experts.num_predicted_right"), predicted),
    }


def plan_to_json(plan: ResidencyPlan) -> Json:
    """Return every field of a plan, and its derived numbers."""
    return {
        **asdict(plan),
        "kv_bytes": plan.kv_bytes,
        "peak_bytes": plan.peak_bytes,
        "read_bytes": plan.read_bytes,
        "parts": [{"name": name, "bytes": nbytes} for name, nbytes in plan.parts()],
        "seconds_to_first_token": [
            {"prompt_tokens": number, "seconds": plan.seconds_to_first_token(number)} for number in PROMPT_LENGTHS
        ],
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
    lost = "config.json promises a head for multi-token prediction that this conversion has lost"
    own = "by the head for multi-token prediction" if plan.mtp_bytes else "none: weights use its memory better"
    about["own_guesses"] = lost if layout.lacks_head else own if layout.head is not None and plan.read_bytes else None
    return {**about, **plan_to_json(plan), **surroundings()}


def surroundings() -> Json:
    """Return versions, platform and device."""
    packages = {"mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "mlx_flash": __version__}
    return {
        "versions": {"python": platform.python_version(), **packages},
        "platform": platform.platform(),
        "device": str(mx.default_device()),
    }


RUN = """
Model: {model}, {planned.model_bytes:size} of weights
Cold: {cold}
Prompt: {prompt_tokens:token}, {prompt_tokens_per_second:speed}
First token: after {time_to_first_token_seconds:duration}, planned: {planned.first_seconds:duration}
Generation: {generation_tokens:token}, {generation_tokens_per_second:speed}, \
planned: {planned.tokens_per_second:speed}, ended by: {finish_reason}
Speculation: {guessed_tokens:guessed token}, {guessed_tokens_right} right, {generation_passes} passes later
Loading: {load_seconds:duration}
Peak memory: {peak_memory_bytes:GB}, planned: {planned.peak_bytes:GB}, {within_budget:within} the budget of \
{budget_bytes:GB}, {is_over:OVER} the budget of {budget_bytes:GB}
Read: {bytes_read:size}, {bytes_read_per_token:size} per token, planned: {planned.read_bytes:size}, \
{read_bytes_per_second:GB/s}
Disk: {reading_bytes_per_second:GB/s} while reading, {cached_read_share:percent} of it through the page cache, \
probed: {disk_bytes_per_second:GB/s}
Time: reading {generation_read_share:percent}, computing {generation_compute_share:percent}, \
waiting {generation_wait_share:percent} of the generation, limited by: {limited_by}
KV cache: {kv_bytes_written:size} written to the disk, {kv_bytes_read:size} read
Experts: {expert_hit_rate:percent} in memory when they were needed, {expert_bytes_read_per_token:size} read per token, \
{expert_prediction_rate:percent} of {expert_predictions} predicted ones right
Prefill: {step} tokens a call, the output equals mlx-lm's with --prefill-step-size {step}
"""
"""A run in words, for :func:`filled`."""


def render_run(report: Json, plan: ResidencyPlan | None = None) -> Table:
    """Return the summary of a run; with its plan, beside the figures that were planned."""
    facts = {
        **report,
        "is_over": report["within_budget"] is False,
        "step": None if report["prefill_as_mlx_lm"] else report["prefill_step_size"],
    }
    if plan is not None:
        first = plan.seconds_to_first_token(report["prompt_tokens"])
        facts["planned"] = {**plan_to_json(plan), "first_seconds": first}
    return labelled(filled(RUN, facts))


PLAN = """
Streamed layers: {streamed_layers}
Experts: {pool.num_slots} of {pool.num_experts} in memory, \
{pool.hit_rate:percent} of those a token needs expected there, {pool.read_bytes:size} read for each token
Towers: {towers.num_units:unit}, {towers.bytes:size} read for each prompt with pictures or sound, \
one after another in {towers.memory_bytes:size} of memory
Own guesses: {own_guesses}
Read per token: {read_bytes:size}, through {streaming.num_slots:slot}
Disk: {disk_bytes_per_second:GB/s} probed, {queue_depth:read} of {read_size:size} in flight
Compressed: to {compression.ratio:percent} of the bytes, {compression_in_words}
Prediction: {tokens_per_second:speed}, from a short probe; up to {likely_seconds:duration} a token are likely
First token: predicted for a prompt of {first_tokens}
Warning: prompts of {long} tokens and more wait over a minute for the first token. {hint}
KV cache: on disk for {kv.num_on_disk} of {num_kv_layers} layers at {context_length} tokens, \
where {kv.disk_bytes:size} are read and a token takes {seconds:duration}
Prefill: {prefill_step_size:token} a call, {context_length:token} of context
MLX cache limit: {cache_limit:size}
"""
"""A plan in words."""

LONG_SECONDS = 60.0
"""A predicted time to the first token above this gets a warning."""


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
    lines = filled(PLAN, {**planning_to_json(model, layout, plan), **_more_facts(layout, plan)})
    return Group(heading, memory, Padding(labelled(lines), (0, 0, 0, 2), expand=False))


def _more_facts(layout: ModelLayout, plan: ResidencyPlan) -> Json:
    """Return what people read of a plan beside its numbers."""
    waits = {number: plan.seconds_to_first_token(number) for number in PROMPT_LENGTHS}
    long = next((number for number, seconds in waits.items() if seconds > LONG_SECONDS), None)
    hint = "Hint: raise ram_budget_gb, or set a larger prefill_step_size."
    if long is not None and long * plan.prompt_seconds_per_token >= waits[long] / 2:
        hint = "Computing takes most of it, which no budget shortens. Hint: kv_prefixes keeps computed prompts."
    return {
        "streamed_layers": _streamed_layers(layout, plan),
        "compression_in_words": plan.compression and compression_in_words(plan.compression),
        "likely_seconds": PROBE_OPTIMISM * plan.opening_seconds,
        "first_tokens": ", ".join(f"{_thousands(n)} tokens {duration(seconds)}" for n, seconds in waits.items()),
        "long": long and _thousands(long),
        "hint": hint,
        "num_kv_layers": len(plan.cache.rows),
        "seconds": plan.seconds,
    }


def compression_in_words(found: Compression) -> str:
    """Return the gain of compression and the speeds that decide it."""
    cores = counted(num_cores(), "core")
    speeds = (
        f"disk {found.disk_bytes_per_second / GB:.2f} GB/s, a core decodes {found.decode_bytes_per_second / GB:.2f} "
        f"GB/s, MLX computes {found.compute_bytes_per_second / GB:.2f} GB/s, {cores}"
    )
    verdict = "pays" if found.pays else "does not pay"
    return f"it {verdict} here, with {found.gain:.2f} times the speed of an uncompressed copy ({speeds})"


def _thousands(number: int) -> str:
    return f"{number:,}".replace(",", " ")


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
