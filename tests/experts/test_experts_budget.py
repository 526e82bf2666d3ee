"""Experts that are read one by one: their sizes are measured as they are, and the process keeps its budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import children
import zoo
from expert_pools import pooled
from mlx_flash import FlashConfig
from mlx_flash.engine import engine
from mlx_flash.engine.prepare import prepare
from mlx_flash.layout.parts import ExpertStack, ModelLayout
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.residency.sizes import ExpertSizes, measure
from models import QWEN3_MOE
from saved_models import model_fixture
from streamed import nbytes_of, streamed_whole
from zoo.weights import VARIANTS, save

MIXTURE = QWEN3_MOE | {"hidden_size": 512, "num_hidden_layers": 4, "moe_intermediate_size": 384, "num_experts": 20}
MIXTURE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2000}
"""0.22 GB in fp32, of which 0.19 GB are experts."""

directory = model_fixture(MIXTURE)


def expected_bytes(stack: ExpertStack) -> int:
    """Bytes of one expert that are read."""
    return sum(parameter.nbytes for parameter in stack.unit.large) // stack.num_experts


@pytest.mark.parametrize(
    ("name", "variant", "num_experts", "top_k"),
    [
        ("qwen3_moe", "fp32", 8, 2),
        ("qwen3_moe", "4bit", 8, 2),
        ("gpt_oss", "mxfp4", 4, 2),
        ("llama4", "fp32", 4, 1),
    ],
)
def test_sizes_of_experts(tmp_path: Path, name: str, variant: str, num_experts: int, top_k: int) -> None:
    save(tmp_path, zoo.configuration(name), VARIANTS[variant])
    layout, experts = measured(tmp_path)
    assert experts.num_experts == (num_experts,) * len(layout.experts)
    assert experts.nbytes == sum(stack.unit.nbytes for stack in layout.experts)
    assert experts.token_bytes == sum(top_k * expected_bytes(stack) for stack in layout.experts)
    largest = max(map(expected_bytes, layout.experts))
    assert experts.slot_bytes % DIRECT_ALIGNMENT == 0
    assert largest + DIRECT_ALIGNMENT <= experts.slot_bytes
    assert top_k <= experts.least_slots <= sum(experts.num_experts)
    matrix = max(p.nbytes for stack in layout.experts for p in stack.unit.large)
    assert experts.least_slots * experts.slot_bytes > matrix


def measured(directory: Path) -> tuple[ModelLayout, ExpertSizes]:
    layout = prepare(directory, FlashConfig(ram_budget_gb=10)).layout
    sizes = measure(layout, {})
    assert sizes.trunk is not None and sizes.trunk.experts is not None
    assert sizes.nbytes == sizes.trunk.nbytes == nbytes_of(layout)
    idle = sum(unit.idle_bytes for unit in sizes.layers)
    assert idle == sizes.trunk.experts.nbytes - sizes.trunk.experts.token_bytes
    assert all(sum(unit.idle_bytes for unit in cut) == idle for cut in sizes.finer)
    assert not any(unit.idle_bytes for unit in sizes.trunk.layers)
    return layout, sizes.trunk.experts


@pytest.mark.parametrize("variant", ["fp32", "4bit"])
def test_token_reads_its_experts(tmp_path: Path, variant: str) -> None:
    """With the smallest pool, what one token after another reads is at most what was measured for one."""
    save(tmp_path, zoo.configuration("qwen3_moe"), VARIANTS[variant])
    _, experts = measured(tmp_path)
    with streamed_whole(tmp_path, pool_slots=0, expert_lookahead=False) as model:
        assert model.engine is not None and model.engine.experts is not None
        stats = model.engine.experts.pool.stats
        for token in range(5):
            before = stats.read_bytes, stats.num_routed - stats.num_hits
            mx.eval(model(mx.array([[token]])))
            read, misses = stats.read_bytes - before[0], stats.num_routed - stats.num_hits - before[1]
            assert read <= experts.token_bytes
            assert read * 6 == experts.token_bytes * misses  # three layers with two experts each
    assert stats.num_routed == 5 * 6 and stats.read_bytes > 0


PROGRAM = """
import gc, json, sys
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_flash import FlashConfig, load_model
from mlx_flash.memory.footprint import peak_footprint
settings, least = json.loads(sys.argv[2]), None
for more in map(int, sys.argv[3:]):
    budget = "min" if least is None else (least + more * 1_000_000) / 1e9
    model, _ = load_model(sys.argv[1], FlashConfig(ram_budget_gb=budget, context_length=104, **settings))
    prompt = mx.array([i * i % 2000 for i in range(64)])
    tokens = [token for token, _ in generate_step(
        prompt, model, max_tokens=8, prefill_step_size=model.plan.prefill_step_size)]
    pool, stats = model.plan.pool, model.engine.experts and model.engine.experts.pool.stats
    print(json.dumps({
        "budget": model.plan.budget_bytes, "base": model.plan.base_bytes,
        "planned": model.plan.peak_bytes, "peak": peak_footprint(),
        "tokens": tokens, "slots": pool and pool.num_slots, "full": stats and stats.num_full,
    }))
    least = least or model.plan.budget_bytes
    settings["prefill_step_size"] = 16  # of the later ones
    model.close()
    del model, pool, stats
    gc.collect()
