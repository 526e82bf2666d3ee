"""The question whether anybody will look at what a call returns.

mlx-lm's prefill calls the model for what that does to the prompt cache and drops the logits, which MLX, being lazy,
then never computes. A head that passes through the slots is computed at once, so it has to know.

The answer is yes only if it is certain: the caller's instructions show that its call is that of the model, and not that
of a function in C which calls the model (``outputs.extend(map(model, inputs))``).
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import mlx.nn as nn

_MAX_FRAMES = 4
_MISSING = object()
_VARIABLES = {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"} | _JUMPS
"""Instructions that the next one does not follow."""


class DroppedResult:
    """The result of a call that computed no logits because its caller drops them. Only debuggers see it."""

    def __repr__(self) -> str:
        return "<logits that were not computed, since the caller drops them>"


def result_is_dropped(called: FrameType) -> bool:
    """Return whether a call's result is thrown away, as in the statement ``model(tokens, cache=cache)``.

    Args:
        called: the frame of the function that was called. A caller that returns the result is followed to its own
            caller.
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
    heights = _heights(instructions)
    height = heights[index]
    if not instructions[index].opname.startswith("CALL") or height is None:
        return None
    # The callee lies in the place of the result: its first instruction ran when the stack was last that low.
    lowest = height + _effect(instructions[index]) - 1
    start = next((i for i in reversed(range(index)) if heights[i] == lowest), index)
    start += instructions[start].opname == "PUSH_NULL"
    if instructions[start].opname not in _VARIABLES:
        return None
    names = [instructions[start].argval]
    for instruction in instructions[start + 1 : index]:
        if instruction.opname not in _ATTRIBUTES:
            break
        names.append(instruction.argval)
    return _Call(names, instructions[start].opname == "LOAD_GLOBAL", instructions[index + 1].opname)


def _heights(instructions: Sequence[dis.Instruction]) -> list[int | None]:
    """Return the height of the stack before each instruction; None where only an exception leads."""
    targets: dict[int, int] = {}
    heights: list[int | None] = []
    height: int | None = 0
    for instruction in instructions:
        height = targets.get(instruction.offset, height)
        heights.append(height)
        if height is None:
            continue
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            targets.setdefault(instruction.argval, height + _effect(instruction, jump=True))
        height = None if instruction.opname in _ENDS else height + _effect(instruction)
    return heights


def _effect(instruction: dis.Instruction, *, jump: bool = False) -> int:
    return dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)


def _find(call: _Call, frame: FrameType) -> object:
    """Return what a call in a frame calls; runs no code of others."""
    name, *attributes = call.names
    scopes = [frame.f_globals, frame.f_builtins] if call.is_global else _scopes(frame)
    found = next((scope[name] for scope in scopes if name in scope), _MISSING)
    for attribute in attributes:
        if isinstance(found, nn.Module) and attribute in found:
            found = found[attribute]
        else:
            found = inspect.getattr_static(found, attribute, _MISSING)
    return found


def _scopes(frame: FrameType) -> Iterator[dict[str, Any]]:
    yield frame.f_locals
    yield frame.f_globals
    yield frame.f_builtins


def _code_of(function: object) -> CodeType | None:
    """Return the code that runs when an object is called; None if it is not Python's, or not found."""
    if isinstance(function, MethodType | staticmethod | classmethod):
        function = function.__func__
    elif not isinstance(function, FunctionType):
        function = inspect.getattr_static(type(function), "__call__", None)
    return function.__code__ if isinstance(function, FunctionType) else None
