"""A generation loop for streamed models, where each pass over the weights counts.

mlx-lm's loop spends three passes before it shows a token: the prompt, the prompt's last token, and the next token,
which it computes ahead to keep a GPU busy. Here the prompt and its last token share one pass, a token is handed out as
soon as it is known, and no pass is spent on a token that nobody asked for. Tokens and log probabilities are mlx-lm's
own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.compiler import compiling
from mlx_flash.compat.generation import (
    generation_stream,
    stock_generate,
    stock_generate_step,
    stock_speculative_generate_step,
    stock_stream_generate,
    with_names,
)
from mlx_flash.engine.guesses import GuessedRows
from mlx_flash.kv.views import can_be_viewed
from mlx_flash.model import FlashLLM
from mlx_flash.speculation.draft import Draft
from mlx_flash.speculation.guesses import MAX_GUESSES, Guesses, Source
from mlx_flash.speculation.lookup import Lookup

_log = logging.getLogger("mlx_flash")

Token = tuple[int, mx.array]
"""A token and the logarithms of all probabilities, ``(vocabulary,)``."""

DraftedToken = tuple[int, mx.array, bool]
"""The same, and whether the token was guessed."""

_CLEAR_EVERY = 256
"""Tokens after which MLX's freed buffers are released, as mlx-lm does."""

_STOCK_OPTIONS = {"kv_bits", "kv_group_size", "quantized_kv_start", "input_embeddings"}
"""Options that only mlx-lm's own loop reads."""


def generate_step(prompt: mx.array, model: Any, stream: Any = generation_stream, **options: Any) -> Iterator[Token]:
    """Yield tokens, as ``mlx_lm.generate.generate_step`` does with the same arguments.

    A model that is not streamed, ``kv_bits`` and ``input_embeddings`` are left to mlx-lm's own loop.
    """
    if not _is_ours(prompt, model, options):
        return stock_generate_step(prompt, model, stream, **options)
    source = Lookup(cast("list[int]", prompt.tolist()))
    return _without_marks(_generate(prompt, model, stream, source, MAX_GUESSES, **_ours(options)))


def speculative_generate_step(
    prompt: mx.array, model: Any, draft_model: Any, stream: Any = generation_stream, **options: Any
) -> Iterator[DraftedToken]:
    """Yield tokens, as ``mlx_lm.generate.speculative_generate_step`` does with the same arguments.

    Tokens and log probabilities are those of :func:`generate_step`, bit for bit: the draft model only guesses, and each
    guess is checked in a call of its own. Where guesses cannot share a pass, mlx-lm's own loop runs, whose last bits
    are others.
    """
    stock = partial(stock_speculative_generate_step, prompt, model, draft_model, stream, **options)
    if not _is_ours(prompt, model, options):
        return stock()
    caches = options.pop("prompt_cache", None)
    num_layers = len(model.layers)
    cache = make_prompt_cache(model) if caches is None else caches[:num_layers]
    drafted = make_prompt_cache(draft_model) if caches is None else caches[num_layers:]
    refusal = model.refusal(cache) or (
        None if can_be_viewed(drafted) else "the draft model has a cache of its own kind"
    )
    if refusal is not None:
        _log.info("mlx-lm checks what the draft model guesses: %s", refusal)
        return stock()
    most = options.pop("num_draft_tokens", 2)
    options = _ours(options)
    source = Draft(draft_model, drafted, cast("list[int]", prompt.tolist()), options.get("prefill_step_size", 2048))
    return _generate(prompt, model, stream, source, most, prompt_cache=caches and cache, **options)


def _is_ours(prompt: mx.array, model: Any, options: Mapping[str, Any]) -> bool:
    others = [name for name in ("kv_bits", "input_embeddings") if options.get(name) is not None]
    return isinstance(model, FlashLLM) and not others and len(prompt) > 0


def _ours(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in options.keys() - _STOCK_OPTIONS}


