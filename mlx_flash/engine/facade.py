"""Methods of ``nn.Module`` on a streamed model; those that would see slot contents are refused, and forked children."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast

import mlx.nn as nn

from mlx_flash.compat.arrays import TRAINING_FLAG
from mlx_flash.compat.callers import is_load_adapters, is_save_model
from mlx_flash.engine.engine import Engine
from mlx_flash.errors import ClosedError, StreamedWeightsError
from mlx_flash.layout.load import ModelLayout


def check_not_forked(pid: int) -> None:
    """Check that this is the process that loaded a model.

    Raises:
        ClosedError: it is a forked child.
    """
    if os.getpid() != pid:
        raise ClosedError(
            f"the model was loaded in process {pid}; its fork {os.getpid()} has no threads that read. Hint: load the "
            "model after the fork, or use the spawn method of multiprocessing."
        )


class ModelFacade(nn.Module):
    """Answers to every attribute of mlx-lm's model, with a module tree of its own that is empty.

    Args:
        model: mlx-lm's.
        layout: its units.

    Attributes:
        layout: the model's units.
        engine: None before streaming begins.
    """

    engine: Engine | None

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        nn.Module.__init__(self)
        delattr(self, TRAINING_FLAG)  # the model's own counts
        # nn.Module would put the model into the module tree if it were set as usual.
        object.__setattr__(self, "_model", model)
        self.layout = layout
        self.engine = None

    def __getattr__(self, key: str) -> Any:
        if key == "_model":  # not there yet: being made by copy or pickle
            raise AttributeError(key)
        return getattr(self._model, key)

    def parameters(self) -> dict[str, Any]:
        """The parameters that are in memory all the time, as a tree.

        While adapters are applied, all of them, lazily loaded.

        Raises:
            StreamedWeightsError: mlx-lm asks in order to save them.
        """
        caller = sys._getframe(1)
        if is_save_model(caller):
            raise _refusal("mlx_lm.utils.save_model()")
        if is_load_adapters(caller) and self.engine is None:
            return cast(dict[str, Any], self._model.parameters())
        elsewhere = {(id(p.container), p.key) for unit in self.layout.units for p in unit.large}
        engine = self.engine

        def in_memory(module: nn.Module, key: str, value: Any) -> bool:
            is_streamed = (id(module), key) in elsewhere if engine is None else engine.is_streamed(module, key)
            return nn.Module.valid_parameter_filter(module, key, value) and not is_streamed

        return cast(dict[str, Any], self._model.filter_and_map(in_memory))

    def trainable_parameters(self) -> dict[str, Any]:
        """None: weights that are read again on every pass cannot be trained."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelFacade:
        raise StreamedWeightsError("a streamed model cannot be copied: its weights are on disk. Hint: load it again.")

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise StreamedWeightsError("a streamed model cannot be pickled: its weights are on disk. Hint: load it again.")


def _refusal(what: str) -> StreamedWeightsError:
    return StreamedWeightsError(
        f"{what} on a streamed model would take what happens to be in the slots for its weights. "
        "Hint: load the model with mlx_lm, or call close() and use the model that it returns."
    )


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: ModelFacade, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._model, name)(*args, **kwargs)
        return self if result is self._model else result

    method.__name__, method.__doc__ = name, f"As ``nn.Module.{name}``, on mlx-lm's model."
    return method


def _delegate_before_start(name: str) -> Callable[..., Any]:
    def method(self: ModelFacade, *args: Any, **kwargs: Any) -> Any:
        if self.engine is not None:
            raise _refusal(f"{name}()")
        getattr(self._model, name)(*args, **kwargs)
        return self

    method.__name__, method.__doc__ = name, f"As ``nn.Module.{name}``; refused once weights are streamed."
    return method


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: ModelFacade, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(f"{name}()")

    method.__name__, method.__doc__ = name, "Refused: it would see slot contents."
    return method


for _name in ("children", "leaf_modules", "modules", "named_modules", "train", "eval", "freeze", "unfreeze"):
    setattr(ModelFacade, _name, _delegate(_name))
for _name in ("load_weights", "update", "update_modules", "apply_to_modules"):
    setattr(ModelFacade, _name, _delegate_before_start(_name))
for _name in ("save_weights", "apply", "set_dtype"):
    setattr(ModelFacade, _name, _refuse(_name))
