"""A packed checkpoint is the same checkpoint, is read in fewer pieces, and is there whole or not at all."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import children
from mlx_flash import FlashConfig, load_model
from mlx_flash.convert import pack as pack_module
from mlx_flash.convert.pack import (
    DATA_ALIGNMENT,
    NOTE_NAME,
    PackReport,
    TensorSpec,
    pack,
    plan_shards,
    streaming_order,
)
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, ConfigError, HeaderError, ReadError, WriteError
from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.parts import Unit
from mlx_flash.layout.units import make_layout
from mlx_flash.storage.placement import Segment, place
from mlx_flash.storage.safetensors import TensorRecord, read_checkpoint, read_shard
from models import GEMMA3, LLAMA, MAMBA2, PREFILL_AND_DECODE, make_random_model, run, same_bits, save, stock

LARGER = LLAMA | {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
"""A model of 16 MB, which is cut into several shards."""

THREE_MB = {"shard_bytes": 3_000_000}

TINY = ["--layers=3", "--hidden-size=64", "--intermediate-size=128", "--heads=4", "--kv-heads=2", "--vocab-size=300"]
EXPERTS = ["--architecture=qwen3_moe", "--experts=12", "--experts-per-token=2", "--dtype=float32"]

MODELS: dict[str, tuple[dict[str, Any], mx.Dtype, int | None]] = {
    "llama-fp32": (LARGER, mx.float32, None),
    "llama-4bit": ({**LARGER, "intermediate_size": 512}, mx.bfloat16, 4),
    "gemma3-bf16": (GEMMA3, mx.bfloat16, None),
    "mamba2-fp16": (MAMBA2, mx.float16, None),
}


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model folders by name, each written once: tensors in hash order over three files, with headers of odd length."""

    @functools.cache
    def get(name: str) -> Path:
        config, dtype, bits = MODELS[name]
        return save(tmp_path_factory.mktemp(name), config, dtype, bits=bits, num_shards=3, header_shift=5)

    return get


