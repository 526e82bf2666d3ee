"""Interrupts at every instruction of some functions: Ctrl-C as early, and as late, as it can come."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash import CacheError, FlashLLM, enginethread, generate_step
from models import computed, guessed, run, same_bits

Trace = Callable[[FrameType, str, object], Any]


class Strike:
    """A trace that counts the instructions of some functions, and raises ``KeyboardInterrupt`` before one of them.

    Around ``with``, where Python looks for no signals, it does not: a lock would stay locked.

    Args:
        functions: the functions, or methods; None for every function of ``mlx_flash``.
        at: number of the instruction; None for none.

    Attributes:
        count: instructions up to now.
        where: function and line of the interrupt; None before it.
    """

    def __init__(self, functions: list[Callable[..., Any]] | None, at: int | None) -> None:
        self.count = 0
        self.where: tuple[str, int] | None = None
        self._codes: set[CodeType] | None = None
        if functions is not None:
            self._codes = {code for function in functions for code in _codes(_code_of(function))}
        self._at = at
        self._steps: dict[int, tuple[CodeType, Trace | None]] = {}  # by address of the code

    def _watches(self, code: CodeType) -> bool:
        if self._codes is not None:
            return code in self._codes
        return "/mlx_flash/" in code.co_filename

    def _trace(self, frame: FrameType, event: str, _: object) -> Trace | None:
        """Trace a function that is called, if it is watched."""
        key = id(frame.f_code)
        if key not in self._steps:
            self._steps[key] = frame.f_code, self._step_of(frame.f_code) if self._watches(frame.f_code) else None
        step = self._steps[key][1]
        frame.f_trace_opcodes, frame.f_trace_lines = step is not None, False
        return step

    def _step_of(self, code: CodeType) -> Trace:
        """Return what is called before each instruction of a function. To find things by code would take longer."""
        left_out = _around_with(code)

        def step(frame: FrameType, event: str, _: object) -> Trace:
            if event == "opcode" and frame.f_lasti not in left_out:
                self.count += 1
                if self.count - 1 == self._at:
                    self.where = code.co_qualname, frame.f_lineno
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return step

        return step

    def run(self, change: Callable[[], Any]) -> bool:
        """Run a change. Return whether it was interrupted."""
        with self:
            try:
                change()
            except KeyboardInterrupt:
                assert self.where is not None
        return self.where is not None

    def __enter__(self) -> Strike:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


@cache
def _around_with(code: CodeType) -> frozenset[int]:
    """Return the offsets of instructions between a ``with`` block and its ``__enter__`` or ``__exit__``."""
    found, instructions = set[int](), list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.opname == "BEFORE_WITH":
            found.add(instructions[i + 1].offset)
        if instruction.opname == "WITH_EXCEPT_START":
            found |= {each.offset for each in instructions[i - 1 : i + 1]}
        nones = instructions[i : i + 3]
        if [each.opname for each in nones] == ["LOAD_CONST"] * 3 and all(each.argval is None for each in nones):
            start = next(j for j in range(i, -1, -1) if instructions[j - 1].opname not in _BEFORE_EXIT)
            end = next(j for j in range(i + 3, len(instructions)) if instructions[j].opname.startswith("CALL"))
            found |= {each.offset for each in instructions[start : end + 1]}
    return frozenset(found)


_BEFORE_EXIT = ("NOP", "POP_TOP", "SWAP")
"""Instructions after the end of a block, before the call of ``__exit__``: they put a returned value aside."""


def _code_of(function: Any) -> CodeType:
    function = getattr(function, "fget", function)
    code: CodeType = getattr(function, "__wrapped__", function).__code__
    return code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


PROMPT = [5, 17, 290, 3, 42, 64]
STEP = 2
LAST = 9


class Victim:
    """A streamed model whose changes are interrupted, and what mlx-lm's own model computes.

    Args:
        model: the streamed model.
        plain: mlx-lm's, with the same weights.
    """

    def __init__(self, model: FlashLLM, plain: Any) -> None:
        self.model = model
        self._plain = plain
        self._known: dict[tuple[tuple[int, ...], ...], mx.array] = {}
        self.caches: list[list[Any]] = []

    def expected(self, chunks: Sequence[Sequence[int]]) -> mx.array:
        """Return mlx-lm's logits of the last chunk."""
        key = tuple(map(tuple, chunks))
        if key not in self._known:
            self._known[key] = run(self._plain, chunks)[-1]
        return self._known[key]

    def is_right(self) -> bool:
        """Return whether a fresh prompt cache gives mlx-lm's logits."""
        return same_bits(run(self.model, [PROMPT[:STEP], [LAST]])[-1:], [self.expected([PROMPT[:STEP], [LAST]])])

    def goes_on(self, cache: list[Any], chunks: Sequence[Sequence[int]]) -> str:
        """Return how an interrupted cache goes on: ``right`` after some of the chunks, ``refused`` or ``wrong``."""
        try:
            found = self.model(mx.array([[LAST]]), cache=cache)
            mx.eval(found)
        except CacheError:
            return "refused"
        for count in range(len(chunks) + 1):
            if same_bits([found], [self.expected([*chunks[:count], [LAST]])]):
                return "right"
        return "wrong"

    def filled(self) -> list[Any]:
        """Return a prompt cache with the prompt in it."""
        cache = make_prompt_cache(self.model)
        for start in range(0, len(PROMPT), STEP):
            mx.eval(self.model(mx.array([PROMPT[start : start + STEP]]), cache=cache))
        return cache