def _without_marks(steps: Generator[DraftedToken, None, None]) -> Iterator[Token]:
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
    source: Source,
    most: int,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Generator[DraftedToken, None, None]:
    cache = make_prompt_cache(model, max_kv_size) if prompt_cache is None else prompt_cache
    report = prompt_progress_callback or (lambda done, total: None)
    report(0, len(prompt))
    choose = Chooser(sampler, logits_processors)
    decoder = Decoder(model, cache, source, most)
    with mx.stream(stream):
        token, logprobs = choose(prompt, model.prompt(prompt[None], cache, prefill_step_size, report))
    num_done, is_in_cache = 0, True
    try:
        while num_done != max_tokens:
            is_in_cache = False
            number = cast(int, token.item())
            yield number, logprobs.squeeze(0), decoder.is_guessed(number)
            num_done += 1
            if num_done % _CLEAR_EVERY == 0:
                mx.clear_cache()
            if num_done == max_tokens:
                return
            is_in_cache = True  # or the call fails, and is not repeated
            num_left = max_tokens - num_done - 1 if max_tokens > 0 else MAX_GUESSES
            with mx.stream(stream):
                token, logprobs = choose(token, decoder.logits(number, num_left))
    finally:
        with mx.stream(stream):
            if prompt_cache is not None and not is_in_cache:  # the caller's cache holds every token that was handed out
                decoder.logits(number, 0)
                source.end()
            decoder.take_back()


class Decoder:
    """The logits of tokens that follow each other: those of plain decoding, bit for bit.

    Args:
        model: the model.
        cache: the prompt cache, which holds the prompt.
        source: guesses tokens.
        most: the most tokens to guess at a time.
    """

    def __init__(self, model: FlashLLM, cache: list[Any], source: Source, most: int = MAX_GUESSES) -> None:
        self._model = model
        self._cache = cache
        self._guesses = Guesses(source, most)
        self._tokens: list[int] = []
        self._rows: GuessedRows | None = None
        self._num_used = 0
        self._reason: str | None = None

    def logits(self, token: int, limit: int) -> mx.array:
        """Add a token to the cache. Return the logits that follow it, ``(1, 1, vocabulary)``.

        Args:
            token: the token.
            limit: the most tokens to guess after it.
        """
        self._guesses.add(token)
        if not self.is_guessed(token):
            self.take_back()
            self._tokens = [token, *self._guess(limit)]
            self._rows = self._model.rows(self._tokens, self._cache)
            del self._tokens[len(self._rows.outputs) :]
        assert self._rows is not None
        self._num_used += 1
        return self._rows.outputs[self._num_used - 1]

    def is_guessed(self, token: int) -> bool:
        """Return whether a token, as the next one, was guessed and is computed already."""
        return self._rows is not None and self._tokens[self._num_used :][:1] == [token]

    def take_back(self) -> None:
        """Take tokens from the cache that were only guessed."""
        rows, self._rows = self._rows, None
        num_used, self._num_used = self._num_used, 0
        if rows is not None and len(self._tokens) > 1:
            self._guesses.note(len(self._tokens) - 1, num_used - 1)
            rows.keep(num_used)

    def _guess(self, limit: int) -> Sequence[int]:
        if not self._guesses.look(limit):
            return []
        before, self._reason = self._reason, self._model.refusal(self._cache)
        if self._reason is None:
            return self._guesses.take(self._model.times, limit)
        if self._reason != before:
            _log.info("no tokens are guessed: %s", self._reason)
        return []


class Chooser:
    """Chooses tokens from logits as mlx-lm does.

    Args:
        sampler: chooses from log probabilities; None takes the likeliest token.
        processors: change logits; None for none.
        tokens: those that processors see before the first ones that are given to a call.
    """

    def __init__(self, sampler: Any, processors: Any, tokens: Sequence[int] = ()) -> None:
        self._sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
        self._processors = processors or ()
        self._tokens = mx.array(list(tokens)) if tokens and self._processors else None

    def __call__(self, new: mx.array | None, output: mx.array) -> tuple[mx.array, mx.array]:
        """Return the next token, ``(1,)``, and the log probabilities, ``(1, vocabulary)``, evaluated.

        Args:
            new: the tokens that were computed; None if processors know them.
            output: the logits, of which the last row counts.
        """
        logits = output[:, -1, :]
        if self._processors:
            self._tokens = mx.concat([tokens for tokens in (self._tokens, new) if tokens is not None])
            for process in self._processors:
                logits = process(self._tokens, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = self._sampler(logprobs)
        with compiling():
            mx.eval(token, logprobs)
        return token, logprobs