def contents(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for record in read_checkpoint(directory).tensors.values():
        with record.path.open("rb") as file:
            file.seek(record.offset)
            found[record.name] = (record.dtype, record.shape, file.read(record.nbytes))
    return found


def order_of(directory: Path) -> list[list[str]]:
    checkpoint = read_checkpoint(directory)
    return streaming_order(make_layout(load_lazily(directory, checkpoint)), checkpoint)


def read_units(directory: Path) -> list[Unit]:
    """The units that every pass reads whole."""
    layout = make_layout(load_lazily(directory, read_checkpoint(directory)))
    return [*layout.layers, *layout.heads, *(unit for unit in layout.embeddings if unit.name in layout.tied)]


def reads_of(directory: Path) -> list[Segment]:
    """The reads of a pass, for kernels that need aligned addresses."""
    groups = [[record for p in unit.large for record in p.records] for unit in read_units(directory)]
    return [segment for group in groups for segment in place([[record] for record in group], 16).segments]


def is_matrix(record: TensorRecord) -> bool:
    return len(record.shape) > 1 and record.nbytes > 64 << 10


def names_on_disk(directory: Path) -> list[str]:
    shards = sorted(read_checkpoint(directory).shards, key=lambda shard: shard.path.name)
    return [record.name for shard in shards for record in shard.tensors]


# --- the same checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_stock_and_streamed(scattered: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source, target = scattered(name), tmp_path / "packed"
    expected = run(stock(source), PREFILL_AND_DECODE)
    pack(source, target, shard_bytes=1_000_000)
    assert contents(target) == contents(source)
    assert same_bits(run(stock(target), PREFILL_AND_DECODE), expected)
    settings = FlashConfig(ram_budget_gb="min", context_length=256, poison_released_slots=True)
    with load_model(target, settings)[0] as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        assert model.plan.streaming.read_bytes > 0


@pytest.mark.parametrize(
    ("naming", "options", "budget"),
    [
        ("mlx", [], "min"),
        ("mlx", ["--quantize-bits=4", "--group-size=32"], "min"),
        ("huggingface", [], 1),  # what mlx-lm stacks is in memory in any case
    ],
)
def test_experts_that_mlx_lm_stacks(tmp_path: Path, naming: str, options: list[str], budget: Any) -> None:
    arguments = [*EXPERTS, f"--naming={naming}", "--shard-size-gb=0.0005", *options]
    source = make_random_model(tmp_path / "source", *TINY, *arguments)
    report = pack(source, tmp_path / "packed", shard_bytes=300_000)
    assert report.num_shards > 1
    assert contents(tmp_path / "packed") == contents(source)
    names = names_on_disk(tmp_path / "packed")
    layers = [int(found[1]) for name in names if (found := re.search(r"layers\.(\d+)\.", name))]
    experts = [int(found[1]) for name in names if (found := re.search(r"layers\.1\..*experts\.(\d+)\.", name))]
    assert (layers, experts) == (sorted(layers), sorted(experts))
    assert len(experts) == (3 * 12 if naming == "huggingface" else 0)
    expected = run(stock(source), [[5, 17, 9], [12]])
    assert same_bits(run(stock(tmp_path / "packed"), [[5, 17, 9], [12]]), expected)
    with load_model(tmp_path / "packed", FlashConfig(ram_budget_gb=budget, context_length=256))[0] as model:
        assert same_bits(run(model, [[5, 17, 9], [12]]), expected)


# --- fewer, larger, aligned reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [1, 2_000_000, 10**12])
def test_each_unit_is_one_aligned_read(
    scattered: Callable[[str], Path], tmp_path: Path, name: str, shard_bytes: int
) -> None:
    source, packed = scattered(name), tmp_path / "packed"
    pack(source, packed, shard_bytes=shard_bytes)
    before, after = reads_of(source), reads_of(packed)
    assert len(after) == len(read_units(packed)) == len(read_units(source))
    assert all(segment.buffer_offset is not None for segment in after)
    assert all(segment.buffer_offset is None for segment in before) and len(before) > len(after)
    assert sum(segment.nbytes for segment in after) <= sum(segment.nbytes for segment in before)
    for unit in order_of(packed):
        paths = {read_checkpoint(packed).tensors[name].path for name in unit}
        assert len(paths) <= 1
    for shard in read_checkpoint(tmp_path / "packed").shards:
        assert shard.data_offset % DATA_ALIGNMENT == 0
        assert all(record.offset % record.itemsize == 0 for record in shard.tensors)


def test_units_lie_in_the_order_of_a_pass_and_what_is_streamed_first_lies_first(
    scattered: Callable[[str], Path], tmp_path: Path
) -> None:
    """The plan pins the smaller tensors of a layer; what is left is still one read."""
    pack(scattered("llama-fp32"), tmp_path / "packed")
    units = [
        re.sub(r"(layers\.\d+|[a-z_]+)\..*", r"\1", n.removeprefix("model."))
        for n in names_on_disk(tmp_path / "packed")
    ]
    assert list(dict.fromkeys(units)) == ["embed_tokens", *(f"layers.{i}" for i in range(5)), "norm", "lm_head"]
    assert units == sorted(units, key=list(dict.fromkeys(units)).index)
    checkpoint = read_checkpoint(tmp_path / "packed")
    for unit in order_of(tmp_path / "packed"):
        records = [checkpoint.tensors[name] for name in unit if is_matrix(checkpoint.tensors[name])]
        assert [r.nbytes for r in records] == sorted((r.nbytes for r in records), reverse=True)
        assert all(left.end == right.offset for left, right in pairwise(records))


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1), st.integers(1, 40))
def test_shards_are_cut_between_units(units: list[list[int]], shard_bytes: int) -> None:
    groups = [[TensorSpec(f"{i}.{j}", "U8", (n,)) for j, n in enumerate(unit)] for i, unit in enumerate(units)]
    shards = plan_shards(groups, shard_bytes, None, "{number} of {count}")
    assert [shard.name for shard in shards] == [f"{i + 1} of {len(shards)}" for i in range(len(shards))]
    cuts = [[int(tensor.name.split(".")[0]) for tensor in shard.tensors] for shard in shards]
    assert [i for cut in cuts for i in sorted(cut)] == [i for i, unit in enumerate(units) for _ in unit]
    assert all(max(left) < min(right) for left, right in pairwise(cuts))
    assert all(shard.nbytes <= shard_bytes or len({*numbers}) == 1 for shard, numbers in zip(shards, cuts, strict=True))
    assert all(a.nbytes + sum(units[min(cut)]) > shard_bytes for a, cut in zip(shards, cuts[1:], strict=False))


