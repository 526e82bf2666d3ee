"""The requests of a model while they are computed: in shared passes, in mlx-lm's batches, or one by one by a loop.

One that fails gets its error alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_flash.compat.arrays import evaluate, explained, random_key, set_random_key
from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.compat.generation import Group, Response, Waiting
from mlx_flash.compat.generation import Progress as PromptProgress
from mlx_flash.errors import BudgetError, CheckpointError, FlashError, RefusedError
from mlx_flash.generation import generate_step, speculative_generate_step
from mlx_flash.generation.batches import GeneratedSequence, Reading, RowGenerator, may_batch
from mlx_flash.logs import log
from mlx_flash.model import FlashLLM
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE, ResidencyPlan, together_bytes
from mlx_flash.server.catalog import Source
from mlx_flash.server.events import Client, End, Event, Failed, Progress, Reason
from mlx_flash.server.prompts import NO_PROMPT, Prompt
from mlx_flash.server.request import GenerationRequest, Sampling
from mlx_flash.server.text import TextStream

if TYPE_CHECKING:  # an extra
    from mlx_flash.server.seeing import Sight


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: GenerationRequest  # as the dialect made it, with the settings and the first messages of its model
    source: Source
    answer: Client | None  # the way to its client, which may have other answers; None on other ranks than 0
    prompt: Prompt = NO_PROMPT  # its prompt; without tokens until its model is in memory
    grammar: str | None = None  # that its answer follows; None for any text
    max_tokens: int = 0  # the most tokens of its answer
    reading: Reading | None = None  # what is wanted of the hidden states of its prompt; None for nothing
    inputs: dict[str, Any] = field(default_factory=dict)  # further options of the loop that answers it
    is_computed: bool = False  # it is in the batch; False while it waits
    is_prompt_done: bool = False  # its prompt is computed
    leader: Job | None = None  # the request for whose prompt it waits, or waited; None for none
    text: TextStream | None = None  # the text so far. There from the beginning of the computation
    num_cached: int = 0  # tokens of the prompt that a kept cache had; in the end, also those of the prefix cache
    num_restored: int = 0  # tokens of the prompt that the prefix cache had
    hidden: list[mx.array] = field(default_factory=list)  # states of its prompt, as far as it wants them
    tokens: list[int] = field(default_factory=list)  # of the answer so far
    is_over: bool = False  # nothing is sent any more
    load_seconds: float = 0.0
    _began: float | None = None
    _first: float | None = None

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def length(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt.tokens) + self.max_tokens

    @property
    def is_apart(self) -> bool:
        """True if it gets the same answer each time: it has a seed, or the hidden states of its prompt are wanted."""
        return self.reading is not None or self.request.sampling.named_seed is not None

    def begin(self) -> None:
        self.is_computed, self._began = True, time.perf_counter()

    def note_token(self, token: int) -> None:
        self.tokens.append(token)
        self._first = self._first or time.perf_counter()

    def send(self, event: Event) -> None:
        if self.answer is not None and not self.is_over:
            self.answer.put(self.number, event)

    def end(self, reason: Reason = "stop", vector: Sequence[float] = ()) -> None:
        """Send the end of a complete answer, or of a request that asks for none."""
        now, stop = time.perf_counter(), None
        began = self._began or now
        first = self._first or now
        if self.text is not None:
            stop, reason = self.text.stop, "tool_calls" if reason == "stop" and self.text.num_calls else reason
        counts = len(self.prompt.tokens), self.num_cached, len(self.tokens)
        self.send(End(reason, stop, *counts, vector, self.load_seconds, first - began, now - first))
        self.is_over = True

    def fail(self, error: RefusedError) -> None:
        self.send(Failed(error))
        self.is_over = True


class LeftError(Exception):
    """The client of a request has left while its prompt was computed."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the client of request {number} has left")
        self.number = number


T = TypeVar("T")


