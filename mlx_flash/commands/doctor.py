"""``mlx-flash plan`` and ``doctor``: what a plan predicts, and what the machine and a cold run of a model measure."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx
from rich.console import Group, RenderableType

from mlx_flash.commands.common import (
    Status,
    emit,
    labelled,
    make_config,
    tabled,
    tokenizer_if_any,
)
from mlx_flash.commands.models import headers_of, model_of, use_name
from mlx_flash.commands.report import (
    Recorder,
    make_report,
    planning_to_json,
    render_plan,
    render_run,
    surroundings,
)
from mlx_flash.commands.vision import is_vision, prepare_model, sampled
from mlx_flash.compat.require import TESTED
from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine.engine import Engine
from mlx_flash.engine.prepare import Prepared, layer_bytes, share_equally
from mlx_flash.files import cache_directory
from mlx_flash.generation import generate_step
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import wired_limit
from mlx_flash.memory.pagecache import drop_file
from mlx_flash.monitor.rates import SystemMemory, system_memory
from mlx_flash.monitor.words import filled, layer_runs, size
from mlx_flash.ranks import needed_files, runs
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.planner import table_of_budgets
from mlx_flash.storage.probe import Disk, DiskProfile, SelfTest, disk_of, profile_for, test_now
from mlx_flash.storage.safetensors import read_checkpoint, weight_files
from mlx_flash.telemetry import Json, ratio


def measure(args: argparse.Namespace, path: Path, config: FlashConfig) -> tuple[Json, ResidencyPlan]:
    """Generate tokens with a cold page cache. Return the measurements and the plan."""
    for file in weight_files(path):
        drop_file(file)
    sees = is_vision(args, path, prefers=True)
    tokenizer = None if sees else tokenizer_if_any(path, args)
    began = time.perf_counter()
    with ExitStack() as stack:
        model: Any
        if sees:
            model, picture = stack.enter_context(sampled(args, path))
            num_tokens, language = len(picture.tokens), model.language_model
            options = {"max_tokens": args.max_tokens, "prefill_step_size": model.plan.prefill_step_size}
            steps: Iterator[tuple[int, Any]] = picture.steps(model, temperature=0.0, **options)
        else:
            with Status("Loading", args.verbose) as status:
                # The text is noise: nothing is guessed from it.
                model, _ = load_model(path, replace(config, speculation=False), progress=status.show_bytes)
            stack.enter_context(model)
            num_tokens, language = args.prompt_tokens, model
            prompt = mx.array([1 + i % 97 for i in range(num_tokens)])
            options = {"max_tokens": args.max_tokens, "prefill_step_size": model.plan.prefill_step_size}
            steps = generate_step(prompt, model, **options)
        run = Recorder(language, num_tokens, time.perf_counter() - began)
        # Beyond max_tokens, mlx-lm computes one token ahead; it is not part of the measured time.
        for token, _ in steps:
            run.add_token(token)
        cold = _cold(model.engine)
    run.finish_reason = "length"
    del tokenizer
    return {**make_report(run, args.model), "cold": cold}, model.plan


def _cold(engine: Engine) -> str:
    """Return how cold a run was, in words."""
    cold = "the cached pages of the checkpoint were dropped before loading"
    share = engine.reader.cached.share
    if share:
        cold += f"; free memory outside the budget caches {share:.0%} of it during the run"
    else:
        cold += ", and reads bypass the page cache" if engine.reader.is_direct else " (a hint to the system)"
    return cold


MACHINE = """
Machine: {versions.platform}, {num_processors:processor}
Memory: {memory.available:size} of {memory.total:size} free, {memory.swap_used:size} swapped out
Disk: {disk.device} at {disk.mount}, {disk.file_system}, {disk.free_bytes:size} free
Disk speed: {profile.bytes_per_second:GB/s}, {profile.direct:direct}, {profile.queue_depth} x {profile.read_size:size}
MLX: {versions.versions.mlx} on {device}, mlx-lm {versions.versions.mlx_lm}, Python {versions.versions.python}
Self-test: reads are {selftest.way}, blocks lost: {lost}
"""
"""The machine in words."""

SLOW_DISK = 1e9
"""Bytes a second below which a disk is called slow: a token of a model of 10 GB that is not in memory takes 10 s."""

NEARLY_FULL = 0.05
"""A disk with a smaller share free is nearly full: many SSDs are slower then."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Facts found out about the machine."""

    device: str  # of MLX, for people
    memory: SystemMemory
    wired_limit: int | None  # bytes that Metal keeps wired at most; None elsewhere
    disk: Disk  # of the model, or of the cache folder
    profile: DiskProfile
    selftest: SelfTest
    versions: Json


