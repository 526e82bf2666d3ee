"""A sequence that is generated: the parts of its prompt, its next tokens, guesses of them, and its end.

Every loop drives sequences in the same way. :func:`compute` computes a row of each: a part of the prompt, or the last
token and guesses of those after it. As long as a sequence :attr:`~GeneratedSequence.is_ready`,
:meth:`~GeneratedSequence.choose` chooses a token, and :meth:`~GeneratedSequence.take` hands it out.

mlx-lm's loop spends three passes before it shows a token: the prompt, the prompt's last token, and the next token,
which it computes ahead to keep a GPU busy. Here the prompt and its last token share one pass, a token is handed out as
soon as it is known, and no pass is spent on a token that nobody asked for. Where everything is in memory, mlx-lm's own
loops run. Tokens and log probabilities are mlx-lm's own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.arrays import draw_as_between, evaluate, random_key, set_random_key
from mlx_flash.compat.caches import trimmable
from mlx_flash.compat.generation import (
    generation_stream,
    stock_generate,
    stock_generate_step,
    stock_speculative_generate_step,
    stock_stream_generate,
    with_names,
)
from mlx_flash.engine.call import Row
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, CacheError, ClosedError, WriteError
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.kv.views import can_be_viewed
from mlx_flash.logs import log
from mlx_flash.model import FlashLLM, Reads
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE
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