def ends_alone(fail: Callable[[RefusedError], None], work: Callable[..., T], *args: Any) -> T | None:
    """Return the result of work for a request. If it fails, the request gets the error, and the result is None."""
    try:
        return work(*args)
    except LeftError:
        raise
    except Exception as error:  # noqa: BLE001 of any model's code or template, and it must end no other request
        fail(refusal_of(error))
        return None


def refusal_of(error: Exception) -> RefusedError:
    """Return an error as its client gets it, and log it without text that may quote the prompt."""
    if isinstance(error, RefusedError):
        cause = error.__cause__
        log.info("a request failed: %s", error if cause is None else type(cause).__name__)
        return error
    error = explained(error)
    is_ours = isinstance(error, FlashError)
    log.error("a request failed: %s", error if is_ours else type(error).__name__)
    log.debug("its origin:", exc_info=error)
    status = 400 if isinstance(error, CheckpointError) else 500  # of a model that the request names
    refused = RefusedError(str(error) if is_ours else f"{type(error).__name__}: {error}", status)
    refused.__cause__ = error.with_traceback(None)  # whose frames hold the caches of the request
    return refused


Kept = tuple[list[Any], list[int]]
"""A prompt cache that is not computed with any more, and its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Limits of a model's batches, with mlx-lm's values."""

    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE  # prompt tokens in one forward call
    decode_concurrency: int = 32  # the most answers that are computed together
    prompt_concurrency: int = 8  # the most prompts
    prompt_cache_size: int = 10  # the most prompt caches that are kept
    prompt_cache_bytes: int | None = None  # the most bytes of these; None takes half of what the plan reserves
    num_draft_tokens: int | None = None  # the most that a draft model guesses at a time; None for as many as pay
    kv_bits: int | None = None  # as of ``mlx_lm.generate``; requests are answered one after another
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    is_conversation: bool = False  # the model has one conversation, which ``mlx_lm.stream_generate``'s loop answers
    max_kv_size: int | None = None  # tokens that the rotating KV cache of a conversation holds; None drops none


@dataclass(frozen=True)
class Loop:
    """A generation loop: with a draft model, with quantized keys and values, or with pictures."""

    steps: Callable[..., Iterator[Any]]  # the loop. It takes the prompt, and the options of mlx-lm's
    make_cache: Callable[[], list[Any]]  # makes the prompt cache of a request


def _loop(model: FlashLLM, draft: Any, options: BatchOptions, sight: Sight | None) -> Loop | None:
    """Return the loop that answers requests one after another; None where they are computed together."""
    quantized: dict[str, Any] = {"kv_bits": options.kv_bits, "kv_group_size": options.kv_group_size}
    quantized |= {"quantized_kv_start": options.quantized_kv_start}
    if sight is not None:
        return Loop(partial(sight.steps, **quantized), sight.make_cache)
    if draft is not None:
        drafted = {"model": model, "draft_model": draft}
        if options.num_draft_tokens is not None:
            drafted["num_draft_tokens"] = options.num_draft_tokens
        caches = [partial(make_prompt_cache, each) for each in (model, draft)]
        return Loop(partial(speculative_generate_step, **drafted), lambda: [e for make in caches for e in make()])
    if options.kv_bits is not None or options.is_conversation:
        return Loop(
            partial(generate_step, model=model, **quantized), partial(make_prompt_cache, model, options.max_kv_size)
        )
    return None


