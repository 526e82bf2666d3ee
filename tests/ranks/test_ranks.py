"""One model on several ranks: the same logits on all of them, bit for bit."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_ranks import RANKS_PROGRAM, lines_of, run_ranks, started
from mlx_flash import cli
from mlx_flash import ranks as chain
from mlx_flash.errors import ConfigError
from mlx_flash.ranks import RankSpeed, runs, share_layers
from models import GEMMA3, LLAMA, QWEN3_MOE, VOCAB_SIZE, make_random_model, save
from zoo import configuration
from zoo.pool import Case, outcome_on_ranks

MODELS = {"llama": LLAMA, "gemma3": GEMMA3, "qwen3_moe": QWEN3_MOE}
MODELS |= {name: configuration(name) | {"vocab_size": VOCAB_SIZE} for name in ("jamba", "rwkv7", "afm7")}

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


def test_architectures_of_other_kinds_have_the_logits_of_one_machine() -> None:
    """``scripts/zoo.py --ranks 2`` compares all of them."""
    outcomes = [outcome_on_ranks(Case(name, "fp32"), timeout=100) for name in ("gpt_oss", "qwen3_next")]
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("ok", "")] * 2


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


def wait_for(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "connection to a peer was lost"), (signal.SIGSTOP, "had no answer in 2 s")]
)
def test_a_lost_rank_ends_the_others(root: Path, tmp_path: Path, number: signal.Signals, words: str) -> None:
    with started(3, tmp_path, RANKS_PROGRAM, "models", root, "llama", "endless") as ranks:
        for rank in ranks:
            wait_for(lambda rank=rank: "ready" in rank.out.read_text() or not rank.process.is_alive(), 120)
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


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (RankSpeed(0, 3e9, 1e15, 1e15), RankSpeed(0, 1e9, 1e15, 1e15)),
        (RankSpeed(1e12, 1e9, 3e12, 3e12), RankSpeed(1e12, 1e9, 1e12, 1e12)),
        (RankSpeed(1e12, 1e9, 1e11, 3e12), RankSpeed(1e12, 1e9, 1e11, 1e12)),
    ],
    ids=["disk", "processor", "memory"],
)
def test_a_faster_machine_gets_more_layers(fast: RankSpeed, slow: RankSpeed) -> None:
    assert Counter(share_layers([10**8] * 40, [slow, fast])) == {0: 10, 1: 30}
