"""Disks that fail: no wrong token, an error that says where, nothing left behind, and all well when the cause is gone.

Every writer runs with every one of its writing calls failing once, and with all calls failing from there on.
"""

from __future__ import annotations

import errno
import gc
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from faulty import FailingDisk, open_in_the_end, open_things, unfinished
from mlx_flash import FlashConfig, FlashLLM, FlashManager, apply_flash_patch, load_model
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import CheckpointError, FileChangedError, FlashError, ReadError, TruncatedFileError
from mlx_flash.storage.safetensors import TensorRecord, read_checkpoint
from mlx_flash.streaming.stream import WeightStream
from models import LLAMA, PREFILL_AND_DECODE, QWEN3_MOE, run, same_bits, save, stock
from streamed import streamed_on_disk
from writers import WRITERS, DerivedCopy, Pack, Prefixes, Writer, make_source, tiny_models

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Returns new folders, each of which is the cache folder and that of telemetry until the next one."""

    def make(number: int) -> Path:
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        return folder

    with tiny_models():
        yield make


@pytest.fixture(autouse=True, scope="module")
def _collects_new_objects_only() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_garbage(_collects_new_objects_only: None) -> None:
    """What earlier tests left must not go while a test counts open files."""
    gc.collect()


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
    assert open_in_the_end(before) == before
    if can_remove:
        assert not [path for path in unfinished(writer.folder) if path.is_file()]
    writer.write()
    assert writer.check()
    writer.let_go()
    assert open_in_the_end(before) == before
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


HARMLESS = {"short": short, "EIO once": failing(errno.EIO, lambda number, _: number == 7)}
FAILURES = {
    "EIO always": failing(errno.EIO, lambda number, _: number >= 7),
    "EIO in a range": failing(errno.EIO, lambda _, offset: 200_000 <= offset < 900_000),
    "ESTALE once": failing(errno.ESTALE, lambda number, _: number == 7),
    "unplugged": failing(errno.ENODEV, lambda number, _: number >= 7),
}


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("name", MODELS)
def test_reads_that_fail(
    checkpoints: dict[str, Checkpoint], name: str, io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints[name]
    where = rf"'model.*' \(\d+ bytes at offset \d+\) in {checkpoint.directory}/.*offset \d+"
    gc.collect()
    before = open_things()
    monkeypatch.setattr("mlx_flash.storage.prefetcher.RETRY_SECONDS", 0.001)
    with streamed(checkpoint.directory, io=io) as model:
        model.start()
        for fault, wrapped in (HARMLESS | FAILURES).items():
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", wrapped(os.preadv))
                if fault in HARMLESS:
                    assert checkpoint.is_right(model), fault
                else:
                    with pytest.raises(ReadError, match=where):
                        run(model, PREFILL_AND_DECODE)
            assert checkpoint.is_right(model), fault
    del model
    gc.collect()
    assert open_in_the_end(before) == before


def failing_at(record: TensorRecord, real: Preadv = os.preadv) -> Preadv:
    """Reads that fail if they have bytes of a tensor."""
    file = record.path.stat().st_ino

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        end = offset + sum(map(len, buffers))
        if os.fstat(fd).st_ino == file and offset < record.end and end > record.offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    return preadv


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
def test_small_parameters_that_cannot_be_read_are_named(
    name: str, checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read at the start, whatever the budget is."""
    monkeypatch.setattr("mlx_flash.storage.prefetcher.RETRY_SECONDS", 0.001)
    folder = checkpoints["dense"].directory
    record = read_checkpoint(folder).tensors[name]
    config = FlashConfig(ram_budget_gb="min", context_length=64, telemetry=False)
    with FlashLLM(prepare(folder, config), config) as model, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing_at(record))
        with pytest.raises(ReadError, match=rf"cannot read '{name}' .* in {record.path}: Input/output error"):
            model.start()
    with streamed(folder) as model:
        assert checkpoints["dense"].is_right(model)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("name", MODELS)
def test_a_start_that_fails_can_be_repeated(
    checkpoints: dict[str, Checkpoint], name: str, io: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It fails while the disk is probed, while headers are read, and at the first and the last weights."""
    settings = {"io": io, "ram_budget_gb": 1.5, "read_size_mb": 0.1, "queue_depth": 2}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no profile of the disk is known
    real, numbers = os.preadv, itertools.count()
    monkeypatch.setattr(os, "preadv", lambda *args: (next(numbers), real(*args))[1])
    streamed(checkpoints[name].directory, **settings).close()
    num_reads = next(numbers)
    gc.collect()
    before = open_things()
    for first in (3, 5, 6, num_reads - 1):
        monkeypatch.setattr(os, "preadv", failing(errno.ENODEV, lambda number, _, first=first: number >= first)(real))
        words = (
            r"'(model.*|lm_head.*|\(disk probe\))' .*offset \d+|"
            r"cannot open .*-of-00002.safetensors .*device\. Hint: check the disk"
        )
        with pytest.raises((ReadError, CheckpointError), match=words):
            streamed(checkpoints[name].directory, **settings)
        gc.collect()
        assert open_in_the_end(before) == before
    monkeypatch.setattr(os, "preadv", real)
    with streamed(checkpoints[name].directory, **settings) as model:
        assert checkpoints[name].is_right(model)


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


def moved_to_another_device(path: Path) -> None:
    """Move a file, and leave a link to its new place."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="mlx-flash-", dir=memory if memory.is_dir() else path.parent)
    path.symlink_to(shutil.move(path, folder))


CHANGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncated,
    "replaced by a copy": replaced,
    "rewritten": rewritten,
    "unlinked": Path.unlink,
    "unreadable": lambda path: path.chmod(0),
    "touched": lambda path: os.utime(path, (0, 0)),
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
    "moved to another device": moved_to_another_device,
}


