"""The fingerprint of everything that decides which parameters mlx-lm computes: checkpoint, configuration, code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.errors import FileChangedError
from mlx_flash.layout.load import LoadedModel
from mlx_flash.storage.safetensors import Checkpoint

FORMAT = 1
"""Version of the packed copies. Copies of other versions are not used."""

State = list[list[object]]
"""Files of a checkpoint: path, size, modification time, change time, digest of the header."""


def state_of(checkpoint: Checkpoint) -> State:
    """Return a description of a checkpoint's files as they are now; changed files give another one.

    Raises:
        FileChangedError: one of them is gone.
    """
    try:
        return [_state_of_file(shard.path, shard.data_offset) for shard in checkpoint.shards]
    except OSError as error:
        raise FileChangedError(
            f"{error.filename} was there a moment ago: {error.strerror}. Hint: start it again."
        ) from error


def _state_of_file(path: Path, head_bytes: int) -> list[object]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        head = hashlib.sha256(file.read(head_bytes)).hexdigest()
    # Programs set modification times, some of them all to one value. Only the system sets change times.
    return [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, head]


def versions() -> dict[str, str]:
    """The versions of the programs that compute."""
    return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}


def fingerprint_of(loaded: LoadedModel, state: State) -> str:
    """A digest of all that decides what is computed; a name for files.

    Args:
        loaded: the model; its configuration holds what the caller replaced in it.
        state: of its checkpoint.
    """
    machine = [platform.machine(), str(mx.default_device())]
    parts = [FORMAT, state, loaded.config, versions(), machine, _code_digest(loaded.model)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _code_digest(model: nn.Module) -> str:
    """Return a digest of the file that defines the model's ``sanitize``, which need not be that of a release."""
    sanitize = getattr(type(model), "sanitize", None)
    path = Path(inspect.getsourcefile(sanitize) or "") if sanitize is not None else Path()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
