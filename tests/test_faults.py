"""Disks that fail: no wrong token, an error that says where, nothing left behind, and all well when the cause is gone.

Every writer runs with every one of its writing calls failing once, and with all calls failing from there on.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from faulty import FailingDisk, open_things, unfinished
from fused import SMALL, sanitize, save_fused
from mlx_flash import DiskKVCache, FlashConfig, FlashLLM, load_model
from mlx_flash.convert import derived
from mlx_flash.convert.copies import list_copies
from mlx_flash.convert.derived import adopt_derived
from mlx_flash.convert.pack import pack
from mlx_flash.errors import FileChangedError, FlashError, ReadError, TruncatedFileError
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.layout.load import load_lazily
from mlx_flash.prefixes.pages import Blob
from mlx_flash.prefixes.store import PrefixStore
from mlx_flash.residency.speed import Speed, load_speed, save_speed
from mlx_flash.storage import probe, selftest
from mlx_flash.storage.probe import DiskProfile, load_profiles
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.telemetry import Publisher, find
from models import LLAMA, PREFILL_AND_DECODE, QWEN3_MOE, run, same_bits, save, stock

TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


class Writer(ABC):
    """A part of the program that writes files to a folder."""

    raises = False
    """A failure ends with an error; otherwise it costs a log line."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.source = folder, source

    @abstractmethod
    def write(self) -> None:
        """Write everything once."""

    @abstractmethod
    def check(self) -> bool:
        """Return whether everything that was written is there, and right."""

    def let_go(self) -> None:
        """Forget what :meth:`write` left in this object."""
        self.__dict__ = {"folder": self.folder, "source": self.source}
        gc.collect()


class Pack(Writer):
    raises = True

    def write(self) -> None:
        if not (self.folder / "packed").exists():
            pack(self.source, self.folder / "packed")

    def check(self) -> bool:
        return same_bits(
            run(stock(self.folder / "packed"), PREFILL_AND_DECODE[3:4]),
            run(stock(self.source), PREFILL_AND_DECODE[3:4]),
        )


class DerivedCopy(Writer):
    raises = True

    def write(self) -> None:
        checkpoint = read_checkpoint(self.source)
        self.loaded = load_lazily(self.source, checkpoint)
        adopt_derived(self.loaded, checkpoint, self.source)

    def check(self) -> bool:
        copies = [copy for copy in list_copies() if copy.is_complete]
        outputs = run(self.loaded.model, PREFILL_AND_DECODE[3:4])
        return len(copies) == 1 and same_bits(outputs, run(stock(self.source), PREFILL_AND_DECODE[3:4]))


class Prefixes(Writer):
    def write(self) -> None:
        with self._store() as store:
            for number in range(2):
                store.put(range(32), number, {"k": Blob(bytes([number]) * 5000, "uint8", (5000,))})

    def check(self) -> bool:
        with self._store() as store:
            found = store.find(range(32))
            data = bytearray(5000)
            return len(found.pages) == 2 and store.read(found.pages[1], lambda _: {"k": memoryview(data)})

    def _store(self) -> PrefixStore:
        governor = WriteGovernor(self.folder)
        return PrefixStore(self.folder, model="m", settings="s", governor=governor, page_tokens=16, free_space_floor=0)


class KVFiles(Writer):
    raises = True

    def write(self) -> None:
        rows = [mx.random.normal((1, 2, 300, 32), key=mx.random.key(i)) for i in range(2)]
        cache, expected = DiskKVCache(directory=self.folder), KVCache()
        for _ in range(2):
            cache.update_and_fetch(*rows)
            expected.update_and_fetch(*rows)
        self.is_right = same_bits(
            [cache.keys, cache.values], [expected.keys[..., :600, :], expected.values[..., :600, :]]
        )
        cache.pool.close()

    def check(self) -> bool:
        return self.is_right


class Probe(Writer):
    def write(self) -> None:
        probe._remember("disk", DiskProfile(1e9, 4096, 2, True))

    def check(self) -> bool:
        return load_profiles()["disk"]["read_size"] == 4096