@pytest.mark.parametrize("when", ["it runs", "it was loaded", "it was planned again"])
@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, change: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of tensors come from headers that were read when the model was loaded, or planned first."""
    directory, name, kind = tmp_path / "model", "'model.*' .*", FileChangedError
    shutil.copytree(checkpoints["dense"].directory, directory)
    shards, real, numbers = sorted(directory.glob("*.safetensors")), os.preadv, itertools.count()

    def change_all() -> None:
        for path in shards:
            CHANGES[change](path)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if next(numbers) == 9:
            change_all()
        return real(fd, buffers, offset)

    with apply_flash_patch(FlashConfig(ram_budget_gb=4.0, context_length=64, telemetry=False, lend_reserves=False)):
        model: Any = streamed(directory) if when == "it runs" else mlx_lm_utils.load_model(directory)[0]
    if when != "it was loaded":
        model.start()
    if when == "it runs":
        monkeypatch.setattr(os, "preadv", preadv)
    else:
        FlashManager.of_process().set_ram_budget(3.9)
        assert model.engine is None
        change_all()
    if change == "truncated":
        kind = TruncatedFileError
    elif change in ("unlinked", "moved") and when != "it runs":
        name, kind = "", CheckpointError
    with model:
        for _ in range(2):
            with pytest.raises(kind, match=rf"{name}{directory}/model-0000\d-of-00002.safetensors.*Hint: "):
                for _ in range(3):
                    run(model, PREFILL_AND_DECODE)
    for link in filter(Path.is_symlink, shards):
        shutil.rmtree(link.readlink().parent)
        link.unlink()
    shutil.copytree(checkpoints["dense"].directory, directory, dirs_exist_ok=True)
    with streamed(directory) as again:
        assert checkpoints["dense"].is_right(again)


def test_files_that_change_are_noticed_where_no_unit_waits(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights come before they are needed where computing takes longer than reading."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoints["dense"].directory, directory)
    shards, real, numbers = sorted(directory.glob("*.safetensors")), WeightStream.acquire, iter(range(1 << 30))

    def acquire(stream: WeightStream, index: int, inputs: Sequence[mx.array] = ()) -> None:
        if not next(numbers):
            for path in shards:
                rewritten(path)
        for unit in stream.units:
            if unit.slot.ticket is not None:
                unit.slot.ticket.done_by(math.inf)
        real(stream, index, inputs)

    with streamed(directory) as model:
        run(model, PREFILL_AND_DECODE[:1])
        monkeypatch.setattr(WeightStream, "acquire", acquire)
        with pytest.raises(FileChangedError, match="replaced by another one"):
            run(model, PREFILL_AND_DECODE[:1])


def test_a_program_may_change_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of the model and of its keys and values were given relative to the one before."""
    expected = run(stock(save(tmp_path / "model", LLAMA)), PREFILL_AND_DECODE)
    monkeypatch.chdir(tmp_path)
    with streamed_on_disk(Path("model"), kv_directory="kv") as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        assert list((tmp_path / "kv").iterdir())
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
    assert not list((tmp_path / "kv").glob("mlx-flash-session-*")) and not list((tmp_path / "other").iterdir())


def test_a_folder_of_keys_and_values_that_is_removed_is_made_again(tmp_path: Path) -> None:
    """The old cache has its files open, so they stay readable."""
    theirs = stock(save(tmp_path / "model", LLAMA))
    expected, calls = run(theirs, PREFILL_AND_DECODE), ([1, 2, 3, 4, 5], [6, 7, 8])
    with streamed_on_disk(tmp_path / "model", kv_directory=tmp_path / "kv") as model:
        cache = make_prompt_cache(model)
        found = [model(mx.array([calls[0]]), cache=cache)]
        mx.eval(found)
        shutil.rmtree(tmp_path / "kv")
        found.append(model(mx.array([calls[1]]), cache=cache))
        assert same_bits(found, run(theirs, calls))
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        assert list((tmp_path / "kv").iterdir())
    assert not list((tmp_path / "kv").iterdir())