# --- files -----------------------------------------------------------------------------------------------------------


def test_index_names_and_metadata(scattered: Callable[[str], Path], tmp_path: Path) -> None:
    source = scattered("llama-fp32")
    several = pack(source, tmp_path / "several", **THREE_MB)
    names = [f"model-{i + 1:05}-of-{several.num_shards:05}.safetensors" for i in range(several.num_shards)]
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    shards = {shard.path.name: shard for shard in read_checkpoint(tmp_path / "several").shards}
    assert sorted(shards) == names
    assert index["metadata"] == {"total_size": several.nbytes}
    assert index["weight_map"] == {r.name: name for name, shard in shards.items() for r in shard.tensors}
    assert all(shard.metadata == {"format": "mlx"} for shard in shards.values())

    one = pack(tmp_path / "several", tmp_path / "one")
    assert one.num_shards == 1
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]


def test_everything_else_is_copied_and_links_become_files(tmp_path: Path) -> None:
    """In the cache of Hugging Face, a model folder is full of links to blobs."""
    real, source = save(tmp_path / "blobs", LARGER, num_shards=2), tmp_path / "snapshot"
    kept = ["README.md", "chat_template.jinja", "adapters/adapters.safetensors", "code/deep/model.py", ".gitattributes"]
    left = [".git/HEAD", ".cache/huggingface/x.lock", "code/__pycache__/model.pyc"]
    for name in [*kept, *left]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for path in real.iterdir():
        (source / path.name).symlink_to(Path("..") / "blobs" / path.name)
    source.chmod(0o555)  # nobody may write to it
    try:
        pack(source, tmp_path / "packed")
    finally:
        source.chmod(0o755)
    mode = (tmp_path / "packed").stat().st_mode
    assert mode & 0o200, "the state could not be removed from the target, nor files be added later"
    found = {str(path.relative_to(tmp_path / "packed")) for path in (tmp_path / "packed").rglob("*") if path.is_file()}
    assert found == {*kept, "config.json", "model.safetensors"}
    assert all((tmp_path / "packed" / name).read_text() == name for name in kept)
    expected = contents(source)
    shutil.rmtree(real)
    assert contents(tmp_path / "packed") == expected
    assert not any(path.is_symlink() for path in (tmp_path / "packed").rglob("*"))


@pytest.mark.parametrize("compresses", [False, True], ids=["plain", "compressed"])
def test_every_form_of_a_path_names_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compresses: bool
) -> None:
    source = save(tmp_path / "a" / "m", LLAMA, num_shards=3)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a" / "b")
    monkeypatch.setenv("HOME", str(tmp_path))
    expected, names = contents(source), set[tuple[str, ...]]()
    for number, form in enumerate(["../m", "../m/", "../b/../m", "../../link/m", "~/a/m", str(source)]):
        report = pack(resolve(form), Path(f"../packed-{number}"), compresses=compresses)
        names.add(tuple(sorted(path.name for path in report.target.iterdir())))
        with load_model(f"../packed-{number}", FlashConfig(ram_budget_gb="min", context_length=256))[0] as model:
            monkeypatch.chdir(tmp_path)
            assert same_bits(run(model, [[5, 17, 9]]), run(stock(source), [[5, 17, 9]]))
            monkeypatch.chdir(tmp_path / "a" / "b")
    assert len(names) == 1 and not any("model-" in name for name in next(iter(names)))
    pack(report.target, tmp_path / "plain")
    assert contents(tmp_path / "plain") == expected


