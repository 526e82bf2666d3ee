"""Changes of a model since it was loaded: adapters, most of all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_flash.compat.arrays import TRAINING_FLAG, memory_of

MOST_BYTES = 1 << 30
"""Most bytes of arrays outside the checkpoint that are compared. With more, the model counts as unknown."""

_PLAIN = (bool, int, float, str)


class ModelIdentity:
    """The modules and arrays of a model at one moment.

    Args:
        model: mlx-lm's, lazily loaded.
    """

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
    plain = {key: value for key, value in (*vars(module).items(), *module.items()) if isinstance(value, _PLAIN)}
    plain.pop(TRAINING_FLAG, None)
    return (
        type(module).__module__,
        type(module).__qualname__,
        {key: (type(value), value) for key, value in plain.items()},
    )


def _described(model: nn.Module) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Path, class, and plain settings of every module."""
    for path, module in model.named_modules():
        origin, kind, plain = _settings(module)
        settings = sorted((key, repr(value)) for key, (_, value) in plain.items())
        yield path, f"{origin}.{kind}", settings
