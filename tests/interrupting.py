"""Interrupts at every instruction of some functions: Ctrl-C as early, and as late, as it can come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class Strike:
    """A trace that counts the instructions of some functions, and raises ``KeyboardInterrupt`` before one of them.

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

    def _watches(self, code: CodeType) -> bool:
        if self._codes is not None:
            return code in self._codes
        return "/mlx_flash/" in code.co_filename

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = self._watches(frame.f_code), False
            return self._trace if frame.f_trace_opcodes else None
        if event == "opcode":
            self.count += 1
            if self.count - 1 == self._at:
                self.where = frame.f_code.co_qualname if sys.version_info >= (3, 11) else "", frame.f_lineno
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> Strike:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


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


def every_interrupt(
    functions: list[Callable[..., Any]], prepare: Callable[[], None], change: Callable[[], None], step: int = 1
) -> Iterator[tuple[str, int]]:
    """Interrupt a change at every instruction of some functions, and yield where, each time after it.

    Args:
        functions: the functions; or methods.
        prepare: makes the change possible again.
        change: what is interrupted.
        step: 1 for all instructions.
    """
    at = 0
    while True:
        prepare()
        with Strike(functions, at) as strike:
            try:
                change()
            except KeyboardInterrupt:
                assert strike.where is not None
        if strike.where is None:
            return
        yield strike.where
        at += step
