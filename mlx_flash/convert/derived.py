"""Parameters that mlx-lm computes while loading, written once, so that they can be read like the others.

Some checkpoints hold a layer's weights in another form than the model uses: fused, transposed, or quantized in another
program's way. What ``mlx_lm`` makes of them cannot be read from the checkpoint, and would have to be in memory all the
time. So it is evaluated once, parameter by parameter, and written to a packed copy in the cache folder
(:mod:`~mlx_flash.convert.copies`). From there it is streamed.

A copy is good for one state of the checkpoint, the configuration, and the code: its name is a digest of all of them.
"""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import cast

import mlx.core as mx

from mlx_flash.compat.arrays import memory_of
from mlx_flash.config import GB
from mlx_flash.convert.copies import (
    Room,
    copy_errors,
    derived_directory,
    discard,
    hold,
    note_use,
    only_one,
    read_manifest,
    remove_older,
    write_manifest,
)
from mlx_flash.convert.parameters import DerivedParameter, derived_parameters, renew
from mlx_flash.convert.writer import ByteCounter, ShardPlan, ShardWriter, aligned_order
from mlx_flash.errors import FileChangedError
from mlx_flash.files import PARTIAL_SUFFIX, rename_durably
from mlx_flash.layout.fingerprint import fingerprint_of, state_of, versions
from mlx_flash.layout.load import LoadedModel, model_name
from mlx_flash.storage.safetensors import Checkpoint, Extent, TensorRecord

LEAST_BYTES = 32_000_000
"""Derived parameters that take less, all together, are computed anew each time, and stay in memory."""

SHARD_BYTES = 2 * 10**9
"""A file of a copy ends after the layer that makes it this large. An interrupted run is taken up at a file's start."""

Progress = Callable[[int, int], object]

_log = logging.getLogger("mlx_flash")


@dataclass(frozen=True, slots=True)
class _Shard(ShardPlan):
    parameters: list[DerivedParameter]

    def parameter(self, name: str) -> DerivedParameter:
        return next(parameter for parameter in self.parameters if parameter.name == name)

    def records(self, folder: Path) -> dict[str, TensorRecord]:
        """Places of its parameters, written or not."""
        sizes = [tensor.nbytes for tensor in self.tensors]
        starts = accumulate(sizes, initial=len(self.head))
        extents = [Extent(folder / self.name, start, nbytes) for start, nbytes in zip(starts, sizes, strict=False)]
        return {
            tensor.name: TensorRecord(tensor.name, tensor.dtype, tensor.shape, extent)
            for tensor, extent in zip(self.tensors, extents, strict=True)
        }


def adopt_derived(
    loaded: LoadedModel,
    checkpoint: Checkpoint,
    directory: Path,
    limit_gb: float | None = None,
    progress: Progress | None = None,
    *,
    write: bool = True,
    share: str = "",
) -> None:
    """Give derived parameters a place on disk to be read from: they become direct ones.

    Nothing is done when they are small all together. Where there is no room for a copy they stay as they are, and a
    warning says so.

    Args:
        loaded: the model; changed in place. After an error it must not be used.
        checkpoint: what it was loaded from.
        directory: the model directory.
        limit_gb: size of all copies together, in decimal GB; older ones are removed to keep it. None leaves a tenth of
            the disk free; 0 does nothing at all.
        progress: called with (bytes written, bytes to write).
        write: False, for a plan, writes and removes nothing: where there is no copy, parameters count as direct ones
            of the copy that would be made. The model must not be called then.
        share: name of the part that this is of a model that several ranks share.

    Raises:
        FileChangedError: the checkpoint changed meanwhile.
        WriteError: the copy cannot be written.
    """
    derived = derived_parameters(loaded)
    total = sum(parameter.spec.nbytes for parameter in derived)
    if limit_gb == 0 or not derived or total < LEAST_BYTES:
        return
    copying = _Copying(loaded, checkpoint, os.path.realpath(directory), derived, share)
    held = copying.use()
    if held is None and not write:
        copying.assume(limit_gb)
        return
    if held is None:
        held = copying.make(limit_gb, progress or (lambda done, total: None))
    if held is not None:
        weakref.finalize(loaded.model, os.close, held)
        copying.adopt()


def _shards(derived: Sequence[DerivedParameter], fingerprint: str) -> list[_Shard]:
    parts: list[list[DerivedParameter]] = [[]]
    size = 0
    for _, group in groupby(derived, lambda parameter: _layer_of(parameter.name)):
        layer = list(group)
        if size >= SHARD_BYTES:
            parts.append([])
            size = 0
        parts[-1] += layer
        size += sum(parameter.spec.nbytes for parameter in layer)
    metadata = {"format": "mlx", "fingerprint": fingerprint}
    return [
        _Shard(f"model-{i:05}.safetensors", aligned_order([p.spec for p in part]), metadata, part)
        for i, part in enumerate(parts, 1)
    ]


def _layer_of(name: str) -> str:
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


