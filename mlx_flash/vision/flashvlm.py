"""``load_vlm`` and ``FlashVLM``: a model of mlx-vlm whose weights are streamed, with the patch or without it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_flash import enginethread
from mlx_flash.compat.arrays import LoadingStreams
from mlx_flash.compat.vlm import (
    VlmLoadModel,
    current_vlm_load_model,
    get_model_path,
    installed_vlm,
    language_part,
    load_processor,
    loaded_tensors,
    make_vlm_cache,
)
from mlx_flash.config import FlashConfig
from mlx_flash.engine.call import ForwardCall, result_is_dropped
from mlx_flash.engine.passes import Passes
from mlx_flash.engine.prepare import prepare
from mlx_flash.engine.prepared import Prepared
from mlx_flash.enginethread import Progress
from mlx_flash.errors import CheckpointError, ConfigError, FlashError
from mlx_flash.kv.kvpool import make_caches
from mlx_flash.layout.load import (
    LoadedModel,
    Sources,
    checked_config,
    failure_explained,
    model_name,
    stock_folder,
)
from mlx_flash.layout.parts import Parameter
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.trace import as_it_was, zeros_for
from mlx_flash.model import FlashLLM, ModelFacade, OfLifecycle
from mlx_flash.residency.ledger import refuse_all_but
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.storage.safetensors import Checkpoint
from mlx_flash.vision.towers import TowerRehearsal, Towers, needed_bytes

_INPUTS = ("inputs", "input_ids", "inputs_embeds", "input_embeddings", "decoder_input_ids")
"""Names under which mlx-vlm's loops give tokens, or embeddings of them, to a language model."""


_NOT_PICTURES = frozenset({*_INPUTS, "mask", "attention_mask"})


