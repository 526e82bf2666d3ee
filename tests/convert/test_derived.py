"""Packed copies hold what mlx-lm computes, take bounded memory to write, and are not used when they might be wrong."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from fused import SMALL, sanitize, save_fused
from mlx_flash import FlashConfig, FlashLLM, cli
from mlx_flash.convert import derived
from mlx_flash.convert.derived import adopt_derived, derived_directory, derived_parameters, list_copies, make_room
from mlx_flash.convert.pack import NOTE_NAME, Rewrite, TensorSpec
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import FlashError, ReadError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, HeldLock
from mlx_flash.layout.load import LoadedModel, load_lazily
from mlx_flash.layout.units import make_layout
from mlx_flash.storage.safetensors import read_checkpoint
from models import PREFILL_AND_DECODE, run, same_bits, stock

NUM_DERIVED = 2 * SMALL["num_hidden_layers"]


@pytest.fixture(autouse=True)
def _tiny_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llama.Model, "sanitize", sanitize)
    monkeypatch.setattr(derived, "LEAST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_fused(tmp_path / "model", SMALL)


def load(directory: Path, model_config: dict[str, Any] | None = None) -> tuple[LoadedModel, Any]:
    checkpoint = read_checkpoint(directory)
    return load_lazily(directory, checkpoint, model_config), checkpoint


def adopt(directory: Path, model_config: dict[str, Any] | None = None, **options: Any) -> LoadedModel:
    loaded, checkpoint = load(directory, model_config)
    adopt_derived(loaded, lambda: load(directory, model_config)[0], checkpoint, directory, **options)
    return loaded


def logits(model: Any) -> list[mx.array]:
    return run(model, PREFILL_AND_DECODE)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parameters that are written, as they are."""
    names: list[str] = []
    compute = derived.compute

    def noting(tensor: TensorSpec, *rest: Any) -> Any:
        names.append(tensor.name)
        return compute(tensor, *rest)

    monkeypatch.setattr(derived, "compute", noting)
    return names


def test_a_copy_holds_what_was_computed_and_is_used_again(directory: Path, computed: list[str]) -> None:
    loaded, checkpoint = load(directory)
    before = {p.spec.name: p.array for p in derived_parameters(loaded)}
    expected = {name: mx.contiguous(array) for name, array in before.items()}
    mx.eval(list(expected.values()))
    adopt_derived(loaded, lambda: load(directory)[0], checkpoint, directory)
    assert sorted(computed) == sorted(expected) and len(expected) == NUM_DERIVED
    assert not derived_parameters(loaded)
    (copy,) = list_copies()
    for name, array in expected.items():
        held = dict(tree_flatten(loaded.model.parameters()))[name]
        assert held is not before[name]
        assert same_bits([held], [array])
        (record,) = loaded.sources[id(held)]
        assert record.path.parent == copy.folder and record.path.is_file()
        with record.path.open("rb") as file:
            file.seek(record.offset)
            assert file.read(record.nbytes) == bytes(memoryview(array))  # type: ignore[arg-type]
    assert same_bits(logits(loaded.model), logits(stock(directory)))

    os.utime(copy.folder / NOTE_NAME, (1, 1))
    again = adopt(directory)
    assert len(computed) == NUM_DERIVED
    assert not derived_parameters(again)
    assert time.time() - list_copies()[0].last_used < 100
    assert same_bits(logits(again.model), logits(stock(directory)))


def test_nothing_is_written_that_does_not_pay_or_must_not_be(
    directory: Path, monkeypatch: pytest.MonkeyPatch, computed: list[str]
) -> None:
    for least_bytes, limit_gb in ((1, 0), (32_000_000, None)):
        monkeypatch.setattr(derived, "LEAST_BYTES", least_bytes)
        assert len(derived_parameters(adopt(directory, limit_gb=limit_gb))) == NUM_DERIVED
        assert not computed and not derived_directory().exists()


def test_no_room_is_told_and_leaves_all_as_it_was(
    directory: Path, computed: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = adopt(directory, limit_gb=0.0001)
    assert len(derived_parameters(loaded)) == NUM_DERIVED and not computed and not list_copies()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "0.00 GB to" in record.message and "is 0.0001" in record.message
    assert same_bits(logits(loaded.model), logits(stock(directory)))
    usage = shutil.disk_usage(directory)._replace(total=10**9, free=10**8 + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert derived_parameters(adopt(directory))
    assert "a tenth" in caplog.text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**8 + 10**7))
    assert not derived_parameters(adopt(directory))


