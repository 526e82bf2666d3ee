"""A model in memory, and the requests that it answers."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import make_stop_sequences
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from mlx_flash import enginethread
from mlx_flash.compat.loaders import makes_own_cache
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import BudgetError, FlashError, RefusedError
from mlx_flash.generation.batches import Reading
from mlx_flash.kv.kvpool import PooledCache
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import Decision, ResidencyPlan, alone_bytes, decide, together_bytes
from mlx_flash.server.batch import (
    BatchOptions,
    Job,
    Kept,
    ServedBatch,
    ends_alone,
    processors_of,
    refusal_of,
    sampler_of,
)
from mlx_flash.server.catalog import Source
from mlx_flash.server.events import Begun, Piece, Progress, Reason, TokenChance, TokenDetail, ToolCall
from mlx_flash.server.grammar import Grammars
from mlx_flash.server.prompts import Prompt, least_tokens, make_prompt, num_common
from mlx_flash.server.ranks import Ranks
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.text import TextStream, complete

if TYPE_CHECKING:  # an extra
    from mlx_flash.server.seeing import Sight


_KEY = "model"
"""mlx-lm's prompt cache holds those of several models by a key; here each model has its own."""


def _recall(model: FlashLLM, nbytes: int) -> None:
    """Free memory that weights have from reserves. In the engine thread, which also changes budgets."""
    if model.engine is not None:
        lending = model.engine.lending
        lending.recall(min(nbytes, lending.nbytes))


