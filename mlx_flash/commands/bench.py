"""``mlx-flash bench``: one cold run of a model, measured against its plan."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import mlx.core as mx

from mlx_flash.commands.common import Status, make_config, print_json, print_rich, tokenizer_if_any
from mlx_flash.commands.report import GenerationReport, Recorder, labelled_lines, make_report, roofline
from mlx_flash.commands.vision import is_vision, seeing
from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine.engine import Engine
from mlx_flash.engine.prepare import resolve
from mlx_flash.generation import generate_step
from mlx_flash.loading import load_model
from mlx_flash.memory.pagecache import drop_file
from mlx_flash.monitor.words import duration, size, speed
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.storage.shards import weight_files


def bench(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash bench``: report the measurements of a run beside the plan."""
    report, plan, cold = measure(args, resolve(args.model), make_config(args))
    if args.json:
        print_json({**report.to_json(), "cold": cold}, out)
    else:
        print_rich(labelled_lines(_lines(report, plan, cold)), out)
    return 0


def measure(args: argparse.Namespace, path: Path, config: FlashConfig) -> tuple[GenerationReport, ResidencyPlan, str]:
    """Load a model with a cold page cache, and generate tokens.

    Args:
        args: ``model``, ``prompt_tokens`` and ``max_tokens``.
        path: the model directory.
        config: how to stream.

    Returns:
        The measurements, the plan, and in words how cold the run was.
    """
    for file in weight_files(path):
        drop_file(file)
    if is_vision(args, path, prefers=True):
        return _measure_seeing(args, path)
    tokenizer = tokenizer_if_any(path, args)
    began = time.perf_counter()
    with Status("Loading", args.verbose) as status:
        # The text is noise: nothing is guessed from it.
        model, _ = load_model(path, replace(config, speculation=False), progress=status.show_bytes)
    with model:
        engine = model.engine
        assert engine is not None
        run = Recorder(model, args.prompt_tokens, time.perf_counter() - began)
        prompt = mx.array([1 + i % 97 for i in range(args.prompt_tokens)])
        step = model.plan.prefill_step_size
        # Beyond max_tokens, mlx-lm computes one token ahead; it is not part of the measured time.
        for token, _ in generate_step(prompt, model, max_tokens=args.max_tokens, prefill_step_size=step):
            run.add(SimpleNamespace(token=token, text="", finish_reason=None, generation_tokens=len(run.tokens) + 1))
        cold = _cold(engine)
    run.finish_reason = "length"
    del tokenizer
    return make_report(run, args.model, step), model.plan, cold


def _measure_seeing(args: argparse.Namespace, path: Path) -> tuple[GenerationReport, ResidencyPlan, str]:
    """As :func:`measure`, of a model that sees, with a picture."""
    from mlx_flash.commands.seen import sample_prompt, tokens_after

    began = time.perf_counter()
    with seeing(args, path) as (model, processor):
        prompt = sample_prompt(model, processor, args.prompt_tokens)  # before the plan, which counts the process
        model.expect(len(prompt.tokens) + args.max_tokens, prompt.keywords)
        with Status("Loading", args.verbose) as status:
            model.start(status.show_bytes)
        run = Recorder(model.language_model, len(prompt.tokens), time.perf_counter() - began)
        for token in tokens_after(model, prompt, args.max_tokens):
            run.add(SimpleNamespace(token=token, text="", finish_reason=None, generation_tokens=len(run.tokens) + 1))
        cold = _cold(model.engine)
    run.finish_reason = "length"
    return make_report(run, args.model, model.plan.prefill_step_size), model.plan, cold


def _cold(engine: Engine) -> str:
    """Return how cold a run was, in words."""
    cold = "the cached pages of the checkpoint were dropped before loading"
    share = engine.reader.cached.share
    if share:
        cold += f"; free memory outside the budget caches {share:.0%} of it during the run"
    else:
        cold += ", and reads bypass the page cache" if engine.reader.is_direct else " (a hint to the system)"
    return cold


def _lines(report: GenerationReport, plan: ResidencyPlan, cold: str) -> Iterator[tuple[str, str]]:
    per_second, per_token = report.generation_tokens_per_second, report.bytes_read_per_token
    yield "Model:", f"{report.model}, {size(plan.model_bytes)} of weights"
    yield "Cold:", cold
    yield "Load:", duration(report.load_seconds)
    prompt = f"for a prompt of {report.prompt_tokens} tokens"
    yield "First token:", f"after {duration(report.time_to_first_token_seconds)}, {prompt}"
    measured = "one token only" if per_second is None else speed(per_second)
    yield "Generation:", f"{measured}; planned: {speed(1 / plan.opening_seconds)}"
    peak, planned = report.peak_memory_bytes / GB, plan.peak_bytes / GB
    yield "Peak memory:", f"{peak:.3f} GB; planned: {planned:.3f} GB; budget: {plan.budget_bytes / GB:.3f} GB"
    if per_token is not None:
        yield "Read:", f"{size(per_token)} per token; planned: {size(plan.read_bytes)}"
    yield from roofline(report)