# --- whole or not at all ---------------------------------------------------------------------------------------------


def test_targets_in_use_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "source", LARGER)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "begun.partial").mkdir()
    (tmp_path / "begun.partial" / "thesis.txt").touch()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    for target, words in (
        (tmp_path / "full", "is not empty: it holds 'notes.txt'"),
        (source, "is not empty"),
        (tmp_path / "file", "is not a folder"),
        (source / "packed", "is inside of the source"),
        (tmp_path / "begun", r"begun\.partial is in the way: it holds 'thesis\.txt'"),
        (tmp_path / "disk", "disk is a disk's own folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            pack(source, target)
    with pytest.raises(ConfigError, match="shard_bytes is 0"):
        pack(source, tmp_path / "packed", shard_bytes=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun.partial", "disk", "file", "full", "source"]
    assert (tmp_path / "begun.partial" / "thesis.txt").exists()


def test_what_cannot_be_done_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "source", LARGER)
    with monkeypatch.context() as patch, pytest.raises(WriteError, match=r"needs 0\.0\d GB more, 0\.01 GB are free"):
        usage = shutil.disk_usage(tmp_path)._replace(free=10_000_000)
        patch.setattr(pack_module.shutil, "disk_usage", lambda path: usage)
        pack(source, tmp_path / "packed")
    for there in ("nowhere", "..", source):
        (source / "tokenizer.json").symlink_to(there)
        with pytest.raises(CheckpointNotFoundError, match=r"tokenizer\.json is no file that can be copied"):
            pack(source, tmp_path / "packed")
        (source / "tokenizer.json").unlink()
    (source / "adapters").mkdir()

    def ask(system: Callable[[Path], Any], path: Path) -> Any:
        if Path(path).name == "adapters":
            raise PermissionError(13, "Permission denied")
        return system(path)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, functools.partial(ask, getattr(os, name)))
    with pytest.raises(CheckpointError, match=r"adapters: cannot read this folder: Permission denied"):
        pack(source, tmp_path / "packed")
    monkeypatch.undo()
    assert not list(tmp_path.rglob("packed*/*.safetensors"))
    monkeypatch.setattr(pack_module.shutil, "copy2", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(WriteError, match=r"cannot copy .*source/config\.json to .*: Permission denied"):
        pack(source, tmp_path / "packed")


class Stop(Exception):
    pass


def interrupted(source: Path, target: Path, share: float, **options: Any) -> None:
    """Packs until a share of the bytes is written and read back."""

    def progress(done: int, total: int) -> None:
        if done >= share * total:
            raise Stop

    with pytest.raises(Stop):
        pack(source, target, progress=progress, **options)


def finished(source: Path, target: Path, **options: Any) -> PackReport:
    """Packs, checks what it said on the way and what came out."""
    seen: list[tuple[int, int]] = []
    report = pack(source, target, progress=lambda done, total: seen.append((done, total)), **options)
    dones = [done for done, _ in seen]
    total = 2 * report.nbytes  # written, and read back
    assert dones == sorted(dones)
    assert {total for _, total in seen} == {total}
    assert (dones[0], dones[-1]) == (2 * report.resumed_bytes, total)
    assert contents(target) == contents(source)
    assert not target.with_name(f"{target.name}.partial").exists()
    assert not (target / NOTE_NAME).exists()
    return report


@pytest.mark.parametrize("share", [0, 0.6, 1])
def test_an_interrupted_run_is_taken_up(scattered: Callable[[str], Path], tmp_path: Path, share: float) -> None:
    source, target = scattered("llama-fp32"), tmp_path / "packed"
    interrupted(source, target, share, **THREE_MB)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed.partial"]
    written = {path: path.stat() for path in (tmp_path / "packed.partial").glob("*.safetensors")}
    assert bool(written) == (share > 0)
    report = finished(source, target, **THREE_MB)
    assert bool(report.resumed_bytes) == bool(written) and report.resumed_bytes < report.nbytes
    for path, before in written.items():
        assert (target / path.name).stat().st_ino == before.st_ino


@pytest.mark.parametrize("change", ["cut", "header", "shard size", "source"])
def test_what_does_not_fit_any_more_is_written_again(tmp_path: Path, change: str) -> None:
    source, target = save(tmp_path / "source", LARGER, num_shards=2), tmp_path / "packed"
    interrupted(source, target, 0.6, shard_bytes=1_000_000 if change == "shard size" else 3_000_000)
    first = min((tmp_path / "packed.partial").glob("*.safetensors"))
    if change == "cut":
        os.truncate(first, first.stat().st_size - 1)
    elif change == "header":
        first.write_bytes(first.read_bytes().replace(b"embed", b"EMBED", 1))
    elif change == "source":  # other bytes, same sizes and names: only the files themselves can tell
        for path in source.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-100_000] + os.urandom(100_000))
    report = finished(source, target, **THREE_MB)
    assert bool(report.resumed_bytes) == (change in ("cut", "header"))
    assert len(list(target.glob("*.safetensors"))) == report.num_shards


