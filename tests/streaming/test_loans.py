"""Loans change what is read and how much memory is used, never a bit of the output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import TransformerBlock

from mlx_flash import FlashConfig, FlashLLM, load_model
from mlx_flash.engine import need as need_module
from mlx_flash.engine.need import make_room, need
from mlx_flash.residency.plan import MB, TOKENS_AHEAD
from models import LLAMA, WIDE_LLAMA, run, same_bits, save, stock
from saved_models import model_fixture
from streamed import streamed_whole, wait_for_reads

EVERYTHING = 1 << 40

directory = model_fixture(WIDE_LLAMA, header_shift=1)
small = model_fixture(LLAMA, header_shift=1)


def loans_of(model: FlashLLM) -> Any:
    assert model.engine is not None
    return model.engine.loans


def read_bytes(model: FlashLLM, calls: list[list[int]]) -> int:
    assert model.engine is not None
    wait_for_reads(model)
    before = model.engine.reader.stats.nbytes
    run(model, calls)
    wait_for_reads(model)
    return model.engine.reader.stats.nbytes - before


@pytest.mark.parametrize("cut", [0, 1, 2, "tiles"])
def test_random_loans_change_no_bit(small: Path, cut: int | str) -> None:
    calls = [[1, 2, 3], [4], [5], [6, 7]]
    expected = run(stock(small), calls)
    random = Random(7)
    with streamed_whole(small, cut=cut) as model:
        loans, lent = loans_of(model), set()
        for _ in range(8):
            loans.lend(random.randrange(2 * model.plan.streaming.read_bytes))
            assert same_bits(run(model, calls), expected)
            lent.add(loans.nbytes)
            loans.recall(random.randrange(loans.nbytes + 1))
            assert same_bits(run(model, calls), expected)
            lent.add(loans.nbytes)
        assert len(lent) > 3
    assert same_bits(run(model.close(), calls), expected)


def test_lent_weights_are_not_read(directory: Path) -> None:
    row = WIDE_LLAMA["hidden_size"] * 4
    with streamed_whole(directory) as model:
        loans, whole = loans_of(model), model.plan.streaming.read_bytes
        assert read_bytes(model, [[1]]) == whole + row
        loans.lend(whole // 2)
        run(model, [[1]])
        assert whole // 3 < loans.saved_bytes < loans.nbytes <= whole // 2
        assert set(range(WIDE_LLAMA["num_hidden_layers"])) <= {array.unit for array in loans._lent}
        run(model, [[1]])  # reads that were in flight when the loans were made
        assert read_bytes(model, [[1]]) == whole + row - loans.saved_bytes
        loans.recall(loans.nbytes)
        assert loans.nbytes == loans.saved_bytes == 0
        run(model, [[1]])
        assert read_bytes(model, [[1]]) == whole + row


def test_units_that_are_not_in_a_slot_give_first(directory: Path) -> None:
    with streamed_whole(directory) as model:
        loans = loans_of(model)
        loans.lend(EVERYTHING)
        run(model, [[1], [2]])
        wait_for_reads(model)
        in_slots = [array for array in loans._lent if loans._stream.units[array.unit].is_in_slot]
        others = loans.nbytes - sum(array.nbytes for array in in_slots)
        assert in_slots and others > 0
        loans.recall(others)
        assert list(loans._lent) == in_slots


def test_a_part_of_the_budget_is_never_lent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need_module, "footprint", lambda: 100 * MB)
    with streamed_whole(directory) as model:
        lending = Lending()
        for known in (100 * MB, 90 * MB):  # less than the footprint: what is not known is not lent
            told = SimpleNamespace(plan=model.plan, missing=-50 * MB, process=known, in_use=0)
            need_module._settle(told, lending, 0)  # type: ignore[arg-type]
        kept = model.plan.unlent_bytes
        assert kept >= TOKENS_AHEAD * model.plan.kv_bytes_per_token > 0
        assert lending.lent == [50 * MB - kept, 40 * MB - kept]


def test_room_that_keys_and_values_grow_into_is_not_lent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need_module, "footprint", lambda: 0)
    with streamed_whole(directory) as model:
        row, lending = model.row(mx.zeros((1, 200), mx.int32), make_prompt_cache(model), 200), Lending()
        plan, lane = model.plan, row.lane()
        needed = need(plan, [lane])
        make_room(needed, lending)  # type: ignore[arg-type]
        assert needed.kv_growth >= 200 * plan.kv_bytes_per_token
        assert lending.lent == [-needed.missing - needed.kv_growth - plan.unlent_bytes]


class Lending:
    nbytes = 0

    def __init__(self) -> None:
        self.lent: list[int] = []

    def lend(self, nbytes: int) -> None:
        self.lent.append(nbytes)


def test_a_loan_takes_no_more_memory_than_it_says(directory: Path) -> None:
    with streamed_whole(directory) as model:
        loans = loans_of(model)
        loans.lend(EVERYTHING)
        loans.recall(1)  # ends what was promised
        run(model, [[1], [2]])
        assert loans.nbytes == 0
        before = mx.get_active_memory()
        loans.lend(8 * MB)
        run(model, [[1]])
        assert 6 * MB < loans.nbytes <= 8 * MB
        assert 0 < mx.get_active_memory() - before <= loans.nbytes
        loans.recall(1)
        assert 0 < loans.nbytes < 8 * MB
        loans.recall(loans.nbytes)
        assert mx.get_active_memory() <= before


def test_reserved_memory_is_lent_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short context leaves the memory of a long one to weights; a long prompt takes it back."""
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 100 * MB)
    monkeypatch.setattr("mlx_flash.engine.need.footprint", lambda: 100 * MB)
    shape = {"hidden_size": 128, "num_hidden_layers": 3, "num_key_value_heads": 8, "head_dim": 128}
    saved = save(tmp_path, WIDE_LLAMA | shape, mx.float32)
    settings: dict[str, Any] = {"context_length": 512, "kv_cache": "stock", "prefill_step_size": 64}
    with load_model(saved, FlashConfig(ram_budget_gb="min", **settings))[0] as model:
        budget = (model.plan.minimum_bytes + MB) / 1e9
    calls = [[[5]], *([[i]] for i in range(6))]
    prompt = [[i % 300 for i in range(448)]]
    expected = run_with_cache(stock(saved), calls)
    with load_model(saved, FlashConfig(ram_budget_gb=budget, **settings))[0] as model:
        cache, loans, plan = make_prompt_cache(model), loans_of(model), model.plan
        room = plan.budget_bytes - plan.base_bytes + plan.active_bytes
        got, lent = [], []
        for rows in [*calls, prompt, [[9]]]:
            got.append(model(mx.array(rows), cache=cache))
            mx.eval(got[-1])
            lent.append(loans.nbytes)
            assert mx.get_active_memory() <= room
        assert lent[1] > plan.kv_bytes // 2 > 0
        assert lent[-2] < lent[-3]
    assert same_bits(got[:-2], expected)