def test_a_plan_writes_nothing_and_progress_ends_at_the_total(directory: Path, computed: list[str]) -> None:
    planned, seen = adopt(directory, write=False), list[tuple[int, int]]()
    assert not derived_parameters(planned) and not computed and not derived_directory().exists()
    found = {p.records for unit in make_layout(planned).units for p in unit.large}
    loaded = adopt(directory, progress=lambda done, total: seen.append((done, total)))
    total = 2 * sum(p.spec.nbytes for p in derived_parameters(load(directory)[0]))  # written, and read back
    assert seen[0] == (0, total) and seen[-1] == (total, total) and seen == sorted(seen) and len(seen) > NUM_DERIVED
    assert found == {p.records for unit in make_layout(loaded).units for p in unit.large}
    assert found == {p.records for unit in make_layout(adopt(directory, write=False)).units for p in unit.large}
    assert derived_parameters(adopt(save_fused(directory, SMALL, mx.float16), write=False, limit_gb=0.0001))


def test_writing_takes_the_memory_of_a_layer_or_two(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "vocab_size": 500}
    directory = save_fused(tmp_path / "model", {**SMALL, **shape})
    nbytes = read_checkpoint(directory).nbytes
    assert nbytes > 60_000_000
    loaded, checkpoint = load(directory)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    adopt_derived(loaded, lambda: load(directory)[0], checkpoint, directory)
    assert mx.get_peak_memory() - before < 2 * nbytes / 12
    assert mx.get_active_memory() - before < nbytes / 100
    assert not derived_parameters(loaded)
    shutil.rmtree(tmp_path)


# --- interruptions ---------------------------------------------------------------------------------------------------


def test_an_interrupted_run_is_taken_up_where_it_ended(
    directory: Path, monkeypatch: pytest.MonkeyPatch, computed: list[str]
) -> None:
    monkeypatch.setattr(derived, "SHARD_BYTES", 1)
    compute = derived.compute
    interrupted = []

    def interrupt(tensor: TensorSpec, *rest: Any) -> Any:
        if ".layers.2." in tensor.name and not interrupted:
            interrupted.append(tensor)
            raise KeyboardInterrupt
        return compute(tensor, *rest)

    monkeypatch.setattr(derived, "compute", interrupt)
    loaded, checkpoint = load(directory)
    with pytest.raises(KeyboardInterrupt):
        adopt_derived(loaded, lambda: load(directory)[0], checkpoint, directory)
    (copy,) = list_copies()
    assert not copy.is_complete and not derived.is_held(copy.folder)
    assert len(computed) == 4
    assert same_bits(logits(loaded.model), logits(stock(directory))), "the model is as it was"

    finished = adopt(directory)
    assert len(computed) == len(set(computed)) == NUM_DERIVED
    assert same_bits(logits(finished.model), logits(stock(directory)))


