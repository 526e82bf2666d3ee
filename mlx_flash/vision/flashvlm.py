"""``load_vlm`` and ``FlashVLM``: a model of mlx-vlm whose weights are streamed, with the patch or without it.

Layers of its towers for pictures and sound are in memory while they compute, one after another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlx_flash import enginethread
from mlx_flash.compat.arrays import LoadingStreams, result_bytes, tape_of
from mlx_flash.compat.require import installed
from mlx_flash.compat.vlm import (
    VlmLoadModel,
    current_vlm_load_model,
    get_model_path,
    language_part,
    load_processor,
    loaded_tensors,
    make_vlm_cache,
)
from mlx_flash.config import FlashConfig
from mlx_flash.engine.call import ForwardCall, result_is_dropped
from mlx_flash.engine.engine import bind_views
from mlx_flash.engine.lifecycle import Lifecycle
from mlx_flash.engine.passes import Passes
from mlx_flash.engine.prepare import Prepared, prepare
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, CheckpointError, ConfigError, FlashError
from mlx_flash.kv.kvpool import make_caches
from mlx_flash.layout.load import LoadedModel, Sources, checked_config, failure_explained, model_name, stock_folder
from mlx_flash.layout.parts import Parameter, Unit
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import SwappedClass, own_class, restore_class, swap_class
from mlx_flash.layout.units import as_it_was, zeros_for, zeros_like
from mlx_flash.memory.arena import Arena, kernel_alignment
from mlx_flash.memory.footprint import footprint, release_freed_memory
from mlx_flash.model import FlashLLM, ModelFacade, OfLifecycle
from mlx_flash.residency.plan import ResidencyPlan, in_gb, refuse_all_but
from mlx_flash.storage.placement import Segment, place
from mlx_flash.storage.safetensors import Checkpoint
from mlx_flash.streaming.stream import compute

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


MARGIN = 1.25
"""Allocators leave holes, and matrix products copy some inputs. Measured on the CPU back end: 0.99 to 1.2 times."""


@dataclass(slots=True)
class TowerRehearsal:
    """Notes of one rehearsal."""

    # the units without units inside them: the unit, what calls it, and its arguments
    calls: list[tuple[Unit, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    retained_bytes: int = 0  # results of units that something still held when a later unit was called, at most
    _results: list[ref[mx.array]] = field(default_factory=list)

    def call(self, unit: Unit, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held = [array.nbytes for result in self._results if (array := result()) is not None]
        self.retained_bytes = max(self.retained_bytes, sum(held))
        before = len(self.calls)
        result = run(*args, **kwargs)
        if len(self.calls) == before:  # else the units inside it count
            self.calls.append((unit, run, args, kwargs))
            self._results += map(ref, arrays_in(result))
        return result


def needed_bytes(call: Callable[..., Any], inputs: dict[str, Any], rehearsal: TowerRehearsal) -> int:
    """Return the memory that results take while a model makes embeddings of pictures, weights not counted.

    Units are computed one after another. So only the largest of them counts, what others keep of them, and what is
    computed outside of them. Raises: ValueError, if the model looks at the numbers of pictures.
    """
    total = _traced(call, (), inputs)
    known: dict[str, int] = {}
    parts = []
    for unit, run, args, kwargs in rehearsal.calls:
        given = [(array.shape, str(array.dtype)) for array in arrays_in((args, kwargs))]
        key = str([*((p.key, p.array.shape, p.array.dtype) for p in unit.large), given])
        if key not in known:
            known[key] = _traced(run, args, kwargs)
        parts.append(known[key])
    outside = max(0, total - sum(parts))
    return int(MARGIN * (outside + max(parts, default=0) + rehearsal.retained_bytes))


def _traced(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the memory of a call's results. Arrays of numbers that are not whole count by their shape alone."""
    tree: Any = [list(args), kwargs]
    flat: Any = tree_flatten(tree)
    floats: list[mx.array] = list({id(leaf): leaf for _, leaf in flat if _is_floating(leaf)}.values())

    def called(*arrays: mx.array) -> list[mx.array]:
        places = {id(leaf): array for leaf, array in zip(floats, arrays, strict=True)}
        given: Any = tree_map(lambda leaf: places.get(id(leaf), leaf), tree)
        positional, named = given
        return arrays_in(run(*positional, **named))

    return result_bytes(tape_of(called, [zeros_like(array) for array in floats]))


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, mx.array) and bool(mx.issubdtype(leaf.dtype, mx.floating))


