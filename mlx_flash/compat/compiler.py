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
_NO_FOLDER = re.compile(r"filesystem error: (temp_directory_path|cannot create director)")
"""Reports of C++ that the folder of the kernels cannot be made."""


def kernel_cache() -> Path:
    """Return the folder where MLX keeps compiled kernels for later runs, below C++'s ``temp_directory_path``."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return Path(next(filter(None, named), "/tmp")) / "mlx" / version("mlx") / "cpu"


def explained(error: Exception) -> Exception:
    """Return an error of MLX's compiler as a :class:`CompilerError` with a hint, any other error as it is."""
    if type(error) is not RuntimeError:
        return error
    if _NO_FOLDER.match(str(error)):
        found = CompilerError(
            f"MLX keeps the kernels that it compiles in {kernel_cache()}, and cannot make this folder; {error}. Hint: "
            "set TMPDIR to a folder that exists and can be written."
        )
    elif _FAILED.search(str(error)):
        found = CompilerError(
            "MLX compiles kernels of this model with g++ at their first use, and g++ failed or was killed; "
            f"{error}. Hint: each takes about {COMPILER_MB} MB beside the budget, which a limit on memory must leave "
            "room for, and some room on the disk. Or run the model once without the limit: "
            f"{kernel_cache()} keeps the kernels."
        )
    else:
        return error
    found.__cause__ = error
    return found


def evaluate(*arrays: Any, waits: bool = True) -> None:
    """Evaluate arrays, or begin to. Raise errors of MLX's compiler as :func:`explained`."""
    try:
        (mx.eval if waits else mx.async_eval)(*arrays)
    except RuntimeError as error:
        if (found := explained(error)) is error:
            raise
        raise found from error
