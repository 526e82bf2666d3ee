"""Readings of prompts: the log probabilities of their tokens, or a text as a vector."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import RefusedError
from mlx_flash.generation.batches import Reading
from mlx_flash.model import FlashLLM
from mlx_flash.server.batch import Job
from mlx_flash.server.events import Piece, TokenChance, TokenDetail


def details_of(tokens: mx.array, logprobs: mx.array, tokenizer: Any) -> list[TokenDetail]:
    """Return tokens, each with the likeliest ones in its place."""
    rows = zip(cast(Any, tokens.tolist()), cast(Any, logprobs.tolist()), strict=True)
    least = -9999.0  # JSON has no infinity: tokens that a grammar forbids have a probability of 0
    return [
        tuple(
            TokenChance(token, tokenizer.decode([token]), max(value, least)) for token, value in zip(*row, strict=True)
        )
        for row in rows
    ]


_NUM_ROWS = 64
"""Tokens whose logits become log probabilities, in 32 bits, at a time."""


def reading_for(job: Job, model: FlashLLM, step: int) -> Reading:
    """Return what a request wants of the hidden states of its prompt, which has parts of at most ``step`` tokens."""
    found, reason = Reading(step, lambda states: states[:, -1:], is_all=True), None
    if job.request.work != "embed":
        found = Reading(model.logits_step(step), lambda states: states)
    else:
        directory = resolve(job.source.base)
        config = json.loads((directory / "config.json").read_bytes())
        pooling = directory / "1_Pooling" / "config.json"
        if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
            reason = "is no causal model"
        elif pooling.is_file() and not json.loads(pooling.read_bytes()).get("pooling_mode_lasttoken", True):
            reason = "makes vectors of the hidden states of all tokens"
    reason = reason if model.body is not None else "has no module in mlx-lm that returns hidden states"
    if reason is not None:
        raise RefusedError(
            f"{job.source.name} {reason}: this server needs the hidden states of a decoder, such as Qwen3-Embedding.",
            400,
            "model",
        )
    return found


def read_all(model: FlashLLM, tokenizer: Any, jobs: Sequence[Job]) -> list[Piece | list[float] | Exception]:
    """Return what some requests want, or why it cannot be computed."""
    wanted = [_of_head(job) for job in jobs]
    heads = [each for own in wanted for each in own]
    outputs = iter(model.apply_head(heads) if heads else [])
    found: list[Piece | list[float] | Exception] = []
    for job, own in zip(jobs, wanted, strict=True):
        states, job.hidden = job.hidden, []
        results = [next(outputs) for _ in own]
        error = next((result for result in results if isinstance(result, Exception)), None)
        if error is not None:
            found.append(error)
        elif job.request.work == "embed":
            found.append(cast(list[float], states[-1][0, -1].astype(mx.float32).tolist()))
        else:
            details = [detail for result in results for detail in details_of(result[0], result[1], tokenizer)]
            found.append(echo_of(job, tokenizer, details))
    return found


def _of_head(job: Job) -> list[tuple[mx.array, Callable[[mx.array], Any]]]:
    """Return the hidden states of a request whose logits are wanted, each with what makes something of these."""
    tokens, states = job.prompt.tokens, job.hidden
    if job.request.work == "embed":
        return []
    starts = accumulate((part.shape[1] for part in states), initial=1)
    targets = [tokens[start : start + part.shape[1]] for start, part in zip(starts, states, strict=False)]
    likeliest = [partial(_likeliest, each, job.request.top_logprobs or 0) for each in targets]
    return [*zip(states, likeliest, strict=True)]


def _likeliest(targets: list[int], number: int, logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return each target and the likeliest tokens, ``(length, 1 + number)``, and their log probabilities."""
    tokens, values = list[mx.array](), list[mx.array]()
    for start in range(0, len(targets), _NUM_ROWS):
        logprobs = nn.log_softmax(logits[0, start : start + _NUM_ROWS].astype(mx.float32))
        found = with_likeliest(targets[start : start + _NUM_ROWS], number, logprobs)
        tokens.append(found[0])
        values.append(found[1])
        mx.eval(*found)
    return mx.concatenate(tokens), mx.concatenate(values)


def with_likeliest(chosen: list[int], number: int, logprobs: mx.array) -> tuple[mx.array, mx.array]:
    """Return tokens, each with the likeliest ones, ``(length, 1 + number)``, and their log probabilities."""
    tokens = mx.array(chosen)[:, None]
    if number := min(number, logprobs.shape[-1]):
        best = mx.argpartition(-logprobs, kth=number - 1, axis=-1)[:, :number]
        order = mx.argsort(-mx.take_along_axis(logprobs, best, axis=-1), axis=-1)
        best = mx.take_along_axis(best, order, axis=-1)
        tokens = mx.concatenate([tokens, best.astype(tokens.dtype)], axis=-1)
    return tokens, mx.take_along_axis(logprobs, tokens, axis=-1)


def echo_of(job: Job, tokenizer: Any, details: Sequence[TokenDetail] | None = None) -> Piece:
    """Return the prompt as the first part of its answer, with the details of all tokens but the first, if given."""
    text, first = job.request.prompt, job.prompt.tokens[0]
    text = tokenizer.decode(job.prompt.tokens) if text is None else text
    chance = TokenChance(first, tokenizer.decode([first]), None)
    return Piece(text, tokens=() if details is None else ((chance,), *details))