class _Copying:
    """The copy for a model as it was loaded, used or made."""

    def __init__(
        self, loaded: LoadedModel, checkpoint: Checkpoint, source: str, derived: Sequence[DerivedParameter], share: str
    ) -> None:
        self._loaded = loaded
        self._checkpoint = checkpoint
        self._source = source
        self._state = state_of(checkpoint)
        self._fingerprint = fingerprint_of(loaded, self._state) + share
        self.folder = derived_directory() / self._fingerprint
        self._partial = self.folder.with_name(self.folder.name + PARTIAL_SUFFIX)
        self.shards = _shards(derived, self._fingerprint)

    def use(self) -> int | None:
        """Holds a copy that is complete and unchanged; None when there is none."""
        held = hold(self.folder)
        if held is None:
            return None
        files = read_manifest(self.folder).get("files")
        if files == self._stamps(self.folder) and all(shard.is_written(self.folder) for shard in self.shards):
            note_use(self.folder)
            return held
        os.close(held)
        return None

    def make(self, limit_gb: float | None, progress: Progress) -> int | None:
        """Make the copy, or what is left of it, and hold it; None when there is no room."""
        with only_one(self._fingerprint):
            if (held := self.use()) is not None:
                return held  # another process was faster
            if self._room(limit_gb).make(self._source):
                return self._make(progress)
        self._tell_no_room(limit_gb)
        return None

    def assume(self, limit_gb: float | None) -> None:
        """Treat the copy as made, if there is room for it."""
        if not self._room(limit_gb).is_enough():
            self._tell_no_room(limit_gb)
            return
        for shard in self.shards:
            for name, record in shard.records(self.folder).items():
                self._note(shard.parameter(name).array, record)

    def adopt(self) -> None:
        """Binds the lazily loaded arrays of the copy."""
        for shard in self.shards:
            arrays = cast(dict[str, mx.array], mx.load(str(self.folder / shard.name)))
            for name, record in shard.records(self.folder).items():
                shard.parameter(name).bind(arrays[name])
                self._note(arrays[name], record)

    def _note(self, array: mx.array | None, record: TensorRecord) -> None:
        assert array is not None
        self._loaded.sources[id(array)] = (record,)
        self._loaded.keep_alive.append(array)

    def _room(self, limit_gb: float | None) -> Room:
        limit = None if limit_gb is None else round(limit_gb * GB)
        return Room(self._needed(), self._fingerprint, limit)

    def _needed(self) -> int:
        return sum(shard.nbytes for shard in self.shards if not shard.is_written(self._partial))

    def _make(self, progress: Progress) -> int:
        if self.folder.exists():
            discard(self.folder)  # damaged
        held = None
        while held is None:  # another process may remove a folder that has no manifest yet
            with copy_errors(self._partial):
                self._partial.mkdir(mode=0o700, exist_ok=True)
            held = hold(self._partial)
        try:
            name = model_name(self._source)
            manifest = {"source": self._source, "model": name, "versions": versions(), "created": time.time()}
            write_manifest(self._partial, manifest)
            self._write(progress)
            write_manifest(self._partial, {**manifest, "files": self._stamps(self._partial)})
            with copy_errors(self.folder):
                rename_durably(self._partial, self.folder)
            remove_older(self._source, self._fingerprint)
        except BaseException:
            os.close(held)
            raise
        return held

    def _write(self, progress: Progress) -> None:
        total = sum(shard.nbytes for shard in self.shards)
        left = [shard for shard in self.shards if not shard.is_written(self._partial)]
        counter = ByteCounter(total, progress)
        counter.add(total - sum(shard.nbytes for shard in left))
        renew(self._loaded, self._checkpoint)
        for shard in self.shards:
            for parameter in shard.parameters if shard not in left else ():
                parameter.let_go()
        for shard in left:
            with ShardWriter(self._partial / shard.name, shard.tensors, shard.metadata, progress=counter.add) as writer:
                for tensor in shard.tensors:
                    write_parameter(writer, shard.parameter(tensor.name))
                self._check_source()

    def _check_source(self) -> None:
        if state_of(self._checkpoint) != self._state:
            raise FileChangedError(
                f"the files of {self._checkpoint.directory} changed while parameters were computed from them. "
                "Hint: start it again."
            )

    def _stamps(self, folder: Path) -> dict[str, list[int]]:
        """Size and time of each file, by which a change is found out; empty when one is missing."""
        try:
            found = {shard.name: (folder / shard.name).stat() for shard in self.shards}
        except FileNotFoundError:
            return {}
        return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}

    def _tell_no_room(self, limit_gb: float | None) -> None:
        _log.warning(
            "%.2f GB of the parameters of %s are computed while loading and stay in memory: there is no room to write "
            "%.2f GB to %s (%s). Hint: mlx-flash cache list shows what is there.",
            sum(shard.nbytes for shard in self.shards) / GB,
            self._source,
            self._needed() / GB,
            derived_directory(),
            "a tenth of its disk is to stay free" if limit_gb is None else f"derived_cache_gb is {limit_gb:g}",
        )


def write_parameter(writer: ShardWriter, parameter: DerivedParameter) -> None:
    """Evaluates a parameter, writes it, and lets it go."""
    array = mx.contiguous(parameter.let_go())
    mx.eval(array)
    writer.write(parameter.name, memory_of(array))
    del array
    mx.clear_cache()  # the next one may be of another size
