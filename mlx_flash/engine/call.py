"""Calls of the model, the rows that consist of them, and lanes: the calls of rows that share a pass."""

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
from mlx_flash.enginethread import Progress
from mlx_flash.kv.kvpool import KVPool, OnDisk, PooledCache
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.kv.views import Checkpoints
from mlx_flash.layout.reachable import nbytes_in
from mlx_flash.ranks import is_elsewhere
from mlx_flash.residency.plan import NewTokens
from mlx_flash.speculation import OwnGuesses

_MAX_FRAMES = 4
_MISSING = object()
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
        if _code_of(_find(call, caller)) is not called.f_code:
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


def _find(call: _Call, frame: FrameType) -> object:
    """Return what a call in a frame calls; runs no code of others."""
    name, *attributes = call.names
    scopes = [*([] if call.is_global else [frame.f_locals]), frame.f_globals, frame.f_builtins]
    found = next((scope[name] for scope in scopes if name in scope), _MISSING)
    for attribute in attributes:
        if isinstance(found, nn.Module) and attribute in found:
            found = found[attribute]
        else:
            found = inspect.getattr_static(found, attribute, _MISSING)
    return found


def _code_of(function: object) -> CodeType | None:
    """Return the code that runs when an object is called; None if it is not Python's, or not found."""
    if isinstance(function, MethodType | staticmethod | classmethod):
        function = function.__func__
    elif not isinstance(function, FunctionType):
        function = inspect.getattr_static(type(function), "__call__", None)
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


def token_call(tokens: mx.array, cache: Sequence[Any], *, wants_logits: bool = True) -> ForwardCall:
    """Return the call of a model with tokens, ``(sequences, length)``, and a prompt cache."""
    return ForwardCall(
        (tokens,), {"cache": cache}, tokens.size, tokens, cache, is_plain=True, wants_logits=wants_logits
    )


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
