"""Interrupts like Ctrl-C at chosen points of the code.

CPython raises what a signal handler raises after a call, at the beginning of a function, and at the end of a loop's
round. A point is one of these, or the place behind an instruction that changes an object. A trace can only raise before
the next instruction. Where that has other handlers it is left out, such as the way from the last call of a ``with``
block to ``__exit__``: CPython finds the handlers of the call. So is the way from ``__enter__`` into the block. Python
3.14 (up to 3.14.10 at least) is at fault there: an interrupt right behind a lock's ``__enter__`` leaves it held.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx_flash

PACKAGE = Path(mlx_flash.__file__).parent

_BEFORE_POINT = ("CALL", "RESUME", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR", "DELETE_ATTR")
_BACK = ("JUMP_BACKWARD", "POP_JUMP_BACKWARD")
_NO_POINT = ("CALL_INTRINSIC", "JUMP_BACKWARD_NO_INTERRUPT")

Trace = Callable[[FrameType, str, Any], Any]


class Interrupt(KeyboardInterrupt):
    """An interrupt that a test raises."""


class Tracer:
    """Counts the points that this thread passes in some folders or modules, and raises at one of them, from 0 on."""

    def __init__(self, number: int | None, folders: Sequence[str] = ("",)) -> None:
        self.count = 0  # points passed
        self.where: str | None = None  # function and line that was interrupted
        self._number = number
        self._paths = tuple(str(PACKAGE / folder) for folder in folders)
        self._steps: dict[int, tuple[CodeType, Trace | None]] = {}  # by address of the code

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace this thread while a block runs."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks here for what it has to trace
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def strike(self, operation: Operation) -> bool:
        """Trace an operation. Return whether it was interrupted."""
        try:
            with self.tracing():
                operation()
        except Interrupt:
            return True
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        key = id(frame.f_code)
        if key not in self._steps:
            is_inside = frame.f_code.co_filename.startswith(self._paths)
            self._steps[key] = frame.f_code, self._step_of(frame.f_code) if is_inside else None
        step = self._steps[key][1]
        if step is not None:
            frame.f_trace = step  # before the next line: Python 3.13 looks for it there
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def _step_of(self, code: CodeType) -> Trace:
        """Return what is called before each instruction of a function. To find its points by code would take longer."""
        points = _points(code)

        def step(frame: FrameType, event: str, argument: Any) -> Trace:
            if event == "opcode" and frame.f_lasti in points:
                self.count += 1
                if self.count - 1 == self._number:
                    self.where = f"{code.co_qualname}:{frame.f_lineno}"
                    raise Interrupt(self.where)
            return step

        return step


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)

    instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    following = dict(pairwise(each.offset for each in instructions))
    ways = [
        (each.offset, each.argval if each.opname.startswith(_BACK) else following[each.offset])
        for each in instructions
        if each.opname.startswith(_BEFORE_POINT + _BACK) and not each.opname.startswith(_NO_POINT)
    ]
    return frozenset(here for previous, here in ways if handler(previous) == handler(here))


Operation = Callable[[], object]
Program = Callable[[Callable[[Operation], bool]], None]
"""Calls what it is given with each operation that may be interrupted, and learns whether it was."""


def total_points(program: Program, folders: Sequence[str]) -> int:
    """Run a program without an interrupt. Return the points that its operations pass."""
    tracer = Tracer(None, folders)
    program(tracer.strike)
    return tracer.count


def interrupted_in(program: Program, number: int, folders: Sequence[str]) -> str | None:
    """Run a program, one of whose operations is interrupted at a point. Return where; None if none came there.

    An interrupt in a finalizer ends only that, as Python has it.
    """
    tracer, hook = Tracer(number, folders), sys.unraisablehook
    sys.unraisablehook = lambda event: None if isinstance(event.exc_value, Interrupt) else hook(event)
    try:
        program(tracer.strike)
    except BaseException:
        print(f"interrupted at point {number}, {tracer.where}")
        raise
    finally:
        sys.unraisablehook = hook
    return tracer.where