def run_with_cache(model: Any, calls: list[list[list[int]]]) -> list[mx.array]:
    cache = make_prompt_cache(model)
    outputs = [model(mx.array(rows), cache=cache) for rows in calls]
    mx.eval(outputs)
    return outputs


def test_a_module_that_keeps_something_lends_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call leaves in a module may refer to arrays in the slot, and would see other weights there."""
    own = TransformerBlock.__call__

    def keeping(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.first_weight = self.mlp.down_proj.weight
        return own(self, *args, **kwargs)

    monkeypatch.setattr(TransformerBlock, "__call__", keeping)
    with streamed_whole(directory, tile_rows=10**9) as model:
        loans = loans_of(model)
        loans.lend(EVERYTHING)
        run(model, [[1], [2]])
        head = sum(unit.nbytes for unit in model.layout.heads)
        assert loans.saved_bytes == head
        assert loans.lend(EVERYTHING) == EVERYTHING  # no memory is promised to it again


def test_models_that_share_a_budget_lend_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 100 * MB)
    monkeypatch.setattr("mlx_flash.engine.need.footprint", lambda: 100 * MB)
    settings = FlashConfig(ram_budget_gb=0.3, context_length=8192)
    with load_model(directory, settings)[0] as first:
        run(first, [[1], [2]])
        assert loans_of(first).nbytes > 0
        with load_model(directory, replace(settings, ram_budget_gb="min", context_length=64))[0] as second:
            for model in (first, second):
                run(model, [[1], [2]])
                assert loans_of(model).nbytes == 0
        run(first, [[1], [2]])
        assert loans_of(first).nbytes > 0
