"""Calls of a model that is spread over ranks share passes, and have the bits of calls one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import mlx.core as mx
import pytest

from local_ranks import RANKS_PROGRAM, lines_of, run_ranks
from mlx_flash.ranks import HAND_ON, HAND_OVER, HANDED
from mlx_flash.streaming.lockstep import Lockstep, Results
from mlx_flash.streaming.stream import Place, WeightStream
from models import save
from shared_passes import MODELS

NUM_RANKS = 2
BOTH = ("llama", "llama runs", "gemma3", "qwen3_next", "cut", "llama-sums", "llama runs-sums")
"""Cases in which both ranks stream, and memory has room for all calls."""

Found = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "gemma3", "qwen3_next"):
        save(root / name, MODELS[name], mx.float32)
    done = run_ranks(
        NUM_RANKS, RANKS_PROGRAM, "rows", root, ",".join([*BOTH, "reads", "unlike", "fails", "uses again"])
    )
    lines = {(rank, case): line for rank, case, line in lines_of(done)}
    assert len(lines) == NUM_RANKS * (len(BOTH) + 4), done
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


def test_four_sequences_read_what_one_reads(found: Found) -> None:
    for rank in range(NUM_RANKS):
        bytes_read = [each[2] for each in found[rank, "reads"]["counts"]]
        rows = 4 * 2 * MODELS["llama"]["hidden_size"] * 4  # each sequence reads its rows of the embeddings
        assert bytes_read[2] - bytes_read[1] - (bytes_read[1] - bytes_read[0]) in range(rows)


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


class Units:
    """A stream that notes which units are acquired, and holds one at a time."""

    def __init__(self) -> None:
        self.wait_turn: Callable[[Place], None] | None = None
        self.acquired: list[int] = []
        self.held: int | None = None

    def acquire(self, index: int) -> None:
        assert self.held is None
        self.held = index
        self.acquired.append(index)

    def release(self, index: int) -> None:
        assert self.held == index
        self.held = None


def test_one_rank_computes_a_group_while_another_computes_the_next_one() -> None:
    """Two ranks whose layers take turns. Of the first group, layer n + 1 waits for layer n of the second."""
    num_layers = 5
    meeting = threading.Barrier(NUM_RANKS, timeout=30)
    both_compute = [threading.Barrier(2, timeout=30) for _ in range(num_layers)]

    def agree(results: Results) -> Results:
        meeting.wait()
        return results

    def call(units: Units, rank: int, group: int) -> None:
        assert units.wait_turn is not None
        for layer in range(num_layers):
            is_own = layer % NUM_RANKS == rank
            if is_own:
                units.wait_turn(layer)
                assert units.held == layer
                if 0 <= layer - 1 + group < num_layers - 1:
                    both_compute[layer - 1 + group].wait()
            units.wait_turn((HAND_ON if is_own else HAND_OVER, layer))
            if not is_own:
                units.wait_turn((HANDED, layer))

    def run(rank: int) -> list[int]:
        units = Units()
        nothing = lambda number: None  # noqa: E731
        lockstep = Lockstep(cast(WeightStream, units), nothing, nothing, nothing, agree, NUM_RANKS)
        assert lockstep.run([[partial(call, units, rank, group)] for group in range(2)]) == [[None], [None]]
        assert units.held is None
        return units.acquired

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        assert list(threads.map(run, range(NUM_RANKS))) == [[0, 2, 4], [1, 3]]