class LoneRequest:
    """A request that a loop answers, in the place of a group of mlx-lm's."""

    def __init__(
        self,
        loop: Loop,
        asked: Waiting,
        step: int,
        inputs: dict[str, Any],
        fail: Callable[[RefusedError], None],
        on_prompt: Callable[[int, int, int], None],
    ) -> None:
        self.uids, self.num_restored, self._on_prompt = [asked.uid], 0, on_prompt
        self._cache, self._tokens, self._fail = asked.cache, list(asked.tokens), fail
        self._prompt = [token for segment in asked.segments for token in segment]
        self._matcher = asked.stop_sequences.matcher()
        self._num_left, self._progress = asked.max_tokens, list[Any]()
        self._steps: Any = loop.steps(
            mx.array(self._prompt),
            max_tokens=asked.max_tokens,
            sampler=asked.sampler,
            logits_processors=[_seeing(asked.tokens, process) for process in asked.processors],
            prompt_cache=asked.cache,
            prefill_step_size=step,
            prompt_progress_callback=self._report,
            **inputs,
        )

    def __len__(self) -> int:
        return int(self._steps is not None)

    @property
    def num_prompts(self) -> int:
        return len(self) if self._prompt else 0

    def next(self) -> tuple[list[Any], list[Any]]:
        """Compute its next token. Return the progress of its prompt, and the token."""
        answer = ends_alone(self._end_with, self._advance)
        progress, self._progress = self._progress, []
        return progress, [] if answer is None else [answer]

    def extract_cache(self, uids: Iterable[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """End the loop, which puts its cache right. Return the cache and the tokens in it; none if they are unknown."""
        if self._steps is None or self.uids[0] not in uids:
            return {}
        self._steps.close()
        offsets = {getattr(entry, "offset", None) for entry in self._cache}
        num_tokens, tokens = offsets.pop() if len(offsets) == 1 else None, [*self._tokens, *self._prompt]
        is_known = num_tokens is not None and num_tokens <= len(tokens)
        return {self.uids[0]: (self._cache, tokens[:num_tokens] if is_known else [])}

    def remove(self, uids: Iterable[int]) -> None:
        if self.uids[0] in uids:
            self._steps = None

    def _report(self, done: int, total: int) -> None:
        self._progress.append(PromptProgress(self.uids[0], (done, total), done == total, done == total))
        self._on_prompt(self.uids[0], done, total)

    def _end_with(self, error: RefusedError) -> None:
        self._steps = None
        self._fail(error)

    def _advance(self) -> Any:
        number, logprobs, *_ = next(self._steps)
        uid, token = self.uids[0], int(number)
        self._tokens += [*self._prompt, token]
        self._prompt, self._num_left = [], self._num_left - 1
        reason = "length" if self._num_left <= 0 else None
        reason = "stop" if self._matcher.advance(token) else reason
        kept = self.extract_cache(self.uids)[uid] if reason else (None, None)
        self._steps = None if reason else self._steps
        return Response(uid, token, logprobs, reason, *kept)


def _seeing(before: Sequence[int], process: LogitsProcessor) -> LogitsProcessor:
    """Return a logits processor that also sees the tokens that the cache held before."""
    seen = mx.array([*before], mx.int32)
    return lambda tokens, logits: process(mx.concatenate([seen, tokens.astype(mx.int32)]), logits)


def padded_length(num_tokens: int) -> int:
    """Return the length up to which prompts of so many tokens may be padded, so that others are computed with them.

    Up to 64 tokens cost a GPU little. Longer prompts get at most as many tokens more as they have.
    """
    return max(64, 1 << (num_tokens - 1).bit_length())


class ServedBatch(RowGenerator):
    """Requests of a model.

    Where weights are streamed they share passes, each computed as if it were alone. Where all are in memory they are in
    mlx-lm's batches from the prompt on: prompts that wait at the same time and are about equally long in one array, and
    all answers in one. On a GPU a call with a row for each of several answers takes little longer than a call for one;
    the price is that the last bits of an answer depend on the others, as in mlx-lm's server. With a loop, they are
    answered one after another.
    """

    def __init__(
        self,
        model: FlashLLM,
        options: BatchOptions,
        jobs: Mapping[int, Job],
        *,
        draft: Any = None,
        sight: Sight | None = None,
        is_shared: bool = False,
    ) -> None:
        self.loop = _loop(model, draft, options, sight)
        super().__init__(
            model,
            on_error=self._note,
            on_prompt=self.note_prompt,
            takes_turns=True,
            takes_turns_alone=not is_shared and not model.plan.read_bytes,  # nothing is read for another pass
            completion_batch_size=options.decode_concurrency if self.loop is None else 1,
            prefill_batch_size=options.prompt_concurrency if self.loop is None else 1,
            prefill_step_size=min(options.prefill_step_size, model.plan.prefill_step_size),
            stream=mx.default_stream(mx.default_device()),
        )
        self._jobs, self._is_shared = jobs, is_shared
        self._errors: dict[int, RefusedError] = {}
        self._fatal: Exception | None = None
        self._groups: list[Group | LoneRequest] = []  # the first ones have the answers, those after them prompts
        self._may_batch = False

    def note_prompt(self, number: int, done: int, total: int) -> None:
        """Note how far a prompt is in the pass under way. All ranks compute a pass to its end.

        Raises: LeftError: the client has left, so that the pass is in vain.
        """
        job = self._jobs.get(number)
        if job is None or self._is_shared:
            return
        if job.answer is not None and number not in job.answer.open:
            raise LeftError(number)
        if total == len(job.prompt.tokens) - job.num_cached:
            job.send(Progress("prompt", job.num_cached + done, job.num_cached + total))

    def _reading(self, uid: int) -> Reading | None:
        return self._jobs[uid].reading if uid in self._jobs else None

    def _is_apart(self, number: int) -> bool:
        return number in self._jobs and self._jobs[number].is_apart and not self._is_shared

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self._flash) if self.loop is None else self.loop.make_cache()

    @property
    def batching(self) -> str:
        """The setting that admission counts the requests under way by."""
        return "stock" if self._groups and self.loop is None else "exact"

    def admit(self, plan: ResidencyPlan, lengths: Sequence[int]) -> str:
        """Take note of the most tokens of each request. Return the setting that admission counts them by.

        Requests are in mlx-lm's batches from now on if the budget has room for one of all of them.
        """
        has_room = together_bytes(plan, lengths, "stock") <= plan.room_bytes
        self._may_batch = has_room and may_batch(self._flash)
        return "stock" if self._may_batch else self.batching

    def advance(self) -> tuple[list[Any], list[Any]]:
        """Compute a part of each request. Return the progress of prompts, and tokens."""
        prompts, answers, num_prompts, num_running = list[Any](), list[Any](), 0, len(self._running)
        if self.num_waiting:
            self._begin_groups()
        for group in [*self._groups]:
            num_new = group.num_prompts
            num_prompts += num_new
            num_running += len(group)
            if num_new and (num_prompts > self.prefill_batch_size or num_running > self.completion_batch_size):
                break  # prompts beyond the limits wait
            self._compute_group(group, prompts, answers)
        self._join_groups()
        if self._running or self.num_waiting:
            try:
                read, computed = super().advance()
                prompts += read
                answers += [answer for answer in computed if answer.uid not in self._errors]
            except LeftError as error:  # others are as they were before their next pass
                self.remove([error.number])
        if self._fatal is not None:
            raise self._fatal
        if self._errors:
            self._running = [sequence for sequence in self._running if sequence.uid not in self._errors]
        return prompts, answers

    def take_errors(self) -> dict[int, RefusedError]:
        """Return the errors of requests since the last call, by number. The requests are gone."""
        errors, self._errors = self._errors, {}
        return errors

    def finish(self, uid: int) -> Kept | None:
        """End a request before its most tokens. Return its cache; None if it is gone."""
        running = next((sequence for sequence in self._running if sequence.uid == uid), None)
        kept = self.remove([uid], return_prompt_caches=running is None).get(uid)
        return kept if running is None else (running.cache, running.tokens)

    def extract_cache(self, uids: Iterable[int]) -> dict[int, Kept]:
        """Return copies of the caches of requests, and the tokens in them."""
        found = super().extract_cache(wanted := set(uids))
        for group in self._groups:
            found |= {uid: (cache, [*tokens]) for uid, (cache, tokens) in group.extract_cache(wanted).items()}
        return found

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Kept]:
        """Let go of requests. Return their caches, if wanted, and the tokens in them."""
        caches = super().remove(gone := set(uids), return_prompt_caches)
        for group in self._groups:
            group.remove(gone)
        self._groups = [group for group in self._groups if len(group)]
        return caches

    def _note(self, uid: int, error: Exception) -> None:
        self._errors[uid] = refusal_of(error)
        if self._is_shared and not isinstance(error, BudgetError):
            self._fatal = error

    def _begin(self, waiting: Waiting) -> GeneratedSequence:
        return super()._begin(self._guarded(waiting))

    def _choose(self, sequence: GeneratedSequence, prompts: list[Any]) -> None:
        super()._choose(sequence, prompts)
        if (job := self._jobs.get(sequence.uid)) is not None:
            job.num_restored = sequence.num_restored
            if sequence.hidden and not sequence.num_left:
                job.hidden, sequence.hidden = sequence.hidden, []

    def _guarded(self, waiting: Waiting) -> Waiting:
        """Return a request whose sampler and processors note what they raise: it ends alone after the call.

        They keep no cache, which batches copy.
        """
        refuse, sampler = partial(self._refuse, waiting.uid), cast(Sampler, waiting.sampler)

        def choose(logprobs: mx.array) -> mx.array:
            token = ends_alone(refuse, sampler, logprobs)
            return greedy(logprobs) if token is None else token  # the former nobody sees

        def guarded(process: LogitsProcessor, tokens: mx.array, logits: mx.array) -> mx.array:
            processed = ends_alone(refuse, process, tokens, logits)
            return logits if processed is None else processed

        chooser = greedy if sampler is greedy else choose  # the former is called once for all that have it
        return waiting._replace(sampler=chooser, processors=[partial(guarded, each) for each in waiting.processors])

    def _refuse(self, uid: int, error: RefusedError) -> None:
        self._errors[uid] = error

    # --- mlx-lm's batches ---------------------------------------------------------------------------------------------

    def _begin_groups(self) -> None:
        """Give prompts that wait to mlx-lm, those together that are about equally long and have room in a step."""
        may_batch = self._may_batch or self.loop is not None
        waiting = [each for each in self.waiting if may_batch and self._reading(each.uid) is None]
        self.forget({each.uid for each in waiting})
        alike: dict[tuple[int, ...], list[Waiting]] = {}
        for each in waiting:
            num_new = sum(map(len, each.segments))
            is_kept = num_new >= CACHE_STEP and self._flash.prefixes is not None  # in pages of one sequence
            is_alone = is_kept or self._is_apart(each.uid) or self.loop is not None
            key = (0, each.uid) if is_alone else (padded_length(num_new), len(each.segments))
            alike.setdefault(key, []).append(each)
        for (length, _), group in alike.items():
            most = max(1, min(self.prefill_step_size // max(1, length), self.prefill_batch_size))
            for start in range(0, len(group), most):
                self._begin_group(group[start : start + most])

    def _begin_group(self, sequences: Sequence[Waiting]) -> None:
        step = self.prefill_step_size
        if self.loop is not None:
            (asked,) = sequences
            inputs, fail = self._jobs[asked.uid].inputs, partial(self._refuse, asked.uid)
            self._groups.append(LoneRequest(self.loop, asked, step, inputs, fail, self.note_prompt))
            return
        limits = {"completion_batch_size": self.completion_batch_size, "prefill_batch_size": self.prefill_batch_size}
        guarded = [self._guarded(each) for each in sequences]
        options = {"sampler": greedy, "prefill_step_size": step, "stream": self.stream, **limits}
        self._groups.append(Group(self._flash, guarded, **options))

    def _compute_group(self, group: Group | LoneRequest, prompts: list[Any], answers: list[Any]) -> None:
        """Compute a token of each answer of a group, or a part of its prompts.

        As far as memory is short, the newest answers end, and prompts are begun again one by one.
        """
        before = self._num_restored if group.num_prompts else 0
        while len(group):
            try:
                read, computed = group.next()
            except LeftError:  # a loop's; the request is dropped before the next pass
                return
            except BudgetError as error:
                assert isinstance(group, Group)
                if group.newest is not None:
                    self._note(group.newest, error)
                    group.remove([group.newest])
                    continue
                self._groups.remove(group)
                for each in group.sequences:
                    self._begin_group([each])
                if not group.sequences:
                    self._note(group.uids[0], error)
                return
            if read:
                group.num_restored += self._num_restored - before
                for response in read:
                    if (job := self._jobs.get(response.uid)) is not None:
                        job.num_restored = group.num_restored
                prompts += read
                if isinstance(group, Group) and group.newest is not None:
                    group.sequences = ()
            for response in computed:
                if response.finish_reason is not None:  # a later token failed, which nobody wants
                    self._errors.pop(response.uid, None)
            answers += computed
            return

    @property
    def _num_restored(self) -> int:
        prefixes = self._flash.prefixes
        return 0 if prefixes is None else prefixes.counters.num_restored

    def _join_groups(self) -> None:
        """Move the answers of groups whose prompts are computed to the first one, unless they stay apart."""
        if self._errors:
            for group in self._groups:
                group.remove(self._errors)
        together: list[Group] = []
        for group in self._groups if len(self._groups) > 1 else ():
            if isinstance(group, Group) and group.newest is not None and not any(map(self._is_apart, group.uids)):
                together.append(group)
        for group in together[1:]:
            together[0].take(group)
        self._groups = [group for group in self._groups if len(group) and group not in together[1:]]
        self.num_elsewhere = sum(map(len, self._groups))


# --- mlx-lm's samplers and logits processors for one request ----------------------------------------------------------

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: mlx-lm multiplies by the inverse, which must be a finite number."""


greedy: Sampler = make_sampler(0.0)
"""Takes the likeliest token. It is one object, so that batches of mlx-lm's call it once for all their requests."""


class SeededSampler:
    """A sampler with random numbers of its own, so that its tokens do not depend on other requests.

    They are those that mlx-lm takes after ``mx.random.seed(seed)``.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._key: mx.array | None = None  # the state after the last token, which is computed with it

    def __call__(self, logprobs: mx.array) -> mx.array:
        if self._key is None:
            mx.random.seed(self._seed)
        else:
            set_random_key(self._key)
        token = self._sampler(logprobs)
        self._key = random_key()
        evaluate(token, self._key, waits=False)
        return token


def sampler_of(sampling: Sampling, tokenizer: Any, vocab_size: int) -> Sampler:
    """Return what chooses tokens."""
    given = sampling.given("top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold")
    if (temperature := sampling.temperature or 0.0) < LEAST_TEMPERATURE:
        return greedy
    if given.get("top_k", 0) >= vocab_size:  # all of them
        del given["top_k"]
    special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    seed = sampling.drawn_seed if sampling.named_seed is None else sampling.named_seed
    return SeededSampler(make_sampler(temperature, xtc_special_tokens=special, **given), seed)


def processors_of(sampling: Sampling, vocab_size: int) -> list[LogitsProcessor]:
    """Return what changes logits."""
    for token, _ in sampling.logit_bias:  # mlx-lm would write beyond its logits
        if not 0 <= token < vocab_size:
            raise RefusedError(f"logit_bias names token {token}: the model has {vocab_size}.", 400, "logit_bias")
    names = [
        f"{kind}_{field}" for kind in ("repetition", "presence", "frequency") for field in ("penalty", "context_size")
    ]
    processors = make_logits_processors(dict(sampling.logit_bias), **sampling.given(*names))
    return cast(list[LogitsProcessor], processors)
