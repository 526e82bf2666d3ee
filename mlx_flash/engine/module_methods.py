"""Methods of ``nn.Module`` on a streamed model; those that would see slot contents are refused, and forked children."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat.arrays import TRAINING_FLAG
from mlx_flash.compat.callers import adapter_file, is_load_adapters, is_save_model
from mlx_flash.engine.engine import Engine
from mlx_flash.engine.lifecycle import Lifecycle
from mlx_flash.errors import ConfigError, StreamedWeightsError
from mlx_flash.layout.adapterfiles import check_adapter
from mlx_flash.layout.parts import ModelLayout

T = TypeVar("T")


class OfLifecycle(Generic[T]):
    """An attribute of a model that its lifecycle keeps."""

    def __set_name__(self, owner: type[ModelFacade], name: str) -> None:
        self._name = name

    def __get__(self, model: ModelFacade, owner: type[ModelFacade]) -> T:
        value: T = getattr(model._life, self._name)
        return value

    def __set__(self, model: ModelFacade, value: T) -> None:
        setattr(model._life, self._name, value)


def _is_floating(dtype: mx.Dtype) -> bool:
    return mx.issubdtype(dtype, mx.floating)


class ModelFacade(nn.Module):
    """Answers to every attribute of mlx-lm's model, with a module tree of its own that is empty.

    Args:
        model: mlx-lm's.
        life: its weights, which are streamed or wait for that.

    Attributes:
        layout: the model's units.
        engine: None before streaming begins.
        tokenizer: the one that was loaded with it; None without.
    """

    _generates: Callable[..., Iterator[Any]] | None = None
    tokenizer: Any = None

    layout = OfLifecycle[ModelLayout]()
    engine = OfLifecycle[Engine | None]()

    def __init__(self, model: nn.Module, life: Lifecycle) -> None:
        nn.Module.__init__(self)
        delattr(self, TRAINING_FLAG)  # the model's own counts
        # nn.Module would put the model into the module tree if it were set as usual.
        object.__setattr__(self, "_model", model)
        self._life = life

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of mlx-lm's model, for programs that ask with ``isinstance``; ``type()`` tells the truth."""
        return type(self._model)

    def belongs_with(self, tokenizer: Any, generates: Callable[..., Iterator[Any]]) -> None:
        """Note the tokenizer, and the function that generates, for :meth:`stream_generate`."""
        object.__setattr__(self, "tokenizer", tokenizer)
        object.__setattr__(self, "_generates", generates)

    def __getattr__(self, key: str) -> Any:
        if key in ("_model", "_life"):  # not there yet: being made by copy or pickle
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

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> ModelFacade:
        """As ``nn.Module.load_weights``; refused once weights are streamed.

        An adapter's tensors are loaded again: those that mlx-lm loaded belong to this thread until they are computed.

        Raises:
            StreamedWeightsError: weights are streamed.
            CheckpointError: mlx-lm would use random numbers for tensors that an adapter lacks.
        """
        adapter = adapter_file(sys._getframe(1))
        if self.engine is not None:
            raise _refusal("load_weights()")
        if adapter is not None:
            check_adapter(adapter.parent)
        with self._life.prepared.loaded.streams.in_force():
            self._model.load_weights(file_or_weights if adapter is None else str(adapter), strict)
        return self

    def set_dtype(self, dtype: mx.Dtype, predicate: Callable[[mx.Dtype], bool] | None = _is_floating) -> None:
        """As ``nn.Module.set_dtype``; refused once weights are streamed.

        Parameters that change cannot be read from the checkpoint any more: they are computed when the model starts, and
        stay in memory. The budget has to hold them.
        """
        if self.engine is not None:
            raise _refusal("set_dtype()")
        with self._life.prepared.loaded.streams.in_force():
            self._model.set_dtype(dtype, lambda found: found != dtype and (predicate is None or predicate(found)))

    def stream_generate(self, prompt: str | list[int], **options: Any) -> Iterator[str]:
        """Yield the text that follows a prompt, in parts, with the tokenizer that ``mlx_flash.load`` loaded.

        Args:
            prompt: text or tokens.
            options: as of ``mlx_flash.stream_generate``.

        Raises:
            ConfigError: the model was loaded without a tokenizer.
        """
        if self._generates is None:
            raise ConfigError(
                f"{self._life.name} was loaded without a tokenizer. Hint: mlx_flash.load(), or "
                "FlashGenerationLoop(model, tokenizer)."
            )
        for response in self._generates(self, self.tokenizer, prompt, **options):
            yield response.text

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
        with self._life.prepared.loaded.streams.in_force():
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
for _name in ("update", "update_modules", "apply_to_modules"):
    setattr(ModelFacade, _name, _delegate_before_start(_name))
for _name in ("save_weights", "apply"):
    setattr(ModelFacade, _name, _refuse(_name))
