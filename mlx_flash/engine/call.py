"""Calls of the model, the rows that consist of them, lanes: the calls of rows that share a pass, and what a pass needs.

The need is one sum, for the choice of its calls, for the check before it, and for errors.
"""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice, takewhile
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache

from mlx_flash import enginethread
from mlx_flash.compat.caches import entries_of, refuses_single_tokens
from mlx_flash.engine.engine import Lending
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, ConfigError, FlashError
from mlx_flash.kv.growth import Growth, update_growth
from mlx_flash.kv.kvledger import NUM_SLOTS, KVLedger, KVOptions, Way
from mlx_flash.kv.kvpool import Adding, KVPool, OnDisk, PooledCache
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.kv.views import Checkpoints
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint, release_freed_memory
from mlx_flash.ranks import is_elsewhere
from mlx_flash.residency.plan import MB, NewTokens, ResidencyPlan
from mlx_flash.speculation import OwnGuesses

_MAX_FRAMES = 4
_VARIABLES = {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}


class DroppedResult:
    """The result of a call that computed no logits because its caller drops them. Only debuggers see it."""

    def __repr__(self) -> str:
        return "<logits that were not computed, since the caller drops them>"


def result_is_dropped(called: FrameType) -> bool:
    """Return whether a call's result is thrown away, as in the statement ``model(tokens, cache=cache)``.

    mlx-lm's prefill drops the logits. A head that passes through the slots is computed at once, so it has to know. The
    answer is yes only if the instructions of the caller, or of the callers that return the result, show that their call
    is that of the model, and not that of a function in C which calls it (``outputs.extend(map(model, inputs))``).
    ``called`` is the frame of the function that was called.
    """
    for _ in range(_MAX_FRAMES):
        caller = called.f_back
        call = None if caller is None else _call_at(caller.f_code, caller.f_lasti)
        if caller is None or call is None or call.following not in {"POP_TOP", "RETURN_VALUE"}:
            return False
        if _called_code(call, caller) is not called.f_code:
            return False
        if call.following == "POP_TOP":
            return True
        called = caller
    return False


class _Call(NamedTuple):
    """A call in some code: the names that lead to what is called, and the instruction after it."""

    names: Sequence[str]
    is_global: bool
    following: str


@lru_cache(maxsize=256)
def _call_at(code: CodeType, offset: int) -> _Call | None:
    """Return the call at an offset, if it calls a variable, or an attribute of one."""
    instructions = list(dis.get_instructions(code))
    index = next(i for i in reversed(range(len(instructions))) if instructions[i].offset <= offset)
    call, begin = instructions[index], _begin(instructions[index])
    # The variable that is called stands where the call begins in the source, and its arguments come later.
    starts = [i for i, each in enumerate(instructions[:index]) if each.opname in _VARIABLES and _begin(each) == begin]
    if not call.opname.startswith("CALL") or begin is None or not starts:
        return None
    start = instructions[starts[-1]]
    attributes = takewhile(lambda each: each.opname in _ATTRIBUTES, instructions[starts[-1] + 1 : index])
    names = [start.argval, *(each.argval for each in attributes)]
    return _Call(names, start.opname == "LOAD_GLOBAL", instructions[index + 1].opname)


def _begin(instruction: dis.Instruction) -> tuple[int, int] | None:
    """Return the line and column where its expression begins; None if Python was told to keep no columns."""
    at = instruction.positions
    return None if at is None or at.lineno is None or at.col_offset is None else (at.lineno, at.col_offset)


def _called_code(call: _Call, frame: FrameType) -> CodeType | None:
    """Return the code that runs in a call; None if it is not Python's, or not found. Runs no code of others."""
    name, *attributes = call.names
    scopes = [*([] if call.is_global else [frame.f_locals]), frame.f_globals, frame.f_builtins]
    found: Any = next((scope[name] for scope in scopes if name in scope), None)
    for attribute in attributes:
        is_part = isinstance(found, nn.Module) and attribute in found
        found = found[attribute] if is_part else inspect.getattr_static(found, attribute, None)
    if isinstance(found, MethodType | staticmethod | classmethod):
        found = found.__func__
    function = found if isinstance(found, FunctionType) else inspect.getattr_static(type(found), "__call__", None)
    return function.__code__ if isinstance(function, FunctionType) else None


