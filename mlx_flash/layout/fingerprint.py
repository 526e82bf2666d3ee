"""The fingerprint of everything that decides which parameters mlx-lm computes: checkpoint, configuration, code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_flash.compat.arrays import TRAINING_FLAG, memory_of
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
    """A digest of all that decides what is computed, what the caller replaced in its configuration included."""
    machine = [platform.machine(), str(mx.default_device())]
    parts = [FORMAT, state, loaded.config, versions(), machine, _code_digest(loaded.model)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _code_digest(model: nn.Module) -> str:
    """Return a digest of the file that defines the model's ``sanitize``, which need not be that of a release."""
    sanitize = getattr(type(model), "sanitize", None)
    path = Path(inspect.getsourcefile(sanitize) or "") if sanitize is not None else Path()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


MOST_BYTES = 1 << 30
"""Most bytes of arrays outside the checkpoint that are compared. With more, the model counts as unknown."""

_PLAIN = (bool, int, float, str)


class ModelIdentity:
    """The modules and arrays of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = model.named_modules()
        self._settings = [_settings(module) for _, module in self._modules]
        self._arrays = _arrays(model)

    @property
    def is_unchanged(self) -> bool:
        """Return True if modules and arrays are the same objects still, with the same settings."""
        modules, arrays = self._model.named_modules(), _arrays(self._model)
        return (
            [(path, id(module)) for path, module in modules] == [(path, id(module)) for path, module in self._modules]
            and [_settings(module) for _, module in modules] == self._settings
            and len(arrays) == len(self._arrays)
            and all(self._arrays.get(name) is array for name, array in arrays.items())
        )

    def changes(self) -> str | None:
        """Return a digest of what was changed since, the bytes of new arrays included; empty if nothing was.

        Returns:
            None when more was changed than is compared.
        """
        if self.is_unchanged:
            return ""
        modules, arrays = list(_described(self._model)), _arrays(self._model)
        new = {name: array for name, array in arrays.items() if self._arrays.get(name) is not array}
        # an array of the checkpoint that has another name now counts with its old name
        old = {id(array): name for name, array in self._arrays.items()}
        moved = {name: old[id(array)] for name, array in new.items() if id(array) in old}
        foreign = {name: array for name, array in new.items() if id(array) not in old}
        if sum(array.nbytes for array in foreign.values()) > MOST_BYTES:
            return None
        digest = hashlib.sha256(repr([modules, sorted(moved.items()), sorted(arrays)]).encode())
        for name in sorted(foreign):
            flat = mx.contiguous(foreign[name]).reshape(-1)
            mx.eval(flat)
            digest.update(repr((name, foreign[name].dtype, foreign[name].shape)).encode())
            digest.update(memory_of(flat))
        return digest.hexdigest()[:32]


def _arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _settings(module: nn.Module) -> tuple[str, str, dict[str, tuple[type, object]]]:
    """Return the class of a module, and its plain settings, each with its type: True is not 1."""
    values = (*vars(module).items(), *module.items())
    plain: dict[str, tuple[type, object]] = {k: (type(v), v) for k, v in values if isinstance(v, _PLAIN)}
    plain.pop(TRAINING_FLAG, None)
    return type(module).__module__, type(module).__qualname__, plain


def _described(model: nn.Module) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Path, class, and plain settings of every module."""
    for path, module in model.named_modules():
        origin, kind, plain = _settings(module)
        settings = sorted((key, repr(value)) for key, (_, value) in plain.items())
        yield path, f"{origin}.{kind}", settings
