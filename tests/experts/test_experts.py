"""Experts that are read one by one give stock mlx-lm's bits, at any size of the pool."""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_flash
import zoo
from checkpoints import DIRECT
from disks import Disk
from expert_pools import ARCHITECTURES, CALLS, PROMPT, QUANTIZED, check_slots, pool_of, pooled, with_pool
from expert_pools import made as made  # a fixture
from mlx_flash import ClosedError, FileChangedError, ReadError, TruncatedFileError, enginethread
from mlx_flash.convert.pack import pack
from mlx_flash.engine.prepare import prepare
from mlx_flash.experts.expertlayers import Experts as ModelExperts
from mlx_flash.experts.pooledstacks import PooledStacks
from mlx_flash.experts.slots import ABSENT
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.arena import SlotArena
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.residency.planner import make_plan
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.ranges import RangeReader
from models import MIXTRAL, QWEN3_MOE, make_random_model, run, same_bits, stock
from models import save as save_tiny
from streamed import config, streamed_whole
from threads import threads_of_models
from zoo.compare import LONGEST_CALL, TURNS, find_difference, only, trace
from zoo.weights import VARIANTS, save

POOLS = ([(0, True), (14, False), (999, True)], [(0, False), (9, True), (999, False)])
"""Slots of the pool (the fewest, some, all), and whether rows are exact. Architectures take turns at the two lists, and
each leaves one size out: which expert is in which slot does not depend on the architecture."""


@pytest.mark.parametrize(
    ("name", "variant", "pool_slots", "exact_rows", "turn"),
    [
        (*each, *pool, (i + j) % 2)
        for i, each in enumerate(ARCHITECTURES)
        for j, pool in enumerate(pool for k, pool in enumerate(POOLS[i % 2]) if k != i % 3)
    ],
)
def test_experts_stream_exactly(
    made: Any, name: str, variant: str, pool_slots: int, exact_rows: bool, turn: int
) -> None:
    """The two pools of an architecture take turns at the two halves of the generations."""
    directory, expected = made(name, variant)
    with streamed_whole(directory, pool_slots=pool_slots, exact_rows=exact_rows) as model:
        model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)
        assert not find_difference(only(TURNS[turn], expected), trace(model, numbers=TURNS[turn]))
        stats = model.engine.experts.pool.stats
        print(stats)
        assert stats.num_calls


