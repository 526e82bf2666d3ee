"""Whose bytes are these: from a lazily loaded mlx-lm model and its checkpoint to units and parameter sources.

Which tensors of the checkpoint become which parameter is found by object identity, not by name: ``mlx_lm`` lets its
caller choose the model class (``get_model_classes``), so the arrays that its ``sanitize`` is given can be seen, and
what it does with them (:mod:`~mlx_flash.layout.sources`). One whose bytes are those of tensors is a *direct*
parameter: they can be read from the files at any time. Everything else was computed on the way: a *derived* one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from mlx_flash.compat.attention import AttentionCall
from mlx_flash.compat.loading import LoadModel, ModelClasses, model_classes
from mlx_flash.errors import CheckpointError, CheckpointNotFoundError
from mlx_flash.files import check_regular
from mlx_flash.layout.cachesizes import CacheEntry, CacheSizes
from mlx_flash.layout.sources import Sources
from mlx_flash.storage.safetensors import MAX_METADATA_BYTES, Checkpoint, TensorRecord

CONFIG_NAMES = {"config.json", "generation_config.json"}
METADATA_SUFFIXES = {".json", ".jinja", ".model", ".txt"}
"""Ends of the names of the small files that mlx-lm and its tokenizers read."""

LAYER_KEYS = {"num_hidden_layers", "num_layers", "n_layers", "n_layer"}
"""Keys of ``config.json`` that count layers."""


@dataclass(slots=True, eq=False)
class Parameter:
    """One array of the module tree.

    Attributes:
        name: its path in the model, such as ``model.layers.3.mlp.down_proj.weight``.
        container: the module, dict or list that holds the array.
        key: under which key or index.
        array: the lazily loaded array; never evaluated while its bytes are streamed.
        records: where its bytes lie, one after another: several for a stack, none when mlx-lm computed it.
    """

    name: str
    container: dict[str, Any] | list[Any]
    key: Any
    array: mx.array
    records: tuple[TensorRecord, ...] = ()

    @property
    def record(self) -> TensorRecord | None:
        """Place of its bytes, if that is one run of bytes of a file."""
        return self.records[0] if len(self.records) == 1 else None

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return int(self.array.nbytes)

    def bind(self, array: mx.array) -> None:
        """Make the module use another array of the same shape and dtype."""
        bind(self.container, self.key, array)


def bind(container: dict[Any, Any] | list[Any], key: Any, array: mx.array) -> None:
    """Put an array into a module, dict or list; a module does not look at it."""
    if isinstance(container, dict):
        dict.__setitem__(container, key, array)
    else:
        container[key] = array


@dataclass(slots=True, eq=False)
class Unit:
    """A module whose large parameters are made resident together.

    Attributes:
        name: the module's path in the model.
        module: the module.
        large: the parameters worth streaming: direct and not small.
        small: the rest, always resident.
    """

    name: str
    module: nn.Module
    large: list[Parameter] = field(default_factory=list)
    small: list[Parameter] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the large parameters."""
        return sum(parameter.nbytes for parameter in self.large)

    @property
    def num_rows(self) -> int | None:
        """Output rows, for a module that can be computed row tile by row tile."""
        if not (is_linear(self.module) or is_embedding(self.module)) or not all(p.record for p in self.large):
            return None
        return int(self.module["weight"].shape[0])


def is_linear(module: nn.Module) -> bool:
    """Return True if a module computes what mlx's linear layers do; other classes may compute something else."""
    return _computes_as(module, nn.Linear, nn.QuantizedLinear)


def is_embedding(module: nn.Module) -> bool:
    """Return True if a module looks rows up as mlx's embeddings do."""
    return _computes_as(module, nn.Embedding, nn.QuantizedEmbedding)


def _computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    return isinstance(module, kinds) and any(type(module).__call__ is kind.__call__ for kind in kinds)