class StreamedLanguage(FlashLLM):
    """The language model of a model that sees. Its caches are mlx-vlm's own.

    What programs set on it, such as positions of a picture, they set on mlx-vlm's module.
    """

    def __init__(self, prepared: Prepared, config: FlashConfig, name: str) -> None:
        super().__init__(prepared, config, name)
        object.__setattr__(self, "_is_made", True)

    def __setattr__(self, key: str, value: Any) -> None:
        if "_is_made" in self.__dict__ and key not in self.__dict__ and not hasattr(type(self), key):
            setattr(self._model, key, value)
        else:
            super().__setattr__(key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a forward pass, as mlx-vlm's language model does. Its caller cuts prompts."""
        call = _parse(args, kwargs, wants_logits=not result_is_dropped(sys._getframe()))
        return self._life.run(lambda passes: self._call(passes, call), args, kwargs)

    @property
    def make_cache(self) -> Any:
        """The model's own, if it has one; or one that makes caches as the settings say."""
        return self._model.make_cache if self.kv is None else self._make_pooled

    def _make_pooled(self) -> list[Any]:
        assert self.kv is not None
        return make_caches(make_vlm_cache(self._model), self.kv.options, self.kv)


def _parse(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wants_logits: bool) -> ForwardCall:
    given = [args[0] if args else None, *(kwargs.get(name) for name in _INPUTS)]
    tokens = next((value for value in given if isinstance(value, mx.array) and value.ndim >= 2), None)
    shape = (1, 1) if tokens is None else (int(tokens.shape[0]), int(tokens.shape[1]))
    cache = kwargs.get("cache")
    return ForwardCall(
        args,
        kwargs,
        num_tokens=shape[0] * shape[1],
        tokens=tokens,
        cache=cache if isinstance(cache, list | tuple) else None,
        is_plain=False,
        wants_logits=wants_logits,
    )


class FlashVLM(ModelFacade):
    """A model of mlx-vlm that is streamed. It is called as mlx-vlm's, and answers to every attribute of it.

    The layers of towers for pictures and sound are read when they are called, and are not in memory otherwise.

    Attributes:
        language_model: the streamed language model.
        plan: what is in memory, and what is not.
        counters: what its calls did so far.
        towers: the units beside the language model.
        name: as given.
    """

    language_model: StreamedLanguage
    plan = OfLifecycle[ResidencyPlan]()

    def __init__(self, prepared: Prepared, config: FlashConfig, name: str) -> None:
        language = StreamedLanguage(prepared, config, name)
        super().__init__(prepared.loaded.model, language._life)
        object.__setattr__(self, "language_model", language)
        self.towers = Towers(prepared.layout.towers, language._life)
        self.name, self.counters = language.name, language.counters

    def start(self, progress: Progress | None = None) -> None:
        """Read the pinned weights, and begin to stream the rest. As :meth:`FlashLLM.start`."""
        self.language_model.start(progress)

    def expect(self, num_tokens: int | None, inputs: Mapping[str, Any]) -> None:
        """Plan for a prompt with pictures, and an answer, before :meth:`start`. Raises: BudgetError."""
        life = self._life
        life.prepared = life.prepared.expecting(life.config, num_tokens, self.picture_bytes(inputs) or 0)
        life.plan = life.prepared.plan

    def picture_bytes(self, inputs: Mapping[str, Any]) -> int | None:
        """Return the memory that making embeddings takes beside weights, by a rehearsal that computes nothing.

        None where the model decides by the numbers of a picture what it computes.
        """
        rehearsal, layout = TowerRehearsal(), self.layout
        absent = [parameter for unit in layout.towers for parameter in unit.large]
        if self.engine is None:  # nothing else is in memory either
            absent += [parameter for unit in layout.units for parameter in (*unit.large, *unit.small)]
            absent += layout.resident
        return enginethread.run(partial(self._rehearse, rehearsal, absent, inputs))

    def _rehearse(self, rehearsal: TowerRehearsal, absent: list[Parameter], inputs: Mapping[str, Any]) -> int | None:
        with as_it_was(self._model), zeros_for(absent):
            self.towers.rehearsal = rehearsal
            try:
                return needed_bytes(self._model.get_input_embeddings, self._named(inputs), rehearsal)
            except (ValueError, RuntimeError):
                return None
            finally:
                self.towers.rehearsal = None

    def _named(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs under the model's own names: the tokens, which come first, have several."""
        first = next(iter(signature(self._model.get_input_embeddings).parameters))
        return {first if name in _INPUTS else name: value for name, value in inputs.items()}

    def get_input_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the embeddings of tokens, pictures and sound, as mlx-vlm's model does."""

        def compute(passes: Passes) -> Any:
            passes.drop_logits(False)
            self.towers.has_room = self._make_room(args, kwargs)
            try:
                result = self._model.get_input_embeddings(*args, **kwargs)
                mx.eval(arrays_in(result))
                return result
            finally:
                self.towers.has_room = False

        return self._life.run(compute, args, kwargs)

    def _make_room(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Make room for pictures, and return whether that was possible."""
        names = [name for name in signature(self._model.get_input_embeddings).parameters if name not in kwargs]
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if any(value is not None for name, value in inputs.items() if name not in _NOT_PICTURES):
            need = self.picture_bytes(inputs)
            if need is not None:
                self.towers.make_room(need + self.layout.tower_bytes, "computing pictures or sound in the towers")
                return True
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = language_part(self._model)
        if own is self._model:
            return self.language_model(*args, **kwargs)
        modules = (module for _, module in self._model.named_modules())
        holder, key = next((module, key) for module in modules for key, child in module.items() if child is own)

        def compute(passes: Passes) -> Any:
            passes.drop_logits(False)
            setattr(holder, key, self.language_model)
            try:
                return self._model(*args, **kwargs)
            finally:
                setattr(holder, key, own)

        return self._life.run(compute, args, kwargs)

    def parameters(self) -> dict[str, Any]:
        """None: those that are in memory all the time belong to the language model."""
        return {}

    def close(self) -> nn.Module:
        """End streaming. Return mlx-vlm's model, lazily loaded, as if it had never been streamed."""
        self.towers.close()
        return self._life.close()

    def __enter__(self) -> FlashVLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_vlm(
    path_or_hf_repo: str | Path,
    config: FlashConfig | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[FlashVLM, Any]:
    """Load a model that sees and its processor, like ``mlx_vlm.load``.

    Args:
        path_or_hf_repo: a model directory, or a Hugging Face repository that is downloaded first.
        config: how to stream; None takes what environment and settings file say (:meth:`FlashConfig.resolve`).
        revision: of the repository.
        progress: called with (bytes done, bytes to do) while pinned weights are read.
        options: of the processor, as of ``mlx_vlm.load``.

    Raises:
        CheckpointError: the model directory is not a usable checkpoint.
        ConfigError: a setting is wrong or not available; BudgetError when the budget is too small.
    """
    path = Path(get_model_path(str(path_or_hf_repo), revision=revision))
    model = load_vlm_model(path, config or FlashConfig.resolve())
    processor = load_processor_of(path, model, **options)
    model.start(progress)
    return model, processor


def load_processor_of(path: Path, model: FlashVLM, **options: Any) -> Any:
    """Return the processor of texts and pictures in a model's folder."""
    try:
        return load_processor(path, model, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot load the processor of {path}. Hint: copy the tokenizer's files and preprocessor_config.json from "
            f"the model's repository. ({' '.join(str(error).split())})"
        ) from error


def load_vlm_model(
    path: Path | str, config: FlashConfig, load_model: VlmLoadModel | None = None, **loading: Any
) -> FlashVLM:
    """Load a model of mlx-vlm that streams from its first call on. No processor is needed."""
    if not config.enabled:
        raise ConfigError("enabled is False, which leaves models to mlx-vlm. Hint: load this one with mlx_vlm.load.")
    config = _settings_of_vlm(config)
    return FlashVLM(prepare_vlm(path, config, load_model=load_model, **loading), config, model_name(path))


def prepare_vlm(path: Path | str, config: FlashConfig, **loading: Any) -> Prepared:
    """Load a model of mlx-vlm lazily, find its units, and plan. Reads headers, no weights."""
    try:
        return prepare(path, _settings_of_vlm(config), loader=load_vlm_lazily, **loading)
    except FlashError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot find the units of {path}: mlx-vlm raised {type(error).__name__}: {error}, when it built the model "
            "or called its language model with tokens alone. Hint: load it with mlx_vlm, without the patch."
        ) from error


def _settings_of_vlm(config: FlashConfig) -> FlashConfig:
    """Return settings with the caches that models of mlx-vlm can have: their own, unless others are asked for."""
    refuse_all_but(config, "for models of mlx-vlm", kv_max_tokens=None, kv_prefixes="off")
    is_open = config.kv_cache is None and config.kv_ram_gb is None
    return replace(config, kv_cache="stock" if is_open else config.kv_cache, kv_prefixes="off")


def load_vlm_lazily(
    directory: Path,
    checkpoint: Checkpoint,
    model_config: dict[str, Any] | None = None,
    *,
    load_model: VlmLoadModel | None = None,
    **loading: Any,
) -> LoadedModel:
    """Build mlx-vlm's model without reading its weights, and remember which array came from which tensors."""
    config = checked_config(directory, checkpoint, model_config)
    sources = Sources(checkpoint)
    streams = LoadingStreams()
    load = load_model or current_vlm_load_model()
    with (
        stock_folder(directory, checkpoint) as folder,
        streams.in_force(),
        failure_explained(directory),
        sources.watching({}),
        loaded_tensors(sources.read),
    ):
        model = load(folder, lazy=True, **loading)
    streams.belong_to(model)
    language = language_part(model)
    if language is None:
        raise CheckpointError(
            f"{type(model).__module__}.{type(model).__name__} of mlx-vlm {installed_vlm()} has no language_model: it "
            "cannot be streamed. Hint: load it with mlx_vlm, without the patch."
        )
    return LoadedModel(model, config, *sources.direct(model), streams, language, make_vlm_cache)
