"""A checkpoint's tensors written again to another folder, whole or not at all.

Everything is written to ``<target>.partial``, which its writer locks and renames at the end. A run that was interrupted
is resumed at the first shard that is not complete, if the checkpoint's files are still the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from mlx_flash.convert.writer import Pieces, ShardPlan, TensorSpec, aligned_order, write_errors
from mlx_flash.errors import FileChangedError
from mlx_flash.files import PARTIAL_SUFFIX, open_locked, rename_durably
from mlx_flash.layout.fingerprint import State, state_of
from mlx_flash.storage.safetensors import Checkpoint

STATE_NAME = ".mlx-flash-pack.json"
"""In the partial folder: the files that its shards come from."""

Progress = Callable[[int, int], object]


class PlannedFile(Protocol):
    """A file of a copy that is to be written, such as a :class:`ShardPlan`."""

    @property
    def name(self) -> str:
        """Name of the file."""

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Its tensors in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""

    def is_written(self, folder: Path) -> bool:
        """Return True if the file is complete in a folder."""

    def write(
        self, folder: Path, pieces: Pieces, progress: Callable[[int], object], check: Callable[[], object]
    ) -> None:
        """Write the file, as :meth:`ShardPlan.write` does."""


def plan_shards(
    groups: Sequence[Sequence[TensorSpec]], shard_bytes: int, metadata: dict[str, str] | None, name: str
) -> list[ShardPlan]:
    """Divide tensors, in order, among shards of at most ``shard_bytes``. A group stays whole, and may be larger.

    Names of shards are made with ``name``, a format of ``number``, from 1, and ``count``.
    """
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(tensor.nbytes for tensor in group)
        if size and size + nbytes > shard_bytes:
            parts.append([])
            size = 0
        parts[-1] += group
        size += nbytes
    names = (name.format(number=number, count=len(parts)) for number in range(1, len(parts) + 1))
    return [ShardPlan(name, aligned_order(part), metadata) for name, part in zip(names, parts, strict=True)]


def counting(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Return a function that counts bytes, and reports the sum of all calls."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return count


class Rewrite:
    """A folder of shards that are made from a checkpoint.

    Args:
        target: the folder.
        shards: its files.
        checkpoint: the source.
        state: of the source when it was read.
        mode: permissions of the folder, less the umask.
        hint: ends the hints of errors when something cannot be written.
    """

    def __init__(
        self,
        target: Path,
        shards: Sequence[PlannedFile],
        checkpoint: Checkpoint,
        state: State,
        mode: int = 0o777,
        hint: str = "then start it again",
    ) -> None:
        self.target, self.shards = target, shards
        self.partial = target.with_name(f"{target.name}{PARTIAL_SUFFIX}")
        self.nbytes = sum(shard.nbytes for shard in shards)
        self._checkpoint, self._state = checkpoint, state
        self._mode, self._hint = mode, hint
        self._is_renamed = False

    @contextmanager
    def locked(self, busy: Callable[[], object]) -> Iterator[None]:
        """Make the partial folder, and keep other runs out of it. Call ``busy`` before waiting for another run."""
        with write_errors(f"cannot make {self.partial}", self._hint):
            fd = self._lock(busy)
        try:
            yield
        finally:
            if not self._is_renamed:
                with suppress(OSError):  # not empty: the next run goes on
                    self.partial.rmdir()
            os.close(fd)

    def _lock(self, busy: Callable[[], object]) -> int:
        wait = False
        while True:
            self.partial.mkdir(mode=self._mode, parents=True, exist_ok=True)
            try:
                return open_locked(self.partial, wait=wait, required=False)
            except BlockingIOError:
                busy()
                wait = True
            except FileNotFoundError:
                pass  # the other run has renamed or removed it

    def clear(self) -> None:
        """Empty the partial folder, but for complete shards of an earlier run from the same source."""
        note = self.partial / STATE_NAME
        state = json.dumps(self._state, indent=1)
        with write_errors(f"cannot empty {self.partial}", self._hint):
            is_same = note.exists() and note.read_text() == state
            keep = {shard.name for shard in self.shards if is_same}
            for entry in self.partial.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in keep and entry != note:
                    entry.unlink()
        write_text(note, state)

    @property
    def missing(self) -> list[PlannedFile]:
        """Shards that are not complete yet."""
        return [shard for shard in self.shards if not shard.is_written(self.partial)]

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be written."""
        return sum(shard.nbytes for shard in self.missing)

    def write(self, pieces: Pieces, count: Callable[[int], object]) -> None:
        """Write the missing shards. Raise FileChangedError if the checkpoint's files are not those that were read."""
        count(self.nbytes - self.missing_bytes)
        for shard in self.missing:
            shard.write(self.partial, pieces, count, self._check_source)

    def _check_source(self) -> None:
        if state_of(self._checkpoint) != self._state:
            raise FileChangedError(
                f"the files of {self._checkpoint.directory} changed while they were copied. Hint: start it again."
            )

    def finish(self) -> None:
        """Give the folder its name."""
        with write_errors(f"cannot rename {self.partial} to {self.target}", self._hint):
            rename_durably(self.partial, self.target)
            self._is_renamed = True
            (self.target / STATE_NAME).unlink()


def write_text(path: Path, text: str) -> None:
    """Write a file of a partial folder to the disk."""
    with write_errors(f"cannot write {path}"), path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