def test_of_two_at_once_one_writes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waits for it, as in another process."""
    compute, written = derived.compute, list[str]()

    def slowly(tensor: TensorSpec, *rest: Any) -> Any:
        written.append(tensor.name)
        yield from compute(tensor, *rest)
        time.sleep(0.05)

    monkeypatch.setattr(derived, "compute", slowly)
    with ThreadPoolExecutor() as pool:
        assert not any(map(derived_parameters, pool.map(adopt, [directory] * 2)))
    assert len(written) == NUM_DERIVED and [copy.is_complete for copy in list_copies()] == [True]


def test_a_run_that_has_waited_does_not_wait_for_the_user_of_the_copy(tmp_path: Path) -> None:
    rewrite, waits = Rewrite(tmp_path / "copy", [], cast(Any, None), cast(Any, {})), threading.Event()
    rewrite.partial.mkdir()
    other = HeldLock(rewrite.partial)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: rewrite.locked(waits.set).__enter__())
        assert waits.wait(20)
        rewrite.partial.rename(rewrite.target)
        fcntl.flock(other.fd, fcntl.LOCK_SH)
        try:
            waiting.result(20)
        finally:
            other.release()


# --- which copy is right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["touch", "weights", "config", "override", "code", "version"])
def test_whatever_decides_what_is_computed_makes_another_copy(
    directory: Path, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    adopt(directory)
    (first,) = list_copies()
    override = None
    if change == "touch":
        os.utime(directory / "model.safetensors", ns=(1, 1))
    elif change == "weights":
        save_fused(directory, SMALL, mx.float16)
    elif change == "config":
        (directory / "config.json").write_text(json.dumps({**SMALL, "rms_norm_eps": 1e-6}))
    elif change == "override":
        override = {"rms_norm_eps": 1e-6}
    elif change == "version":
        monkeypatch.setattr("mlx_flash.layout.load.versions", lambda: {"mlx": "0", "mlx-lm": "0"})
    else:
        code = tmp_path / "other.py"
        code.write_text(
            "from fused import *\nimport fused\ndef sanitize(self, weights):\n"
            "    return {k: 2 * v if 'up_proj' in k else v for k, v in fused.sanitize(self, weights).items()}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(llama.Model, "sanitize", __import__("other").sanitize)
    loaded = adopt(directory, override)
    if override is None:
        assert same_bits(logits(loaded.model), logits(stock(directory)))
    (second,) = list_copies()
    assert second.folder != first.folder


def test_the_copy_of_what_a_source_was_stays_while_it_is_used(directory: Path) -> None:
    before = adopt(directory)
    (first,) = list_copies()
    os.utime(directory / "model.safetensors", ns=(1, 1))
    now = adopt(directory)
    assert {copy.folder for copy in list_copies()} > {first.folder}
    assert same_bits(logits(before.model), logits(now.model))


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        flip,
        lambda path: flip(path, 20),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: (path.parent / NOTE_NAME).unlink(),
        lambda path: ((path.parent / NOTE_NAME).unlink(), os.mkfifo(path.parent / NOTE_NAME)),
        lambda path: (path.parent / NOTE_NAME).write_text("{"),
        lambda path: (path.parent / NOTE_NAME).write_text('{"files": [1]}'),
    ],
)
def test_a_damaged_copy_is_written_again(directory: Path, damage: Any, computed: list[str]) -> None:
    adopt(directory)
    (path,) = derived_directory().glob("*/*.safetensors")
    damage(path)
    loaded = adopt(directory)
    assert len(computed) == 2 * NUM_DERIVED
    assert same_bits(logits(loaded.model), logits(stock(directory)))
    assert [copy.is_complete for copy in list_copies()] == [True]


@pytest.mark.parametrize("limit_gb", [None, 0])
def test_an_error_of_mlx_while_it_computes_parameters_names_the_folder(limit_gb: int | None, directory: Path) -> None:
    """MLX reads past the end of a file that was cut after its headers were read; its error names nothing."""
    path = directory / "model.safetensors"
    first = min(r.offset for name, r in load(directory)[1].tensors.items() if ".self_attn." in name)
    config = FlashConfig(ram_budget_gb="min", context_length=64, telemetry=False, derived_cache_gb=limit_gb)
    words = f"MLX cannot read a file of {re.escape(str(directory))}.*Hint: check the disk; `mlx-flash verify`"

    def cut(*_: object) -> None:
        os.truncate(path, first + 10)

    if limit_gb is None:
        loaded, checkpoint = load(directory)
        assert derived_parameters(loaded)
        with pytest.raises(ReadError, match=words):
            adopt_derived(loaded, lambda: (load(directory)[0], cut())[0], checkpoint, directory)
    else:
        prepared = prepare(directory, config)
        cut()
        with FlashLLM(prepared, config) as model:
            with pytest.raises(ReadError, match=words):
                model.start()
            with pytest.raises(ReadError, match=r"are lost. Hint: check the disk, and load the model again"):
                model.start()  # MLX takes what it could not read for evaluated
    mx.clear_cache()  # no error of MLX is left for a later call


def test_a_cache_folder_that_cannot_be_written_is_an_error(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(WriteError, match="derived_cache_gb=0"):
        adopt(directory)
    assert issubclass(WriteError, FlashError)


# --- room ------------------------------------------------------------------------------------------------------------


def fake_copy(name: str, nbytes: int, age: float, source: str = "/elsewhere") -> Path:
    folder = derived_directory() / name
    folder.mkdir(parents=True)
    (folder / "model-00001.safetensors").write_bytes(bytes(nbytes))
    manifest = {"source": source, "model": name, "files": {}}
    (folder / NOTE_NAME).write_text(json.dumps(manifest))
    os.utime(folder / NOTE_NAME, (time.time() - age, time.time() - age))
    return folder


def test_room_is_made_of_what_was_used_longest_ago() -> None:
    old, new, own = fake_copy("old", 10**6, 300), fake_copy("new", 10**6, 10), fake_copy("own", 10**6, 1, "/here")
    assert make_room(10**6, "/here", "mine", 10**7)
    assert old.exists() and new.exists() and own.exists()
    assert not make_room(10**7 + 1, "/here", "mine", 10**7)
    assert old.exists() and new.exists() and own.exists(), "what is no use is not done"
    assert make_room(10**6, "/here", "mine", 3 * 10**6 + 10_000)
    assert old.exists() and new.exists() and not own.exists(), "of the same source, so of no use"
    assert make_room(10**6, "/here", "mine", 2 * 10**6 + 10_000)
    assert not old.exists() and new.exists()
    held = HeldLock(new, shared=True)
    assert not make_room(10**6, "/here", "mine", 10**6 + 10_000)
    held.release()
    assert make_room(10**6, "/here", "mine", 10**6 + 10_000)
    assert not new.exists()
    begun = fake_copy(f"mine{PARTIAL_SUFFIX}", 10**6, 300)
    assert not make_room(10**6, "/here", "mine", 1_500_000)
    assert make_room(400_000, "/here", "mine", 1_500_000) and begun.exists(), "the copy's own beginning is no room"


def test_a_copy_is_named_after_the_repository(tmp_path: Path) -> None:
    begun = derived_directory() / f"{'0' * 32}{PARTIAL_SUFFIX}"
    begun.mkdir(parents=True)
    adopt(save_fused(tmp_path / "models--org--some-model" / "snapshots" / "0a1b2c", SMALL))
    assert [copy.model for copy in list_copies()] == ["org/some-model"]
    assert not begun.exists()  # it had no manifest


# --- the command -----------------------------------------------------------------------------------------------------


def command(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["cache", *args]) == 0
    return capsys.readouterr().out


def test_the_command_lists_and_clears(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", capsys=capsys).startswith("0 packed copies")
    loaded = adopt(directory)
    fake_copy("abandoned", 5_000_000, 3 * 86400 + 5)
    disks = derived_directory().parent / "disks.json"
    disks.write_text('{"one": {}}')
    text = command("list", capsys=capsys)
    assert re.search(r"model +\d+ kB +used today", text) and re.search(r"abandoned +5\.0 MB +used 3 days ago", text)
    assert re.search(r"2 packed copies of 5\.\d MB", text) and "1 remembered" in text
    listed = json.loads(command("list", "--json", capsys=capsys))
    assert [copy["model"] for copy in listed["copies"]] == ["model", "abandoned"]
    assert listed["copies"][0]["source"] == str(directory) and listed["disks"] == ["one"]
    assert listed["bytes"] == sum(copy["bytes"] for copy in listed["copies"]) > 5_000_000

    cleared = json.loads(command("clear", "--json", capsys=capsys))
    assert [copy["model"] for copy in cleared["removed"]] == ["abandoned"]
    assert [copy["model"] for copy in cleared["kept"]] == ["model"], "a loaded model reads from it"
    assert not disks.exists()
    assert same_bits(logits(loaded.model), logits(stock(directory)))
    del loaded
    text = command("clear", capsys=capsys)
    assert re.search(r"model +\d+ kB +used today +packed copy, removed", text) and "removed 1 packed copy" in text
    assert not list_copies()
    folder = fake_copy("strange", 10, 10)
    (folder / NOTE_NAME).write_text("[]")
    text = command("list", capsys=capsys)
    assert "(cannot be read)" in text and "not complete" in text
    assert "removed 1 packed copy" in command("clear", capsys=capsys) and not folder.exists()
    assert "removed 0 packed copies" in command("clear", capsys=capsys)
