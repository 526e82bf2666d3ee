"""One decoding run, resident or streamed. ``python benchmarks/runs.py JOB``, with a job in JSON, prints its result."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import Run, run_worker
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlx_flash
from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import FlashConfig, parse_budget
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.memory.pagecache import round_up
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import PREFILL_STEPS, ResidencyPlan
from mlx_flash.telemetry import ratio

PREFILL_STEP = PREFILL_STEPS[-1]
"""The step that fits every budget. All runs use it, because another step may give other bits."""


@dataclass(frozen=True)
class Job:
    """The work of one process; without a budget it runs the resident model, which decodes one sequence.

    Attributes:
        context: tokens of KV cache to reserve; None for what the sequences need.
        settings: of `FlashConfig`.
        batch: number of sequences with the same prompt, which share passes.
        own: decode one sequence with mlx-flash's loop, without guesses, and not with mlx-lm's.
        warm: decode a token first, which compiles the kernels of a GPU.
    """

    model: str
    tokens: int
    prompt_tokens: int
    budget: float | str | None = None
    context: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    own: bool = False
    warm: bool = False


@dataclass(frozen=True)
class Counters:
    """The counts of a streamed model up to a moment."""

    num_passes: int = 0
    nbytes: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_routed: int = 0
    num_hits: int = 0
    num_predicted: int = 0
    num_predicted_right: int = 0
    missed_bytes: int = 0


def work(job: Job) -> Run:
    """Run a job in this process."""
    return _resident_run(job) if job.budget is None else _streamed_run(job)


def _resident_run(job: Job) -> Run:
    began = time.perf_counter()
    model, _ = mlx_lm_utils.load_model(Path(job.model))
    loaded = time.perf_counter() - began
    run = _decode(model, job, Counters)
    return run | {"load_seconds": loaded, "peak_bytes": peak_footprint(), **asdict(job)}


def _streamed_run(job: Job) -> Run:
    length = job.prompt_tokens + job.tokens
    if job.batch > 1:  # each cache grows by whole steps
        length = round_up(length, CACHE_STEP)
    config = FlashConfig(
        ram_budget_gb=parse_budget(job.budget),
        context_length=job.context or job.batch * length,  # as the command line sets it
        speculation=not job.own,
        **job.settings,
    )
    began = time.perf_counter()
    model, _ = load_model(job.model, config)
    model.start()
    loaded = time.perf_counter() - began
    with model:
        run = _decode(model, job, lambda: _counters(model))
        run |= {"load_seconds": loaded, "peak_bytes": peak_footprint(), **asdict(job)}
        predicted = ratio(1, model.plan.seconds) if job.batch == 1 else None
        run |= {"budget_bytes": model.plan.budget_bytes, "predicted_tokens_per_second": predicted}
        return run | {"plan": _plan_summary(model.plan)}


def _decode(model: Any, job: Job, count: Callable[[], Counters]) -> Run:
    """Decode a fixed prompt greedily. The clock runs from the first token to the last.

    A token of a batch is one of each of its sequences.
    """
    prompt = mx.array([7 + 13 * i % 89 for i in range(job.prompt_tokens)])
    step = mlx_flash.generate_step if job.own else generate_step
    if job.warm:
        list(step(prompt[:1], model, max_tokens=1))
    if job.batch == 1:
        steps = (token for token, _ in step(prompt, model, max_tokens=job.tokens, prefill_step_size=PREFILL_STEP))
    else:
        steps = _batch(model, prompt, job)
    ids: list[int] = []
    begun, before, after = count(), Counters(), Counters()
    start = first = last = time.perf_counter()
    for token in steps:
        last, after = time.perf_counter(), count()
        if not ids:
            first, before = last, after
        ids.append(int(token))
    passes, seconds = len(ids) - 1, last - first
    busy = after.busy_seconds - before.busy_seconds
    return {
        "token_ids": ids,
        "first_token_seconds": first - start,
        "first_token_passes": before.num_passes - begun.num_passes,
        "seconds_per_token": seconds / passes,
        "tokens_per_second": job.batch * passes / seconds,
        "bytes_per_token": (after.nbytes - before.nbytes) / passes,
        "read_bytes_per_second": (after.nbytes - before.nbytes) / busy if busy > 0 else None,
        "wait_share": (after.wait_seconds - before.wait_seconds) / seconds,
        **_experts(before, after, passes),
    }


def _batch(model: FlashLLM, prompt: mx.array, job: Job) -> Iterator[int]:
    """Yield the tokens of the first of several sequences with the same prompt, which share passes."""
    caches = [make_prompt_cache(model) for _ in range(job.batch)]
    new = [prompt[None]] * job.batch
    for _ in range(job.tokens):
        rows = [model.row(tokens, cache, PREFILL_STEP) for tokens, cache in zip(new, caches, strict=True)]
        while not all(row.is_done for row in rows):
            model.advance(rows)
        if (error := next((row.error for row in rows if row.error), None)) is not None:
            raise error
        new = [mx.argmax(row.outputs[-1][:, -1, :], axis=-1)[None] for row in rows]
        mx.eval(new)
        yield int(new[0].item())


def _experts(before: Counters, after: Counters, passes: int) -> Run:
    """Return hit rates of the expert pool; empty without one.

    An expert counts as missed when it was not in the pool, or only because look-ahead had read it.
    """
    routed = after.num_routed - before.num_routed
    if not routed:
        return {}
    missed = after.missed_bytes - before.missed_bytes
    predicted = after.num_predicted - before.num_predicted
    right = after.num_predicted_right - before.num_predicted_right
    return {
        "hit_rate": (after.num_hits - before.num_hits - right) / routed,
        "predicted_right": right / predicted if predicted else None,
        "missed_bytes_per_token": missed / passes,
        "read_per_missed": (after.nbytes - before.nbytes) / missed if missed else None,
    }


def _counters(model: FlashLLM) -> Counters:
    engine = model.engine
    assert engine is not None
    read, wait_seconds = engine.reader.stats, engine.stream.stats.wait_seconds
    num_passes = model.counters.num_passes
    if engine.experts is None:
        return Counters(num_passes, read.nbytes, read.busy_seconds, wait_seconds)
    pool = engine.experts.pool
    stats = pool.stats
    missed = stats.num_routed - stats.num_hits + stats.num_predicted_right
    return Counters(
        num_passes,
        read.nbytes,
        read.busy_seconds,
        wait_seconds + stats.wait_seconds,
        stats.num_routed,
        stats.num_hits,
        stats.num_predicted,
        stats.num_predicted_right,
        missed * max(layer.expert_bytes for layer in pool.layers),
    )


def _plan_summary(plan: ResidencyPlan) -> dict[str, Any]:
    streaming = plan.streaming
    return {
        "minimum_bytes": plan.minimum_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_seconds_per_token": plan.opening_seconds,
        "read_bytes": plan.read_bytes,
        "streamed_layers": len(streaming.layers),
        "tiled_heads": dict(streaming.heads),
        "num_slots": streaming.num_slots,
        "slot_bytes": streaming.slot_bytes,
        "read_size": plan.read_size,
        "queue_depth": plan.queue_depth,
        "disk_bytes_per_second": plan.disk_bytes_per_second,
        "context_length": plan.context_length,
        "prefill_step_size": plan.prefill_step_size,
        "parts": dict(plan.parts()),
        "pool": plan.pool and asdict(plan.pool),
    }


def run_job(job: Job, limit_bytes: int | None = None) -> Run:
    """Run a job in a process of its own, in a memory cgroup if a limit is given.

    Raises:
        KilledError: the kernel killed it for the limit.
        SystemExit: it failed; with the last line that it wrote.
    """
    label = "the resident run" if job.budget is None else f"the run with budget {job.budget}"
    return run_worker(__file__, [json.dumps(asdict(job))], label=label, limit_bytes=limit_bytes)


if __name__ == "__main__":
    print(json.dumps(work(Job(**json.loads(sys.argv[1])))))
