"""The loops that generate, and a sequence on its way: the parts of its prompt, its next tokens, guesses, and its end.

Every loop drives sequences in the same way. :func:`compute` computes a row of each: a part of the prompt, or the last
token and guesses of those after it. As long as a sequence :attr:`~GeneratedSequence.is_ready`,
:meth:`~GeneratedSequence.choose` chooses a token, and :meth:`~GeneratedSequence.take` hands it out.

mlx-lm's loop spends three passes before it shows a token: the prompt, the prompt's last token, and the next token,
which it computes ahead to keep a GPU busy. Here the prompt and its last token share one pass, a token is handed out as
soon as it is known, and no pass is spent on a token that nobody asked for. Where everything is in memory, mlx-lm's own
loops run. Tokens and log probabilities are mlx-lm's own.

mlx-lm computes a batch as one array with a row for each sequence, padded to the longest one. Kernels then work on other
shapes than for a sequence alone, and on GPUs the last bits differ. Here each sequence keeps its own cache and its own
calls; they share the weights that a pass reads.
"""

from __future__ import annotations

import copy
import math
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.arrays import draw_as_between, evaluate, random_key, set_random_key
from mlx_flash.compat.caches import trimmable
from mlx_flash.compat.generation import (
    BatchGenerator,
    Response,
    StockBatchGenerator,
    Waiting,
    generation_stream,
    merge_caches,
    stock_batch_generate,
    stock_generate,
    stock_generate_step,
    stock_speculative_generate_step,
    stock_stream_generate,
    wanted_of,
    with_names,
)
from mlx_flash.compat.generation import Progress as PromptProgress
from mlx_flash.engine.call import Row
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, CacheError, ClosedError, FlashError, WriteError
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.kv.views import can_be_viewed
from mlx_flash.logs import log
from mlx_flash.model import FlashLLM, Reads
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, together_bytes
from mlx_flash.speculation import MAX_GUESSES, Draft, Guesses, Lookup, OwnGuesses, Source

Choice = tuple[mx.array, mx.array]
"""A token that was chosen, ``(1,)``, and the logarithms of all probabilities, ``(1, vocabulary)``."""


