"""Loading: from a lazily loaded mlx-lm model and its checkpoint to the sources of parameters.

Which tensors of the checkpoint become which parameter is found by object identity, not by name: ``mlx_lm`` lets its
caller choose the model class (``get_model_classes``), so the arrays that its ``sanitize`` is given can be seen, and
what it does with them (:class:`Sources`). One whose bytes are those of tensors is a *direct*
parameter: they can be read from the files at any time. Everything else was computed on the way: a *derived* one.

The files of an adapter are checked before mlx-lm applies it: its errors name neither the file nor the setting.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import math
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.arrays import CHANGING, TRAINING_FLAG, LoadingStreams, memory_of, wrapped_functions
from mlx_flash.compat.loaders import LoadModel, ModelClasses, missing_parameters, model_classes
from mlx_flash.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FileChangedError,
    FlashError,
    IndexFileError,
    ReadError,
)
from mlx_flash.files import PrivateFolder, cache_directory, check_regular, read_regular
from mlx_flash.storage.blocks import LOGICAL_START
from mlx_flash.storage.safetensors import (
    INDEX_NAME,
    MAX_METADATA_BYTES,
    Checkpoint,
    TensorRecord,
    absent_shards,
    make_head,
    read_shard,
    refuse_unreadable,
)

_watching = threading.RLock()


class Sources:
    """The tensors of a checkpoint whose bytes arrays have.

    mlx-lm's ``sanitize`` puts the tensors of experts, one by one in original checkpoints, into stacks. Along the first
    axis a stack's bytes are those of its parts, one after another, and the rows of a tensor are a run of its bytes. So
    while ``sanitize`` runs, the functions of MLX that stack, concatenate, split and reshape are watched.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._found: dict[int, tuple[mx.array, tuple[TensorRecord, ...]]] = {}

    def of(self, array: mx.array) -> tuple[TensorRecord, ...]:
        """The tensors, or rows of them, whose bytes one after another are the array's. Empty when it was computed."""
        return self._found.get(id(array), (array, ()))[1]

    def direct(self, model: nn.Module) -> tuple[dict[int, tuple[TensorRecord, ...]], list[mx.array]]:
        """Return the tensors of a model's direct parameters, by ``id``, and these arrays: ids stay theirs."""
        ids = [id(array) for *_, array in iter_parameters(model)]
        found = [self._found[key] for key in ids if key in self._found]
        return {id(array): records for array, records in found}, [array for array, _ in found]

    def read(self, weights: Mapping[str, mx.array]) -> None:
        """Note arrays as they come from the checkpoint, by the names of their tensors."""
        for name, array in weights.items():
            record = self._checkpoint.tensors.get(name)
            if record is not None and record.nbytes == array.nbytes:  # mlx reads some dtypes as others
                self._found[id(array)] = array, (record,)

    @contextmanager
    def watching(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """Notes what happens to arrays that were read from the checkpoint, by the names of their tensors."""
        self.read(weights)
        with _watching, wrapped_functions(self._watched):  # the functions belong to the process
            yield

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        notes: dict[str, Callable[..., None]] = {
            "split": self._note_split,
            "contiguous": self._note_copied,
            "stack": self._note_joined,
            "concatenate": self._note_joined,
            **dict.fromkeys(CHANGING, self._note_changed),
        }
        note: Callable[..., None] = notes.get(name, self._note_reshaped)

        def watched(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            note(result, *args, **options)
            return result

        return watched

    def _note(self, array: mx.array, records: tuple[TensorRecord, ...]) -> None:
        if sum([record.nbytes for record in records]) == array.nbytes:
            self._found[id(array)] = array, records

    def _note_joined(self, result: mx.array, arrays: Sequence[mx.array], axis: int = 0, **_: Any) -> None:
        parts = [self.of(array) for array in arrays]
        if axis == 0 and all(parts) and all(array.dtype == result.dtype for array in arrays):
            self._note(result, tuple(record for part in parts for record in part))

    def _note_split(self, results: Sequence[mx.array], array: mx.array, indices: Any, axis: int = 0, **_: Any) -> None:
        records = self.of(array)
        if axis == 0 and len(records) == 1 and records[0].shape == tuple(array.shape):
            start = 0
            for result in results:
                self._note(result, (records[0].rows(start, start + result.shape[0]),))
                start += result.shape[0]
        if axis == 1 and array.ndim == 3:
            self._note_rows_of_experts(results, _one_by_one(records))

    def _note_rows_of_experts(self, results: Sequence[mx.array], experts: Sequence[TensorRecord]) -> None:
        """Note parts of a stack that have some rows of each expert."""
        start = 0
        for result in results:
            num_experts, num_rows, _ = result.shape
            if len(experts) == num_experts:
                self._note(result, tuple(expert.rows(start, start + num_rows) for expert in experts))
            start += num_rows

    def _note_copied(self, result: mx.array, array: mx.array, *_: Any, **__: Any) -> None:
        self._note(result, self.of(array))

    def _note_changed(self, result: Any, array: mx.array, *_: Any) -> None:
        self._found.pop(id(array), None)

    def _note_reshaped(self, result: mx.array, array: mx.array, *_: Any, **__: Any) -> None:
        records = self.of(array)
        if len(records) > 1 or (records and records[0].shape[:1] == tuple(result.shape[:1])):
            self._note(result, records)  # rows have to stay rows


def _one_by_one(records: Sequence[TensorRecord]) -> list[TensorRecord]:
    """Return the matrices that a stack is made of: its own, or those of tensors that are matrices."""
    if len(records) == 1 and len(records[0].shape) == 3:
        rows = [records[0].rows(i, i + 1) for i in range(records[0].shape[0])]
        return [replace(record, shape=record.shape[1:]) for record in rows]
    return list(records) if all(len(record.shape) == 2 for record in records) else []


METADATA_SUFFIXES = {".json", ".jinja", ".model", ".txt"}
"""Ends of the names of the small files that mlx-lm and its tokenizers read."""

LAYER_KEYS = {"num_hidden_layers", "num_layers", "n_layers", "n_layer"}
"""Keys of ``config.json`` that count layers."""

UNCLEAR_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
"""Errors of mlx-lm's code that say nothing of the ``config.json`` or the shards that it did not expect."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Result of :func:`load_lazily`."""

    model: nn.Module  # mlx-lm's model, every weight a lazily loaded array
    config: dict[str, Any]  # its configuration, as mlx-lm returns it
    # where the bytes of each direct parameter lie, by the ``id`` of its array: the tensors, or rows of them, that it is
    # made of, one after another
    sources: dict[int, tuple[TensorRecord, ...]]
    keep_alive: list[mx.array]  # those arrays, so that no ``id`` is used twice
    streams: LoadingStreams  # the streams of its lazily loaded arrays, which any thread may evaluate
    # the part that is called with tokens, of a model that has others; None is the model itself
    language: nn.Module | None = None
    # makes an empty prompt cache for the part that is called
    make_cache: Callable[[nn.Module], list[Any]] = make_prompt_cache

    @property
    def called(self) -> nn.Module:
        """The module that is called with tokens and a prompt cache."""
        return self.model if self.language is None else self.language


def load_config(directory: Path) -> dict[str, Any]:
    """Return the model's configuration, as mlx-lm reads it.

    Raises: CheckpointError: there is none, it is not JSON, or a file that mlx-lm will read is not a regular one.
    """
    path = directory / "config.json"
    _check_files(directory)
    if not path.exists():
        raise CheckpointNotFoundError(f"{path} does not exist. Hint: is {directory} a model directory?")
    config: dict[str, Any] = mlx_lm_utils.load_config(directory)
    return config


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file.

    Raises: CheckpointError: it is no JSON object. OSError: it cannot be read, is too large, or no regular file.
    """
    try:
        found = json.loads(read_regular(path, MAX_METADATA_BYTES))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number too long for int(), nested too deep
        raise CheckpointError(f"{path} is not JSON: {error}. Hint: download or copy it again.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object. Hint: download or copy it again.")
    return found


def _check_files(directory: Path) -> None:
    """Check the small files of a model folder: opening a FIFO waits for ever, and reading ``/dev/zero`` has no end."""
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{str(directory)!r}: this path is not UTF-8, and MLX opens no files below it. Hint: rename the folder."
        ) from None
    try:
        for path in directory.iterdir():
            is_read = path.suffix in METADATA_SUFFIXES and path.name != INDEX_NAME
            if path.name in ("config.json", "generation_config.json") and path.exists():
                try:
                    read_object(path)
                except CheckpointError as error:
                    if path.name == "config.json" or not isinstance(error.__cause__, json.JSONDecodeError):
                        raise  # mlx-lm passes over the other one where it is not JSON
            elif is_read and path.exists() and not path.is_dir():
                check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # the caller reports a missing folder
    except OSError as error:
        raise CheckpointError(
            f"cannot read {error.filename}: {error.strerror}. Hint: check the folder, or download it again."
        ) from error


def checked_config(
    directory: Path, checkpoint: Checkpoint, model_config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the model's configuration, checked before a model is built from it.

    Raises: CheckpointError: the model is built by code of its own, or has more layers than tensors.
    """
    config = {**load_config(directory), **(model_config or {})}
    if config.get("model_file") is not None:
        raise CheckpointError(
            f"the model in {directory} is built by code of its own (model_file): it cannot be streamed. "
            "Hint: load it with mlx_lm, without the patch."
        )
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in LAYER_KEYS & part.keys():  # mlx-lm makes the modules of all layers before it looks at the files
            if isinstance(part[key], int) and part[key] > len(checkpoint.tensors):
                raise CheckpointError(
                    f"{directory / 'config.json'}: {key} is {part[key]}, but the checkpoint has "
                    f"{len(checkpoint.tensors)} tensors. Hint: download it again."
                )
    return config


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
    """Build mlx-lm's model without reading its weights, and remember which array came from which tensors.

    ``model_config``, ``get_model_classes`` and ``loading`` are as in ``mlx_lm.utils.load_model``; ``load_model`` is
    that function, by default the one that is in force when this module is imported.

    Raises: CheckpointError: the model is built by code of its own, beside the checkpoint, or a parameter has no tensor.
    """
    checked_config(directory, checkpoint, model_config)
    sources = Sources(checkpoint)
    original: list[type[nn.Module]] = []

    def recording_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = get_model_classes(config=config)
        original.append(model_class)
        return _recording_class(model_class, sources), args_class

    streams = LoadingStreams()
    with streams.in_force(), failure_explained(directory), stock_folder(directory, checkpoint) as folder:
        model, config = load_model(
            folder, lazy=True, model_config=model_config, get_model_classes=recording_classes, **loading
        )
    streams.belong_to(model)
    model.__class__ = original[0]
    return LoadedModel(model, config, *sources.direct(model), streams)


@contextmanager
def failure_explained(directory: Path) -> Iterator[None]:
    """Raise an error with a hint where mlx-lm finds no tensor for a parameter, or fails for another reason."""
    try:
        yield
    except FlashError:
        raise
    except (ValueError, *UNCLEAR_ERRORS) as error:
        missing, shards = missing_parameters(error), absent_shards(directory)
        if not missing or (isinstance(error, KeyError) and not shards):
            found = shorten(str(error), 400, placeholder=" ...")
            raise CheckpointError(
                f"{directory}: mlx-lm cannot build the model ({type(error).__name__}: {found}). "
                "Hint: compare config.json with that of the repository; mlx-lm may not know this kind of model."
            ) from error
        found = f"{directory} has no tensor for {len(missing)} of the model's parameters, such as {missing[0]!r}"
        if not shards:
            raise CheckpointError(
                f"{found}. Hint: compare the folder with its repository, or download it again."
            ) from error
        raise IndexFileError(
            f"{found}: the index names {', '.join(shards[:8])}{', ...' if shards[8:] else ''} ({len(shards)} files), "
            "which are not there. Hint: the download is incomplete; start it again."
        ) from error


@contextmanager
def reads_explained(streams: LoadingStreams, directory: Path) -> Iterator[None]:
    """Raise a ReadError with a hint where MLX cannot read a file that it computes a parameter from.

    After such an error nothing of the model can be evaluated: later blocks raise it, too.
    """
    again = "Hint: check the disk, and load the model again."
    if streams.has_failed:
        raise ReadError(f"parameters of the model in {directory} could not be computed before, and are lost. {again}")
    try:
        yield
    except RuntimeError as error:
        if "Unable to read" not in str(error):
            raise
        streams.fail()
        raise ReadError(
            f"MLX cannot read a file of {directory}, or of an adapter: {error}. Hint: check the disk; "
            "`mlx-flash verify` reads every tensor, and names the one that cannot be read."
        ) from error


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


def iter_parameters(module: nn.Module) -> list[tuple[str, Any, Any, mx.array]]:
    """Every array in a module's tree, private constants included, once: (name, container, key, array)."""
    found, seen = list[tuple[str, Any, Any, mx.array]](), {id(module)}
    under_way: list[tuple[str, Any, Any]] = [("", module, iter(module.items()))]
    while under_way:
        path, container, items = under_way[-1]
        for key, value in items:
            name = f"{path}.{key}" if path else str(key)
            if isinstance(value, mx.array):
                if not isinstance(container, tuple):  # which holds it for good
                    found.append((name, container, key, value))
            elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
                seen.add(id(value))
                inner = value.items() if isinstance(value, dict) else enumerate(value)
                under_way.append((name, value, iter(inner)))
                break
        else:
            under_way.pop()
    return found


@contextmanager
def stock_folder(directory: Path, checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a folder that mlx-lm can load lazily: the model's own if nothing in it is compressed.

    In its place, shards have the headers of the compressed files, and holes for weights. The files are cut to nothing
    as soon as the model is there, so that reading from one raises an error.
    """
    if not checkpoint.is_compressed:
        yield directory
        return
    with closing(PrivateFolder(cache_directory() / "headers", "headers of compressed weights")) as private:
        paths = {shard.path.name: shard for shard in checkpoint.shards}
        for path in directory.iterdir():
            if path.name not in paths:
                (private.path / path.name).symlink_to(path.resolve())
        stand_ins = []
        for name, shard in paths.items():
            path = private.path / f"model-{name}"
            if shard.blocks is None:
                path.symlink_to(shard.path.resolve())
            else:
                places = [(r, r.offset - LOGICAL_START) for r in shard.tensors]
                tensors = {r.name: (r.dtype, r.shape, (start, start + r.nbytes)) for r, start in places}
                write_stand_in(path, tensors, shard.metadata)
                stand_ins.append(path)
        yield private.path
        for path in stand_ins:
            os.truncate(path, 0)


def write_stand_in(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int], Sequence[int]]],
    metadata: Mapping[str, str] | None,
    nbytes: int = 0,
) -> None:
    """Write a safetensors file with a hole in place of tensors: dtype, shape and data offsets by name.

    The file has at least so many bytes. Blanks in the header move the tensors to its end.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, (dtype, shape, offsets) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
    end = max((offsets[1] for _, _, offsets in tensors.values()), default=0)
    head = make_head(header, nbytes=nbytes - end)
    path.write_bytes(head)
    os.truncate(path, len(head) + end)


def whole_tensors(checkpoint: Checkpoint, records: Iterable[TensorRecord]) -> set[str]:
    """Return the names of tensors of which some records have every byte. Equal records count once.

    Parameters that mlx-lm computed may have a tensor's name. Their records are in the files of another copy.
    """
    found: dict[str, set[tuple[int, int]]] = {}
    tensors = checkpoint.tensors
    for record in records:
        if record.name in tensors and record.path == tensors[record.name].path:
            found.setdefault(record.name, set()).add((record.offset, record.nbytes))
    return {name for name, parts in found.items() if sum(nbytes for _, nbytes in parts) == tensors[name].nbytes}


def check_direct(directory: Path, checkpoint: Checkpoint, records: Iterable[TensorRecord]) -> None:
    """Check that every compressed tensor is in the records that this program reads, since mlx-lm cannot read it."""
    compressed = {record.name: record.nbytes for shard in checkpoint.shards if shard.blocks for record in shard.tensors}
    if not compressed:
        return
    if missing := sorted(compressed.keys() - whole_tensors(checkpoint, records)):
        raise CheckpointError(
            f"mlx-lm computes parameters from {missing[0]!r} of {directory} while it loads, and the tensor is "
            "compressed. Hint: pack the model without --compress, which makes an uncompressed copy of it."
        )


FORMAT = 1
"""Version of the packed copies. Copies of other versions are not used."""

State = list[list[object]]
"""Files of a checkpoint: path, size, modification time, change time, digest of the header."""


def state_of(checkpoint: Checkpoint) -> State:
    """Return a description of a checkpoint's files as they are now; changed files give another one.

    Raises: FileChangedError: one of them is gone.
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
        self._settings = _settings(self._modules)
        self._arrays = _arrays(model)

    @property
    def is_unchanged(self) -> bool:
        """Return True if modules and arrays are the same objects still, with the same settings."""
        modules, arrays = self._model.named_modules(), _arrays(self._model)
        return (
            [(path, id(module)) for path, module in modules] == [(path, id(module)) for path, module in self._modules]
            and _settings(modules) == self._settings
            and len(arrays) == len(self._arrays)
            and all(self._arrays.get(name) is array for name, array in arrays.items())
        )

    def changes(self) -> str | None:
        """Return a digest of what was changed since, the bytes of new arrays included; empty if nothing was, and None
        when more was changed than is compared.
        """
        if self.is_unchanged:
            return ""
        named, arrays = self._model.named_modules(), _arrays(self._model)
        modules = [
            (path, f"{origin}.{kind}", sorted((key, repr(value)) for key, (_, value) in plain.items()))
            for (path, _), (origin, kind, plain) in zip(named, _settings(named), strict=True)
        ]
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


def _settings(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, str, dict[str, tuple[type, object]]]]:
    """Return the classes of modules, and their plain settings, each with its type: True is not 1."""
    found = []
    for _, module in named:
        plain = dict[str, tuple[type, object]]()
        for key, value in (*vars(module).items(), *module.items()):
            if isinstance(value, _PLAIN) and key != TRAINING_FLAG:
                plain[key] = type(value), value
        found.append((type(module).__module__, type(module).__qualname__, plain))
    return found


CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapters.safetensors"

_PAIR = ("lora_a", "lora_b")
_HINT = "Hint: train or copy the adapter again."


def check_adapter(folder: Path) -> None:
    """Check the files of an adapter, but not whether it suits a model.

    Raises: CheckpointError: a file is missing, damaged or no regular file, or mlx-lm would use random numbers for a
    tensor.
    """
    try:
        config = read_object(folder / CONFIG_NAME)
    except OSError as fault:
        refuse_unreadable(folder / CONFIG_NAME, "file", fault)
    is_full = config.get("fine_tune_type") == "full"
    if not is_full:
        _check_settings(folder / CONFIG_NAME, config)
    path = folder / WEIGHTS_NAME
    names = [record.name for record in read_shard(path).tensors]
    if not is_full and (missing := next(_missing(names), None)):
        raise CheckpointError(f"{path} has no tensor {missing!r}, but its counterpart. {_HINT}")


@contextmanager
def mismatch_explained(folder: Path) -> Iterator[None]:
    """Raise a `CheckpointError` where mlx-lm cannot apply the adapter of a folder to a model."""
    try:
        yield
    except FlashError:
        raise
    except (ValueError, *UNCLEAR_ERRORS) as error:
        first, *found = [line.strip() for line in str(error).splitlines()] or [""]
        if found:  # of each tensor a line
            first = f"{found[0]} (and {len(found) - 1} other tensors)" if found[1:] else found[0]
        raise CheckpointError(
            f"{folder}: mlx-lm cannot apply this adapter ({type(error).__name__}: {first}). "
            f"Hint: compare {CONFIG_NAME}; the adapter may be another model's."
        ) from error


def _check_settings(path: Path, config: dict[str, Any]) -> None:
    if "peft_type" in config:
        raise CheckpointError(f"{path} is of an adapter of PEFT. Hint: mlx-lm takes those that mlx_lm.lora trains.")
    settings = config.get("lora_parameters")
    scale = settings.get("scale") if isinstance(settings, dict) else 1  # mlx-lm refuses other wrong settings itself
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise CheckpointError(f"{path}: scale must be a finite number, found {scale!r:.80}. {_HINT}")


def _missing(names: Iterable[str]) -> Iterator[str]:
    """Yield the absent tensors of pairs of which the other one is there."""
    found = set(names)
    for name in found:
        stem, _, leaf = name.rpartition(".")
        yield from (f"{stem}.{other}" for other in _PAIR if leaf in _PAIR and f"{stem}.{other}" not in found)
