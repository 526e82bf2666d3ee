"""Parameters that mlx-lm computes while loading, written once, so that they can be read like the others.

Some checkpoints hold a layer's weights in another form than the model uses: fused, transposed, or quantized in another
program's way. What ``mlx_lm`` makes of them cannot be read from the checkpoint, and would have to be in memory all the
time. So it is evaluated once, parameter by parameter, and written to a packed copy in the cache folder
(:mod:`~mlx_flash.convert.copies`). From there it is streamed.

A copy is good for one state of the checkpoint, the configuration, and the code: its name is a digest of all of them.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import cast

import mlx.core as mx

from mlx_flash.compat.arrays import memory_of
from mlx_flash.config import GB
from mlx_flash.convert.copies import (
    COPY_HINT,
    Room,
    copy_errors,
    derived_directory,
    discard,
    hold,
    note_use,
    read_manifest,
    remove_older,
    write_manifest,
)
from mlx_flash.convert.parameters import DerivedParameter, derived_parameters
from mlx_flash.convert.rewrite import Progress, Rewrite, plan_shards
from mlx_flash.convert.writer import TensorSpec, cut
from mlx_flash.files import make_private
from mlx_flash.layout.fingerprint import fingerprint_of, state_of, versions
from mlx_flash.layout.load import LoadedModel, model_name, reads_explained
from mlx_flash.storage.safetensors import Checkpoint, TensorRecord

LEAST_BYTES = 32_000_000
"""Derived parameters that take less, all together, are computed anew each time, and stay in memory."""

SHARD_BYTES = 2 * 10**9
"""Size of a copy's file, unless one layer is larger. An interrupted run goes on at the start of a file."""

_log = logging.getLogger("mlx_flash")


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
    """Give derived parameters a place on disk to be read from: they become direct ones.

    Nothing is done when they are small all together. Where there is no room for a copy they stay as they are, and a
    warning says so. After an error the model is as it was.

    Args:
        loaded: the model; changed in place.
        load: loads it once more. What a copy is computed from belongs to that model, and is dropped with it.
        checkpoint: the files of both.
        directory: the model directory.
        limit_gb: size of all copies together, in decimal GB; older ones are removed to keep it. None leaves a tenth of
            the disk free; 0 does nothing at all.
        progress: called while they are written and read back.
        write: False, for a plan, writes and removes nothing: where there is no copy, parameters count as direct ones
            of the copy that would be made. The model must not be called then.

    Raises:
        FileChangedError: the checkpoint changed meanwhile.
        WriteError: the copy cannot be written.
    """
    derived = derived_parameters(loaded)
    total = sum(parameter.spec.nbytes for parameter in derived)
    if limit_gb == 0 or not derived or total < LEAST_BYTES:
        return
    copying = _Copying(loaded, checkpoint, os.path.realpath(directory), derived, limit_gb)
    if (held := copying.use()) is not None or (write and (held := copying.make(load, progress)) is not None):
        weakref.finalize(loaded.model, os.close, held)
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
        self._rewrite = Rewrite(self._folder, self._shards, checkpoint, state, 0o700, COPY_HINT)

    def use(self) -> int | None:
        """Hold the copy if it is complete and unchanged. Return the descriptor, or None."""
        held = hold(self._folder)
        if held is None:
            return None
        files, shards = read_manifest(self._folder).get("files"), self._shards
        if files == self._stamps(self._folder) and all(shard.is_written(self._folder) for shard in shards):
            note_use(self._folder)
            return held
        os.close(held)
        return None

    def make(self, load: Callable[[], LoadedModel], progress: Progress | None) -> int | None:
        """Make the copy, or what is left of it, and hold it. Return None when there is no room."""
        with copy_errors(self._folder):
            make_private(derived_directory())
        while (held := self.use()) is None:  # another process may remove a copy before it is held
            with self._rewrite.locked(self._tell_busy):
                if (held := self.use()) is not None:
                    return held  # another process was faster
                if not self._room().make(self._source):
                    self._tell_no_room()
                    return None
                self._write(load, progress)
        return held

    def _write(self, load: Callable[[], LoadedModel], progress: Progress | None) -> None:
        partial = self._rewrite.partial
        self._rewrite.clear()
        name = model_name(self._source)
        manifest = {"source": self._source, "model": name, "versions": versions(), "created": time.time()}
        write_manifest(partial, manifest)
        missing = {tensor for shard in self._rewrite.missing for tensor in shard.tensors}
        other = load()
        arrays = {p.spec.name: p.array for p in derived_parameters(other) if p.spec in missing}
        streams, sources = other.streams, other.sources
        del other
        gc.collect()  # the rest of that model, which is in cycles
        with reads_explained(streams, sources, self._checkpoint):
            self._rewrite.write(lambda tensor: compute(tensor, arrays), progress)
        write_manifest(partial, {**manifest, "files": self._stamps(partial)})
        if self._folder.exists():
            discard(self._folder)  # damaged
        self._rewrite.finish()
        remove_older(self._source, self._fingerprint)

    def assume(self) -> None:
        """Treat the copy as made, if there is room for it."""
        if not self._room().is_enough():
            self._tell_no_room()
            return
        for shard in self._shards:
            for record in shard.records(self._folder):
                self._note(self._parameters[record.name].array, record)

    def adopt(self) -> None:
        """Bind the lazily loaded arrays of the copy."""
        for shard in self._shards:
            arrays = cast(dict[str, mx.array], mx.load(str(self._folder / shard.name)))
            for record in shard.records(self._folder):
                self._parameters[record.name].bind(arrays[record.name])
                self._note(arrays[record.name], record)

    def _note(self, array: mx.array, record: TensorRecord) -> None:
        self._loaded.sources[id(array)] = (record,)
        self._loaded.keep_alive.append(array)

    def _room(self) -> Room:
        limit = None if self._limit_gb is None else round(self._limit_gb * GB)
        return Room(self._rewrite.missing_bytes, self._fingerprint, limit)

    def _stamps(self, folder: Path) -> dict[str, list[int]]:
        """Return size and time of each file, by which a change is found out; empty when one is missing."""
        try:
            found = {shard.name: (folder / shard.name).stat() for shard in self._shards}
        except FileNotFoundError:
            return {}
        return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}

    def _tell_busy(self) -> None:
        _log.warning("another process computes the same parameters: waiting for it (%s)", self._rewrite.partial)

    def _tell_no_room(self) -> None:
        limit = self._limit_gb
        _log.warning(
            "%.2f GB of the parameters of %s are computed while loading and stay in memory: there is no room to write "
            "%.2f GB to %s (%s). Hint: mlx-flash cache list shows what is there.",
            self._rewrite.nbytes / GB,
            self._source,
            self._rewrite.missing_bytes / GB,
            derived_directory(),
            "a tenth of its disk is to stay free" if limit is None else f"derived_cache_gb is {limit:g}",
        )


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