class Chooser:
    """Chooses tokens from logits as mlx-lm does. ``tokens`` are those that processors see before the first call's."""

    def __init__(self, sampler: Any, processors: Any, tokens: mx.array | list[int]) -> None:
        self.sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
        self.processors = processors or ()
        self._tokens = mx.array(tokens) if self.processors else None
        self._last: mx.array | None = None
        self._keys: tuple[mx.array, mx.array] | None = None  # before and after the last token
        self._next_key: mx.array | None = None  # before the next one, if its numbers are drawn already

    def __call__(self, output: mx.array) -> Choice:
        """Return the next token, and the probabilities that it was chosen from: the last row of the logits counts."""
        logits = output[:, -1, :]
        if self._tokens is not None:
            self._tokens = self._tokens if self._last is None else mx.concat([self._tokens, self._last])
            for process in self.processors:
                logits = process(self._tokens, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        self._last = token = self._draw(logprobs)
        keys = () if self._keys is None else self._keys[1:]  # later, it would wait for the pass after this one
        evaluate(token, logprobs, *keys)
        return token, logprobs

    def _draw(self, logprobs: mx.array) -> mx.array:
        """Choose a token from log probabilities, with the random numbers that were drawn ahead, if there are any."""
        ahead = None
        if self._next_key is not None:
            ahead = random_key()
            set_random_key(self._next_key)
            self._next_key = None
        try:
            before = random_key()
            token: mx.array = self.sampler(logprobs)
            after = random_key()
        finally:
            if ahead is not None:
                set_random_key(ahead)
        self._keys = None if after is before else (before, after)
        return token

    def draw_ahead(self) -> None:
        """Draw the random numbers of the next token, which gets them when it is chosen.

        When mlx-lm hands a token out, it has chosen the next one. What the caller draws from then on follows that.
        """
        key = random_key()
        if self._keys is not None and self._next_key is None and draw_as_between(*self._keys):
            self._next_key = key


class Token(NamedTuple):
    """A token, the logarithms of all probabilities, ``(vocabulary,)``, and whether the token was guessed."""

    number: int
    logprobs: mx.array
    is_guessed: bool


class GeneratedSequence:
    """A prompt and the tokens that follow it, on their way through a model.

    ``is_seen`` says that the caller sees in the cache every token that was handed out, as with mlx-lm. A negative
    ``max_tokens`` is no limit. What ``report`` raises ends the pass.
    """

    def __init__(
        self,
        model: FlashLLM,
        cache: list[Any],
        segments: list[list[int]],
        chooser: Chooser,
        *,
        step: int,
        max_tokens: int,
        guesses: Guesses | None = None,
        tokens: Sequence[int] = (),
        report: Progress | None = None,
        reads: Reads | None = None,
        is_seen: bool = False,
        uid: int = 0,
        stop: Any = None,
    ) -> None:
        self.model, self.cache, self.max_tokens = model, cache, max_tokens
        self.chooser, self.uid, self.stop = chooser, uid, stop
        self.segments = segments  # of the prompt, those that are left
        self.guesses = guesses  # None once nothing is guessed any more
        self.tokens = list(tokens)  # those in the cache
        self.row: Row | None = None  # what is computed now, or was computed and not chosen from
        self.num_prompt = sum(map(len, segments))
        self.most_tokens = len(tokens) + self.num_prompt + max_tokens  # that its cache will have
        self.num_tokens = self.num_taken = 0  # tokens that were chosen, and those of them that were handed out
        self.num_calls = 0  # calls of one token that are computed now; 0 for a part of the prompt
        self.num_restored = 0  # tokens of the prompt that came from the prefix cache
        self.ends_segment = True  # whether the row that is computed ends with a segment
        self.has_room = True  # False once guesses had none: a draft model still needs the text
        self._step, self._report, self.reads = step, report, reads
        self._is_read_only = reads is not None and max_tokens == 0
        self.hidden: list[mx.array] = []  # what is kept of the prompt's hidden states, one array for each part
        self._new: list[int] = []  # the tokens of the row
        self._at = -1  # number of the logits to choose from
        self._token: mx.array | None = None
        self._logprobs = mx.array([])
        self._owed = Owed(cache) if is_seen else None
        self._reason: str | None = None

    def begin(self, num_others: int = 0, *, most: int | None = None) -> Row:
        """Return the row to compute now, beside as many calls of others.

        Args:
            most: the most tokens of a prompt, at least a step; None for as many as memory allows.
        """
        if self.row is None and self._owed is not None and self._owed.found is not None:  # somebody looked
            self.row, self._new, self._at = self._owed.found, [self.last], -1
            if self.guesses is not None and self.guesses.reader is not None:
                self.guesses.reader.restart()
        if self.row is not None:
            return self.row
        self._at, self.num_calls = -1, int(self._token is not None)
        options: dict[str, Any]
        if self._token is None:
            if most is not None:
                most -= most % self.model.prefill_step(self._step, 0)
            taken, self.ends_segment = _take_segments(self.segments, self.cache, most)
            self._new = [token for segment in taken for token in segment]
            options = {
                "wants_logits": not self.segments and not self._is_read_only,
                "ends": list(accumulate(map(len, taken[:-1]))),
                "segment_left": 0 if self.ends_segment else len(self.segments[0]),
                "reads": self.reads,
            }
        else:
            guessed = self._guess(num_others)
            self._new, self.num_calls = [self.last, *guessed], 1 + len(guessed)
            self._at = 0 if guessed else -1
            options = {"num_guesses": len(guessed), "owed": self._owed}
        row = self.model.row(mx.array([self._new]), self.cache, self._step, reader=self._reader(), **options)
        row.report = None if self.num_calls else self._report
        self.row = row
        return row

    def _reader(self) -> OwnGuesses | None:
        """Return the source of guesses that reads the hidden states of the next row, if one does."""
        reader = None if self.guesses is None else self.guesses.reader
        if reader is None or (self.has_room and self.model.refusal(self.cache) is None):
            return reader
        reader.restart()
        return None

    def _guess(self, num_others: int) -> Sequence[int]:
        limit = self.max_tokens - self.num_tokens - 1 if self.max_tokens > 0 else MAX_GUESSES
        if self.guesses is None or not self.has_room or not self.guesses.look(limit):
            return []
        before, self._reason = self._reason, self.model.refusal(self.cache)
        if self._reason is None:
            guessed, size = self.guesses.take(self.model.times, limit, num_others), self._logprobs.shape[-1]
            return [*takewhile(lambda token: token < size, guessed)]  # a draft model may have more tokens
        if self._reason != before:
            log.info("no tokens are guessed: %s", self._reason)
        return []

    @property
    def is_ready(self) -> bool:
        """True if the logits that the next token follows from are computed."""
        row = self.row
        if row is None or row.error is not None or self.segments or self._is_read_only:
            return False
        return bool(row.outputs) and (not row.left or self._at >= 0)

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that are not in the cache."""
        if self._token is not None:
            return 0
        return (0 if self.row is None else self.row.num_left) + sum(map(len, self.segments))

    def end_part(self) -> bool:
        """Note that a part of the prompt is in the cache, if it is, and more is to come or no token is wanted.

        Return whether that is so.
        """
        if self.row is None or not self.row.is_done or not (self.segments or self._is_read_only):
            return False
        self.hidden += [] if self.reads is None else self.row.outputs
        self.tokens += self._new
        self.num_restored += self.row.num_restored
        self.row = None
        return True

    def choose(self) -> None:
        """Choose the token that follows. It is known after :meth:`take`."""
        assert self.row is not None
        output = self.row.outputs[self._at]
        self._token, self._logprobs = self.chooser(output)
        if self.reads is not None and not self.num_tokens:
            self.hidden += self.row.outputs[:-1]
        self.num_restored += 0 if self.num_tokens else self.row.num_restored
        self.tokens += self._new if self._at < 0 else self._new[self._at : self._at + 1]
        if self._at < 0:
            self.row = None
        self.num_tokens += 1

    def take(self) -> Token:
        """Return the token that was chosen. Guesses that it proves wrong are taken back."""
        number, is_right = self.last, False
        if self.guesses is not None:
            self.guesses.add(number)
        if self._at >= 0:
            is_right = self._guessed[self._at : self._at + 1] == [number]
            self._at += is_right
            if not is_right:
                self.take_back()
        self.num_taken = self.num_tokens
        if self._owed is not None:
            self._owed.owe(self._token_owed(self._owed) if self.row is None else self.row.guessed(1 + self._at))
        return Token(number, self._logprobs.squeeze(0), is_right)

    @property
    def _guessed(self) -> list[int]:
        """The guesses that are computed, as many as memory had room for."""
        return [] if self.row is None else self._new[1 : len(self.row.outputs)]

    def take_back(self) -> None:
        """Take tokens from the cache that were only guessed. Harmless when repeated."""
        if self.row is not None and self.row.outputs and self.row.whole.checkpoints is not None:
            num_tried, num_right = len(self._guessed), self._at
            self.row.keep(1 + num_right)
            self.row, self._at = None, -1
            self.model.counters.end_guess(num_tried, num_right)
            if self.guesses is not None:
                self.guesses.note(num_tried, num_right)

    @property
    def last(self) -> int:
        assert self._token is not None
        number: Any = self._token.item()
        return int(number)

    def end(self) -> None:
        """End before the last token is computed, although it may have been guessed. Nothing is guessed any more."""
        if self._at >= 0:
            self._at -= 1
            self.take_back()
        self.guesses = None

    def _token_owed(self, owed: Owed) -> Debt:
        """Return what the cache lacks of mlx-lm's, which holds the token that was handed out last."""
        cache, step, number, model_of = self.cache, self._step, self.last, weakref.ref(self.model)

        def settle() -> None:
            model = model_of()
            try:
                if model is None:
                    raise ClosedError("the model was freed")
                row = model.row(mx.array([[number]]), cache, step, owed=owed)
                model.advance([row])
                if row.error is not None:
                    raise row.error
            except ClosedError as error:
                raise CacheError(
                    f"a prompt cache lacks its last token ({number}): its generator was closed before it was computed, "
                    "and then the model. Hint: use the cache, or let the generator end, before you close the model."
                ) from error

        return Debt(1, settle, number)


def _take_segments(segments: list[list[int]], cache: list[Any], most: int | None) -> tuple[list[list[int]], bool]:
    """Let go of the segments of a prompt that are computed now. Return them, and whether they are whole.

    A part of a segment ends where the whole would be cut, too.
    """
    # A cache that can be trimmed has the ends of its segments in it; of another one they are states of their own.
    apart = len(segments) > 2 and trimmable(cache) is None
    taken: list[list[int]] = []
    num_left = math.inf if most is None else most
    while segments and len(segments[0]) <= num_left and not (apart and taken):
        taken.append(segments.pop(0))
        num_left -= len(taken[-1])
    if taken or most is None:
        return taken, True
    part, segments[0] = segments[0][:most], segments[0][most:]
    return [part], False


def compute(sequences: Sequence[GeneratedSequence], *, most: int | None = None) -> None:
    """Compute a part of each sequence, in as few passes as memory allows. Errors of one sequence are in its row.

    ``most`` is that of :meth:`GeneratedSequence.begin`.

    Raises: ReadError: weights could not be read, and no sequence went on.
    """
    if not sequences:
        return
    model, rows, num_others = sequences[0].model, [], len(sequences) - 1
    for sequence in sequences:
        rows.append(sequence.begin(num_others, most=most))
        num_others += max(0, sequence.num_calls - 1)
    model.advance(rows)
    without = [
        sequence
        for sequence, row in zip(sequences, rows, strict=True)
        if sequence.num_calls > 1 and isinstance(row.error, BudgetError | WriteError)
    ]
    for sequence in without:
        sequence.has_room, sequence.row = False, None
    if without:
        model.advance([sequence.begin() for sequence in without])


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
    while not sequence.is_ready:
        with mx.stream(stream):
            compute([sequence])
        if sequence.row is not None and sequence.row.error is not None:
            raise sequence.row.error


class Reading(NamedTuple):
    """The hidden states of a prompt that are wanted."""

    step: int  # the most tokens of a part
    keeps: Reads  # as ``reads`` of :meth:`FlashLLM.row`
    is_all: bool = False  # nothing else is wanted: the sequence ends with its prompt


class RowGenerator(BatchGenerator):
    """mlx-lm's ``BatchGenerator``, whose sequences share passes over the weights and nothing else.

    Each call of ``next`` computes a token of each answer and as much of each prompt as memory allows, one part at
    least. Sequences join and leave in between. One that the budget may not hold beside those that run waits for them. A
    token is handed out as soon as it is known, so a prompt cache that is handed out with the last token lacks it.

    Args:
        completes_caches: for ``batch_generate``: given prompt caches stay as they are. True adds the last tokens to the
            others when all sequences have ended, in one pass for all. If False, nobody wants these: a sequence that has
            ended makes room for the next one. None uses the given ones, and hands them out with the last tokens.
        on_error: called with the number of a sequence that could not be computed, and the reason. None raises it.
        takes_turns: compute at most a step of each prompt in a pass that others wait for.
        takes_turns_alone: do so in every pass, since another sequence may come at any time.
        on_prompt: called with the number of a sequence, and the tokens of its prompt that are done and to do: during a
            pass in which it is alone, and at the end of one that it shares. What it raises, :meth:`next` raises; others
            of the pass keep what they have computed.
    """

    def __init__(
        self,
        model: FlashLLM,
        *,
        completes_caches: bool | None = None,
        on_error: Callable[[int, Exception], None] | None = None,
        takes_turns: bool = False,
        takes_turns_alone: bool = False,
        on_prompt: Callable[[int, int, int], None] = lambda uid, done, total: None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self._flash = model
        self._running: list[GeneratedSequence] = []
        self._completes_caches = completes_caches
        self._ended: list[GeneratedSequence] = []
        self._on_error = on_error
        self._on_prompt = on_prompt
        self._takes_turns, self._takes_turns_alone = takes_turns, takes_turns_alone
        self._may_lack_tokens = False
        self.num_elsewhere = 0  # number of sequences that a subclass computes itself

    def _next(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each sequence, unless an interrupt ended an earlier call: tokens may be lost."""
        if self._may_lack_tokens:
            raise CacheError(
                "the batch was interrupted between two tokens, and some may be lost. Hint: begin again with a new "
                "BatchGenerator."
            )
        self._may_lack_tokens = True
        try:
            found = self.advance()
        except Exception:
            self._may_lack_tokens = False
            raise
        self._may_lack_tokens = False
        return found

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each sequence. Return the progress of prompts, and tokens.

        Raises: FlashError: weights could not be read; or a sequence could not be computed, and nobody takes its error.
        """
        self._join()
        began, num_left = time.perf_counter(), self._num_left
        compute([sequence for sequence in self._running if not sequence.is_ready], most=self._most_prompt)
        prompts: list[Any] = []
        answers: list[Any] = []
        for sequence in [*self._running]:
            self._choose(sequence, prompts)
        for sequence in [*self._running]:
            self._take(sequence, answers)
        if not self._running and not self.waiting:
            self._complete_caches()
        num_prompt, seconds = num_left - self._num_left, time.perf_counter() - began
        self.count(prompt_tokens=num_prompt, new_tokens=len(answers), seconds=seconds)
        return prompts, answers

    @property
    def _num_left(self) -> int:
        return sum(sequence.num_left for sequence in self._running)

    def _join(self) -> None:
        num_prompts = sum(not sequence.num_tokens for sequence in self._running)
        num_running = len(self._running) + self.num_elsewhere
        room = min(self.prefill_batch_size - num_prompts, self.completion_batch_size - num_running)
        for waiting in self.waiting[: max(0, room)]:
            if not self._has_room(waiting):
                return
            self.forget({waiting.uid})
            if self._completes_caches is not None:
                waiting = waiting._replace(cache=copy.deepcopy(waiting.cache))
            self._running.append(self._begin(waiting))

    def _reading(self, uid: int) -> Reading | None:
        """Return the hidden states of a sequence's prompt that are wanted."""
        return None

    def _begin(self, waiting: Waiting) -> GeneratedSequence:
        reading = self._reading(waiting.uid)
        prompt = [*waiting.tokens, *(token for segment in waiting.segments for token in segment)]
        step, segments, max_tokens = self.prefill_step_size, waiting.segments, int(waiting.max_tokens)
        if reading is not None:
            step = min(step, reading.step)
            if reading.is_all:
                segments, max_tokens = [prompt], 0  # no token is computed alone
        return GeneratedSequence(
            self._flash,
            waiting.cache,
            segments,
            Chooser(waiting.sampler, waiting.processors, prompt),
            step=step,
            max_tokens=max_tokens,
            guesses=Guesses(Lookup(prompt), *self._flash.own_guesses(len(prompt) + max_tokens)),
            tokens=waiting.tokens,
            report=partial(self._on_prompt, waiting.uid),
            reads=None if reading is None else reading.keeps,
            uid=waiting.uid,
            stop=waiting.stop_sequences.matcher(),
        )

    @property
    def _most_prompt(self) -> int | None:
        """The most tokens of a prompt in a pass: a step where others wait for the pass, as in mlx-lm's batches."""
        have_reads = [sequence.reads is not None for sequence in self._running]  # nobody waits for their tokens
        is_waited_for = self._takes_turns_alone or (self._takes_turns and len(have_reads) > 1 and not all(have_reads))
        return self.prefill_step_size if is_waited_for else None

    def _has_room(self, waiting: Waiting) -> bool:
        """Return whether a sequence, and those that run, can all be computed to their ends in the budget."""
        if not self._running:  # alone, its keys and values may go to disk, and its prompt may be cut
            return True
        lengths = [sequence.most_tokens for sequence in (*self._running, *self._ended)]
        return self._flash.has_room([*lengths, waiting.most_tokens])

    def _choose(self, sequence: GeneratedSequence, prompts: list[Any]) -> None:
        """Choose the next token of a sequence, if what it follows from is computed."""
        row = sequence.begin()
        if row.error is not None:
            self._running.remove(sequence)
            self._fail(sequence.uid, row.error)
            return
        if not sequence.num_tokens:
            done, total = sequence.num_prompt - sequence.num_left, sequence.num_prompt
            ends_segment = row.is_done and sequence.ends_segment
            prompts.append(PromptProgress(sequence.uid, (done, total), ends_segment, done == total))
        if sequence.end_part():
            if not sequence.segments:  # it is only read
                self._running.remove(sequence)
        elif sequence.is_ready:
            _choose_next(sequence)

    def _take(self, sequence: GeneratedSequence, answers: list[Any]) -> None:
        """Take the token that a sequence has chosen, and those that it has guessed right."""
        while sequence.num_tokens > sequence.num_taken:
            answers.append(self._answer(sequence))
            if answers[-1].finish_reason is not None:
                if self._completes_caches is False:
                    answers[-1].prompt_cache = None
                self._running.remove(sequence)
                sequence.end()
                if self._completes_caches:
                    self._ended.append(sequence)
            elif sequence.num_calls > 1 and sequence.is_ready:  # the next one was guessed right
                _choose_next(sequence)

    def _answer(self, sequence: GeneratedSequence) -> Any:
        number, logprobs, _ = sequence.take()
        reason = "length" if sequence.num_tokens >= sequence.max_tokens else None
        reason = "stop" if sequence.stop.advance(number) else reason
        kept = (sequence.cache, sequence.tokens) if reason else (None, None)
        return Response(sequence.uid, number, logprobs, reason, *kept)

    def _fail(self, uid: int, error: Exception) -> None:
        if self._on_error is None:
            raise error
        self._on_error(uid, error)

    def _complete_caches(self) -> None:
        """Add the last tokens to the caches of sequences that have ended."""
        compute(self._ended)
        for sequence in self._ended:
            row = sequence.begin()
            if row.error is not None:
                raise row.error
            sequence.tokens.append(sequence.last)
        self._ended.clear()

    def extract_cache(self, uids: Iterable[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Return copies of the caches of sequences, and the tokens in them."""
        wanted = set(uids)
        found = {sequence.uid: sequence for sequence in self._running if sequence.uid in wanted}
        waiting = super().extract_cache(wanted - found.keys())
        return {**waiting, **{uid: (copy.deepcopy(each.cache), [*each.tokens]) for uid, each in found.items()}}

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Let go of sequences. Return their caches, if wanted, and the tokens in them."""
        gone = set(uids)
        caches = self.extract_cache(gone) if return_prompt_caches else {}
        self.forget(gone)
        self._running = [sequence for sequence in self._running if sequence.uid not in gone]
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        waiting = int(super().prompt_cache_nbytes)
        return waiting + sum(int(entry.nbytes) for sequence in self._running for entry in sequence.cache)


def _choose_next(sequence: GeneratedSequence) -> None:
    key = random_key()
    sequence.choose()
    if random_key() is not key:  # whose order of numbers would depend on guesses
        sequence.guesses = None


def shares_passes(model: FlashLLM, lengths: Sequence[int], caches: Sequence[list[Any]] = ()) -> bool:
    """Return whether sequences share passes, each computed as if it were alone. If not, they are mlx-lm's batches.

    They share passes, too, where mlx-lm's batches, which are padded, have no room. ``lengths`` are the most tokens of
    each sequence, prompt and answer, and ``caches`` those to go on from. The model is started.
    """
    if not may_batch(model, caches):
        return True
    return model.batching != "stock" and together_bytes(model.plan, lengths, "stock") > model.plan.room_bytes


def may_batch(model: FlashLLM, caches: Sequence[list[Any]] = ()) -> bool:
    """Return whether sequences go to mlx-lm's batches: all weights are in memory, or the settings want it.

    These batches must keep to the settings, and be able to merge the caches to go on from. The model is started.
    """
    if (not model.is_in_memory and model.batching != "stock") or not model.is_batchable:
        return False
    try:
        merge_caches([*caches] or [make_prompt_cache(cast(nn.Module, model))])  # nothing is computed
    except (AttributeError, FlashError, TypeError, ValueError):
        return False
    return True


class SharingGenerator(StockBatchGenerator):  # type: ignore[misc]
    """mlx-lm's ``BatchGenerator``, as ``mlx_lm.batch_generate`` makes it while the patch is applied.

    For a streamed model whose sequences share passes it is a `RowGenerator`. Every other caller gets mlx-lm's own.
    """

    def __new__(cls, model: Any, *args: Any, **options: Any) -> Any:
        wanted = wanted_of(sys._getframe(1)) if isinstance(model, FlashLLM) else None
        if wanted is None or not shares_passes(model, wanted.lengths, wanted.given):
            return super().__new__(cls)
        return RowGenerator(model, *args, completes_caches=wanted.caches, **options)


batch_generate = with_names(stock_batch_generate, BatchGenerator=SharingGenerator)
