"""Runs of models that see for ``verify``, ``bench`` and ``doctor``: a prompt with a picture made here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_flash.commands.common import Status
from mlx_flash.commands.receipt import Call, Notice, Reference, Report, checked_bytes, digest_of, digests_of, keep
from mlx_flash.commands.report import Json
from mlx_flash.commands.vision import seeing
from mlx_flash.compat.vlm import current_vlm_load_model
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.vision.flashvlm import FlashVLM
from mlx_flash.vision.pictures import PicturePrompt, make_prompt, sample_picture, steps

_WORDS = ("What", "is", "in", "this", "picture", "?")


def sample_prompt(model: nn.Module, processor: Any, num_words: int) -> PicturePrompt:
    """Return a prompt of so many words and a picture, the same in every run."""
    return make_prompt(model, processor, " ".join(islice(cycle(_WORDS), num_words)), [sample_picture()])


def stream_seeing(
    args: argparse.Namespace, path: Path
) -> tuple[ResidencyPlan, ModelLayout, list[Call], Json, PicturePrompt]:
    """Return the plan, the layers, the streamed calls, what reading and comparing bytes counted, and the prompt."""
    with (
        seeing(args, path) as (model, processor),
        Status("Streamed", args.verbose) as status,
    ):
        prompt = sample_prompt(model, processor, args.prompt_tokens)
        model.expect(len(prompt.tokens) + args.max_tokens, prompt.keywords)
        model.start()
        layers = {unit.name: unit.module for unit in _watched(model.layout)}
        with checked_bytes(model.engine, model.layout) as (check, numbers), model.towers.before_release(check.segments):
            calls = _trace(model, prompt, args.max_tokens, model.plan.prefill_step_size, layers, keep, status.show)
        return model.plan, model.layout, calls, numbers, prompt


def reference_seeing(
    path: Path,
    layout: ModelLayout,
    prompt: PicturePrompt,
    calls: Sequence[Call],
    step: int,
    *,
    resident: bool,
    report: Report,
) -> list[Call]:
    """Repeat calls by mlx-vlm alone, which reads the weights itself.

    Args:
        path: the model directory.
        layout: of the streamed model, for the names of its layers.
        prompt: of the calls.
        calls: to repeat.
        step: prompt tokens in a forward call.
        resident: keep the whole model in memory. Otherwise the weights of a layer leave after each of its calls.
        report: progress.
    """
    reference = Reference(lambda lazy: current_vlm_load_model()(path, lazy=lazy), _watched(layout), resident)
    return _trace(reference.model, prompt, len(calls), step, reference.layers, reference.then, report)


def _watched(layout: ModelLayout) -> list[Unit]:
    return [*layout.towers, *layout.layers]


def _trace(
    model: nn.Module,
    prompt: PicturePrompt,
    num_tokens: int,
    step: int,
    layers: dict[str, nn.Module],
    then: Notice,
    report: Report,
) -> list[Call]:
    """Generate tokens by mlx-vlm's loop. Return the calls with their digests, of log probabilities in place of logits.

    Args:
        model: what to call.
        prompt: the prompt.
        num_tokens: tokens to generate.
        step: prompt tokens in a forward call.
        layers: modules whose outputs get a digest, by name.
        then: called after each of them.
        report: progress.
    """
    calls: list[Call] = []
    given = prompt.tokens
    with digests_of(layers, then) as digests:
        for token, logprobs in steps(model, prompt, max_tokens=num_tokens, temperature=0.0, prefill_step_size=step):
            calls.append(Call(given, digest_of(logprobs), dict(digests)))
            given = [token]
            report(len(calls), num_tokens)
    return calls


def tokens_after(model: FlashVLM, prompt: PicturePrompt, num_tokens: int) -> Iterator[int]:
    """Yield the most likely tokens after a prompt."""
    step = model.plan.prefill_step_size
    found = steps(model, prompt, max_tokens=num_tokens, temperature=0.0, prefill_step_size=step)
    return (token for token, _ in found)