class Speeds(Writer):
    def write(self) -> None:
        save_speed("model", Speed(1e9, 1e10, 1e-4, 1e-3, is_measured=True))

    def check(self) -> bool:
        return load_speed("model") == Speed(1e9, 1e10, 1e-4, 1e-3, is_measured=True)


class SelfTests(Writer):
    def write(self) -> None:
        selftest._remember("device", selftest.SelfTest("in place", 1, {}, 0.1))

    def check(self) -> bool:
        return selftest.load_results()["device"]["way"] == "in place"


class Governor(Writer):
    def write(self) -> None:
        governor = WriteGovernor(self.folder, gb_per_day=1)
        governor.count(700)
        assert not governor.claim(2**30)  # within the cap, whatever fails

    def check(self) -> bool:
        return WriteGovernor(self.folder).telemetry()["total_bytes"] in (700, 1400)


class Telemetry(Writer):
    def write(self) -> None:
        publisher = Publisher(lambda: {"tokens": 3}, interval_seconds=0.001)
        publisher.start()
        while publisher.path is not None and not publisher.path.exists() and publisher._thread.is_alive():
            time.sleep(0.001)
        self.seen = [published.state for published in find() if published.pid == os.getpid()]
        publisher.close()
        publisher._thread.join() if publisher._thread.ident else None

    def check(self) -> bool:
        return {"tokens": 3} in self.seen


