"""The C++ compiler that MLX's CPU back end starts when it meets a compiled function for the first time."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_flash.errors import CompilerError

COMPILER_MB = 115
"""Peak of ``g++`` for a kernel of mlx-lm's models. Measured: 112 to 114 MB, 1.2 s."""

_FAILED = re.compile(r"\[Compile::eval_cpu\] Failed to compile|Could not load C\+\+ shared library")


def kernel_cache() -> Path:
    """Return the folder where MLX keeps compiled kernels for later runs, below C++'s ``temp_directory_path``."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return Path(next(filter(None, named), "/tmp")) / "mlx" / version("mlx") / "cpu"


def explained(error: Exception) -> Exception:
    """Return an error of MLX's compiler as a :class:`CompilerError` with a hint, any other error as it is."""
    if type(error) is not RuntimeError or _FAILED.search(str(error)) is None:
        return error
    found = CompilerError(
        f"MLX compiles kernels of this model with g++ at their first use, and g++ failed or was killed; {error}. Hint: "
        f"each takes about {COMPILER_MB} MB beside the budget, which a limit on memory must leave room for. Or run the "
        f"model once without the limit: {kernel_cache()} keeps the kernels."
    )
    found.__cause__ = error
    return found


def evaluate(*arrays: Any, waits: bool) -> None:
    """Evaluate arrays, or begin to. Raise errors of MLX's compiler as :func:`explained`."""
    try:
        (mx.eval if waits else mx.async_eval)(*arrays)
    except RuntimeError as error:
        if (found := explained(error)) is error:
            raise
        raise found from error
