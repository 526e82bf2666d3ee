"""Files that change while the model runs: every change ends the run with an error that names tensor and file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from mlx_flash.errors import FileChangedError, TruncatedFileError
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, SourceFile
from reading import PAGE, Load, descriptors, packed, write_file

NBYTES = 500_123
SIZES = [100_000, 200_000, NBYTES - 2 * PAGE - 300_000]
LONG_AGO = 1_000_000_000

Change = Callable[[Path], object]


MODES = pytest.mark.parametrize("mode", ["direct", "buffered", "kept"])


@contextmanager
def reading(folder: Path, mode: str) -> Iterator[tuple[Path, Load, BackgroundPrefetcher]]:
    """A file, its tensors, and a reader that has read them."""
    folder.mkdir()
    shard = write_file(folder / "shard", NBYTES)
    os.utime(shard, (LONG_AGO, LONG_AGO))
    load, before = Load(packed(shard, 2 * PAGE, SIZES)), descriptors()
    with closing(BackgroundPrefetcher([shard], direct=mode != "buffered", read_size=64 << 10)) as reader:
        load.check(reader, mode)
        shard.read_bytes()  # neither this nor looking is a change
        list(folder.iterdir())
        load.check(reader, mode)
        yield shard, load, reader
    assert descriptors() == before


def check_fails(reader: BackgroundPrefetcher, load: Load, mode: str, error: type[Exception], match: str) -> None:
    """Fails again and again, and uses up nothing."""
    num_open = descriptors()
    for _ in range(3):
        with pytest.raises(error, match=match) as caught:
            load.check(reader, mode)
        assert type(caught.value) is error
        assert "'shard." in str(caught.value)
        assert str(load.records[0].path) in str(caught.value)
        assert "Hint: " in str(caught.value)
    assert descriptors() == num_open


def overwrite_and_set_times_back(shard: Path) -> None:
    status = shard.stat()
    shard.write_bytes(np.random.default_rng(9).bytes(NBYTES))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_over(shard: Path, flips: bool = False) -> None:
    data, copy = bytearray(shard.read_bytes()), shard.with_name("copy")
    data[NBYTES // 2] ^= flips
    copy.write_bytes(data)
    os.utime(copy, (LONG_AGO, LONG_AGO))
    copy.replace(shard)


def replace_by_a_shorter_one(shard: Path) -> None:
    shard.unlink()
    write_file(shard, 1000)


def grow(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"more")


OTHER, SHORTER = "replaced by another one", "was truncated since the model was loaded, from {} to {} bytes"
CHANGES: list[tuple[Change, type[Exception], str]] = [
    (lambda shard: os.truncate(shard, 0), TruncatedFileError, SHORTER.format(NBYTES, 0)),
    (lambda shard: os.truncate(shard, NBYTES - 1), TruncatedFileError, SHORTER.format(NBYTES, NBYTES - 1)),
    (replace_by_a_shorter_one, TruncatedFileError, SHORTER.format(NBYTES, 1000)),
    (Path.unlink, FileChangedError, os.strerror(errno.ENOENT)),
    (lambda shard: copy_over(shard, flips=True), FileChangedError, "other inode, change time"),
    (overwrite_and_set_times_back, FileChangedError, "other change time"),
    (grow, FileChangedError, "other size, modification time, change time"),
    # The bytes may be the same, but nothing except a comparison of all of them could tell.
    *((change, FileChangedError, OTHER) for change in (Path.touch, copy_over)),
    (lambda shard: shard.with_name("link").hardlink_to(shard), FileChangedError, OTHER),
]


@MODES
def test_every_change_is_an_error_and_writing_the_bytes_back_another(tmp_path: Path, mode: str) -> None:
    """Also where all bytes of the tensors that are read come: the file is not to be trusted any more."""
    for number, (change, error, words) in enumerate(CHANGES):
        with reading(tmp_path / str(number), mode) as (shard, load, reader):
            whole, first = shard.read_bytes(), Load(load.records[:1])
            change(shard)
            for each in (load, first):
                check_fails(reader, each, mode, error, words)
            shard.write_bytes(whole)
            check_fails(reader, load, mode, FileChangedError, OTHER)


# --- several files ---------------------------------------------------------------------


@MODES
def test_only_one_of_several_files_changes(tmp_path: Path, mode: str) -> None:
    shards = [write_file(tmp_path / name, NBYTES, seed) for seed, name in enumerate(("shard", "second", "third"))]
    loads = [Load(packed(path, 2 * PAGE, SIZES)) for path in shards]
    everything = Load([record for load in loads for record in load.records])
    reader = BackgroundPrefetcher(shards, direct=mode != "buffered", read_size=64 << 10)
    away = tmp_path / "away"
    shards[1].rename(away)
    for _ in range(2):
        loads[0].check(reader, mode)
        for load in (loads[1], everything):
            with pytest.raises(FileChangedError, match=r"'second\.0' from .*/second: "):
                load.check(reader, mode)
        loads[2].check(reader, mode)
    away.rename(shards[1])
    with pytest.raises(FileChangedError, match=r"'second\.0' from .*/second: "):
        everything.check(reader, mode)
    loads[0].check(reader, mode)
    reader.close()


# --- the file by itself ----------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("function", ["open", "preadv"])
def test_file_system_without_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, function: str
) -> None:
    """Some refuse the flag, some the reads."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no O_DIRECT on this system")
    shard = write_file(tmp_path / "shard", NBYTES)
    before = descriptors()
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    def refuse_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse if function == "open" else refuse_read)
        file = SourceFile(shard, direct=True)
    assert file.direct_fd is None
    assert descriptors() == before + 1
    file.close()
    assert descriptors() == before