class PromptCaches(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt cache."""

    def __init__(self, model: Any, max_size: int, max_bytes: int | None, ranks: Ranks | None) -> None:
        super().__init__(max_size, 1 << 63 if max_bytes is None else max_bytes)
        self.limit_bytes: int | None = None  # that requests leave for all of them now; None for no limit
        self._model = model
        self._ranks = ranks

    def keep(self, prompt_cache: list[Any], tokens: list[int], kind: str = "assistant") -> None:
        """Keep a cache that is not computed with any more, if there is room for it. System prompts are dropped last."""
        if not tokens:
            return
        nbytes = sum(entry.nbytes for entry in prompt_cache)
        if self.limit_bytes is not None:
            if nbytes > self.limit_bytes:
                return
            self.trim_to(n_bytes=self.limit_bytes - nbytes)
        enginethread.run(partial(_recall, self._model, nbytes))  # copies are not evaluated yet
        for entry in prompt_cache:
            if isinstance(entry, PooledCache):
                entry.shorten()
            mx.eval(arrays_in(entry))
        self.insert_cache(_KEY, tokens[:], prompt_cache, cache_type=kind)

    def longest(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        """Return a copy of the kept cache with the longest prefix of a prompt, and the number of tokens in it.

        At least the prompt's last token is left to compute: its logits are needed.
        """
        if self.limit_bytes is not None and self.nbytes > self.limit_bytes // 2:
            self.trim_to(n_bytes=self.limit_bytes // 2)  # the copy is there beside the row of the batch for a moment
        try:
            cache, rest = self.fetch_nearest_cache(_KEY, tokens)
            if cache is not None and not rest:
                if can_trim_prompt_cache(cache):
                    trim_prompt_cache(cache, 1)
                    rest = tokens[-1:]
                else:
                    cache, rest = self.fetch_nearest_cache(_KEY, tokens[:-1])
                    rest = [*rest, tokens[-1]]
        except BudgetError:  # there is no room for a copy
            self.trim_to(n_sequences=0)
            cache, rest = None, tokens
        num_cached = 0 if cache is None else len(tokens) - len(rest)
        if self._ranks is not None and not self._ranks.have_same(num_cached):  # another rank has let go of it
            return None, 0
        return (cache, num_cached) if num_cached else (None, 0)


class OwnCache:
    """The cache of the only conversation. It is taken out, not copied, so it needs no room of its own."""

    def __init__(self) -> None:
        self._cache: list[Any] = []
        self.tokens: list[int] = []
        self.limit_bytes: int | None = None

    def __len__(self) -> int:
        return 0

    def keep(self, prompt_cache: list[Any], tokens: list[int], kind: str = "assistant") -> None:
        self._cache, self.tokens = (prompt_cache, tokens) if tokens else ([], [])

    def longest(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        """Return the cache, cut to the longest prefix of a prompt, and the number of tokens in it."""
        cache, held = self._cache, self.tokens
        self._cache, self.tokens = [], []
        common = num_common(held, tokens[:-1])
        if not common or (common < len(held) and not can_trim_prompt_cache(cache)):
            return None, 0
        trim_prompt_cache(cache, len(held) - common)
        return cache, common

    def trim_to(self, **_: Any) -> None:
        """Do nothing, as the conversation is planned for."""


LEAST_ANSWER = 256
"""Tokens of an answer that a request has room for, or the most that it asks for: otherwise it is refused."""


class LoadedModel:
    """A model in memory. Belongs to the generation thread."""

    def __init__(
        self,
        source: Source,
        model: FlashLLM,
        tokenizer: Any,
        draft: Any,
        options: BatchOptions,
        ranks: Ranks | None,
        sight: Sight | None = None,
    ) -> None:
        self.source, self.model, self.tokenizer, self.draft = source, model, tokenizer, draft
        complete(tokenizer)
        self.jobs: dict[int, Job] = {}  # admitted; some wait for another one that computes the same prompt
        self.vocab_size = model.plan.activations.logits_per_token // 4
        self.kept: PromptCaches | OwnCache = OwnCache()
        if not options.is_conversation:
            self.kept = PromptCaches(model, options.prompt_cache_size, options.prompt_cache_bytes, ranks)
        self.expires: float | None = None  # of ``time.monotonic()``, if no request comes; None for never
        self.keep_alive: float | None = None  # seconds after its last request; None or negative for ever
        self._options = options
        self._ranks = ranks
        self._sight = sight
        self._grammars = Grammars(tokenizer, self.vocab_size)
        self._stops = make_stop_sequences(tokenizer)
        shared = {"draft": draft, "sight": sight, "is_shared": ranks is not None}
        self._new_batch = partial(ServedBatch, model, options, self.jobs, **shared)
        self._batch = self._new_batch()
        self._most_kept: int | None = None
        if options.max_kv_size is not None and not makes_own_cache(resolve(source.base)):
            # A rotating cache adds the tokens of a call to those it keeps.
            self._most_kept = options.max_kv_size + self._batch.prefill_step_size
        # The last token of a copy is computed once more, so it must be possible to take it out.
        self._shares_prompts = self._batch.loop is None and can_trim_prompt_cache(make_prompt_cache(model))

    def prepare(self, job: Job) -> None:
        """Make the prompt of a request, and check that the budget has room for it when nothing else runs."""
        request, options = job.request, self.source.defaults.template_options or {}
        if request.tools and not self.tokenizer.has_tool_calling:
            raise RefusedError("this chat template shows the model no tools. Hint: use another model.", 400, "tools")
        job.max_tokens = 1 if request.work == "embed" else max(1, request.max_tokens or 0)
        job.reading = self._reading(job) if request.is_read else None
        try:
            if num_prompt := least_tokens(request, self.tokenizer):
                try:
                    self._shorten(job, num_prompt)
                except RefusedError as error:  # the prompt has more tokens
                    raise RefusedError(f"counted in pieces: {error}", error.status) from None
            job.prompt = self._prompt(request, options)
            job.grammar = self._grammars.of(request, job.prompt)
        except (FlashError, MemoryError):
            raise
        except Exception as error:  # of the model's template or tokenizer, whose code may raise anything
            field = "prompt" if request.messages is None else "messages"
            raise RefusedError(f"{field} cannot be used: {type(error).__name__}: {error}", 400, field) from error
        sampler_of(request.sampling, self.tokenizer, self.vocab_size)
        processors_of(request.sampling, self.vocab_size)
        if request.work != "count":
            self._shorten(job, len(job.prompt.tokens))

    def _prompt(self, request: GenerationRequest, options: Mapping[str, Any]) -> Prompt:
        if self._sight is not None:
            return self._sight.prompt(self.vocab_size, request, options)
        if request.pictures:
            raise RefusedError(
                f"{self.source.name} takes no pictures here. Hint: --vision, with a model that sees.",
                400,
                "messages",
            )
        return make_prompt(request, self.tokenizer, options, self.vocab_size)

    def _shorten(self, job: Job, num_prompt: int) -> None:
        """Shorten the longest answer to a request to what has room when nothing else runs: its end says so."""

        def lacks_room(num_answer: int) -> bool:
            try:
                self._decide(job, [], num_prompt, num_answer)
            except RefusedError:
                return True
            return False

        if lacks_room(job.max_tokens):
            shorter = range(min(LEAST_ANSWER, job.max_tokens), job.max_tokens, LEAST_ANSWER)
            num_fitting = bisect_left(shorter, True, key=lacks_room)
            if not num_fitting:
                self._decide(job, [], num_prompt, job.max_tokens)
            job.max_tokens = shorter[num_fitting - 1]

    def _reading(self, job: Job) -> Reading:
        if self._batch.loop is not None or self._ranks is not None:
            raise RefusedError(
                "this server gives no vectors and no log probabilities of prompts. Hint: start it without a draft "
                "model, quantized keys and values, --vision and further ranks.",
                400,
            )
        return reading_for(job, self.model, self._batch.prefill_step_size)

    def admits(self, job: Job) -> bool:
        """Return whether there is room for a request now. If so, kept caches leave what it needs."""
        running = [other.length for other in self.jobs.values()]
        decision = self._decide(job, running, len(job.prompt.tokens), job.max_tokens)
        if decision == "wait":
            return False
        plan, lengths = self._plan_for(job), [*running, job.length]
        batching = self._batch.admit(plan, lengths)
        needed = alone_bytes(plan, job.length) if decision == "alone" else together_bytes(plan, lengths, batching)
        self.kept.limit_bytes = max(0, plan.room_bytes - needed)
        self.kept.trim_to(n_bytes=self.kept.limit_bytes)
        return True

    def begin(self, job: Job) -> None:
        """Add a request to the batch, or let it wait for another one that computes the same prompt now."""
        computed = [other for other in self.jobs.values() if other.is_computed and not other.is_prompt_done]
        same = (other for other in computed if other.prompt.tokens == job.prompt.tokens)
        job.leader = None if job.reading is not None else next(same, None)
        if job.leader is not None and self._shares_prompts:
            self.jobs[job.number] = job
            job.send(Progress("prompt", 0, len(job.prompt.tokens)))
        else:
            self._compute(job)

    def _compute(self, job: Job) -> None:
        request, options = job.request, self._options
        state = "raw" if request.messages is None or options.is_conversation else job.prompt.state
        after = job.prompt.tokens[-1] if request.continues else None
        job.text = TextStream(self.tokenizer, request.stop, state, request.tools, after, bool(request.must_call))
        if job.reading is not None:  # all of it is computed
            cache, job.num_cached = None, 0
        elif self._sight is None:
            cache, job.num_cached = self.kept.longest(job.prompt.tokens)
        else:  # the same tokens may stand for another picture
            cache = None
            pictures = self._sight.inputs(request, self.source.defaults.template_options or {})
            job.inputs = {"inputs": pictures}
        self._batch.insert_as(
            job.number,
            job.prompt.after(job.num_cached),
            max_tokens=job.max_tokens,
            caches=cache or self._batch.make_cache(),
            all_tokens=job.prompt.tokens[: job.num_cached],
            samplers=sampler_of(request.sampling, self.tokenizer, self.vocab_size),
            logits_processors=self._processors(job),
            stop_sequences=self._stops,
        )
        self.jobs[job.number] = job
        job.begin()
        del cache
        limit = self.model.plan.kv_bytes // 2 if options.prompt_cache_bytes is None else options.prompt_cache_bytes
        self.kept.trim_to(n_bytes=limit)
        job.send(Begun(len(job.prompt.tokens), job.num_cached))
        if request.echo and job.reading is None:
            job.send(echo_of(job, self.tokenizer))

    def advance(self) -> None:
        """Compute a part of each request, and send what is new."""
        for job in [job for job in self.jobs.values() if not job.is_computed]:
            if job.leader is None or job.leader.is_prompt_done or job.leader.number not in self.jobs:
                ends_alone(partial(self.drop, job), self._compute, job)
        prompts, answers = self._batch.next()
        read: list[Job] = []
        for response in prompts:
            if (found := self._computed(response.uid)) is not None:
                ends_alone(partial(self.drop, found), self._take_prompt, found, response)
                if found.reading is not None and response.end_of_prompt:
                    read.append(found)
        for job, event in zip(read, read_all(self.model, self.tokenizer, read) if read else (), strict=True):
            ends_alone(partial(self.drop, job), self._take_reading, job, event)
        for response in answers:
            if (found := self._computed(response.uid)) is not None:
                ends_alone(partial(self.drop, found), self._take_token, found, response)
        for number, error in self._batch.take_errors().items():
            if (found := self._computed(number)) is not None:
                del self.jobs[number]
                self._fail(found, error)

    def _computed(self, number: int) -> Job | None:
        """Return the request with a number; None if it has ended, or waits to begin again."""
        job = self.jobs.get(number)
        return job if job is not None and job.is_computed else None

    def drop(self, job: Job, error: RefusedError | None = None) -> None:
        """End a request: with an error, or because its client left."""
        if self.jobs.pop(job.number, None) is not None and job.is_computed:
            self._batch.remove([job.number])
        if error is not None:
            job.fail(error)

    def stop(self, job: Job) -> None:
        """End an answer that nobody waits for any more, and keep its cache."""
        if self._computed(job.number) is not None:
            self._end(job, "stop", self._batch.finish(job.number))

    def drop_all(self, error: RefusedError) -> None:
        """End all requests with an error, after a pass that failed for all."""
        jobs = list(self.jobs.values())
        self.jobs.clear()
        self._batch.close()
        self._batch = self._new_batch()
        for job in jobs:
            job.fail(error)

    def close(self) -> None:
        self.kept.trim_to(n_sequences=0)
        self._batch.close()
        for model in (self.model if self._sight is None else self._sight.model, self.draft):
            if model is not None:
                model.close()

    def _fail(self, job: Job, error: RefusedError) -> None:
        """End a request that could not be computed. If memory was short, kept caches leave, and it begins once more."""
        if isinstance(error.__cause__, BudgetError) and len(self.kept) and not job.tokens:
            self.kept.trim_to(n_sequences=0)
            job.is_computed = job.is_prompt_done = False
            self.jobs[job.number] = job
        else:
            job.fail(error)

    def _processors(self, job: Job) -> Sequence[Any]:
        found: list[Any] = list(processors_of(job.request.sampling, self.vocab_size))
        if job.grammar is not None:
            found.append(self._grammars.processor(job.grammar))
        return found

    def _plan_for(self, job: Job) -> ResidencyPlan:
        """Return the plan as a request finds it: grammars take memory, if it has one or an earlier one had."""
        nbytes = self._grammars.needed_bytes if job.request.has_form else self._grammars.nbytes
        return replace(self.model.plan, base_bytes=self.model.plan.base_bytes + nbytes)

    def _decide(self, job: Job, running: Sequence[int], num_prompt: int, num_answer: int) -> Decision:
        if self._most_kept is not None:
            num_prompt = min(num_prompt, self._most_kept)
            num_answer = min(num_answer, self._most_kept - num_prompt)
        wish = partial(
            decide,
            self._plan_for(job),
            num_prompt,
            num_answer,
            running,
            may_batch=self._batch.loop is None,
            batching=self._batch.batching,
        )
        return wish() if self._ranks is None else self._ranks.agree(wish)

    def _take_prompt(self, job: Job, response: Any) -> None:
        """Send how far a prompt is, and keep its cache at the end of a segment."""
        done, total = (job.num_cached + number for number in response.progress)
        job.send(Progress("prompt", done, total))
        is_last = done >= len(job.prompt.tokens) - 1  # the cache at the end of the answer has it
        is_segment = response.end_of_segment and not is_last and job.reading is None
        is_awaited = any(other.leader is job and not other.is_computed for other in self.jobs.values())
        job.is_prompt_done = response.end_of_prompt
        if response.end_of_prompt:
            job.num_cached += job.num_restored
        if is_segment or (response.end_of_prompt and is_awaited):
            kind = job.prompt.kind_at(done) if is_segment else "user"
            with contextlib.suppress(BudgetError):  # there is no room for a copy
                for cache, tokens in self._batch.extract_cache([response.uid]).values():
                    self.kept.keep(cache, tokens, kind)

    def _take_reading(self, job: Job, event: Piece | list[float] | Exception) -> None:
        """Send what a request wants of its prompt's hidden states. One that wants nothing else ends."""
        if isinstance(event, Exception):
            self.drop(job)
            self._fail(job, refusal_of(event))
            return
        if isinstance(event, Piece):
            job.send(event)
        else:
            self.jobs.pop(job.number)
            job.end(vector=event)

    def _take_token(self, job: Job, response: Any) -> None:
        """Send what a token completes, and end the answer with its last one."""
        assert job.text is not None
        if job.request.max_tokens == 0:  # the token is not wanted
            self._end(job, "length", _taken(response))
            return
        job.note_token(response.token)
        reason = response.finish_reason
        parts = job.text.add(response.token) if reason != "stop" else []
        if reason is not None:
            parts += job.text.end()
        details = job.request.top_logprobs
        if details is not None and reason != "stop":
            (detail,) = details_of(*with_likeliest([response.token], details, response.logprobs[None]), self.tokenizer)
            first = next((part for part in parts if isinstance(part, Piece)), None)
            detailed = Piece("", tokens=(detail,)) if first is None else replace(first, tokens=(detail,))
            parts = [detailed, *(part for part in parts if part is not first)]
        has_call = False
        for part in parts:
            if not (has_call and job.request.one_call):
                job.send(part)
            has_call = has_call or isinstance(part, ToolCall)
        if reason is not None:
            kept = _taken(response)
        elif job.text.stop is not None or (has_call and job.request.one_call):
            reason, kept = "stop", self._batch.finish(response.uid)
        else:
            return
        self._end(job, reason, kept)

    def _end(self, job: Job, reason: Reason, kept: Kept | None) -> None:
        """End an answer, and keep its cache: not of a prompt that was read, nor of tokens that stand for pictures."""
        self.jobs.pop(job.number, None)
        if kept is not None and job.reading is None and self._sight is None:
            self.kept.keep(*kept)
        del kept
        job.end(reason)


def _taken(response: Any) -> Kept | None:
    """Return the cache that comes with a last token, which the response gives up."""
    cache, response.prompt_cache = response.prompt_cache, None
    return None if cache is None else (cache, response.all_tokens)


# --- log probabilities of prompts, and texts as vectors ---------------------------------------------------------------


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