CHUNKS = [PROMPT[start : start + STEP] for start in range(0, len(PROMPT), STEP)]


def decode(victim: Victim) -> tuple[list[Any], list[list[int]], Callable[[], Any]]:
    """A pass of one token."""
    cache = victim.filled()
    return [cache], [*CHUNKS, [7]], lambda: victim.model(mx.array([[7]]), cache=cache)


def prompt(victim: Victim) -> tuple[list[Any], list[list[int]], Callable[[], Any]]:
    """A prompt whose parts share a pass."""
    cache = make_prompt_cache(victim.model)
    tokens = mx.array([[*PROMPT, 7]])
    return [cache], [*CHUNKS, [7]], lambda: computed(victim.model, tokens, cache, STEP)


def guesses(victim: Victim) -> tuple[list[Any], list[list[int]], Callable[[], Any]]:
    """A token and two guesses, one of which is kept."""
    cache = victim.filled()
    return [cache], [*CHUNKS, [7], [8], [8]], lambda: guessed(victim.model, [7, 8, 8], cache).keep(2)


def sharing(victim: Victim) -> tuple[list[Any], list[list[int]], Callable[[], Any]]:
    """Two sequences that share a pass."""
    caches = [victim.filled(), victim.filled()]
    rows = [victim.model.row(mx.array([[7]]), cache, STEP) for cache in caches]
    return caches, [*CHUNKS, [7]], lambda: victim.model.advance(rows)


def lending(victim: Victim) -> tuple[list[Any], list[list[int]], Callable[[], Any]]:
    """Memory that is lent and recalled around a pass."""
    cache = victim.filled()
    assert victim.model.engine is not None
    lent = victim.model.engine.lending

    def change() -> None:
        enginethread.run(lambda: lent.lend(400_000))
        victim.model(mx.array([[7]]), cache=cache)
        enginethread.run(lambda: lent.recall(200_000))
        enginethread.run(lambda: lent.recall(400_000))

    return [cache], [*CHUNKS, [7]], change


CHANGES = {change.__name__: change for change in (decode, prompt, guesses, sharing, lending)}


def outcomes(victim: Victim, change: str, strike: Callable[[Callable[[], Any]], bool]) -> list[str]:
    """Interrupt a change, and return what it has left: of the model, and of each prompt cache.

    Args:
        victim: the model.
        change: name of the change.
        strike: runs it and interrupts it; returns False if no interrupt came.
    """
    caches, chunks, run_it = CHANGES[change](victim)
    if not strike(run_it):
        return []
    fresh = "right" if victim.is_right() else "wrong model"
    return [fresh, *(victim.goes_on(cache, chunks) for cache in caches)]


def generation(victim: Victim) -> tuple[list[Any], list[list[int]], Callable[[], Any]]:
    """A text of three tokens, with a prompt cache of the caller's."""
    before = [*CHUNKS[:-1], *([token] for token in CHUNKS[-1])]  # mlx-lm computes the last token of a prompt alone
    text: list[int] = []
    while len(text) < 3:
        logits = victim.expected([*before, *([token] for token in text)])
        text.append(int(logits[0, -1].argmax().item()))
    cache = make_prompt_cache(victim.model)
    for chunk in CHUNKS[:-1]:
        mx.eval(victim.model(mx.array([chunk]), cache=cache))

    def change() -> None:
        steps = generate_step(mx.array(CHUNKS[-1]), victim.model, prompt_cache=cache, max_tokens=-1)
        try:
            for expected, (token, _) in zip(text, steps, strict=False):  # which takes no token beyond the text
                assert token == expected
        finally:
            steps.close()  # type: ignore[attr-defined]

    return [cache], [*before, *([token] for token in text)], change


CHANGES["generation"] = generation