@pytest.mark.parametrize("change", [lambda path: os.utime(path, (1, 1)), Path.unlink], ids=["touched", "gone"])
def test_a_source_that_changes_meanwhile(tmp_path: Path, change: Callable[[Path], None]) -> None:
    source = save(tmp_path / "source", LARGER, num_shards=2)
    changed = False

    def progress(done: int, total: int) -> None:
        nonlocal changed
        if done > 0.45 * total and not changed:
            changed = True
            change(source / "model-00001-of-00002.safetensors")

    with pytest.raises(ReadError, match=r"(were copied|cannot read .*|a moment ago.*)\. Hint"):
        pack(source, tmp_path / "packed", progress=progress)
    assert not (tmp_path / "packed").exists()
    assert not list(tmp_path.rglob("packed*/*.safetensors"))


def test_a_second_run_at_once_is_refused(scattered: Callable[[str], Path], tmp_path: Path) -> None:
    source, refused = scattered("llama-fp32"), []

    def progress(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(ConfigError, match="another run is writing") as caught:
                pack(source, tmp_path / "packed")
            refused.append(caught.value)

    pack(source, tmp_path / "packed", progress=progress)
    assert refused
    assert contents(tmp_path / "packed") == contents(source)


def test_one_wrong_bit_is_found(scattered: Callable[[str], Path], tmp_path: Path) -> None:
    source, target = scattered("llama-fp32"), tmp_path / "packed"
    name = "model.layers.3.mlp.up_proj.weight"

    damaged = []

    def progress(done: int, total: int) -> None:
        for path in [] if damaged else (tmp_path / "packed.partial").glob("*.safetensors.partial"):
            with suppress(HeaderError):  # it is not complete
                record = {record.name: record for record in read_shard(path).tensors}.get(name)
                if record is not None:
                    data = bytearray(path.read_bytes())
                    data[record.end - 1] ^= 1
                    path.write_bytes(data)
                    damaged.append(path)

    with pytest.raises(WriteError, match=rf"'{name}' in .* is not what was written"):
        pack(source, target, **THREE_MB, progress=progress)
    assert damaged and not damaged[0].exists() and not target.exists()
    finished(source, target, **THREE_MB)


MEASURE = """
import sys
from pathlib import Path
from mlx_flash.layout.load import load_lazily
from mlx_flash.convert.pack import pack
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.memory.footprint import peak_footprint
load_lazily(Path(sys.argv[1]), read_checkpoint(Path(sys.argv[1])))
before = peak_footprint()
pack(Path(sys.argv[1]), Path(sys.argv[2]))
print(peak_footprint() - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """200 MB, of which the largest tensor has 131 MB."""
    big = {**LARGER, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 32_000, "num_hidden_layers": 2}
    source = save(tmp_path / "source", {**big, "tie_word_embeddings": True})
    assert read_checkpoint(source).nbytes > 200_000_000
    done = children.run("-c", MEASURE, source, tmp_path / "packed")
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) < 40_000_000
