"""Guesses of what stacks of experts will need: how good each is, what is read of them, and what is computed once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from expert_pools import pool_of, with_pool
from mlx_flash.engine.prepare import prepare
from mlx_flash.experts.expertlayers import CAREFUL_ODDS, EVEN_ODDS, Guess, Lookahead, Odds, PooledStacks, ranks_of
from mlx_flash.experts.pool import ABSENT
from mlx_flash.layout.units import scores_of
from mlx_flash.model import FlashLLM
from models import QWEN3_MOE, run, same_bits, stock
from models import save as save_tiny
from noting import noted
from saved_models import model_fixture
from streamed import config
from zoo.weights import VARIANTS, save

GATES = {
    "mixtral": "block_sparse_moe.gate",
    "deepseek_v3": "mlp.gate",
    "gpt_oss": "mlp.router",
    "granitemoe": "block_sparse_moe.router",
    "llama4": "feed_forward.router",
    "nemotron_h": "mixer.gate",
}

tiny = model_fixture(QWEN3_MOE)


@pytest.fixture(scope="module")
def foreseeable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention adds nothing: a guess from the residual after the experts is what the router says."""
    directory = save_tiny(tmp_path_factory.mktemp("foreseeable"), QWEN3_MOE, mx.float32)
    weights: Any = mx.load(str(directory / "model.safetensors"))
    for name, array in weights.items():
        if "o_proj" in name:
            weights[name] = mx.zeros_like(array)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


@given(st.integers(1, 3), st.integers(1, 6), st.integers(7, 9), st.integers(0, 999))
def test_ranks_follow_the_scores(num_tokens: int, top_k: int, num_experts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.permuted(np.tile(np.arange(num_experts, dtype=np.float32), (num_tokens, 1)), axis=1)
    indices = rng.permuted(np.argsort(-logits, axis=1)[:, :top_k], axis=1)
    shaped = mx.array(indices.reshape(num_tokens, 1, top_k).astype(np.uint32))
    expected: dict[int, int] = {}
    for token, chosen in enumerate(indices.tolist()):
        for expert in chosen:
            rank = int((logits[token] > logits[token, expert]).sum())
            expected[expert] = min(rank, expected.get(expert, rank))
    said = mx.array(logits.reshape(num_tokens, 1, num_experts))
    own = mx.take_along_axis(said, shaped, axis=-1)
    for returned in (said, (shaped, own), (own.astype(mx.bfloat16), shaped)):
        ranks = ranks_of([shaped, cast(mx.array, scores_of(returned, shaped, num_experts))])
        assert ranks == expected and list(ranks.values()) == sorted(ranks.values())
    for nothing in (None, shaped, said[..., :-1] if num_experts - 1 > top_k else None, (said.astype(mx.int32),)):
        assert scores_of(nothing, shaped, num_experts) is None
        assert ranks_of([shaped]) == dict.fromkeys(expected, 0)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 99), st.sampled_from([CAREFUL_ODDS, EVEN_ODDS])
)
def test_only_ranks_that_were_right_are_read(shares: list[float], seed: int, least: float) -> None:
    odds, rng = Odds(least), np.random.default_rng(seed)
    assert odds.num_good == 0
    right = [0] * len(shares)
    for i in range(400):
        for rank, share in enumerate(shares):
            is_right = (i + 1) * share - right[rank] >= 0.5 + rng.uniform(-0.3, 0.3)
            right[rank] += is_right
            odds.note({0: rank}, {0} if is_right else set())
    good = [rank for rank in range(len(shares)) if right[rank] >= 400 * (least + 0.01)]
    bad = [rank for rank in range(len(shares)) if right[rank] >= 400 * (least - 0.01)]
    assert max(good, default=-1) < odds.num_good <= max(bad, default=-1) + 1


def test_scores_of_most_architectures_are_observed(tmp_path: Path) -> None:
    for name, gate in GATES.items():
        save(tmp_path / name, zoo.configuration(name), VARIANTS["fp32"])
        prepared = prepare(tmp_path / name, config())
        modules = {id(module): path for path, module in prepared.loaded.model.named_modules()}
        assert prepared.layout.experts
        for stack in prepared.layout.experts:
            assert stack.gate is not None and modules[id(stack.gate)].endswith(gate)


TOKENS = [[(7 * i + i * i) % 1000] for i in range(100)]


def test_right_predictions_waste_no_reads_and_no_rows(foreseeable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = noted(monkeypatch, PooledStacks, "run", lambda _, layer, x, slots: slots.size if layer else 0)
    with with_pool(foreseeable, 24) as model:
        ahead = ahead_of(model)
        guess = ahead.guess
        ahead.guess = lambda layer, *, is_early: None if is_early else guess(layer, is_early=False)  # type: ignore[method-assign]
        run(model, TOKENS[:40])
        assert min(ahead._late._right) >= CAREFUL_ODDS
        stats = replace(pool_of(model).stats)
        rows.clear()
        assert same_bits(run(model, TOKENS[40:]), run(stock(foreseeable), TOKENS[40:]))
        after = pool_of(model).stats
        assert after.num_predicted - stats.num_predicted == after.num_predicted_right - stats.num_predicted_right > 20
        assert after.num_evicted > stats.num_evicted
        assert sum(rows) == 60 * 2 * 2  # tokens, stacks but the first, which is not guessed, and experts


def test_nothing_is_guessed_once_all_experts_are_there(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guesses: list[int] = []
    real = Lookahead.read
    monkeypatch.setattr(Lookahead, "read", lambda *args, **how: (guesses.append(args[1]), real(*args, **how))[1])
    with with_pool(tiny, 48) as model:
        expected = run(stock(tiny), TOKENS)
        assert same_bits(run(model, TOKENS), expected)
        pool = pool_of(model)
        for layer, table in enumerate(pool.slot_of):  # what no token has needed
            pool.wait(layer, pool.request(layer, np.flatnonzero(table == ABSENT).tolist()))
        assert guesses and pool.num_resident == 48
        guesses.clear()
        assert same_bits(run(model, TOKENS), expected)
        assert not guesses and pool.stats.num_evicted == 0


def test_bad_predictions_are_not_read(tiny: Path) -> None:
    with with_pool(tiny, 24) as model:
        ahead = ahead_of(model)
        real = ahead.guess

        def wrong(layer: int, *, is_early: bool) -> Guess | None:
            guess = real(layer, is_early=is_early)
            return None if guess is None else [(guess[0] + 5) % 16, *guess[1:]]

        ahead.guess = wrong  # type: ignore[method-assign]
        assert same_bits(run(model, TOKENS), run(stock(tiny), TOKENS))
        stats = replace(pool_of(model).stats)
        assert stats.num_predicted < 20
        run(model, TOKENS)
        assert pool_of(model).stats.num_predicted == stats.num_predicted


def test_full_shape_calls_are_not_predicted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_flash.experts.expertlayers.try_slots", lambda module, first: False)
    with with_pool(tiny, 24) as model:
        assert same_bits(run(model, TOKENS[:20]), run(stock(tiny), TOKENS[:20]))
        stats = pool_of(model).stats
        assert stats.num_full == stats.num_calls == 60 and stats.num_predicted == 0


def ahead_of(model: FlashLLM) -> Lookahead:
    assert model.engine is not None and model.engine.experts is not None
    return model.engine.experts._ahead
