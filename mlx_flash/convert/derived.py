"""Parameters that mlx-lm computes while loading, written once, so that they can be read like the others.

Some checkpoints hold a layer's weights in another form than the model uses: fused, transposed, or quantized in another
program's way. What ``mlx_lm`` makes of them cannot be read from the checkpoint, and would have to be in memory all the
time. So it is evaluated once, parameter by parameter, and written to a packed copy in the cache folder. From
there it is streamed.

A copy is good for one state of the checkpoint, the configuration, and the code: its name is a digest of all of them.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_flash.compat.arrays import memory_of
from mlx_flash.config import GB
from mlx_flash.convert.pack import MOST_NOTE_BYTES, NOTE_NAME, Progress, Rewrite, TensorSpec, cut, plan_shards
from mlx_flash.files import (
    PARTIAL_SUFFIX,
    HeldLock,
    cache_directory,
    free_bytes,
    free_floor,
    is_held,
    make_private,
    read_json_object,
    remove_unheld,
    write_errors,
)
from mlx_flash.forks import finalize
from mlx_flash.layout.load import LoadedModel, fingerprint_of, iter_parameters, model_name, reads_explained, state_of
from mlx_flash.layout.parts import bind
from mlx_flash.logs import log
from mlx_flash.storage.safetensors import Checkpoint, TensorRecord

_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.complex64: "C64",
}


@dataclass(slots=True, eq=False)
class DerivedParameter:
    """A parameter that was computed, at every place (container, key) of the model. It is not evaluated."""

    array: mx.array
    places: list[tuple[Any, Any]]
    spec: TensorSpec

    def bind(self, array: mx.array) -> None:
        for container, key in self.places:
            bind(container, key, array)


def derived_parameters(loaded: LoadedModel) -> list[DerivedParameter]:
    """Return the parameters that were computed from tensors of the checkpoint, in the order of the module tree.

    Constants that a module makes for itself, such as RoPE frequencies, are private to it and none of them: mlx-lm loads
    weights into what ``parameters()`` names.
    """
    named = {id(array) for _, array in cast(Any, tree_flatten(loaded.model.parameters()))}
    found: dict[int, DerivedParameter] = {}
    for name, container, key, array in iter_parameters(loaded.model):
        if id(array) in loaded.sources or id(array) not in named or not array.nbytes:
            continue
        if array.dtype in _DTYPES:
            spec = TensorSpec(name, _DTYPES[array.dtype], tuple(array.shape))
            parameter = found.setdefault(id(array), DerivedParameter(array, [], spec))
            parameter.places.append((container, key))
    return list(found.values())


COPY_HINT = "or set derived_cache_gb=0"
"""Ends the hints of errors when a copy cannot be written."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A packed copy on disk. Times are in seconds since 1970; ``source`` is empty when it cannot be read."""

    folder: Path
    source: str
    model: str
    nbytes: int
    last_used: float
    is_complete: bool

    @property
    def fingerprint(self) -> str:
        return self.folder.name.removesuffix(PARTIAL_SUFFIX)


def derived_directory() -> Path:
    """Return the folder of all copies; it need not exist."""
    return cache_directory() / "derived"