WRITERS = (Pack, DerivedCopy, Prefixes, KVFiles, Probe, Speeds, SelfTests, Governor, Telemetry)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fused(tmp_path_factory.mktemp("model"), {**SMALL, **TINY})


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Returns new folders, each of which is the cache folder and that of telemetry until the next one."""
    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    monkeypatch.setattr(derived, "LEAST_BYTES", 1)

    def make(number: int) -> Path:
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        return folder

    return make


@pytest.fixture(autouse=True)
def _collects_new_objects_only() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_a_writing_call_that_fails(
    kind: type[Writer], code: int, source: Path, folders: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    needs_room = code in (errno.ENOSPC, errno.EDQUOT)
    writer = kind(folders(0), source)
    with FailingDisk(needs_room=needs_room).mounted() as disk:
        writer.write()
    assert disk.count and writer.check() and not unfinished(writer.folder)
    slow = kind in (Pack, DerivedCopy, Prefixes)  # their calls are divided among the errors
    for first in range(ERRORS.index(code) if slow else 0, disk.count, len(ERRORS) if slow else 1):
        for always in (False, True):
            writer = kind(folders(2 * first + always + 1), source)
            _fail_once(writer, FailingDisk(code, first, always=always, needs_room=needs_room), needs_room)


def _fail_once(writer: Writer, disk: FailingDisk, can_remove: bool) -> None:
    before = open_things()
    with disk.mounted():
        try:
            writer.write()
        except FlashError as error:
            assert writer.raises and str(writer.folder) in str(error) and "Hint: " in str(error)
    writer.let_go()
    assert open_things() == before
    if can_remove:
        assert not [path for path in unfinished(writer.folder) if path.is_file()]
    writer.write()
    assert writer.check()
    writer.let_go()
    assert open_things() == before
    assert not unfinished(writer.folder)


# --- reads -----------------------------------------------------------------------------

Preadv = Callable[[int, Sequence[memoryview], int], int]

MODELS = {"dense": LLAMA | {"num_hidden_layers": 3, "hidden_size": 128}, "mixture": QWEN3_MOE}


class Checkpoint(NamedTuple):
    directory: Path
    expected: list[mx.array]

    def is_right(self, model: FlashLLM) -> bool:
        return same_bits(run(model, PREFILL_AND_DECODE), self.expected)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folders = {name: save(tmp_path_factory.mktemp(name), config, num_shards=2) for name, config in MODELS.items()}
    return {name: Checkpoint(folder, run(stock(folder), PREFILL_AND_DECODE)) for name, folder in folders.items()}


def streamed(directory: Path, **settings: object) -> FlashLLM:
    settings = {"ram_budget_gb": "min", "context_length": 64, "prefill_step_size": 16, "telemetry": False} | settings
    return load_model(directory, FlashConfig(**settings))[0]  # type: ignore[arg-type]


def failing(code: int, fails: Callable[[int, int], bool]) -> Callable[[Preadv], Preadv]:
    """Reads that fill half of the buffer, and fail, if ``fails(number of the read, offset)``."""

    def wrap(real: Preadv) -> Preadv:
        count = iter(range(1 << 30))

        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if not fails(next(count), offset):
                return real(fd, buffers, offset)
            buffers[0][: len(buffers[0]) // 2] = b"\xa5" * (len(buffers[0]) // 2)
            raise OSError(code, os.strerror(code))

        return preadv

    return wrap


def short(real: Preadv) -> Preadv:
    """Reads of one page, which is the least that a direct read may return in the middle of a file."""
    return lambda fd, buffers, offset: real(fd, [memoryview(buffers[0])[:4096]], offset)


def slow(real: Preadv) -> Preadv:
    """Reads of which one in eight takes long."""
    dice = random.Random(5)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.02 * (dice.random() < 1 / 8))
        return real(fd, buffers, offset)

    return preadv


HARMLESS = {"short": short, "slow": slow, "EIO once": failing(errno.EIO, lambda number, _: number == 7)}
FAILURES = {
    "EIO always": failing(errno.EIO, lambda number, _: number >= 7),
    "EIO in a range": failing(errno.EIO, lambda _, offset: 200_000 <= offset < 900_000),
    "ESTALE once": failing(errno.ESTALE, lambda number, _: number == 7),
    "unplugged": failing(errno.ENODEV, lambda number, _: number >= 7),
}


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fault", [*HARMLESS, *FAILURES])
def test_reads_that_fail(
    checkpoints: dict[str, Checkpoint], name: str, io: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints[name]
    gc.collect()
    before = open_things()
    monkeypatch.setattr("mlx_flash.storage.ranges.RETRY_SECONDS", 0.001)
    with streamed(checkpoint.directory, io=io) as model:
        model.start()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", {**HARMLESS, **FAILURES}[fault](os.preadv))
            if fault in HARMLESS:
                assert checkpoint.is_right(model)
            else:
                with pytest.raises(
                    ReadError, match=rf"'model.*' \(\d+ bytes at offset \d+\) in {checkpoint.directory}/.*offset \d+"
                ):
                    run(model, PREFILL_AND_DECODE)
        assert checkpoint.is_right(model)
    del model
    gc.collect()
    assert open_things() == before


# --- files that change while the model runs --------------------------------------------


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def rewritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")


CHANGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncated,
    "replaced by a copy": replaced,
    "rewritten": rewritten,
    "unlinked": Path.unlink,
    "unreadable": lambda path: path.chmod(0),
    "touched": lambda path: os.utime(path, (0, 0)),
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoints["dense"].directory, directory)
    shards = sorted(directory.glob("*.safetensors"))
    real, numbers = os.preadv, iter(range(1 << 30))

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(numbers) == 9:
            for path in shards:
                CHANGES[change](path)
        return real(fd, buffers, offset)

    with streamed(directory) as model:
        model.start()
        monkeypatch.setattr(os, "preadv", preadv)
        kind = TruncatedFileError if change == "truncated" else FileChangedError
        with pytest.raises(kind, match=rf"'model.*' .*{directory}/model-0000\d-of-00002.safetensors.*Hint: "):
            for _ in range(3):
                run(model, PREFILL_AND_DECODE)
    shutil.copytree(checkpoints["dense"].directory, directory, dirs_exist_ok=True)
    with streamed(directory) as again:
        assert checkpoints["dense"].is_right(again)


def test_a_clock_that_jumps(checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    dice, real = random.Random(3), time.time
    monkeypatch.setattr(time, "time", lambda: real() + dice.uniform(-1e9, 1e9))
    for _ in range(2):
        with streamed(checkpoints["dense"].directory, telemetry=True, kv_prefixes="exact") as model:
            assert checkpoints["dense"].is_right(model)