class Towers:
    """The units beside a language model.

    A unit gets new memory for each of its calls, and its lazily loaded arrays back afterwards. So whatever else refers
    to its weights has the right ones, and no architecture has to be known.
    """

    def __init__(self, units: list[Unit], life: Lifecycle) -> None:
        self._units = units
        self._life = life
        self.rehearsal: TowerRehearsal | None = None  # takes calls, in which units have no weights
        self.has_room = False  # room was made for the calls that come, after a rehearsal
        self._resident: set[int] = set()
        # Called with the weights of each unit after its call, and the parts of files that they came from.
        self.before_release: Callable[[Sequence[Segment], memoryview], None] | None = None
        for unit in units:
            swap_class(unit.module, TowerUnit, partial(self.call, unit))

    def call(self, unit: Unit, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read a unit, call it, evaluate what it computed, and let go of its weights."""
        if self.rehearsal is not None:
            return self.rehearsal.call(unit, run, args, kwargs)
        if id(unit) in self._resident:
            return run(*args, **kwargs)

        def call(_: Passes) -> Any:
            with self._in_memory(unit, _largest(args, kwargs)):
                result = run(*args, **kwargs)
                compute(result, args, kwargs)
            return result

        return self._life.run(call, args, kwargs)

    @contextmanager
    def _in_memory(self, unit: Unit, given: mx.array | None) -> Iterator[None]:
        engine = self._life.engine
        assert engine is not None
        if not self.has_room:
            size = "" if given is None else f" for an input of {tuple(given.shape)}"
            self.make_room(unit.nbytes + _activation_bytes(unit, given), f"{unit.name}{size}")
        placement = place([parameter.records for parameter in unit.large], kernel_alignment())
        arena = Arena(placement.nbytes)
        engine.reader.submit(placement.segments, arena.memory, caching="found", urgent=True).wait()
        self._resident.add(id(unit))
        try:
            bind_views([(unit.large, placement, arena)])
            yield
            if self.before_release is not None:
                self.before_release(placement.segments, arena.memory)
        finally:
            self._resident.discard(id(unit))
            for parameter in unit.large:
                parameter.bind(parameter.array)

    def make_room(self, need: int, words: str) -> None:
        """End loans where memory is short."""
        budget, engine = self._life.plan.budget_bytes, self._life.engine
        assert engine is not None
        if footprint() + need > budget:
            release_freed_memory()
        missing = footprint() + need - budget
        if missing > 0:
            missing -= engine.lending.recall(missing)
            release_freed_memory()
        if missing > 0 and (total := footprint() + need) > budget:
            raise BudgetError(
                f"{words} of {self._life.name} needs {need / 1e6:.1f} MB, which takes the process to {in_gb(total)} "
                f"GB; the budget is {in_gb(budget)} GB. Hint: raise ram_budget_gb, or give smaller pictures.",
                total,
            )

    def close(self) -> None:
        for unit in self._units:
            restore_class(unit.module)
        self._units = []


class TowerUnit(SwappedClass):
    """A module of a tower that is read when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = self._flash_state
        return call(partial(own_class(cast(nn.Module, self)).__call__, self), args, kwargs)


def _largest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> mx.array | None:
    return max(arrays_in(args, kwargs), key=lambda array: array.size, default=None)


def _activation_bytes(unit: Unit, given: mx.array | None) -> int:
    """Return what the linear layers of a unit compute from an input, in bytes. Attention scores do not count."""
    if given is None or given.ndim < 2:
        return 0
    outputs = sum(int(p.array.shape[-2]) for p in unit.large if p.key == "weight" and p.array.ndim == 2)
    return 2 * max(4, given.itemsize) * outputs * int(given.size) // int(given.shape[-1])


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
        return super().close()


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
            f"{type(model).__module__}.{type(model).__name__} of mlx-vlm {installed('mlx-vlm')} has no language_model: "
            "it cannot be streamed. Hint: load it with mlx_vlm, without the patch."
        )
    return LoadedModel(model, config, *sources.direct(model), streams, language, make_vlm_cache)