@dataclass(slots=True, eq=False)
class ExpertStack:
    """A module that computes each token with the experts it is told.

    Attributes:
        unit: the module; every array below it has one row an expert.
        num_experts: how many experts there are.
        top_k: how many of them compute each token.
        block: the module that calls it and whose router chooses, if it is called with nothing but the tokens.
        norm: the module that makes the input of ``block``.
        router: what ``block`` uses before it calls the experts.
        gate: the module in ``block`` that returns the scores of the experts, if one does.
    """

    unit: Unit
    num_experts: int
    top_k: int
    block: nn.Module | None
    norm: nn.Module | None
    router: list[Parameter]
    gate: nn.Module | None

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert that are not in memory always."""
        return self.unit.nbytes // self.num_experts


@dataclass(slots=True, eq=False)
class ModelLayout:
    """A model, split into what can be streamed and how.

    Attributes:
        layers: one unit a layer, in the order of ``model.layers``; called whole.
        heads: linear layers outside of them, such as ``lm_head``; can be computed row tile by row tile.
        embeddings: tables outside of them; a lookup needs a few rows.
        resident: every other array of the model, constants such as RoPE tables included.
        tied: names of the embeddings that serve as the head too.
        finer: ways to cut the layers into smaller units, each finer than the one before: attention and MLP, then their
            parts. What a cut leaves over stays in memory. In calling order; parameters are those of the layers.
        cache: sizes of the model's cache.
        cache_entries: its entries, and the modules that use each of them.
        experts: the stacks of experts in the layers, in calling order.
        attention: the calls of MLX's attention that the model makes.
        has_own_attention: whether layers compute attention scores themselves.
    """

    layers: list[Unit]
    heads: list[Unit]
    embeddings: list[Unit]
    resident: list[Parameter]
    tied: set[str]
    finer: list[list[Unit]] = field(default_factory=list)
    cache: CacheSizes = field(default_factory=CacheSizes)
    cache_entries: list[CacheEntry] = field(default_factory=list)
    experts: list[ExpertStack] = field(default_factory=list)
    attention: tuple[AttentionCall, ...] = ()
    has_own_attention: bool = False

    @property
    def units(self) -> list[Unit]:
        """All units."""
        return [*self.layers, *self.heads, *self.embeddings]

    def cut(self, number: int) -> list[Unit]:
        """Return the units of a cut: 0 for whole layers, ``i`` for ``finer[i - 1]``."""
        return (self.layers, *self.finer)[number]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        small = [parameter for unit in self.units for parameter in unit.small]
        return sum(unit.nbytes for unit in self.units) + sum(p.nbytes for p in [*small, *self.resident])


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Result of :func:`load_lazily`.

    Attributes:
        model: mlx-lm's model, every weight a lazily loaded array.
        config: its configuration, as mlx-lm returns it.
        sources: where the bytes of each direct parameter lie, by the ``id`` of its array: the tensors, or rows of them,
            that it is made of, one after another.
        keep_alive: those arrays, so that no ``id`` is used twice.
    """

    model: nn.Module
    config: dict[str, Any]
    sources: dict[int, tuple[TensorRecord, ...]]
    keep_alive: list[mx.array]


