"""Functions of mlx-lm that are known by their code when they call a streamed model or one of its caches."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from mlx_lm import utils
from mlx_lm.models import cache
from mlx_lm.tuner import utils as tuner_utils

from mlx_flash.compat.require import require
from mlx_flash.errors import StreamedWeightsError

_EVALUATE_STATE = ("mlx_lm.generate", "mlx_vlm.generate.ar")
"""The modules in which ``state`` is asked for in order to evaluate it, and for nothing else."""


def _code_of(module: ModuleType, name: str, *parameters: str) -> CodeType:
    code: CodeType = require(require(module, name, *parameters), "__code__")
    return code


_SAVE_MODEL = _code_of(utils, "save_model")
"""Asks for ``parameters()`` in order to write them: refused."""

_LOAD_ADAPTERS = _code_of(tuner_utils, "load_adapters", "model", "adapter_path")
"""Asks for ``parameters()`` to compare their names with an adapter's, gets all of them, and loads tensors into them."""

_MAKE_PROMPT_CACHE = _code_of(cache, "make_prompt_cache", "model", "max_kv_size")
"""Calls ``make_cache()`` without what it was asked for: that is read from its frame."""


def is_save_model(frame: FrameType) -> bool:
    """Return whether a frame is ``mlx_lm.utils.save_model``'s."""
    return frame.f_code is _SAVE_MODEL


def is_load_adapters(frame: FrameType) -> bool:
    """Return whether a frame is ``load_adapters``'s."""
    return frame.f_code is _LOAD_ADAPTERS


def adapter_file(frame: FrameType) -> Path | None:
    """Return the tensors that ``load_adapters`` gives a model; None if the frame is another's."""
    return Path(frame.f_locals["adapter_path"], "adapters.safetensors") if is_load_adapters(frame) else None


def requested_kv_size(frame: FrameType) -> int | None:
    """Return the ``max_kv_size`` that ``make_prompt_cache`` was called with; None if the frame is another's."""
    requested: Any = frame.f_locals["max_kv_size"] if frame.f_code is _MAKE_PROMPT_CACHE else None
    return None if requested is None else int(requested)


def evaluates_only() -> bool:
    """Return whether the caller's caller is one of the loops that evaluate ``state`` and let it go."""
    return sys._getframe(2).f_globals.get("__name__") in _EVALUATE_STATE


def calling_modules() -> Iterator[str]:
    """Yield the modules of the functions on the stack. A module that runs as a program has its name in its spec."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        yield getattr(spec, "name", None) or frame.f_globals.get("__name__", "")
        frame = frame.f_back


def refuse_writers(writers: Container[str]) -> None:
    """Refuse callers that change or write weights."""
    for module in calling_modules():
        if module in writers:
            raise StreamedWeightsError(
                f"{module} needs the model's weights to change or write them; a streamed model has them for moments. "
                "Hint: run it without the patch (remove_flash_patch(), or FlashConfig(enabled=False))."
            )