CONFIGS: dict[str, tuple[dict[str, Any], mx.Dtype, int | None]] = {
    "qwen3_moe": (QWEN3_MOE, mx.float32, None),
    "qwen3_moe-4bit": (QUANTIZED, mx.bfloat16, 4),
    "mixtral": (MIXTRAL, mx.float32, None),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories of tiny models and what stock mlx-lm computes, by name."""
    found: dict[str, tuple[Path, list[Any]]] = {}

    def get(name: str) -> tuple[Path, list[Any]]:
        if name not in found:
            config, dtype, bits = CONFIGS[name]
            directory = save_tiny(tmp_path_factory.mktemp(name), config, dtype, bits=bits, header_shift=1)
            found[name] = directory, trace(stock(directory), CALLS)
        return found[name]

    return get


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes every plan one with a pool of so many slots, and the rest in memory."""

    def plan(pool_slots: int) -> None:
        layouts: list[ModelLayout] = []

        def spy(loaded: Any) -> ModelLayout:
            layouts.append(make_layout(loaded))
            return layouts[-1]

        monkeypatch.setattr("mlx_flash.engine.prepare.make_layout", spy)
        monkeypatch.setattr(
            "mlx_flash.engine.prepare.make_plan", lambda *args: pooled(make_plan(*args), layouts[-1], pool_slots)
        )

    return plan


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


ONE_WAY, OTHER_WAY = [(0, True), (11, False), (999, True)], [(0, False), (11, True), (999, False)]
"""Slots of the pool, and whether rows are exact."""


@pytest.mark.parametrize(
    ("name", "trunk", "pool_slots", "exact_rows"),
    [
        *(("qwen3_moe", "resident", *pool) for pool in ONE_WAY),
        *(("qwen3_moe-4bit", "streamed", *pool) for pool in OTHER_WAY),
        *(("mixtral", "mixed", *pool) for pool in ONE_WAY + OTHER_WAY),
    ],
)
def test_any_pool_gives_stock_bits(tiny: Any, name: str, trunk: str, pool_slots: int, exact_rows: bool) -> None:
    directory, expected = tiny(name)
    exact_rows = exact_rows and mx.default_device() == mx.cpu
    with with_pool(directory, pool_slots, trunk, exact_rows=exact_rows) as model:
        pool = pool_of(model)
        assert not find_difference(expected, trace(model, CALLS))
        assert not find_difference(expected, trace(model, CALLS))
        check_slots(pool)
        if pool.slots.num_slots < 20:
            assert pool.stats.num_evicted > 0
        num_experts = model.layout.experts[0].num_experts
        assert (pool.stats.num_full > 0) == (not exact_rows or pool.slots.num_slots < num_experts)
        if pool_slots:
            assert 0 < pool.stats.num_hits < pool.stats.num_routed
        stack = model.layout.experts[0].unit.module
    closed = trace(model.close(), CALLS[-1:])
    assert closed and not find_difference(expected[-len(closed) :], closed)
    assert type(stack) is SwitchGLU


@pytest.mark.parametrize("trunk", ["resident", "streamed"])
def test_lookahead_changes_no_bit(tiny: Any, trunk: str) -> None:
    directory, expected = tiny("qwen3_moe")
    predicted = []
    for lookahead in (False, True):
        with with_pool(directory, 24, trunk, expert_lookahead=lookahead) as model:
            assert not find_difference(expected, trace(model, CALLS))
            stats = pool_of(model).stats
            predicted.append(stats.num_predicted)
            assert stats.num_predicted_right <= stats.num_predicted
    assert predicted[0] == 0 < predicted[1]


def test_unknown_expert_is_an_index_error(tiny: Any) -> None:
    directory, expected = tiny("qwen3_moe")
    with with_pool(directory, 8) as model:
        module = model.layout.experts[1].unit.module
        for indices in ([[0, 16]], [[-1, 3]]):
            with pytest.raises(IndexError, match=r"layers\.1\.mlp\.switch_mlp' was asked for experts .*: it has 16"):
                module(mx.zeros((1, 64)), mx.array(indices))
        assert not find_difference(expected, trace(model, CALLS))


@pytest.mark.skipif(has_own_memory(), reason="MLX's CUDA kernel takes no empty arrays: mlx-lm ends the process too")
def test_stack_called_without_tokens(tiny: Any) -> None:
    with with_pool(tiny("qwen3_moe")[0], 8) as model:
        module = model.layout.experts[1].unit.module
        assert module(mx.zeros((0, 64)), mx.zeros((0, 2), mx.uint32)).shape == (0, 2, 64)


def test_stale_experts_show(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison works: when what was needed before is not evaluated before its slot goes, the logits are wrong."""
    directory, _ = tiny("qwen3_moe")
    x, indices = mx.ones((1, 64)), mx.array([[3, 4]])
    right = stock(directory).layers[0].mlp.switch_mlp(x, indices)
    mx.eval(x, indices, right)
    for works in (True, False):
        if not works:
            monkeypatch.setattr(ModelExperts, "_evaluate_pending", lambda self, *others: mx.eval(others))
            monkeypatch.setattr(mx, "async_eval", lambda *arrays: None)  # else it is computed in time, by chance
        with with_pool(directory, 0) as model:
            module, other = (stack.unit.module for stack in model.layout.experts[:2])

            def compute(module: Any = module, other: Any = other) -> mx.array:
                late: mx.array = module(x, indices)
                for expert in range(0, 16, 2):
                    mx.eval(other(x, mx.array([[expert, expert + 1]])))
                mx.eval(late)
                return late

            model.start()
            assert same_bits([enginethread.run(compute)], [right]) == works


def test_two_models_called_in_turns(tiny: Any) -> None:
    (one, _), (two, _) = tiny("qwen3_moe"), tiny("mixtral")
    chunks = (PROMPT[:9], [3], [999], PROMPT, [4])
    expected = [run(stock(directory), chunks) for directory in (one, two)]
    with with_pool(one, 9) as first, with_pool(two, 5, "mixed") as second:
        caches = [make_prompt_cache(model) for model in (first, second)]
        for i, chunk in enumerate(chunks):
            outputs = [first(mx.array([chunk]), cache=caches[0]), second(mx.array([chunk]), cache=caches[1])]
            assert same_bits(outputs, [logits[i] for logits in expected])


def test_threads_take_turns(tiny: Any) -> None:
    """What a thread was given is its own to evaluate, whatever others call meanwhile."""
    directory, _ = tiny("qwen3_moe")
    calls = [mx.array([[1, 2, 3]]), mx.array([[7, 9]]), mx.array([[5, 5, 5, 1]])]
    reference = stock(directory)
    expected = [reference(tokens) for tokens in calls]
    mx.eval(expected)
    outcomes: list[bool] = []
    with with_pool(directory, 4) as model:

        def work(i: int) -> None:
            with mx.stream(mx.new_stream(mx.default_device())):
                for _ in range(20):
                    outcomes.append(same_bits([model(calls[i])], [expected[i]]))
                model(calls[i])  # nobody ever looks at it

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same_bits([model(calls[0])], expected[:1])
    assert outcomes == [True] * 60


GENERATION: dict[str, dict[str, Any]] = {
    "plain": {},
    "small steps": {"prefill_step_size": 8},
    "rotating cache": {"max_kv_size": 16},
    "8-bit cache": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
}


@pytest.mark.parametrize("name", GENERATION)
def test_generation_gives_stock_tokens(tiny: Any, name: str) -> None:
    if has_own_memory() and "kv_bits" in GENERATION[name]:
        pytest.skip("MLX has no CUDA kernel for these keys")
    directory, _ = tiny("qwen3_moe")
    options = {"max_tokens": 10, "prefill_step_size": 2048, **GENERATION[name]}
    expected = list(generate_step(mx.array(PROMPT), stock(directory), **options))
    with with_pool(directory, 10, "mixed", exact_rows=False) as model:
        found = list(generate_step(mx.array(PROMPT), model, **options))
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert same_bits([logprobs for _, logprobs in found], [logprobs for _, logprobs in expected])


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_speculative_decoding(tiny: Any, tmp_path: Path, num_draft_tokens: int) -> None:
    directory, _ = tiny("qwen3_moe")
    draft = save_tiny(tmp_path / "draft", {**QWEN3_MOE, "num_hidden_layers": 1})

    def speculated(model: Any, draft: Any) -> list[int]:
        options = {"num_draft_tokens": num_draft_tokens, "max_tokens": 12, "prefill_step_size": 2048}
        return [token for token, *_ in speculative_generate_step(mx.array(PROMPT), model, draft, **options)]

    expected = speculated(stock(directory), stock(draft))
    with with_pool(directory, 9) as model, with_pool(draft, 4) as small:
        assert speculated(model, small) == expected


def test_saved_and_trimmed_prompt_caches_continue(tiny: Any, tmp_path: Path) -> None:
    directory, _ = tiny("qwen3_moe")

    def logits(model: Any, file: Path) -> list[mx.array]:
        cache = make_prompt_cache(model)
        model(mx.array([PROMPT]), cache=cache)
        save_prompt_cache(str(file), cache)
        cache = load_prompt_cache(str(file))
        trim_prompt_cache(cache, 15)
        return [model(mx.array([chunk]), cache=cache) for chunk in ([7], PROMPT[:20], [8])]

    expected = logits(stock(directory), tmp_path / "stock.safetensors")
    with with_pool(directory, 7, "streamed") as model:
        assert same_bits(logits(model, tmp_path / "streamed.safetensors"), expected)


def test_batch_generation_gives_stock_texts(tmp_path: Path, planned: Callable[[int], None]) -> None:
    directory = tmp_path / "model"
    shape = "--architecture qwen3_moe --dtype float32 --hidden-size 64 --layers 2 --heads 4 --kv-heads 2"
    sizes = "--vocab-size 600 --experts 8 --experts-per-token 2 --intermediate-size 128"
    make_random_model(directory, *shape.split(), *sizes.split())
    model, tokenizer, *_ = mlx_lm.load(str(directory))
    prompts = [tokenizer.encode(text) for text in ("Tell me about the sea.", "Hello", "One two three")]
    expected = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=8).texts
    planned(6)
    with mlx_flash.load_model(directory, config())[0] as streamed:
        assert mlx_lm.batch_generate(streamed, tokenizer, prompts, max_tokens=8).texts == expected
        assert pool_of(streamed).stats.num_evicted > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-4bit"])
@pytest.mark.parametrize("pool_slots", [4, 20])
def test_adapters_of_experts_equal_resident(
    tiny: Any, tmp_path: Path, planned: Callable[[int], None], name: str, pool_slots: int
) -> None:
    directory, plain = tiny(name)
    keys = [f"mlp.switch_mlp.{projection}" for projection in ("gate_proj", "down_proj")]
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": [*keys, "self_attn.q_proj"]}
    resident = stock(directory)
    linear_to_lora_layers(resident, 2, parameters)
    mx.random.seed(3)
    leaves = {k: 0.1 * mx.random.normal(v.shape) for k, v in tree_flatten(resident.parameters()) if ".lora_" in k}
    assert any("switch_mlp" in key for key in leaves)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), leaves)
    settings = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    resident = mlx_lm.utils.load_adapters(stock(directory), str(tmp_path))
    resident.eval()
    expected = trace(resident, CALLS)
    assert find_difference(plain, expected)
    planned(pool_slots)
    with mlx_flash.load_model(directory, config(), adapter_path=str(tmp_path))[0] as model:
        assert not find_difference(expected, trace(model, CALLS))
        small = [[p.name for p in stack.unit.small] for stack in model.layout.experts]
        assert [len([name for name in names if ".lora_" in name]) for names in small] == [0, 4, 4]
        assert pool_of(model).stats.num_calls > 0
        lora = model.layers[2].mlp.switch_mlp.gate_proj
    assert not find_difference(expected, trace(model.close(), CALLS))
    assert type(lora) is LoRASwitchLinear and type(lora.linear) in (SwitchLinear, QuantizedSwitchLinear)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_original_checkpoints_of_experts(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    DIRECT[name](directory)
    expected = trace(stock(directory))
    with with_pool(directory, 5, exact_rows=False) as model:
        assert not find_difference(expected, trace(model))
        for layer in pool_of(model).layers:
            assert {len(each.segments) for each in layer.placements} <= {1, 2, 3}
            assert {p.nbytes for each in layer.placements for s in each.segments for p in s.pieces} == {64 * 128 * 4}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-4bit"])
def test_packed_checkpoint(tiny: Any, tmp_path: Path, name: str) -> None:
    directory, expected = tiny(name)
    pack(directory, tmp_path / "packed")
    with with_pool(tmp_path / "packed", 5, exact_rows=False) as model:
        assert not find_difference(expected, trace(model, CALLS))
        assert pool_of(model).stats.num_evicted > 0


FAULTS = [(7, True), (24, True), (24, False)]
"""Slots of the pool, and whether a prompt's experts go through it too."""


@pytest.mark.parametrize(("pool_slots", "exact_rows"), FAULTS)
def test_disk_error_names_the_tensor_and_later_calls_work(
    tiny: Any, disk: Disk, pool_slots: int, exact_rows: bool
) -> None:
    directory, _ = tiny("qwen3_moe")
    named = r"'model\.layers\.\d\.mlp\.switch_mlp\..*_proj\.weight' .* offset \d+.*/model\.safetensors: Input/output"
    chunks = ([3], [4], PROMPT, [5])
    expected = run(stock(directory), chunks)
    with with_pool(directory, pool_slots, exact_rows=exact_rows) as model:
        for failing in (chunks, [PROMPT], chunks):
            pool_of(model).drop_unread(0, range(16))
            for expert in np.flatnonzero(pool_of(model).slot_of[0] != ABSENT).tolist():
                pool_of(model).leave((0, expert))
            disk.is_broken = True
            for _ in range(2):
                with pytest.raises(ReadError, match=named):
                    run(model, failing)
                check_slots(pool_of(model))
            disk.is_broken = False
            assert same_bits(run(model, chunks), expected)
            check_slots(pool_of(model))


@pytest.mark.parametrize(("pool_slots", "exact_rows"), FAULTS)
def test_shard_cut_short_or_replaced_is_named(tmp_path: Path, pool_slots: int, exact_rows: bool) -> None:
    directory = save_tiny(tmp_path / "model", QWEN3_MOE)
    expected = trace(stock(directory), CALLS)
    shard = directory / "model.safetensors"
    whole = shard.read_bytes()
    named = r"'model\.layers\.\d\.mlp\.switch_mlp.*model\.safetensors"
    with with_pool(directory, pool_slots, exact_rows=exact_rows) as model:
        for broken, error in ((whole[: len(whole) // 20], TruncatedFileError), (whole[::-1], FileChangedError)):
            shard.write_bytes(broken)
            for _ in range(2):
                with pytest.raises(error, match=named):
                    trace(model, CALLS)
        shard.write_bytes(whole)
        with pytest.raises(FileChangedError, match=named):  # only a comparison of all bytes could tell
            trace(model, CALLS)
    with with_pool(directory, pool_slots, exact_rows=exact_rows) as model:
        assert not find_difference(expected, trace(model, CALLS))


def test_failed_prediction_does_not_fail_the_call(tiny: Any, disk: Disk) -> None:
    directory, _ = tiny("qwen3_moe")
    stacks = [layer.mlp.switch_mlp for layer in stock(directory).layers]
    x, one, two = mx.ones((1, 64)), mx.array([[3, 4]]), mx.array([[5, 6]])
    with with_pool(directory, 24) as model:
        first, second = (stack.unit.module for stack in model.layout.experts[:2])
        assert same_bits([first(x, one)], [stacks[0](x, one)])
        disk.is_broken = True
        pool_of(model).read_ahead(1, [5, 6], 3)
        assert same_bits([first(x, one)], [stacks[0](x, one)])
        with pytest.raises(ReadError, match=r"layers\.1\.mlp\.switch_mlp"):
            second(x, two)
        disk.is_broken = False
        assert same_bits([second(x, two)], [stacks[1](x, two)])
        check_slots(pool_of(model))


def test_failed_pass_drops_its_predictions(tiny: Any) -> None:
    """What one pass was expected to need next gives way to what another one needs now."""
    directory, _ = tiny("qwen3_moe")
    x, indices = mx.ones((4, 64)), mx.array([[0, 1], [2, 3], [4, 5], [6, 7]])
    with with_pool(directory, 8) as model:
        pool_of(model).read_ahead(2, [5], 1)
        found = model.layout.experts[0].unit.module(x, indices)
        assert same_bits([found], [stock(directory).layers[0].mlp.switch_mlp(x, indices)])


def test_closing_while_experts_are_read(tiny: Any, disk: Disk) -> None:
    directory, expected = tiny("qwen3_moe")
    model = with_pool(directory, 24)
    disk.gate.clear()
    pool_of(model).read_ahead(1, [5, 6], 3)
    pool_of(model).read_ahead(0, list(range(9)), 24)
    closing = threading.Thread(target=model.close)
    closing.start()
    disk.gate.set()
    closing.join(20)
    assert not closing.is_alive()
    assert not threads_of_models()
    assert not find_difference(expected, trace(model.close(), CALLS))
    with pytest.raises(ClosedError):
        model(mx.array([[1]]))


def test_mixture_without_stacks_streams_whole_layers(tmp_path: Path) -> None:
    save(tmp_path, zoo.configuration("dbrx"), VARIANTS["fp32"])
    expected = trace(stock(tmp_path))
    prepared = prepare(tmp_path, config())
    assert not prepared.layout.experts and prepared.plan.pool is None
    with streamed_whole(tmp_path) as model:
        model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)
        assert not find_difference(expected, trace(model))
        assert model.engine is not None and model.engine.experts is None


@pytest.mark.parametrize("shape", [(1,), (), (96,)])
def test_stack_with_a_shared_array_is_read_whole(tiny: Any, shape: tuple[int, ...]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = mx.full(shape, 0.5)

        def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
            return nn.silu(gate) * x * self.scale

    directory, _ = tiny("qwen3_moe")
    loaded = prepare(directory, config()).loaded
    loaded.model.layers[1].mlp.switch_mlp.activation = Scaled()
    names = [stack.unit.name for stack in make_layout(loaded).experts]
    assert names == ["model.layers.0.mlp.switch_mlp", "model.layers.2.mlp.switch_mlp"]


@pytest.mark.parametrize("pool_slots", [None, 9])
def test_bounce_buffers_are_used_where_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool_slots: int | None
) -> None:
    """As on CUDA, where a disk must not write beside what is computed from."""
    directory = save_tiny(tmp_path / "model", QWEN3_MOE)
    expected = trace(stock(directory), CALLS[2:])
    in_place: list[bool] = []
    read = RangeReader._read_direct

    def spy(self: RangeReader, wanted: Any, target: memoryview) -> None:
        in_place.append(not isinstance(target.obj, mmap.mmap))
        read(self, wanted, target)

    monkeypatch.setattr(RangeReader, "_read_direct", spy)
    for arrival in ("in place", "bounced"):
        monkeypatch.setattr("mlx_flash.residency.machine.way_of_reading", lambda found=arrival: found)
        in_place.clear()
        with streamed_whole(directory, pool_slots=pool_slots) as model:
            assert not find_difference(expected, trace(model, CALLS[2:]))
        assert in_place and any(in_place) == (arrival == "in place")


def test_reads_during_computation_arrive(tiny: Any, tmp_path: Path) -> None:
    """Of the slots of one array some are read into while MLX computes from the others. On CUDA a third of these reads
    was lost where they were direct and in place."""
    nbytes, num_slots = 1 << 20, 12
    slots = SlotArena(num_slots, nbytes + 2 * DIRECT_ALIGNMENT)
    offsets = range(0, 8 * nbytes, nbytes // 2)
    data = np.random.default_rng(3).integers(0, 256, offsets.stop, np.uint8)
    file = tmp_path / "bytes"
    file.write_bytes(data.tobytes())
    arrival = prepare(tiny("qwen3_moe")[0], config()).machine.arrival
    rows = slots.view(0, (nbytes,), mx.uint8)
    reader = BackgroundPrefetcher([file], arrival=arrival)
    try:
        for round_ in range(12):
            sums = [rows[slot].astype(mx.uint32).sum() for slot in range(0, num_slots, 2)]
            mx.async_eval(sums)
            reads = {slot: offsets[(slot + 5 * round_) % 15] for slot in range(1, num_slots, 2)}
            tickets = []
            for slot, start in reads.items():
                segment = Segment(file, start, nbytes, 0, (Piece("x", start, nbytes, 0),))
                tickets.append(reader.submit([segment], slots.memory(slot), urgent=True))
                mx.async_eval([total + 1 for total in sums], rows[slot - 1].max())
            for ticket in tickets:
                ticket.wait()
            for slot, start in reads.items():
                assert np.array_equal(np.array(rows[slot]), data[start : start + nbytes])
    finally:
        reader.close()


@pytest.mark.parametrize("exact_rows", [True, False])
def test_rows_compute_alone_only_where_that_is_exact(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, exact_rows: bool
) -> None:
    computed: list[tuple[int, ...]] = []
    real = PooledStacks.run

    def run_slots(self: PooledStacks, layer: int, x: mx.array, slots: mx.array) -> mx.array:
        computed.append(slots.shape)
        return real(self, layer, x, slots)

    monkeypatch.setattr(PooledStacks, "run", run_slots)
    directory, expected = tiny("qwen3_moe")
    routed: list[tuple[int, ...]] = []
    with with_pool(directory, 9, exact_rows=exact_rows) as model:
        assert model.engine is not None and model.engine.experts is not None
        model.engine.experts.listeners.append(lambda layer, routing: routed.append(routing.shape))
        assert not find_difference(expected, trace(model, CALLS))
        assert pool_of(model).stats.num_evicted
    assert (set(computed) <= set(routed)) == (not exact_rows or mx.default_device() == mx.gpu)
