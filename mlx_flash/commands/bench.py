"""``mlx-flash bench``: one cold run of a model, measured against its plan."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import mlx.core as mx

from mlx_flash.commands.common import Status, emit, make_config, tokenizer_if_any
from mlx_flash.commands.report import Json, Recorder, make_report, render_run
from mlx_flash.commands.vision import is_vision, seeing
from mlx_flash.config import FlashConfig
from mlx_flash.engine.engine import Engine
from mlx_flash.engine.prepare import resolve
from mlx_flash.generation import generate_step
from mlx_flash.loading import load_model
from mlx_flash.memory.pagecache import drop_file
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.storage.shards import weight_files


def bench(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash bench``: report the measurements of a run beside the plan."""
    report, plan, cold = measure(args, resolve(args.model), make_config(args))
    report["cold"] = cold
    emit(args, report, render_run(report, plan), out)
    return 0


def measure(args: argparse.Namespace, path: Path, config: FlashConfig) -> tuple[Json, ResidencyPlan, str]:
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


def _measure_seeing(args: argparse.Namespace, path: Path) -> tuple[Json, ResidencyPlan, str]:
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