def load_config(directory: Path) -> dict[str, Any]:
    """Return the model's configuration, as mlx-lm reads it.

    Raises:
        CheckpointError: there is none, it is not JSON, or a file that mlx-lm will read is not a regular one.
    """
    path = directory / "config.json"
    _check_files(directory)
    try:
        config: dict[str, Any] = mlx_lm_utils.load_config(directory)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path} does not exist. Hint: is {directory} a model directory?") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Hint: check who may read it.") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Hint: download it again.") from error
    except (TypeError, AttributeError) as error:  # mlx-lm takes what is in the file for an object
        raise CheckpointError(
            f"{path} or generation_config.json is no JSON object. Hint: download it again."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object. Hint: download it again.")
    return config


def _check_files(directory: Path) -> None:
    """Check the small files of a model folder: opening a FIFO waits for ever, and reading ``/dev/zero`` has no end."""
    try:
        for path in directory.iterdir():
            if path.suffix in METADATA_SUFFIXES and path.exists() and not path.is_dir():
                check_regular(path, MAX_METADATA_BYTES if path.name in CONFIG_NAMES else None)
    except (FileNotFoundError, NotADirectoryError):
        return  # said by whoever needs the folder
    except OSError as error:
        raise CheckpointError(
            f"cannot read {error.filename}: {error.strerror}. Hint: check the folder, or download it again."
        ) from error


def _check_code(directory: Path, config: dict[str, Any]) -> None:
    """Refuse a model with code of its own before mlx-lm may run it."""
    if config.get("model_file") is not None:
        raise CheckpointError(
            f"the model in {directory} is built by code of its own (model_file): it cannot be streamed. "
            "Hint: load it with mlx_lm, without the patch."
        )


def _check_num_layers(directory: Path, config: dict[str, Any], num_tensors: int) -> None:
    """Refuse more layers than tensors: mlx-lm makes the modules of all layers before it looks at the files."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in LAYER_KEYS & part.keys():
            if isinstance(part[key], int) and part[key] > num_tensors:
                raise CheckpointError(
                    f"{directory / 'config.json'}: {key} is {part[key]}, but the checkpoint has {num_tensors} tensors. "
                    "Hint: download it again."
                )


def model_name(directory: str | Path) -> str:
    """The folder's name; of a downloaded repository its own, since the folder is named after a revision."""
    repositories = [part for part in Path(directory).parts if part.startswith("models--")]
    return repositories[-1].removeprefix("models--").replace("--", "/") if repositories else Path(directory).name


def load_lazily(
    directory: Path,
    checkpoint: Checkpoint,
    model_config: dict[str, Any] | None = None,
    *,
    load_model: LoadModel = mlx_lm_utils.load_model,
    get_model_classes: ModelClasses = model_classes,
    **loading: Any,
) -> LoadedModel:
    """Builds mlx-lm's model without reading its weights, and remembers which array came from which tensors.

    Args:
        directory: the model directory.
        checkpoint: what is in it.
        model_config: entries that replace those of ``config.json``, as in ``mlx_lm.utils.load_model``.
        load_model: mlx-lm's function, by default the one that is in force when this module is imported.
        get_model_classes, loading: as in ``mlx_lm.utils.load_model``.

    Raises:
        CheckpointError: the model is built by code of its own, beside the checkpoint.
    """
    expected = {**load_config(directory), **(model_config or {})}
    _check_code(directory, expected)
    _check_num_layers(directory, expected, len(checkpoint.tensors))
    sources = Sources(checkpoint)
    original: list[type[nn.Module]] = []

    def recording_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = get_model_classes(config=config)
        original.append(model_class)
        return _recording_class(model_class, sources), args_class

    model, config = load_model(
        directory, lazy=True, model_config=model_config, get_model_classes=recording_classes, **loading
    )
    model.__class__ = original[0]
    arrays = [array for _, _, _, array in iter_parameters(model, "")]
    direct = [array for array in arrays if sources.of(array)]  # what went into the others would be held for nothing
    return LoadedModel(model, config, {id(array): sources.of(array) for array in direct}, direct)


def _recording_class(model_class: type[nn.Module], sources: Sources) -> type[nn.Module]:
    """A subclass that notes the arrays as they come from the files, and what ``sanitize`` makes of them."""

    def sanitize(self: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        inherited: Callable[..., dict[str, mx.array]] | None = getattr(super(recording, self), "sanitize", None)
        with sources.watching(weights):
            return inherited(weights) if inherited is not None else weights

    recording: type[nn.Module] = type(
        model_class.__name__,
        (model_class,),
        {"sanitize": sanitize, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__},
    )
    return recording


def iter_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any, Any, mx.array]]:
    """Every array in a module's tree, private constants included: (name, container, key, array)."""
    yield from _iter_arrays(module, prefix, set())


def _iter_arrays(container: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any, Any, mx.array]]:
    if id(container) in seen:
        return
    seen.add(id(container))
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, mx.array):
            yield name, container, key, value
        elif isinstance(value, dict | list):
            yield from _iter_arrays(value, name, seen)
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, dict | list):
                    yield from _iter_arrays(item, f"{name}.{i}", seen)
