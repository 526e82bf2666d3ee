"""Ranks that have only a part of a model's files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from local_ranks import RANKS_PROGRAM, lines_of, run_ranks
from mlx_flash import cli
from mlx_flash.engine.call import Lane, parse_call
from mlx_flash.engine.need import check_least
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import BudgetError, CheckpointError
from mlx_flash.layout.units import layers_of
from mlx_flash.ranks import NeededFiles, RankFolder, follow_files, needed_files
from mlx_flash.residency.plan import ResidencyPlan
from models import LLAMA, QWEN3_MOE, VOCAB_SIZE, save
from streamed import config
from zoo import configuration

OWNERS = {"llama": [2, 2, 1, 0, 0], "qwen3_moe": [1, 2, 0]}


def save_by_layer(directory: Path, config: dict[str, object]) -> Path:
    """Write a model with a shard for each layer, one for the rest, and the index of an earlier conversion."""
    save(directory, config, mx.float32)
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.eval(weights)
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{_layer(name)}.safetensors" for name in weights}
    for file in set(files.values()):
        own = {name: array for name, array in weights.items() if files[name] == file}
        mx.save_safetensors(str(directory / file), own, {"format": "mlx"})
    stale = {"weight_map": dict.fromkeys(files, "model-00001-of-00009.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(stale))
    return directory


def _layer(name: str) -> str:
    found = re.search(r"layers\.(\d+)", name)
    return found[1] if found else "rest"


def part(directory: Path, rank: int, layers: list[int]) -> None:
    """Make the folder of a rank, with the shards of some layers."""
    folder = directory / f"rank-{rank}"
    folder.mkdir()
    for file in [*directory.glob("*.json"), *(directory / f"model-{name}.safetensors" for name in [*layers, "rest"])]:
        (folder / file.name).hardlink_to(file)


def test_ranks_with_the_files_of_their_layers_compute_the_logits_of_one_machine(tmp_path: Path) -> None:
    for name, shape in (("llama", LLAMA), ("qwen3_moe", QWEN3_MOE)):
        directory = save_by_layer(tmp_path / name, shape)
        for rank in range(3):
            part(directory, rank, [layer for layer, owner in enumerate(OWNERS[name]) if owner == rank])
    done = run_ranks(3, RANKS_PROGRAM, "models", tmp_path, "llama-files,qwen3_moe-files")
    found = {(rank, name): each for rank, name, each in lines_of(done)}
    assert len(found) == 6, done
    for (rank, name), each in found.items():
        own = [layer for layer, owner in enumerate(OWNERS[name.removesuffix("-files")]) if owner == rank]
        assert each["is_equal"]
        assert {_layer(unit) for unit in each["units"] if ".layers." in unit} == set(map(str, own))
        assert len(each["rows"]) == len(own) and all(each["rows"])  # memory for keys and values of its own layers only


def test_a_file_that_every_rank_needs_is_named() -> None:
    folder = RankFolder(Path(), [set(), {"b"}], 0)
    assert folder.able_ranks(NeededFiles([{"a"}, {"a", "b"}], {"a"})) == [[0, 1], [0]]
    with pytest.raises(CheckpointError, match=r"rank 1 lacks b, .* every rank computes"):
        folder.able_ranks(NeededFiles([{"a"}], {"b"}))


def test_a_layer_that_no_rank_has_all_files_of_is_an_error() -> None:
    folder = RankFolder(Path(), [{"a"}, {"b"}], 0)
    with pytest.raises(CheckpointError, match="no rank has all files of layer 1: a, b"):
        folder.able_ranks(NeededFiles([{"a"}, {"a", "b"}], set()))


def test_layers_follow_files_and_are_shared_evenly() -> None:
    assert follow_files([0, 1, 0, 1], [1] * 4, [[0, 1]] * 4) == [0, 1, 0, 1]
    assert follow_files([0, 0, 0, 0], [1] * 4, [[1], [1], [0, 1], [1, 2]]) == [1, 1, 0, 2]


@pytest.mark.parametrize("model", ["llama", "qwen3_next"])
def test_each_layer_needs_its_own_file(tmp_path: Path, model: str) -> None:
    """mlx-lm rearranges some tensors of the second one's layers."""
    directory = save_by_layer(
        tmp_path, LLAMA if model == "llama" else configuration(model) | {"vocab_size": VOCAB_SIZE}
    )
    prepared = prepare(directory, config())
    num_layers = len(layers_of(prepared.loaded.model))
    needed = needed_files(num_layers, prepared.checkpoint)
    assert needed.layers == [{f"model-{number}.safetensors"} for number in range(num_layers)]
    assert needed.all_ranks == {"model-rest.safetensors"}


def test_keys_and_values_of_other_ranks_take_no_memory(tmp_path: Path) -> None:
    plan = prepare(save(tmp_path / "llama", LLAMA, mx.float32), config()).plan
    cache = [KVCache() for _ in range(5)]
    for entry in cache:
        entry.update_and_fetch(*[mx.zeros((1, 4, 256, 32))] * 2)
    lane = Lane(parse_call((mx.array([[1]]),), {"cache": cache}))
    whole = check_need(plan, lane)
    for entry in cache[1:]:
        vars(entry)["_flash_is_elsewhere"] = True
    assert check_need(plan, lane) == whole - 4 * 2 * 256 * 4 * 32 * 4


def check_need(plan: ResidencyPlan, lane: Lane) -> int:
    """Return the bytes that a call takes the process to, as its refusal says."""
    with pytest.raises(BudgetError) as refusal:
        check_least(replace(plan, budget_bytes=0), lane)
    return refusal.value.minimum_bytes


def test_plan_prints_the_layers_of_each_rank_and_the_files_to_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_by_layer(tmp_path, LLAMA)
    flags = ["plan", "--model", str(directory), "--ram-budget-gb", "1", "--ranks", "2"]
    assert cli.main([*flags, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["ranks"]
    assert [part["layers"] for part in parts] == [[[0, 3]], [[3, 5]]]
    assert parts[1]["files"] == [f"model-{name}.safetensors" for name in (3, 4, "rest")] and parts[1]["nbytes"]
    assert cli.main(flags) == 0
    assert "0-2" in capsys.readouterr().out
