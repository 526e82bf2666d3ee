"""A compressed copy computes mlx-lm's bits, is read in parts, and is there whole or not at all."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import utils as mlx_lm_utils

from expert_pools import with_pool
from faulty import open_in_the_end, open_things
from mlx_flash import FlashConfig, load_model
from mlx_flash.cli import main
from mlx_flash.convert.pack import PackReport, pack
from mlx_flash.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from mlx_flash.residency.machine import _reads
from mlx_flash.storage import blocks as codec
from mlx_flash.storage.blocks import BLOCK_BYTES, Compression, decoding_bytes
from mlx_flash.storage.probe import DiskProfile
from mlx_flash.storage.safetensors import read_checkpoint
from models import GEMMA3, LLAMA, PREFILL_AND_DECODE, QWEN3_MOE, run, same_bits, save, stock

LARGER = LLAMA | {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
TIED = {**LARGER, "tie_word_embeddings": True}
MODELS: dict[str, tuple[dict[str, Any], mx.Dtype, int | None]] = {
    "dense-bf16": (LARGER, mx.bfloat16, None),
    "tied-fp16": (TIED, mx.float16, None),
    "windows-bf16": (GEMMA3, mx.bfloat16, None),
    "mixture-fp32": (QWEN3_MOE | {"moe_intermediate_size": 192}, mx.float32, None),
    "4bit": ({**LARGER, "intermediate_size": 4096, "num_hidden_layers": 2}, mx.bfloat16, 4),
}
SMALLEST = FlashConfig(ram_budget_gb="min", context_length=256, poison_released_slots=True)


def compressed(source: Path, target: Path, **options: Any) -> PackReport:
    return pack(source, target, compresses=True, **options)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its compressed copy."""
    folder = tmp_path_factory.mktemp("dense")
    source = save(folder / "source", LARGER, mx.bfloat16, num_shards=2)
    compressed(source, folder / "packed", shard_bytes=2_000_000)
    return source, folder / "packed"


def coded_names(directory: Path) -> set[str]:
    """Return the names of the tensors that are compressed."""
    return {r.name for shard in read_checkpoint(directory).shards if shard.blocks for r in shard.tensors}


