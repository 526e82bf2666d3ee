"""One model on several ranks: the same logits on all of them, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from local_ranks import RANKS_PROGRAM, lines_of, run_ranks, started
from mlx_flash import cli
from mlx_flash import ranks as chain
from mlx_flash.engine.call import Lane, check_least, parse_call
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import BudgetError, CheckpointError, ConfigError
from mlx_flash.layout.units import layers_of
from mlx_flash.ranks import (
    HAND_ON,
    HAND_OVER,
    HANDED,
    NeededFiles,
    RankFolder,
    RankSpeed,
    follow_files,
    needed_files,
    runs,
    share_layers,
)
from mlx_flash.streaming.stream import Lockstep, Results
from models import GEMMA3, LLAMA, QWEN3_MOE, VOCAB_SIZE, make_random_model, save
from shared_passes import MODELS as ROW_MODELS
from streamed import config
from waiting import eventually
from zoo import configuration

MODELS = {"llama": LLAMA, "gemma3": GEMMA3, "qwen3_moe": QWEN3_MOE}
MODELS |= {name: configuration(name) | {"vocab_size": VOCAB_SIZE} for name in ("jamba", "rwkv7", "gpt_oss", "afm7")}

SECONDS = 20.0
SPEEDS = st.builds(RankSpeed, st.floats(0, 1e12), st.floats(1e6, 1e11), st.floats(1e6, 1e13), st.floats(1e6, 1e13))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    for name, shape in MODELS.items():
        save(found / name, shape, mx.float32)
    return found


def launch(num_ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks of this machine, as a user does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = Path(sys.executable).with_name("mlx.launch")
    command = [launcher, "-n", num_ranks, "-p", port, "--python", sys.executable, *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)


def test_all_ranks_get_the_logits_and_tokens_of_one_machine(root: Path) -> None:
    num_ranks, names = 3, [*(name for name in MODELS if name != "afm7"), "llama-sums"]
    done = run_ranks(num_ranks, RANKS_PROGRAM, "models", root, ",".join(names))
    found = {(rank, name): each for rank, name, each in lines_of(done)}
    assert {key: each["is_equal"] for key, each in found.items()} == {
        (rank, name): True for rank in range(num_ranks) for name in names
    }, done
    for rank, name in itertools.product(range(num_ranks), ("llama", "llama-sums")):
        layers = {unit for unit in found[rank, name]["units"] if ".layers." in unit}
        assert layers == {f"model.layers.{i}" for i in range(rank, 5, num_ranks)}
        assert [each["layers"] for each in found[rank, name]["told"]["each"]] == [
            [[layer, layer + 1] for layer in range(other, 5, num_ranks)] for other in range(num_ranks)
        ]


def test_a_model_that_is_no_chain_is_refused(root: Path) -> None:
    """Its later layers use keys and values of an earlier one, which another rank may have."""
    done = run_ranks(2, RANKS_PROGRAM, "models", root, "afm7")
    assert any(
        found["error"] == "StreamedWeightsError" and "ranks" in found["text"] for _, _, found in lines_of(done)
    ), done


@pytest.mark.parametrize("evaluate", [mx.eval, mx.async_eval, mx.array.tolist])
def test_each_use_of_what_another_rank_has_raises(evaluate: Any) -> None:
    for dtype in (mx.float32, mx.bfloat16) * 2:
        used = mx.softmax(chain._trap(mx.zeros((2, 3), dtype))) + 1
        with pytest.raises(RuntimeError, match=chain._NO_VALUE):
            evaluate(used)


@pytest.mark.parametrize(
    ("fault", "words"), [("dies", "rank 0 exchanges"), ("other tokens", "start the same program with the same")]
)
def test_a_rank_that_is_lost_or_computes_something_else_is_an_error(root: Path, fault: str, words: str) -> None:
    done = run_ranks(2, RANKS_PROGRAM, "models", root, "llama", fault)
    found = [found for rank, _, found in lines_of(done) if rank == 0]
    assert found[0]["error"] == "PeerError" and words in found[0]["text"], done


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "connection to a peer was lost"), (signal.SIGSTOP, "had no answer in 2 s")]
)
def test_a_lost_rank_ends_the_others(root: Path, tmp_path: Path, number: signal.Signals, words: str) -> None:
    with started(3, tmp_path, RANKS_PROGRAM, "models", root, "llama", "endless") as ranks:
        for rank in ranks:
            eventually(lambda rank=rank: "ready" in rank.out.read_text() or not rank.process.is_alive(), 120)
        assert ranks[1].process.pid is not None and ranks[1].process.is_alive(), ranks[1].errors.read_text()
        os.kill(ranks[1].process.pid, number)
        others = ranks[0], ranks[2]
        for rank in others:
            rank.process.join(SECONDS)
        errors = [rank.out.read_text() + rank.errors.read_text() for rank in others]
        assert all(rank.process.exitcode for rank in others), errors
        assert any(words in each for each in errors), errors  # the second one may see that the first one is gone


def test_ranks_with_unequal_room_cut_prompts_alike(root: Path) -> None:
    """One has a shorter prefill step, the other has room for two tokens at a time."""
    done = run_ranks(2, RANKS_PROGRAM, "models", root, "llama", "less room")
    assert {(rank, found.get("is_equal")) for rank, _, found in lines_of(done)} == {(0, True), (1, True)}, done
    assert all("room for 2 tokens at a time" in each.stderr for each in done)


def test_generate_prints_the_text_of_one_machine_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--layers", "3", "--hidden-size", "64", "--intermediate-size", "128", "--heads", "4", "--kv-heads", "2"]
    directory = make_random_model(tmp_path / "model", *shape)
    flags = ["generate", "--model", str(directory), "--prompt", "hello", "--max-tokens", "5", "--ram-budget-gb", "1"]
    assert cli.main(flags) == 0
    alone = capsys.readouterr().out
    done = launch(2, Path(sys.executable).with_name("mlx-flash"), *flags)
    assert done.stdout == alone, done.stderr
    assert done.stderr.count("Generation:") == 1


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=20), st.lists(SPEEDS, min_size=1, max_size=6))
def test_every_layer_has_a_rank_and_every_rank_a_layer(layer_bytes: list[int], ranks: list[RankSpeed]) -> None:
    if len(layer_bytes) < len(ranks):
        with pytest.raises(ConfigError, match="start fewer"):
            share_layers(layer_bytes, ranks)
        return
    owners = share_layers(layer_bytes, ranks)
    assert len(owners) == len(layer_bytes) and set(owners) == set(range(len(ranks)))
    following = [(a, b) for a, b in pairwise(owners) if a != b]
    assert all(b == (a + 1) % len(ranks) for a, b in following)  # neighbours only: a ring has no other connections
    covered = [layer for rank in range(len(ranks)) for a, b in runs(owners, rank) for layer in range(a, b)]
    assert sorted(covered) == list(range(len(layer_bytes)))


def test_ranks_take_turns_only_if_they_read() -> None:
    layers = [100] * 12
    assert share_layers(layers, [RankSpeed(1e4, 1e9, 1e9, 1e9)] * 3) == [0] * 4 + [1] * 4 + [2] * 4
    assert share_layers(layers, [RankSpeed(100, 1e9, 1e12, 1e12)] * 3) == [0, 1, 2] * 4


# --- ranks that have only a part of a model's files -------------------------------------------------------------------


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


def test_files_decide_which_ranks_may_have_a_layer() -> None:
    folder = RankFolder(Path(), [set(), {"b"}], 0)
    assert folder.able_ranks(NeededFiles([{"a"}, {"a", "b"}], {"a"})) == [[0, 1], [0]]
    with pytest.raises(CheckpointError, match=r"rank 1 lacks b, .* every rank computes"):
        folder.able_ranks(NeededFiles([{"a"}], {"b"}))
    with pytest.raises(CheckpointError, match="no rank has all files of layer 1: a, b"):
        RankFolder(Path(), [{"a"}, {"b"}], 0).able_ranks(NeededFiles([{"a"}, {"a", "b"}], set()))
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
    lane, needed = Lane(parse_call((mx.array([[1]]),), {"cache": cache})), list[int]()
    for some in ([], cache[1:]):
        for entry in some:
            vars(entry)["_flash_is_elsewhere"] = True
        with pytest.raises(BudgetError) as refusal:
            check_least(replace(plan, budget_bytes=0), lane)
        needed.append(refusal.value.minimum_bytes)
    assert needed[0] - needed[1] == 4 * 2 * 256 * 4 * 32 * 4


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


# --- calls that share passes ------------------------------------------------------------------------------------------


NUM_RANKS = 2
BOTH = ("llama", "llama runs", "gemma3", "qwen3_next", "cut", "llama-sums", "llama runs-sums")
"""Cases in which both ranks stream, and memory has room for all calls."""

Found = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "gemma3", "qwen3_next"):
        save(root / name, ROW_MODELS[name], mx.float32)
    done = run_ranks(NUM_RANKS, RANKS_PROGRAM, "rows", root, ",".join([*BOTH, "unlike", "fails", "uses again"]))
    lines = {(rank, case): line for rank, case, line in lines_of(done)}
    assert len(lines) == NUM_RANKS * (len(BOTH) + 3), done
    return lines


def test_all_calls_have_the_logits_of_mlx_lm(found: Found) -> None:
    """Windows, recurrent states, ranks that take turns or have a run each, units smaller than layers, sums only."""
    assert all(each.get("is_equal", True) for each in found.values()), found


def test_prompts_and_tokens_take_one_pass_each(found: Found) -> None:
    """Four sequences of two tokens, with prompts of one to three parts; then a prompt of five parts, and a token."""
    for rank in range(NUM_RANKS):
        for case in BOTH:
            num_units, counts = found[rank, case]["num_units"], found[rank, case]["counts"]
            assert [each[:2] for each in counts] == [[0, 0], [2, 2 * num_units], [4, 4 * num_units]], case


def test_ranks_with_unequal_room_choose_the_same_calls(found: Found) -> None:
    """One streams all of its layers, the other none of them; it has room for five of nine calls."""
    assert [found[rank, "unlike"]["counts"][1][0] for rank in range(NUM_RANKS)] == [3, 3]
    assert [found[rank, "unlike"]["num_units"] > 0 for rank in range(NUM_RANKS)] == [True, False]


def test_an_error_on_one_rank_ends_the_row_on_all(found: Found) -> None:
    for rank, name in enumerate(("PeerError", "ValueError")):
        assert found[rank, "fails"]["errors"] == ["IndexError", None, None, None, name]
        assert set(found[rank, "fails"]["offsets"]) == {0}


def test_a_model_that_needs_an_order_is_computed_in_order_on_all_ranks(found: Found) -> None:
    """Only the rank that streams these layers one by one sees it."""
    assert all(found[rank, "uses again"]["needs_order"] for rank in range(NUM_RANKS))


def test_one_rank_computes_a_group_while_another_computes_the_next_one() -> None:
    """Two ranks whose layers take turns. Of the first group, layer n + 1 waits for layer n of the second."""
    num_layers = 5
    meeting = threading.Barrier(NUM_RANKS, timeout=30)
    both_compute = [threading.Barrier(2, timeout=30) for _ in range(num_layers)]

    def agree(results: Results) -> Results:
        meeting.wait()
        return results

    def call(stream: Any, rank: int, group: int) -> None:
        for layer in range(num_layers):
            is_own = layer % NUM_RANKS == rank
            if is_own:
                stream.wait_turn(layer)
                if 0 <= layer - 1 + group < num_layers - 1:
                    both_compute[layer - 1 + group].wait()
            stream.wait_turn((HAND_ON if is_own else HAND_OVER, layer))
            if not is_own:
                stream.wait_turn((HANDED, layer))

    def run(rank: int) -> list[int]:
        read = list[int]()
        stream: Any = SimpleNamespace(acquire=read.append, release=lambda layer: None)
        lockstep = Lockstep(stream, *[lambda number: None] * 3, agree, NUM_RANKS)
        assert lockstep.run([[partial(call, stream, rank, group)] for group in range(2)]) == [[None], [None]]
        return read

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        assert list(threads.map(run, range(NUM_RANKS))) == [[0, 2, 4], [1, 3]]
