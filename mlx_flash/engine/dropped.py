"""Whether anybody will look at what a call returns.

mlx-lm's prefill calls the model for what that does to the prompt cache and drops the logits, which MLX, being lazy,
then never computes. A head that passes through the slots is computed at once, so it has to know.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType
from typing import NoReturn

from mlx_flash.errors import FlashError

_MAX_FRAMES = 4


def result_is_dropped(frame: FrameType | None) -> bool:
    """Whether a call's result is thrown away, as in the statement ``model(tokens, cache=cache)``.

    Args:
        frame: the caller's, at the call. One that returns the result is followed to its own caller. A caller in C, such
            as ``map``, cannot be seen: a statement like ``outputs.extend(map(model, inputs))`` counts as one that drops
            the result, so what is returned then has to be right all the same.
    """
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        following = _following(frame.f_code, frame.f_lasti)
        if following == "POP_TOP":
            return True
        if following != "RETURN_VALUE":
            return False
        frame = frame.f_back
    return False


@lru_cache(maxsize=256)
def _following(code: CodeType, offset: int) -> str:
    """The name of the instruction after the one at an offset, or with its cache there, if that is a call."""
    previous = ""
    for instruction in dis.get_instructions(code):
        if instruction.offset > offset:
            return instruction.opname if previous.startswith("CALL") else ""
        previous = instruction.opname
    return ""


class DroppedResult:
    """What a call returns that computed no logits because nobody was going to look at them. Any look is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __bool__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FlashError(
            "the logits of this call were not computed: the cache was filled from the prefix cache, and the calling "
            "code seemed to drop the result. Hint: FlashConfig(kv_prefixes='off')."
        )