def double(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have mlx-lm compute with some tensors while it loads a Llama."""

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return {**weights, **{name: weights[name] * 2 for name in names}}

    monkeypatch.setattr("mlx_lm.models.llama.Model.sanitize", sanitize)


@pytest.mark.parametrize("name", MODELS)
def test_same_bits_and_fewer_bytes(tmp_path: Path, name: str) -> None:
    config, dtype, bits = MODELS[name]
    source = save(tmp_path / "source", config, dtype, bits=bits)
    report = compressed(source, tmp_path / "packed")
    assert report.ratio < (0.97 if bits else 0.9)
    expected = run(stock(source), PREFILL_AND_DECODE)
    before = open_things()
    with load_model(tmp_path / "packed", SMALLEST)[0] as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        plan, compression = model.plan, model.plan.compression
        assert model.engine is not None and model.engine.reader.stats.nbytes > 0
        assert compression is not None and compression.ratio == report.ratio
        assert plan.bounce_bytes >= plan.queue_depth * decoding_bytes(plan.read_size)
    del model
    gc.collect()  # what a pool of experts has replaced is in a cycle, and holds the arrays that were never read
    num_open, threads = open_in_the_end(before)
    assert num_open <= before[0] and threads == before[1]
    with load_model(tmp_path / "packed", FlashConfig(ram_budget_gb=3))[0] as model:  # everything in memory
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
    pack(tmp_path / "packed", tmp_path / "plain")
    assert same_bits(run(stock(tmp_path / "plain"), PREFILL_AND_DECODE), expected)


def test_routers_of_compressed_mixtures_stay_in_memory(tmp_path: Path) -> None:
    """Beside a pool of experts a router is never streamed, though it is compressed like all that passes may read."""
    config, dtype, bits = MODELS["mixture-fp32"]
    source = save(tmp_path / "source", config, dtype, bits=bits)
    compressed(source, tmp_path / "packed")
    assert any(name.endswith("mlp.gate.weight") for name in coded_names(tmp_path / "packed"))
    with with_pool(tmp_path / "packed", 8, "streamed") as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), run(stock(source), PREFILL_AND_DECODE))


def test_only_what_every_pass_reads_is_compressed(dense: tuple[Path, Path]) -> None:
    names = coded_names(dense[1])
    assert "lm_head.weight" in names and "model.embed_tokens.weight" not in names
    assert not any("norm" in name for name in names)


@pytest.mark.parametrize("part", ["compressed-00002-of-", "uncompressed-00001-of-"])
def test_a_copy_without_one_of_its_files_is_refused(dense: tuple[Path, Path], tmp_path: Path, part: str) -> None:
    for path in dense[1].iterdir():
        if not path.name.startswith(part):
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(CheckpointNotFoundError, match="copy"):
        read_checkpoint(tmp_path)
    for path in dense[0].glob("*.safetensors"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="has both"):
        read_checkpoint(tmp_path)
    (dense[0] / "notes.flash").touch()
    read_checkpoint(dense[0])  # somebody's own file
    (tmp_path / "compressed-00001-of-00001.flash").touch()
    with pytest.raises(CheckpointError, match=r"compressed-00001-of-00001\.flash was made by an earlier version"):
        read_checkpoint(tmp_path)


def test_tensors_that_mlx_lm_computes_with_are_refused(
    dense: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another release of mlx-lm may compute what this one took as it is."""
    double(monkeypatch, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.* is compressed"):
        load_model(dense[1], SMALLEST)


def test_a_model_needs_the_library(dense: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    codec.zstandard_library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(ConfigError, match=r"pip install zstandard"):
            load_model(dense[1], SMALLEST)
    codec.zstandard_library.cache_clear()


def test_what_mlx_lm_computes_is_not_compressed(dense: tuple[Path, Path], tmp_path: Path, monkeypatch: Any) -> None:
    """It is computed from an uncompressed file, and streamed from the copy in the cache folder."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(5)]
    double(monkeypatch, *names)
    monkeypatch.setattr("mlx_flash.convert.derived.LEAST_BYTES", 1)
    compressed(dense[0], tmp_path / "packed")
    assert (coded := coded_names(tmp_path / "packed")) and not coded & {*names}
    with load_model(tmp_path / "packed", SMALLEST)[0] as model:
        assert same_bits(run(model, PREFILL_AND_DECODE), run(stock(dense[0]), PREFILL_AND_DECODE))


# --- the command -----------------------------------------------------------------------


def test_the_command_says_how_far_it_shrank(dense: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    assert main(["pack", str(dense[0]), str(tmp_path / "packed"), "--compress"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    ratio = read_checkpoint(tmp_path / "packed").ratio
    assert f"{ratio:.0%} of the bytes, `mlx-flash plan`" in told and ratio < 0.8
    assert main(["pack", str(tmp_path / "packed"), str(tmp_path / "plain"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] == 1


def test_plan_and_verify_know_a_compressed_copy(dense: tuple[Path, Path], capsys: Any) -> None:
    with pytest.raises(FileNotFoundError):
        mlx_lm_utils.load_model(dense[1])
    budget = ["--context-length=256", "--ram-budget-gb=min"]
    assert main(["plan", "--model", str(dense[1]), *budget]) == 0
    assert "Compressed:" in capsys.readouterr().out
    assert main(["verify", "--model", str(dense[1]), *budget, "--max-tokens=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_exact"] is True
    assert found["bytes_compared"] > 0


def test_as_many_threads_decode_as_keep_up_with_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_flash.storage.blocks.num_cores", lambda: 16)
    disk = DiskProfile(6e9, 4 << 20, 4, True)
    slow, fast = Compression(2 / 3, 2e9, 3e8, 3e9, False), Compression(2 / 3, 2e9, 6e9, 3e9, False)
    assert _reads(FlashConfig(), disk, None) == (4 << 20, 4)
    assert _reads(FlashConfig(), disk, slow) == (2 << 20, 4 + 2)
    assert _reads(FlashConfig(), disk, fast) == (2 << 20, 4 + 6)
    large, small = replace(disk, read_size=8 << 20, queue_depth=2), replace(disk, read_size=1 << 20, queue_depth=8)
    assert _reads(FlashConfig(), large, slow) == _reads(FlashConfig(), small, slow) == (2 << 20, 4 + 2)
    monkeypatch.setattr("mlx_flash.storage.blocks.num_cores", lambda: 2)
    assert _reads(FlashConfig(), disk, replace(fast, shares_cores=True)) == (2 << 20, 4 + 1)
    assert _reads(FlashConfig(queue_depth=3, read_size_mb=0.1), disk, fast) == (BLOCK_BYTES, 3)
