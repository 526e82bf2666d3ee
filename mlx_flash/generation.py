"""A generation loop for streamed models, where each pass over the weights counts.

mlx-lm's loop spends three passes before it shows a token: the prompt, the prompt's last token, and the next token,
which it computes ahead to keep a GPU busy. Here the prompt and its last token share one pass, a token is handed out as
soon as it is known, and no pass is spent on a token that nobody asked for. Tokens and log probabilities are mlx-lm's
own.
"""

from __future__ import annotations

import logging
import weakref
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
from mlx_flash.engine.pending import Pending
from mlx_flash.errors import CacheError, ClosedError
from mlx_flash.kv.checkpoints import Checkpoints
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
    guess is checked in a call of its own. That pays where calls share what a pass reads. Where they cannot, such as for
    a model that is all in memory, the draft model is not asked. mlx-lm's own loop, which checks all guesses in one
    call, may be faster there; its last bits are others.
    """
    stock = partial(stock_speculative_generate_step, prompt, model, draft_model, stream, **options)
    if not _is_ours(prompt, model, options):
        return stock()
    caches = options.pop("prompt_cache", None)
    num_layers = len(model.layers)
    cache = make_prompt_cache(model) if caches is None else caches[:num_layers]
    drafted = make_prompt_cache(draft_model) if caches is None else caches[num_layers:]
    if not can_be_viewed(drafted):
        _log.info("mlx-lm checks what the draft model guesses: it has a cache of its own kind")
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
    num_done, output, pending = 0, None, None
    try:
        while num_done != max_tokens:
            number = cast(int, token.item())
            is_guessed = decoder.is_guessed(number)
            if prompt_cache is not None:  # the caller sees every token in it that was handed out
                output = decoder.logits(number, 0) if is_guessed else None
                pending = decoder.pending(number, is_owed=not is_guessed)
                pending.put()
            yield number, logprobs.squeeze(0), is_guessed
            if pending is not None:
                pending.lift()
                output = output if pending.logits is None else pending.logits
            num_done += 1
            if num_done % _CLEAR_EVERY == 0:
                mx.clear_cache()
            if num_done == max_tokens:
                break
            num_left = max_tokens - num_done - 1 if max_tokens > 0 else MAX_GUESSES
            with mx.stream(stream):
                output = decoder.logits(number, num_left, pending) if output is None else output
                token, logprobs = choose(token, output)
                output = None
        if pending is not None:
            with mx.stream(stream):
                if output is None:
                    decoder.logits(number, 0, pending)
                source.end()
    except BaseException:  # no pass begins now: the last token stays owed
        if pending is not None:
            num_missing = source.leave([number] if pending.is_owed else [])
            Pending(source.cache, num_missing, source.end).put()
            if pending.is_owed:
                pending.put()
            else:
                pending.lift()  # the guesses go now
        raise
    finally:
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
        self._checkpoints: Checkpoints | None = None
        self._num_used = 0
        self._reason: str | None = None

    def logits(self, token: int, limit: int, owed: Pending | None = None) -> mx.array:
        """Add a token to the cache. Return the logits that follow it, ``(1, 1, vocabulary)``.

        Args:
            token: the token.
            limit: the most tokens to guess after it.
            owed: what the token makes up for.
        """
        self._guesses.add(token)
        if not self.is_guessed(token):
            self.take_back()
            self._tokens = [token, *self._guess(limit)]
            self._checkpoints = Checkpoints()
            self._rows = self._model.rows(self._tokens, self._cache, owed, self._checkpoints)
            del self._tokens[len(self._rows.outputs) :]
        assert self._rows is not None
        self._num_used += 1
        return self._rows.outputs[self._num_used - 1]

    def pending(self, token: int, *, is_owed: bool) -> Pending:
        """Return the difference between the cache, and that of mlx-lm, which holds the token that was handed out.

        Args:
            token: the token.
            is_owed: whether it was not computed yet.
        """
        if not is_owed:
            return Pending(self._cache, self._num_used - len(self._tokens), self.take_back)
        self.take_back()
        cache, model_of = self._cache, weakref.ref(self._model)

        def compute() -> mx.array:
            model = model_of()
            try:
                if model is None:
                    raise ClosedError("the model was freed")
                return model.rows([token], cache, pending).outputs[0]
            except ClosedError as error:
                raise CacheError(
                    f"a prompt cache lacks its last token ({token}): its generator was closed before it was computed, "
                    "and then the model. Hint: use the cache, or let the generator end, before you close the model."
                ) from error

        pending = Pending(cache, 1, compute, token)
        return pending

    def is_guessed(self, token: int) -> bool:
        """Return whether a token, as the next one, was guessed and is computed already."""
        return self._rows is not None and self._tokens[self._num_used :][:1] == [token]

    def take_back(self) -> None:
        """Take tokens from the cache that were only guessed."""
        if self._rows is not None and len(self._tokens) > 1:
            self._guesses.note(len(self._tokens) - 1, self._num_used - 1)
            self._rows.keep(self._num_used)
        elif self._rows is None and self._checkpoints is not None:  # an interrupt has hidden the rows from us
            self._checkpoints.take_back(1)
        self._rows, self._checkpoints, self._num_used = None, None, 0

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
