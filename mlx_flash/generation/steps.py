"""A generation loop for streamed models, where each pass over the weights counts.

mlx-lm's loop spends three passes before it shows a token: the prompt, the prompt's last token, and the next token,
which it computes ahead to keep a GPU busy. Here the prompt and its last token share one pass, a token is handed out as
soon as it is known, and no pass is spent on a token that nobody asked for. Where everything is in memory, mlx-lm's own
loops run. Tokens and log probabilities are mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.generation import (
    generation_stream,
    stock_generate,
    stock_generate_step,
    stock_speculative_generate_step,
    stock_stream_generate,
    with_names,
)
from mlx_flash.engine.engine import Progress
from mlx_flash.generation.sequence import Chooser, GeneratedSequence, Token, compute
from mlx_flash.kv.views import can_be_viewed
from mlx_flash.logs import log
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE
from mlx_flash.speculation import MAX_GUESSES, Draft, Guesses, Lookup, Source

_CLEAR_EVERY = 256
"""Tokens after which MLX's freed buffers are released, as mlx-lm does."""

_STOCK_OPTIONS = {"kv_bits", "kv_group_size", "quantized_kv_start", "input_embeddings"}
"""Options that only mlx-lm's own loop reads."""


def generate_step(
    prompt: mx.array, model: Any, stream: Any = generation_stream, **options: Any
) -> Iterator[tuple[int, mx.array]]:
    """Yield tokens, as ``mlx_lm.generate.generate_step`` does with the same arguments.

    A model that is not streamed or all in memory, ``kv_bits`` and ``input_embeddings`` are left to mlx-lm's own loop.
    """
    if not _is_ours(prompt, model, options):
        return stock_generate_step(prompt, model, stream, **_within_plan(prompt, model, options))
    lookup = Lookup(cast("list[int]", prompt.tolist()))
    return _without_marks(_generate(prompt, model, stream, [lookup], MAX_GUESSES, **_ours(options)))


def speculative_generate_step(
    prompt: mx.array, model: Any, draft_model: Any, stream: Any = generation_stream, **options: Any
) -> Iterator[tuple[int, mx.array, bool]]:
    """Yield tokens, as ``mlx_lm.generate.speculative_generate_step`` does with the same arguments.

    Tokens and log probabilities are those of :func:`generate_step`, bit for bit: the draft model only guesses, and each
    guess is checked in a call of its own. That pays where calls share what a pass reads. Where they cannot, the draft
    model is not asked. Where the text itself promises more, it guesses instead. Unset, ``num_draft_tokens`` is what
    pays. A model that is all in memory is left to mlx-lm's own loop, which checks all guesses in one call.
    """
    within = _within_plan(prompt, model, options)
    within.pop("prompt_progress_callback", None)  # which mlx-lm's own has not
    stock = partial(stock_speculative_generate_step, prompt, model, draft_model, stream, **within)
    if not _is_ours(prompt, model, options):
        return stock()
    caches = options.pop("prompt_cache", None)
    num_layers = len(model.layers)
    cache = make_prompt_cache(model) if caches is None else caches[:num_layers]
    drafted = make_prompt_cache(draft_model) if caches is None else caches[num_layers:]
    if not can_be_viewed(drafted):
        log.info("mlx-lm checks what the draft model guesses: it has a cache of its own kind")
        return stock()
    most = options.pop("num_draft_tokens", MAX_GUESSES)
    options, tokens = _ours(options), cast("list[int]", prompt.tolist())
    draft = Draft(draft_model, drafted, tokens, options.get("prefill_step_size", DEFAULT_PREFILL_STEP_SIZE))
    sources: list[Source] = [Lookup(tokens), draft]
    return _generate(prompt, model, stream, sources, most, prompt_cache=caches and cache, **options)


def _is_ours(prompt: mx.array, model: Any, options: Mapping[str, Any]) -> bool:
    is_stock = options.get("kv_bits") is not None or options.get("input_embeddings") is not None
    return isinstance(model, FlashLLM) and not is_stock and len(prompt) > 0 and not model.is_in_memory


def _within_plan(prompt: mx.array, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of mlx-lm's own loop, with calls that a streamed model does not cut once more."""
    if not isinstance(model, FlashLLM):
        return dict(options)
    step = options.get("prefill_step_size", DEFAULT_PREFILL_STEP_SIZE)
    return {**options, "prefill_step_size": model.prefill_step(step, len(prompt))}


def _ours(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in options.keys() - _STOCK_OPTIONS}


def _without_marks(steps: Generator[Token, None, None]) -> Iterator[tuple[int, mx.array]]:
    with closing(steps):
        for token, logprobs, _ in steps:
            yield token, logprobs


stream_generate = with_names(
    stock_stream_generate, generate_step=generate_step, speculative_generate_step=speculative_generate_step
)
generate = with_names(stock_generate, stream_generate=stream_generate)


def _generate(
    prompt: mx.array,
    model: FlashLLM,
    stream: Any,
    sources: Sequence[Source],
    most: int,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE,
    prompt_progress_callback: Progress | None = None,
) -> Generator[Token, None, None]:
    if prompt_progress_callback is not None:
        prompt_progress_callback(0, len(prompt))
    own = model.own_guesses(None if max_tokens < 0 else len(prompt) + max_tokens)
    sequence = GeneratedSequence(
        model,
        make_prompt_cache(model, max_kv_size) if prompt_cache is None else prompt_cache,
        [cast("list[int]", prompt.tolist())],
        Chooser(sampler, logits_processors, prompt),
        step=prefill_step_size,
        max_tokens=max_tokens,
        guesses=Guesses(*own, *sources, most=most),
        report=prompt_progress_callback,
        is_seen=prompt_cache is not None,
    )
    try:
        _compute(sequence, stream)
        if not max_tokens and sequence.row is not None:  # mlx-lm chooses one, and drops it
            with mx.stream(stream):
                sequence.chooser(sequence.row.outputs[-1])
        while sequence.num_tokens != max_tokens:
            _compute(sequence, stream)
            with mx.stream(stream):
                sequence.choose()
                token = sequence.take()
                sequence.chooser.draw_ahead()
            yield token
            if sequence.num_tokens % _CLEAR_EVERY == 0:
                mx.clear_cache()
        if prompt_cache is not None and sequence.num_tokens:
            _compute(sequence, stream)
            with mx.stream(stream):
                sources[-1].end()
    finally:  # where the caller has stopped, no pass begins: the last token stays owed
        sequence.take_back()
        if prompt_cache is not None and sequence.num_tokens:
            sources[-1].leave()


def _compute(sequence: GeneratedSequence, stream: Any) -> None:
    """Compute what the next token follows from, if that is not done."""
    while not sequence.is_ready:
        with mx.stream(stream):
            compute([sequence])
        if sequence.row is not None and sequence.row.error is not None:
            raise sequence.row.error
