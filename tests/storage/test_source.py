"""Files that change while the model runs: every change ends the run with an error that names tensor and file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, FileChangedError, TruncatedFileError
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.source import SourceFile
from reading import PAGE, Load, descriptors, packed, write_file

NBYTES = 500_123
SIZES = [100_000, 200_000, NBYTES - 2 * PAGE - 300_000]
LONG_AGO = 1_000_000_000


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = write_file(tmp_path / "shard", NBYTES)
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


@pytest.fixture(params=["direct", "buffered", "kept"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def load(shard: Path) -> Load:
    return Load(packed(shard, 2 * PAGE, SIZES))


@pytest.fixture
def reader(shard: Path, mode: str, load: Load) -> Iterator[BackgroundPrefetcher]:
    """Has read the file once."""
    before = descriptors()
    reader = BackgroundPrefetcher([shard], direct=mode != "buffered", read_size=64 << 10)
    load.check(reader, mode)
    yield reader
    reader.close()
    assert descriptors() == before


def check_fails(reader: BackgroundPrefetcher, load: Load, mode: str, error: type[Exception], match: str) -> None:
    """Fails again and again, and uses up nothing."""
    for _ in range(3):
        with pytest.raises(error, match=match) as caught:
            load.check(reader, mode)
        assert type(caught.value) is error
        assert "'shard." in str(caught.value)
        assert str(load.records[0].extent.path) in str(caught.value)
        assert "Hint: " in str(caught.value)


def other_bytes(shard: Path) -> bytes:
    return write_file(shard.with_name("other"), shard.stat().st_size, seed=9).read_bytes()


def check_other(reader: BackgroundPrefetcher, load: Load, mode: str) -> None:
    """Restored bytes count as other ones: nothing but a comparison of all of them could tell."""
    check_fails(reader, load, mode, FileChangedError, "replaced by another one")


# --- truncated, replaced, deleted: and put back ----------------------------------------


@pytest.mark.parametrize("left", [0, 1, 2 * PAGE, 300_000, 300_000 // PAGE * PAGE, NBYTES - 1])
def test_truncated_and_written_again(
    shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str, left: int
) -> None:
    whole = shard.read_bytes()
    os.truncate(shard, left)
    num_open = descriptors()
    check_fails(reader, load, mode, TruncatedFileError, "truncated")
    assert descriptors() == num_open
    shard.write_bytes(whole)
    check_other(reader, load, mode)
    assert descriptors() == num_open


@pytest.mark.parametrize("left", [0, 2 * PAGE, NBYTES - 1])
def test_truncated_and_replaced_by_a_copy(
    shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str, left: int
) -> None:
    copy = shard.with_name("copy")
    copy.write_bytes(shard.read_bytes())
    os.truncate(shard, left)
    check_fails(reader, load, mode, TruncatedFileError, "truncated")
    copy.replace(shard)
    check_other(reader, load, mode)


def test_truncation_beyond_the_read_tensors_is_an_error(
    shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str
) -> None:
    """All bytes come, but the file is not to be trusted any more."""
    first = Load(load.records[:1])
    os.truncate(shard, NBYTES - 1)
    check_fails(reader, first, mode, TruncatedFileError, f"from {NBYTES} to {NBYTES - 1} bytes")


def test_replaced_and_put_back(shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str) -> None:
    away, other = shard.with_name("away"), shard.with_name("other")
    other_bytes(shard)
    shard.rename(away)
    other.replace(shard)
    num_open = descriptors()
    check_fails(reader, load, mode, FileChangedError, "replaced by another")
    assert descriptors() == num_open
    away.replace(shard)
    check_other(reader, load, mode)


def test_replaced_by_a_shorter_one_and_put_back(
    shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str
) -> None:
    away = shard.with_name("away")
    shard.rename(away)
    write_file(shard, 1000)
    check_fails(reader, load, mode, TruncatedFileError, f"from {NBYTES} to 1000 bytes")
    away.replace(shard)
    check_other(reader, load, mode)


def test_overwritten_in_place_and_written_again(
    shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str
) -> None:
    whole = shard.read_bytes()
    shard.write_bytes(other_bytes(shard))
    check_fails(reader, load, mode, FileChangedError, "replaced by another")
    shard.write_bytes(whole)
    check_other(reader, load, mode)


@pytest.mark.parametrize("how", ["away", "copy"])
def test_deleted_and_put_back(shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str, how: str) -> None:
    away = shard.with_name("away")
    if how == "copy":
        away.write_bytes(shard.read_bytes())
        shard.unlink()
    else:
        shard.rename(away)
    num_open = descriptors()
    check_fails(reader, load, mode, FileChangedError, os.strerror(errno.ENOENT))
    assert descriptors() == num_open
    away.replace(shard)
    check_other(reader, load, mode)


def test_folder_moved_and_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shard = write_file(folder / "shard", NBYTES)
    load = Load(packed(shard, 0, [1000, 2000]))
    reader = BackgroundPrefetcher([shard])
    folder.rename(tmp_path / "away")
    check_fails(reader, load, "direct", FileChangedError, os.strerror(errno.ENOENT))
    folder.write_text("a file where the folder was")
    check_fails(reader, load, "direct", FileChangedError, os.strerror(errno.ENOTDIR))
    folder.unlink()
    (tmp_path / "away").rename(folder)
    load.check(reader)
    reader.close()


def test_grown_and_cut_back(shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str) -> None:
    with shard.open("ab") as file:
        file.write(b"more")
    check_fails(reader, load, mode, FileChangedError, "replaced by another")
    os.truncate(shard, NBYTES)
    check_other(reader, load, mode)


@pytest.mark.parametrize("at", [0, 1, *range(0, NBYTES, NBYTES // 7), NBYTES - 1])
def test_any_other_byte_is_an_error(shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str, at: int) -> None:
    with shard.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    check_fails(reader, load, mode, FileChangedError, "replaced by another")


@pytest.mark.parametrize("at", range(0, NBYTES, NBYTES // 7))
def test_other_byte_in_a_new_file_of_the_same_time_is_an_error(
    shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str, at: int
) -> None:
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    other = shard.with_name("other")
    other.write_bytes(data)
    os.utime(other, (LONG_AGO, LONG_AGO))
    other.replace(shard)
    check_fails(reader, load, mode, FileChangedError, "other inode, change time")


# --- changes that may have changed bytes -----------------------------------------------


def rewrite(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes())


def copy_over(shard: Path) -> None:
    copy = shard.with_name("copy")
    copy.write_bytes(shard.read_bytes())
    copy.replace(shard)


def move_and_put_back(shard: Path) -> None:
    shard.rename(shard.with_name("away"))
    shard.with_name("away").rename(shard)


def become_a_link(shard: Path) -> None:
    copy_over(shard)
    target = shard.with_name("target")
    shard.rename(target)
    shard.symlink_to(target)


def link(shard: Path) -> None:
    shard.with_name("link").hardlink_to(shard)


@pytest.mark.parametrize("change", [Path.touch, rewrite, copy_over, move_and_put_back, become_a_link, link])
def test_same_bytes_after_a_change_count_as_others(
    shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str, change: Callable[[Path], None]
) -> None:
    num_open = descriptors()
    change(shard)
    check_other(reader, load, mode)
    assert descriptors() == num_open


def test_reading_and_looking_are_no_changes(shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str) -> None:
    shard.read_bytes()
    list(shard.parent.iterdir())
    load.check(reader, mode)


def test_change_whose_time_was_set_back(shard: Path, reader: BackgroundPrefetcher, load: Load, mode: str) -> None:
    status = shard.stat()
    shard.write_bytes(other_bytes(shard))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    check_fails(reader, load, mode, FileChangedError, "replaced by another")


# --- several files ---------------------------------------------------------------------


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


def test_descriptors_lead_to_the_opened_file(shard: Path) -> None:
    """A read in flight must not find its descriptor closed, or leading to another file."""
    file = SourceFile(shard, direct=True)
    fds, first = (file.buffered_fd, file.direct_fd), os.pread(file.buffered_fd, 100, 0)
    file.check_unchanged("a tensor")
    shard.write_bytes(other_bytes(shard)[:100])
    with pytest.raises(TruncatedFileError):
        file.check_unchanged("a tensor")
    shard.unlink()
    with pytest.raises(FileChangedError):
        file.check_unchanged("a tensor")
    assert (file.buffered_fd, file.direct_fd) == fds
    assert os.pread(file.buffered_fd, 100, 0) != first
    file.close()
    for fd in filter(None, fds):
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(fd)


def test_direct_descriptor_only_on_request(shard: Path) -> None:
    file = SourceFile(shard, direct=False)
    assert file.direct_fd is None
    file.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("function", ["open", "preadv"])
def test_file_system_without_direct_reads(
    shard: Path, monkeypatch: pytest.MonkeyPatch, code: int, function: str
) -> None:
    """Some refuse the flag, some the reads."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no O_DIRECT on this system")
    before = descriptors()
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    def refuse_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, refuse if function == "open" else refuse_read)
    file = SourceFile(shard, direct=True)
    assert file.direct_fd is None
    assert descriptors() == before + 1
    file.close()
    assert descriptors() == before


def test_empty_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "empty", 0)
    file = SourceFile(path, direct=True)
    file.check_unchanged("a tensor")
    file.close()
    file.close()


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="absent"):
        SourceFile(tmp_path / "absent", direct=True)
    write_file(tmp_path / "file", 10)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOTDIR)):
        SourceFile(tmp_path / "file" / "below", direct=True)


def test_small_change_at_the_very_end_of_a_large_file(tmp_path: Path) -> None:
    """A file that is written from front to back into reserved space is not taken for finished too early."""
    path = write_file(tmp_path / "large", 8 << 20)
    file = SourceFile(path, direct=False)
    with path.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        last = out.read(1)
        out.seek(-1, os.SEEK_END)
        out.write(np.bitwise_not(np.frombuffer(last, np.uint8)).tobytes())
    with pytest.raises(FileChangedError):
        file.check_unchanged("a tensor")
    file.close()
