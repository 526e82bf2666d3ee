"""What mlx-lm asks a cache for, seen by who asks."""

from __future__ import annotations

import sys
from types import FrameType

from mlx_lm.generate import speculative_generate_step

_EVALUATES_ONLY = "mlx_lm.generate"
"""The module of mlx-lm in which ``state`` is asked for in order to evaluate it, and for nothing else."""


def evaluates_only() -> bool:
    """Whether the caller's caller is one of mlx-lm's loops, which evaluate ``state`` and let it go."""
    return sys._getframe(2).f_globals.get("__name__") == _EVALUATES_ONLY


def is_for_a_draft() -> bool:
    """Whether the question comes from the beginning of mlx-lm's speculative decoding, a few calls up."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):  # over a list of caches, in a function of its own
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code is speculative_generate_step.__code__:
            return True
    return False