"""


def generate(directory: Path, *more: int, **settings: Any) -> list[dict[str, Any]]:
    """Generate in one process with the smallest budget, then with so many MB more each time."""
    done = children.run("-c", PROGRAM, directory, json.dumps(settings), 0, *more, forks=False)
    assert done.returncode == 0, done.stderr.decode()
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    for told in found:  # the peak is that of the process until then, and budgets grow
        assert told["planned"] <= told["budget"]
        assert told["peak"] <= told["budget"], f"{told['peak'] - told['budget']} bytes over"
    return found


def test_mixture_stays_within_its_budget(directory: Path) -> None:
    """The fewest experts, some, most, and everything in memory: the same tokens, and never more than was promised.

    What the disk is found to like may change from one load to the next on a busy machine, and with it the memory for
    reading; so this is given.
    """
    found = generate(directory, 30, 120, 350, io="buffered", queue_depth=4, read_size_mb=2)
    slots = [told["slots"] for told in found]
    assert len(found) == 4 and all(told["tokens"] == found[0]["tokens"] for told in found)
    assert slots[-1] is None and None not in slots[:-1]
    # The sizes of processes that use a GPU differ by more than the first step.
    assert slots[:-1] == sorted(slots[:-1] if mx.default_device() == mx.gpu else set(slots[:-1])), found


@pytest.mark.parametrize("prefill_step_size", [16, 64])
def test_prompts_of_more_experts_than_slots_stay_within_the_budget(directory: Path, prefill_step_size: int) -> None:
    (told,) = generate(directory, prefill_step_size=prefill_step_size, lend_reserves=False)
    assert told["slots"] < 10 and told["full"]


def test_activations_of_chosen_experts(tmp_path: Path) -> None:
    """Whatever the configuration calls their number."""
    found = []
    for top_k in (2, 4):
        save(tmp_path / str(top_k), {**zoo.configuration("ernie4_5_moe"), "moe_k": top_k}, VARIANTS["fp32"])
        layout = prepare(tmp_path / str(top_k), FlashConfig(ram_budget_gb=10)).layout
        found.append(measure(layout, {}).activations.per_token)
    assert found[1] - found[0] == 2 * 2 * 4 * (64 + 64 + 128)


def test_whole_layers_of_mixtures_stay_within_the_budget(directory: Path) -> None:
    (told,) = generate(directory, expert_pool=False)
    assert told["slots"] is None


@pytest.mark.parametrize(("is_room", "reads"), [(True, (4 << 20, 2)), (False, (1 << 20, 16))])
def test_experts_that_the_page_cache_holds_are_read_by_few_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_room: bool, reads: tuple[int, int]
) -> None:
    monkeypatch.setattr(engine, "_spare_memory", lambda budget: 10**12 if is_room else 0)
    save(tmp_path, zoo.configuration("qwen3_moe"), VARIANTS["fp32"])
    prepared = prepare(tmp_path, FlashConfig())
    plan = replace(pooled(prepared.plan, prepared.layout, 6), read_size=1 << 20, queue_depth=16)
    reader = engine._reader(replace(prepared, plan=plan), FlashConfig())
    assert (reader.read_size, reader.queue_depth) == reads
    reader.close()