@dataclass(slots=True, eq=False)  # frozen, one takes five times as long to make, for each token
class ForwardCall:
    """The arguments of one call, and what they say about it. It does not change."""

    arguments: tuple[Any, ...]  # as the caller gave them; mlx-lm's models take the tokens first, then the prompt cache
    keywords: Mapping[str, Any]
    num_tokens: int  # new tokens, over all sequences; 1 if the first argument is no array
    tokens: mx.array | None  # the first argument, if it is an array ``(sequences, length)``
    cache: Sequence[Any] | None  # mlx-lm's prompt cache, one entry a layer, if there is one
    is_plain: bool  # tokens and a prompt cache, and nothing else
    wants_logits: bool = True  # False where the caller drops the result
    # of the prompt cache before each part of the call, if the parts are guesses; None if none is
    checkpoints: Checkpoints | None = None
    # tokens of each sequence that come after it in its segment of the prompt, such as a system prompt
    segment_left: int = 0
    # what computes it in place of the whole model: the model without its head, or the head alone; None for the model
    runs: Callable[..., Any] | None = None
    # gets the hidden states of the model's final norm, to guess the tokens that follow
    reader: OwnGuesses | None = None

    @property
    def wants_output(self) -> bool:
        """False where the caller drops what the call returns: it only adds to the prompt cache."""
        return self.wants_logits or self.runs is not None

    @property
    def batch_size(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)

    @property
    def length(self) -> int:
        """New tokens of each sequence."""
        return self.num_tokens // (1 if self.tokens is None else len(self.tokens))  # asked for each token: one call

    def part(self, start: int, stop: int | None = None) -> ForwardCall:
        """Return the same call with some of each sequence's new tokens; it needs ``tokens``."""
        assert self.tokens is not None
        num_later = 0 if stop is None else max(0, self.tokens.shape[1] - stop)
        return self.with_tokens(self.tokens[:, start:stop], num_later)

    def with_tokens(self, tokens: mx.array, num_later: int = 0) -> ForwardCall:
        """Return the same call with other new tokens, ``(sequences, length)``, before so many more of its segment."""
        return ForwardCall(  # dataclasses.replace() would take three times as long, for each part of a prompt
            (tokens, *self.arguments[1:]),
            self.keywords,
            tokens.size,
            tokens,
            self.cache,
            self.is_plain,
            self.wants_logits,
            self.checkpoints,
            self.segment_left + num_later,
            self.runs,
            self.reader,
        )

    def parts(self, step: int) -> list[ForwardCall]:
        """Return calls with at most ``step`` new tokens of each sequence, one after another.

        Windows of padded prompts take no single tokens, so the last part of a call with some may have one more.
        """
        assert self.tokens is not None
        length = self.tokens.shape[1]
        if length <= step:
            return [self]
        starts = [*range(0, length, step)]
        if length % step == 1 and len(starts) > 1 and any(map(refuses_single_tokens, entries_of(self.cache or ()))):
            del starts[-1]
        return [self.part(start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]

    def step_within(self, limit: int) -> int | None:
        """Return how many new tokens of each sequence make at most ``limit``; None where a call is not to be cut.

        Of several sequences it is a power of two: calls of usual lengths are cut at its multiples, one after another.
        """
        if not self.is_plain or self.tokens is None:
            return None
        step = max(1, limit // max(1, self.batch_size))
        if step >= self.length:
            return None
        return step if self.batch_size == 1 else 1 << (step.bit_length() - 1)


def token_call(tokens: mx.array, cache: Sequence[Any], **more: Any) -> ForwardCall:
    """Return the call of a model with tokens, ``(sequences, length)``, and a prompt cache; ``more`` are attributes."""
    return ForwardCall((tokens,), {"cache": cache}, tokens.size, tokens, cache, is_plain=True, **more)


def parse_call(arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, wants_logits: bool = True) -> ForwardCall:
    """Return the call that was made with these arguments."""
    first = arguments[0] if arguments else None
    tokens = first if isinstance(first, mx.array) else None
    is_positional = keywords.get("cache") is None and len(arguments) > 1
    cache = arguments[1] if is_positional else keywords.get("cache")
    cache = cache if isinstance(cache, list | tuple) else None
    has_others = len(arguments) > 1 + is_positional or any(
        value is not None and key != "cache" for key, value in keywords.items()
    )
    is_two_dimensional = tokens is not None and tokens.ndim == 2
    return ForwardCall(
        arguments,
        keywords,
        num_tokens=1 if tokens is None else tokens.size,
        tokens=tokens if is_two_dimensional else None,
        cache=cache,
        is_plain=is_two_dimensional and cache is not None and not has_others,
        wants_logits=wants_logits,
    )


class Lane:
    """The calls of one row that share a pass, which add tokens to one prompt cache. It looks at its entries once.

    ``step`` are the new tokens of each sequence that go through the model at a time; None for all of them. ``num_kept``
    is that of ``NewTokens``.
    """

    def __init__(self, *calls: ForwardCall, step: int | None = None, num_kept: int = 0) -> None:
        first = calls[0]
        cache = first.cache or ()
        self.calls, self.num_kept, self.reader = [*calls], num_kept, first.reader
        self.step = step = step or (first.length if len(calls) > 1 else None)
        self.own = [entry for entry in cache if isinstance(entry, PooledCache)]  # the caches that belong to a pool
        self.others: list[Any] = []  # mlx-lm's own on this machine, without the lists that hold some
        if len(self.own) < len(cache):
            others = [entry for entry in entries_of(cache) if not isinstance(entry, PooledCache)]
            self.others = [entry for entry in others if not is_elsewhere(entry)]
        kinds = {*map(type, self.own), *map(type, self.others)}
        is_fused = not any(issubclass(kind, QuantizedKVCache) for kind in kinds)
        self.lengths = [vars(entry)["disk"].length if entry.is_on_disk else vars(entry)["offset"] for entry in self.own]
        lengths = [*(self.lengths if is_fused else [entry.offset for entry in self.own])]
        lengths += map(_num_attended, self.others)
        num_tokens, batch_size = sum([call.num_tokens for call in calls]), first.batch_size
        self.length = num_tokens // batch_size
        self.tokens = NewTokens(
            num_tokens=num_tokens,
            num_at_once=step * batch_size if step else num_tokens,
            context=max(num_tokens, max(lengths, default=-self.length) + self.length),
            batch_size=batch_size,
            all_logits=first.wants_logits,
            in_parts=bool(step),
            is_fused=is_fused,
            num_kept=num_kept,
            quantized_row=0 if is_fused else max(map(_quantized_row, [*self.own, *self.others])),
        )

    @property
    def pools(self) -> set[KVPool]:
        """The pools of its own caches: one, unless a program made them one by one."""
        return {entry.pool for entry in self.own}


def _quantized_row(entry: Any) -> int:
    """Return the bytes of a token of all sequences in an entry; 0 if it is not quantized, or empty."""
    if not isinstance(entry, QuantizedKVCache):
        return 0
    if isinstance(entry, OnDisk):
        return entry.disk.layout.token_bytes
    return 0 if entry.keys is None else nbytes_in(entry) // int(entry.keys[0].shape[2])


def _num_attended(entry: Any) -> int:
    has_size = hasattr(entry, "size") and not isinstance(entry, QuantizedKVCache)  # whose size is always 0
    return int(entry.size() if has_size else getattr(entry, "offset", 0))  # a model's own caches may have neither


@dataclass(eq=False, slots=True)
class Row:
    """New tokens of one prompt cache: a call, or the parts of a prompt, on their way through the model."""

    whole: ForwardCall  # all of it as one call
    stretches: Sequence[ForwardCall]  # the calls that it consists of, which may be cut at any token
    step: int | None = None  # new tokens of each sequence in a part at most; None for those of a stretch
    # what the prompt cache says, if it is watched between two tokens. The first part makes up for a token.
    owed: Owed | None = None
    num_extra: int = 0  # tokens before those that the caller has given: an owed one
    joins: bool = False  # whether the logits of all parts become one array. Then the one of each part is dropped.
    # called with (tokens done, tokens to do), if given, in the thread that waits for the pass; during a pass if the row
    # is alone in it. What it raises ends the pass, where the cache can be put back.
    report: Progress | None = None
    left: deque[ForwardCall] = field(init=False)  # the parts that are not computed yet
    is_one_part: bool = field(init=False)  # whether it was never cut
    # of the parts whose logits are wanted, or of the only part; or one array with those of all parts
    outputs: list[Any] = field(default_factory=list)
    error: Exception | None = None
    was_sought: bool = False  # whether the prefix cache was asked for the parts that are left
    num_restored: int = 0  # tokens that came from it

    def __post_init__(self) -> None:
        self.left = deque(self.stretches if self.step is None else _cut(self.stretches, self.step))
        self.is_one_part = len(self.left) == 1
        if self.is_one_part:
            self.whole = self.left[0]

    @property
    def is_done(self) -> bool:
        return self.error is not None or not self.left

    def lane(self, num_parts: int = 1) -> Lane:
        calls, num_kept = [*islice(self.left, num_parts)], self.num_joined
        if num_parts > 1 and self.joins:
            num_kept += sum([call.num_tokens for call in calls])
        return Lane(*calls, num_kept=num_kept)

    @property
    def num_joined(self) -> int:
        """Tokens whose logits will be in one array that is not made yet."""
        return 0 if self.is_one_part or self.outputs or not self.joins else self.whole.num_tokens

    @property
    def length(self) -> int:
        """New tokens of each sequence in the next part; 0 if it cannot be cut."""
        first = self.left[0]
        return first.length if first.is_plain else 0

    def skip(self, number: int) -> None:
        """Let go of so many tokens of each sequence that are left: they were restored."""
        self.num_restored += number
        while number and number >= self.length:
            number -= self.length
            self.left.popleft()
        if number:
            self.left[0] = self.left[0].part(number)

    @property
    def num_done(self) -> int:
        """Tokens of each sequence that are computed."""
        return (self._total - self.num_left) // self.whole.batch_size

    @property
    def _total(self) -> int:
        return self.whole.num_tokens - self.num_extra

    def cut(self) -> int:
        """Cut the tokens that are left into parts of half the length. Return the new tokens of each sequence in one."""
        step, length, stretches = self.length, self.length, list[ForwardCall]()
        num_left = sum([part.length for part in self.left])
        for call in reversed(self.stretches):
            if num_left > 0:
                stretches.insert(0, call.part(call.length - num_left) if num_left < call.length else call)
            num_left -= call.length
        while self.length == length and step > 1:  # twice if a single token may not be left over
            step = (step + 1) // 2
            self.left = deque(_cut(stretches, step))
        self.is_one_part = self.was_sought = False
        return step

    def keep(self, number: int) -> None:
        """Keep the first tokens of a row that ends with guesses, and take the others back. Harmless when repeated."""
        enginethread.run(partial(self._keep, number))  # which no interrupt cuts in two

    def _keep(self, number: int) -> None:
        checkpoints = self.whole.checkpoints
        assert checkpoints is not None
        if self.owed is not None:
            self.owed.lift()
            self.owed.debt = None
        checkpoints.take_back(number)
        del self.outputs[number:]

    @property
    def num_left(self) -> int:
        return min(self._total, sum(part.num_tokens for part in self.left))

    def tell(self, more: int, share: float = 1.0) -> None:
        if self.report is not None:
            done = min(self._total, self._total - self.num_left + int(share * more))
            enginethread.tell(partial(self.report, done, self._total))

    def finish(self, calls: Sequence[ForwardCall], outcome: list[Any] | Exception) -> None:
        if isinstance(outcome, Exception):
            self.error = outcome
            return
        for call, output in zip(calls, outcome, strict=True):
            first = self.left.popleft()
            assert first is call
            if self.joins and not self.is_one_part:
                self._join(call, output)
            elif call.wants_output or self.is_one_part:
                self.outputs.append(output)
        if self.owed is not None:
            self.owed.debt, self.owed.found = self.guessed(1), self

    def guessed(self, number: int) -> Debt | None:
        """Return what a prompt cache has too much whose caller knows the first tokens; None if it has no guesses."""
        num_more = len(self.outputs) - number
        is_guessed = self.whole.checkpoints is not None and num_more > 0
        return Debt(-num_more, partial(self.keep, number)) if is_guessed else None

    def _join(self, call: ForwardCall, logits: mx.array) -> None:
        length = self.whole.length
        if not self.outputs:
            self.outputs.append(mx.zeros((len(logits), length, *logits.shape[2:]), logits.dtype))
        end = length - self.num_left // self.whole.batch_size
        self.outputs[0][:, end - call.length : end] = logits
        if self.left:  # the array must not refer to the logits of a part any more
            mx.eval(self.outputs)


def _cut(stretches: Sequence[ForwardCall], step: int) -> list[ForwardCall]:
    return [part for call in stretches for part in call.parts(step)]


_CALLED_WITH = "padding_of_last_call"
"""Attribute of a batch with the array of paddings of its last call. mlx-lm replaces it when sequences come or go."""

_LITTLE_BYTES = 16_000_000
"""Less than what plans set aside for what running adds to a process. Nearly all calls for one token take less."""


@dataclass
class Need:
    """The memory of the process in a pass, in bytes: what there is now, and what the pass adds."""

    plan: ResidencyPlan
    lanes: Sequence[Lane]
    process: int  # the process itself without arrays, and buffers
    in_use: int  # arrays now: weights, keys and values
    activations: int  # intermediate results of the calls that compute, and of those that wait
    waiting: int  # intermediate results of more parts of the same prompts, or of a layer that begins ahead
    growth: int  # what comes to caches of mlx-lm, and to those of a head that guesses
    states: int  # what recurrent states keep of a call
    pool: KVPool | None  # of the caches that the plan knows; None where there are none in the calls
    adding: Adding  # the tokens that come to these
    kv: KVLedger  # the layers of all caches of the pool, with those tokens

    @property
    def total(self) -> int:
        """All of it, but for what comes to caches of the pool."""
        return self.process + self.in_use + self.activations + self.waiting + self.growth + self.states

    @property
    def missing(self) -> int:
        """Bytes that the budget lacks for that; negative where something is left."""
        return self.total - self.plan.budget_bytes

    @property
    def kv_growth(self) -> int:
        """Bytes that come to caches of the pool that stay where they are, as far as the plan lets them grow."""
        kv, limit = self.kv, self.plan.kv.limit
        growth = kv.growth if limit is None else min(kv.growth, max(0, limit - kv.now))
        return max(growth, self.kv_growth_on_disk(NUM_SLOTS)) if kv.is_on_disk else growth

    def kv_growth_on_disk(self, num_slots: int = 1) -> int:
        """Return the same with every layer on disk; it is negative where they take less than now."""
        return 0 if self.pool is None else self.kv.least_with(num_slots) - self.kv.now

    def fits(self, lent: int, *, offloads: bool = False) -> bool:
        """Return whether the pass has room once ``lent`` bytes are given back. If it ``offloads``, layers go to disk.

        Raises: WriteError: keys and values would have to go to disk, which has no room.
        """
        if self.missing - lent + (self.kv_growth_on_disk() if offloads else self.kv_growth) > 0:
            return False
        try:
            return self.kv_way(lent)[1].missing <= 0
        except BudgetError:
            return False

    def begin_ahead(self, lent: int) -> bool:
        """Count that a layer begins before the one before it is computed, if there is room. Return whether there is.

        Not for calls that compute longer than Python takes between two layers: of several tokens, or of several caches.
        Nor where buffers of keys and values grow, since two layers would have old and new ones, nor where a layer waits
        for those on disk.
        """
        new = self.lanes[0].tokens
        if len(self.lanes) > 1 or new.num_tokens > new.batch_size:
            return False
        states = new.batch_size * self.plan.cache.largest_state  # which the call replaces
        if self.kv.is_on_disk or self.growth > states or self.kv_growth:
            return False
        nbytes = self.plan.ledger.of_a_layer(new) + states
        if self.missing + nbytes > lent:
            return False
        self.waiting = nbytes
        return True

    def goes_to_disk(self, lent: int) -> bool:
        """Return whether layers go to disk for the tokens, or stay there."""
        if self.pool is None or self.pool.options.budget_bytes is None:
            return False
        way = self.kv.way(self._kv_limits(lent)[-1])
        return bool(way.num_slots) and not way.missing

    def kv_way(self, lent: int = 0, held: int = 0) -> tuple[int, Way]:
        """Return a limit for the caches of the pool once ``lent`` bytes are given back, and how they stay within it.

        Slots that calls hold while others compute take ``held`` bytes. Raises: BudgetError, WriteError.
        """
        if self.pool is None:
            return 0, Way(self.missing - lent)
        plan = self.plan
        for limit in self._kv_limits(lent, held):
            way = self.pool.way(self.kv, limit)
            if not way.missing:
                break
        if way.missing and plan.kv.is_fixed and limit == plan.kv.limit:
            raise no_room_for_kv(plan, self.lanes, limit + way.missing)
        return limit, way

    def _kv_limits(self, lent: int, held: int = 0) -> list[int]:
        """Return limits for keys and values: the plan's, and then all that is free."""
        kv, free = self.plan.kv, self.kv.now - self.missing + lent - held
        if kv.limit is None:
            return [free]
        return [min(free, kv.limit - held), *(() if kv.is_fixed else (free,))]

    @property
    def slots_held(self) -> int:
        """The bytes of slots that sequences with layers on disk hold while another one computes."""
        if self.pool is None or not self.kv.is_on_disk:
            return 0
        lanes = [lane for lane in self.lanes if lane.own]
        ledger, together = self.plan.ledger, [lane.tokens for lane in lanes]
        if not (held := ledger.slots_held(together)):
            return 0
        if any(lane.step for lane in lanes):
            return held
        # one slot serves all, with room for the longest, and MLX replaces it as a whole
        slots = [*map(ledger.slot_held, together), *[each.nbytes for each in self.pool.ring.slots]]
        return max(slots) * (len(together) - 1)


_NO_LAYERS = KVLedger(KVOptions(copies_slots=False), ())


def need(plan: ResidencyPlan, lanes: Sequence[Lane], waiting: int = 0) -> Need:
    """Return what a pass needs; ``waiting`` are bytes of parts of prompts that wait in it."""
    found = _need(plan, lanes, waiting)
    if found.missing > 0:  # a prompt may still be computed, and GPUs let go of the last results late
        mx.synchronize()
        found = _need(plan, lanes, waiting)
    return found


def _need(plan: ResidencyPlan, lanes: Sequence[Lane], waiting: int) -> Need:
    new, ledger, pools = [lane.tokens for lane in lanes], plan.ledger, {pool for lane in lanes for pool in lane.pools}
    if len(pools) > 1:
        raise ConfigError(
            f"the layers of a prompt cache are of {len(pools)} models, or were made with as many different settings, "
            "so that their memory is not counted together. Hint: take all layers from one make_prompt_cache(model)."
        )
    pool, adding, kv, in_use = next(iter(pools), None), _adding(plan, lanes), _NO_LAYERS, active_memory()
    if pool is not None:  # caches count with what they take instead of what they reserve
        kv = pool.ledger(adding)
        in_use = max(0, in_use - kv.active) + kv.now
    return Need(
        plan,
        lanes,
        process=plan.process_bytes,
        in_use=in_use,
        activations=ledger.computed(new),
        waiting=waiting,
        growth=_growth_of_others(plan, lanes) + sum([each.reader.missing_bytes for each in lanes if each.reader]),
        states=ledger.states(max([each.num_at_once for each in new])),
        pool=pool,
        adding=adding,
        kv=kv,
    )


def _adding(plan: ResidencyPlan, lanes: Sequence[Lane]) -> Adding:
    """Return the tokens that calls add to caches of the pool."""
    step, tokens = 0, dict[PooledCache, tuple[int, int]]()
    for lane in lanes:
        if lane.own:
            rows, new = plan.cache.rows, lane.tokens
            step, num_new = max(step, new.num_at_once // new.batch_size), new.num_tokens // new.batch_size
            known = rows if len(rows) == len(lane.own) else [max(rows, default=0)] * len(lane.own)
            for entry, nbytes in zip(lane.own, known, strict=True):
                tokens[entry] = num_new, new.batch_size * nbytes
    return Adding(tokens, step)


def make_room(need: Need, lending: Lending | None = None, *, may_shrink: bool = False, offloads: bool = False) -> Need:
    """Refuse a pass that would take the process over its budget; only loans have changed when it raises.

    Loans end as far as the pass needs their memory. What it does not need is lent. If it ``may_shrink``, nothing goes
    to disk to make room for more activations than were planned: the caller tries fewer tokens. If it ``offloads``,
    layers go to disk before loans end for their sake. Return what it needs, as it was counted last.

    Raises: BudgetError, which names what to change; WriteError, where the disk has no room for keys and values.
    """
    plan, lanes = need.plan, need.lanes
    changed = _changed_batches([entry for lane in lanes for entry in lane.others])
    if changed:
        nbytes = nbytes_in(changed)
        if (lending is None or not lending.nbytes) and need.missing + nbytes <= 0:
            need.growth += nbytes  # the call may evaluate all of them
        else:
            _evaluate_layers(changed, nbytes, lending)
            need = _need(plan, lanes, need.waiting)
    growth = need.kv_growth_on_disk() if offloads else need.kv_growth  # one slot will do for a prompt
    if lending is not None:
        need.in_use -= _settle(need, lending, growth)
    if may_shrink and need.activations > plan.activation_bytes and need.missing + growth > 0:
        raise too_large(need, need.missing + growth)
    missing = _make_room_for_kv(need)
    if missing > 0:
        raise too_large(need, missing)
    for entry in changed:
        setattr(entry, _CALLED_WITH, entry.left_padding)
    return need


def admit_in_memory(need: Need) -> bool:
    """Let a pass begin for which nothing has to leave memory, or be evaluated first. Return whether it may."""
    if need.kv.is_on_disk or _changed_batches([entry for lane in need.lanes for entry in lane.others]):
        return False
    try:
        limit, way = need.kv_way()
    except FlashError:
        return False  # a pass is tried next, and raises the error
    if way.missing > 0 or way.num_slots:
        return False
    return need.pool is None or need.pool.admit(need.adding, limit, way) == 0


def _make_room_for_kv(need: Need) -> int:
    """Offload layers of the pool for the pass. Return the bytes that are missing even then."""
    if (pool := need.pool) is None:
        return need.missing
    while True:
        held = need.slots_held
        limit, way = need.kv_way(held=held)
        if not way.missing:
            pool.admit(need.adding, limit, way)
        if way.missing or held or not way.num_slots:  # with each layer where it is
            return way.missing
        need.kv = pool.ledger(need.adding)  # layers have moved
        if not need.slots_held:
            return 0


def check_least(plan: ResidencyPlan, lane: Lane, lending: Lending | None = None) -> None:
    """Refuse a call that does not fit even token by token, with no weights lent. Changes nothing."""
    least = need(plan, [Lane(*lane.calls, step=1, num_kept=lane.num_kept)])
    way = least.kv_way(0 if lending is None else lending.recallable)[1]
    if way.missing > 0:
        raise too_large(least, way.missing)


def layers_at_once(need: Need, num_layers: int, num_calls: int = 1) -> int | None:
    """Return the number of layers that MLX may record ahead of a GPU; None if their results fit the budget together.

    MLX keeps the intermediate results of recorded layers until they are computed, and the old arrays of caches that
    grow. Checks before a pass count one layer. Calls wait for each other, so with several each layer is waited for.
    """
    if num_layers < 2:
        return None
    if num_calls > 1:
        return 1
    lane, plan = need.lanes[0], need.plan
    replaced = max(map(nbytes_in, lane.others), default=0) if need.growth else 0
    each = plan.ledger.of_a_layer(lane.tokens) + max(need.kv.replaced, replaced)
    if (num_layers - 1) * each <= _LITTLE_BYTES:
        return None
    found = 1 + max(0, -need.missing - need.kv_growth) // each
    return None if found >= num_layers else found


def _growth_of_others(plan: ResidencyPlan, lanes: Sequence[Lane]) -> int:
    """Return the most bytes that calls add to mlx-lm's own caches, which copy one layer after another as they grow."""
    states, growths = 0, [Growth(0, 0)]
    for lane in lanes:
        new, entries = lane.tokens, lane.others
        if entries:
            states += 0 if any(map(arrays_in, entries)) else new.batch_size * plan.cache.constant_bytes
            token_bytes = plan.kv_bytes_per_token - (sum(plan.cache.rows) if lane.own else 0)
            per_layer = new.batch_size * token_bytes // len(entries)
            growths.append(update_growth(entries, lane.length, per_layer, lane.step))
    if len(growths) == 1:  # no lane has such caches
        return 0
    return states + sum([each.added for each in growths]) + max([each.peak - each.added for each in growths])


def _settle(need: Need, lending: Lending, growth: int) -> int:
    """End loans where memory is short, and lend what is left over. Return the bytes that were freed.

    What the process has beyond the footprint as plan and arrays explain it, such as holes between arrays, is not lent.
    """
    short, known_bytes = need.missing + growth, need.process + need.in_use
    unknown = max(0, footprint() - known_bytes)
    if short + unknown > 0:
        release_freed_memory()
        unknown = max(0, footprint() - known_bytes)
    short += unknown
    if short > 0:
        return lending.recall(short)
    lending.lend(-short - need.plan.unlent_bytes)
    return 0


def _changed_batches(entries: Sequence[Any]) -> list[Any]:
    """Return the batches that sequences were added to or removed from since their last call."""
    return [entry for entry in entries if vars(entry).get("left_padding") is not vars(entry).get(_CALLED_WITH)]


def _evaluate_layers(batches: Sequence[Any], nbytes: int, lending: Lending | None) -> None:
    """Evaluate the layers of batches one after another.

    When sequences come or go, mlx-lm replaces the arrays of all layers at once, but lazily. Evaluated together, they
    would be there twice.
    """
    if lending is not None:
        lending.recall(min(nbytes, lending.nbytes))
    for entry in batches:
        mx.eval(arrays_in(entry))


def too_large(need: Need, missing: int) -> BudgetError:
    """Return the error for a pass that takes so many bytes more than the budget."""
    plan, lanes = need.plan, need.lanes
    num_tokens, context = _sizes(lanes)
    total = plan.budget_bytes + missing
    kv = total - need.process - need.in_use - need.activations
    all_logits = any(x.tokens.all_logits and x.length > 1 for x in lanes)
    hint = _hint(plan, max(x.tokens.num_at_once for x in lanes), context, all_logits)
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} would take "
        f"the process to {total / MB:.1f} MB: {need.process / MB:.0f} MB for the process itself, "
        f"{need.in_use / MB:.0f} MB in arrays now, {need.activations / MB:.0f} MB of activations, {kv / MB:.0f} MB of "
        f"KV cache; the budget is {plan.budget_bytes / MB:.1f} MB. {hint}",
        total,
    )


def no_room_for_kv(plan: ResidencyPlan, lanes: Sequence[Lane], needed: int) -> BudgetError:
    """Return the error for a call that fits the budget, but not the share of it that the user gave the KV cache."""
    (num_tokens, context), limit = _sizes(lanes), plan.kv.limit or 0
    return BudgetError(
        f"a forward call with {num_tokens} new token{'s' * (num_tokens != 1)} in a context of {context} needs "
        f"{needed / MB:.1f} MB for its keys and values; kv_ram_gb "
        f"allows {limit / MB:.1f} MB. "
        f"Hint: raise kv_ram_gb to at least {-(-needed // 1000) / 1e6:.6f}, to more for a longer context.",
        plan.budget_bytes + needed - limit,
    )


def _sizes(lanes: Sequence[Lane]) -> tuple[int, int]:
    """Return the new tokens of all calls, and the longest context."""
    return sum(lane.tokens.num_tokens for lane in lanes), max(lane.tokens.context for lane in lanes)


def _hint(plan: ResidencyPlan, num_tokens: int, context: int, all_logits: bool) -> str:
    if num_tokens > plan.prefill_step_size:
        return f"Hint: pass prefill_step_size={plan.prefill_step_size} to mlx_lm, or raise ram_budget_gb."
    if context > plan.context_length:
        return f"Hint: load the model with FlashConfig(context_length={2 * context}), or raise ram_budget_gb."
    if all_logits:
        return (
            "Hint: ask for the logits of fewer tokens at a time; for several sequences at once load the model with a "
            "larger context_length, which counts tokens over all of them; or raise ram_budget_gb."
        )
    return (
        "Hint: raise ram_budget_gb; let go of other arrays and models in this process; for several sequences at once "
        "ask for a larger context_length, which counts tokens over all of them."
    )