def doctor(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash doctor``: measure a short run of a model, if there is one, then look at the machine."""
    path = None if args.model is None else model_of(args)
    config = make_config(args)
    facts, words = ({}, []) if path is None else _look_at_model(args, path, config)
    found = examine(path, config)  # last: the self-test takes memory of the process, which no plan counts
    lost = ", ".join(f"{way} {number}" for way, number in found.selftest.lost.items())
    about = {**asdict(found), "num_processors": os.cpu_count(), "lost": lost}
    machine = labelled([*filled(MACHINE, about), *(("Note", words) for words in advice(found))])
    emit(args, {**asdict(found), "advice": list(advice(found)), **facts}, [machine, *words], out)
    return 0


def examine(path: Path | None, config: FlashConfig) -> Findings:
    """Look at the machine, and at the disk of a model; without one, of the cache folder."""
    known = mx.device_info()
    shards = () if path is None else read_checkpoint(path).shards
    place = max(shards, key=lambda shard: shard.nbytes).path if shards else cache_directory()
    return Findings(
        device=f"{known.get('device_name', '?')} ({mx.default_device()})",
        memory=system_memory(),
        wired_limit=wired_limit(),
        disk=disk_of(path or cache_directory()),
        profile=profile_for(place, config.io),
        selftest=test_now(),
        versions=surroundings(),
    )


def advice(found: Findings) -> Iterator[str]:
    """Yield what is worth knowing, one sentence or two each."""
    disk, memory, test = found.disk, found.memory, found.selftest
    if disk.free_bytes < NEARLY_FULL * disk.total_bytes:
        yield f"{disk.mount} has {size(disk.free_bytes)} of {size(disk.total_bytes)} free. Nearly full SSDs are slow."
    if found.profile.bytes_per_second < SLOW_DISK:
        yield (
            f"{disk.mount} ({disk.device}, {disk.file_system}) reads only {found.profile.bytes_per_second / GB:.2f} "
            "GB/s, which makes large models slow. Hint: copy them to a faster disk, such as an internal one."
        )
    if not found.profile.direct:
        yield (
            f"weights pass through the page cache: {disk.mount} ({disk.file_system}) has no direct reads, or they are "
            "slower."
        )
    if memory.swap_used > memory.total // 10:
        yield f"{size(memory.swap_used)} are swapped out. Hint: close other programs, or take a smaller budget."
    if test.way != "in place":
        lost = test.lost.get("in place", 0)
        yield f"direct reads in place lost {lost} blocks, so they are {test.way}."
    if found.wired_limit is not None:
        yield (
            f"Metal keeps at most {size(found.wired_limit)} wired: a larger budget is slow. mlx-lm does not warn here, "
            "since it does not see streamed weights. Hint: sudo sysctl iogpu.wired_limit_mb=N raises the limit."
        )
    for name, (oldest, newest) in TESTED.items():
        if not _numbers(oldest) <= _numbers(found.versions["versions"][name.replace("-", "_")]) <= _numbers(newest):
            yield f"mlx-flash was tested with {name} {oldest} to {newest}."


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".") if part.isdigit()]


def _look_at_model(args: argparse.Namespace, path: Path, config: FlashConfig) -> tuple[Json, list[RenderableType]]:
    """Measure a short run, and plan for several budgets. Return the facts, and the same in words."""
    tokenizer = tokenizer_if_any(path, args)
    sees = is_vision(args, path, prefers=True)
    prepared = prepare_model(path, config, with_vlm=sees)  # before the run, which takes memory
    del tokenizer
    report, plan = measure(args, path, config)
    budgets = budgets_of(prepared, config)
    return {"run": report, "budgets": budgets}, [Group("", render_run(report, plan), tabled(BUDGETS, budgets))]


def rank_parts(prepared: Prepared, num_ranks: int) -> list[Json]:
    """Return the part of each rank, if machines like this one share a model: its layers, and the shards with them."""
    owners = share_equally(prepared.loaded, prepared.plan, prepared.machine, num_ranks)
    nbytes = layer_bytes(prepared.loaded)
    needed = needed_files(len(nbytes), prepared.checkpoint)
    parts = []
    for rank in range(num_ranks):
        own = [number for number, owner in enumerate(owners) if owner == rank]
        total = sum(nbytes[number] for number in own)
        parts.append({"rank": rank, "layers": runs(owners, rank), "nbytes": total, "files": needed.of(own)})
    return parts


RANKS = {
    "Rank": "{rank}",
    "Layers": "{runs}",
    "Weights": "{nbytes:size}",
    "Shards to copy, with all files that are no shards": "{shards}",
}
"""A table of ranks."""


def render_ranks(parts: Sequence[Json], num_files: int) -> RenderableType:
    """Return a table of the ranks, whose model has some number of shards."""

    def shards(files: Sequence[str]) -> str:
        return f"all {num_files}" if 1 < num_files == len(files) else ", ".join(files)

    rows = ({**part, "runs": layer_runs(part["layers"]), "shards": shards(part["files"])} for part in parts)
    return tabled(RANKS, rows)


PROMPT_TOKENS = 2_000
"""Length of the prompt for which the time to the first token is shown."""


BUDGETS = {
    "budget GB": "{budget_bytes:billions}",
    "peak GB": "{peak_bytes:billions}",
    "read per token": "{read_bytes:bytes}",
    "tokens/s": "{tokens_per_second:rate}",
    f"first of {PROMPT_TOKENS}": "{seconds_to_first_token:duration}",
    "context": "{longest_context:whole}",
}
"""A table of budgets."""


def budgets_of(prepared: Prepared, config: FlashConfig) -> list[Json]:
    """Return the plans of a model from its smallest budget to the one that holds it whole."""
    return [
        {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": plan.peak_bytes,
            "read_bytes": plan.read_bytes,
            "tokens_per_second": ratio(1, plan.opening_seconds),
            "seconds_to_first_token": plan.seconds_to_first_token(PROMPT_TOKENS),
            "prompt_tokens": PROMPT_TOKENS,
            "longest_context": longest_context,
        }
        for plan, longest_context in table_of_budgets(prepared.sizes, config, prepared.machine)
    ]


def plan(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash plan``: reads no weights."""
    use_name(args)
    with headers_of(args.model) as (path, probe):
        tokenizer = tokenizer_if_any(path, args)
        config = make_config(args)
        prepared = prepare_model(path, config, probe, with_vlm=is_vision(args, path, prefers=True))
        del tokenizer
    budgets = budgets_of(prepared, config) if args.budgets else []
    parts = rank_parts(prepared, args.ranks) if args.ranks > 1 else []
    facts = planning_to_json(args.model, prepared.layout, prepared.plan)
    facts |= {"budgets": budgets} if args.budgets else {}
    facts |= {"ranks": parts} if parts else {}
    words = [tabled(BUDGETS, budgets) if args.budgets else render_plan(args.model, prepared.layout, prepared.plan)]
    words += [render_ranks(parts, len(prepared.checkpoint.shards))] if parts else []
    emit(args, facts, words, out)
    return 0