def list_copies() -> list[Copy]:
    """Return all copies, interrupted ones too, the one used last first."""
    try:
        folders = [path for path in derived_directory().iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(map(_look_at, folders), key=lambda copy: copy.last_used, reverse=True)


def _look_at(folder: Path) -> Copy:
    note = read_json_object(folder / NOTE_NAME, MOST_NOTE_BYTES)
    about: dict[str, Any] = {key: note.get(key, "") for key in ("source", "model")}
    nbytes, last_used = 0, 0.0
    with suppress(OSError):  # it is being removed
        nbytes = sum(path.stat().st_size for path in folder.iterdir())
        last_used = (folder / NOTE_NAME).stat().st_mtime
    is_complete = "files" in note and not folder.name.endswith(PARTIAL_SUFFIX)
    return Copy(folder, nbytes=nbytes, last_used=last_used, is_complete=is_complete, **about)


def remove(copy: Copy) -> bool:
    """Remove a copy, unless a process holds it. Return True if it is gone."""
    with copy_errors(copy.folder):
        return remove_unheld(copy.folder)


def make_room(needed: int, source: str, fingerprint: str, limit: int | None, *, removes: bool = True) -> bool:
    """Remove other copies until there is room for more bytes of a copy; none when that would not be enough.

    Those of the same source, which are of no use any more, go first, then those used longest ago. The copy itself and
    its beginning stay. ``limit`` is that of all copies; None leaves a tenth of the disk free. Return whether there is
    room.
    """
    copies, folder = list_copies(), derived_directory()
    room = free_bytes(folder) - (free_floor(folder) if limit is None else 0)
    if limit is not None:
        room = min(room, limit - sum(copy.nbytes for copy in copies))
    others = [copy for copy in copies if copy.fingerprint != fingerprint and not is_held(copy.folder, required=False)]
    excess = needed - room
    if excess > sum(copy.nbytes for copy in others) or not removes:
        return excess <= sum(copy.nbytes for copy in others)
    for copy in sorted(others, key=lambda copy: (copy.source != source, copy.last_used)):
        if excess > 0 and remove(copy):
            log.info("removed %s, the packed copy of %s, to make room", copy.folder, copy.source)
            excess -= copy.nbytes
    return excess <= 0


def copy_errors(path: Path) -> AbstractContextManager[None]:
    """Turn the system's errors while a copy is written into ours."""
    return write_errors(f"cannot write {path}", COPY_HINT)


LEAST_BYTES = 32_000_000
"""Derived parameters that take less, all together, are computed anew each time, and stay in memory."""

SHARD_BYTES = 2 * 10**9
"""Size of a copy's file, unless one layer is larger. An interrupted run goes on at the start of a file."""


def adopt_derived(
    loaded: LoadedModel,
    load: Callable[[], LoadedModel],
    checkpoint: Checkpoint,
    directory: Path,
    limit_gb: float | None = None,
    progress: Progress | None = None,
    *,
    write: bool = True,
) -> None:
    """Give derived parameters a place on disk to be read from: they become direct ones. Raises: FlashError.

    Nothing is done when they are small all together, or the limit is 0. Where there is no room for a copy they stay as
    they are, and a warning says so. After an error the model is as it was. ``load`` loads the model once more: what a
    copy is computed from belongs to that model, and is dropped with it.

    Without ``write``, for a plan, nothing is written or removed: where there is no copy, parameters count as direct
    ones of the copy that would be made. The model must not be called then.
    """
    derived = derived_parameters(loaded)
    total = sum(parameter.spec.nbytes for parameter in derived)
    if limit_gb == 0 or not derived or total < LEAST_BYTES:
        return
    copying = _Copying(loaded, checkpoint, os.path.realpath(directory), derived, limit_gb)
    if (held := copying.use()) is not None or (write and (held := copying.make(load, progress)) is not None):
        finalize(loaded.model, held.release)
        with loaded.streams.in_force():
            copying.adopt()
    elif not write:
        copying.assume()


class _Copying:
    """The copy for a model as it was loaded, used or made."""

    def __init__(
        self,
        loaded: LoadedModel,
        checkpoint: Checkpoint,
        source: str,
        derived: Sequence[DerivedParameter],
        limit_gb: float | None,
    ) -> None:
        self._loaded, self._checkpoint, self._source, self._limit_gb = loaded, checkpoint, source, limit_gb
        state = state_of(checkpoint)
        self._fingerprint = fingerprint_of(loaded, state)
        self._parameters = {parameter.spec.name: parameter for parameter in derived}
        self._folder = derived_directory() / self._fingerprint
        layers = groupby((parameter.spec for parameter in derived), lambda spec: _layer_of(spec.name))
        metadata = {"format": "mlx", "fingerprint": self._fingerprint}
        groups = [[*group] for _, group in layers]
        self._shards = plan_shards(groups, SHARD_BYTES, metadata, "model-{number:05}.safetensors")
        about = {"source": source, "model": model_name(source)}
        self._rewrite = Rewrite(self._folder, self._shards, checkpoint, state, about, 0o700, COPY_HINT)

    def use(self) -> HeldLock | None:
        try:
            held = HeldLock(self._folder, shared=True, required=False)  # keeps it from being removed
        except (FileNotFoundError, NotADirectoryError):
            return None
        if self._rewrite.is_whole():
            with suppress(OSError):  # another user's, or a disk that cannot be written: it is only removed earlier
                os.utime(self._folder / NOTE_NAME)  # the copy used last
            return held
        held.release()
        return None

    def make(self, load: Callable[[], LoadedModel], progress: Progress | None) -> HeldLock | None:
        """Make the copy, or what is left of it, and hold it. Return None when there is no room."""
        with copy_errors(self._folder):
            make_private(derived_directory())
        busy = partial(log.warning, "another process computes the same parameters: waiting for it (%s)")
        while (held := self.use()) is None:  # another process may remove a copy before it is held
            with self._rewrite.locked(partial(busy, self._rewrite.partial)):
                if (held := self.use()) is not None:
                    return held  # another process was faster
                if not self._has_room():
                    return None
                self._write(load, progress)
        return held

    def _write(self, load: Callable[[], LoadedModel], progress: Progress | None) -> None:
        self._rewrite.clear()
        missing = {tensor for shard in self._rewrite.missing for tensor in shard.tensors}
        other = load()
        arrays = {p.spec.name: p.array for p in derived_parameters(other) if p.spec in missing}
        streams = other.streams
        del other
        gc.collect()  # the rest of that model, which is in cycles
        with reads_explained(streams, self._checkpoint.directory):
            self._rewrite.write(lambda tensor: compute(tensor, arrays), progress)
        self._rewrite.finish(keeps_note=True)
        for copy in list_copies():  # of what the source was before, and of no known source
            if copy.source in (self._source, "") and copy.fingerprint != self._fingerprint:
                remove(copy)

    def assume(self) -> None:
        if not self._has_room(removes=False):
            return
        for shard in self._shards:
            for record in shard.records(self._folder):
                self._note(self._parameters[record.name].array, record)

    def adopt(self) -> None:
        for shard in self._shards:
            arrays = cast(dict[str, mx.array], mx.load(str(self._folder / shard.name)))
            for record in shard.records(self._folder):
                self._parameters[record.name].bind(arrays[record.name])
                self._note(arrays[record.name], record)

    def _note(self, array: mx.array, record: TensorRecord) -> None:
        self._loaded.sources[id(array)] = (record,)
        self._loaded.keep_alive.append(array)

    def _has_room(self, *, removes: bool = True) -> bool:
        """Return the result of :func:`make_room` for the rest of the copy. A warning says when there is none."""
        limit = None if self._limit_gb is None else round(self._limit_gb * GB)
        if make_room(self._rewrite.missing_bytes, self._source, self._fingerprint, limit, removes=removes):
            return True
        log.warning(
            "%.2f GB of the parameters of %s are computed while loading and stay in memory: there is no room to write "
            "%.2f GB to %s (%s). Hint: mlx-flash cache list shows what is there.",
            self._rewrite.nbytes / GB,
            self._source,
            self._rewrite.missing_bytes / GB,
            derived_directory(),
            "a tenth of its disk is to stay free" if limit is None else f"derived_cache_gb is {self._limit_gb:g}",
        )
        return False


def _layer_of(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def compute(tensor: TensorSpec, arrays: dict[str, mx.array]) -> Iterator[memoryview]:
    """Take an array, evaluate it, yield its bytes, and drop it."""
    array = mx.contiguous(arrays.pop(tensor.name))
    mx.eval(array)
    yield from cut(memory_of(array))
    del array
    mx.clear_cache()  # the next one may be of another size
