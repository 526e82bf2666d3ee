"""Parts of a prompt share a pass with keys and values on disk: mlx-lm's bits, and no more memory than is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlx_flash
import zoo
from kv_settings import SMALL, least_share, little_under_way, settings
from mlx_flash import FlashLLM
from mlx_flash.engine.call import need
from mlx_flash.engine.passes import waiting_bytes
from models import stock
from saved_models import models_fixture
from streamed import streamed_whole

__all__ = ["little_under_way"]

STEP, LENGTH, NUM_TOKENS = 64, 640, 3
PROMPT = mx.array([(7 * i * i + 3 * i) % 300 for i in range(LENGTH)])
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_hidden_layers": 3, "head_dim": 128},
    "gpt_oss": zoo.configuration("gpt_oss") | {"num_hidden_layers": 4, "layer_types": None},
    "qwen3_next": zoo.configuration("qwen3_next") | {"num_hidden_layers": 4, "full_attention_interval": 2},
}
"""Plain caches; with sliding windows beside them; with recurrent states."""

directories = models_fixture(MODELS)


def streamed(directory: Path, cut: Any, more_bytes: int = 10**9) -> FlashLLM:
    """Return a model whose keys and values have just the room that they need on disk, and parts some more."""
    context = {"context_length": LENGTH + NUM_TOKENS, "kv_step": 16, "speculation": False}
    share = least_share(directory, settings(directory, **context))
    model = streamed_whole(
        directory, cut=cut, prefill_step_size=STEP, kv_cache="disk", kv_ram_gb=share / 1e9, **context
    )
    model.plan = replace(model.plan, budget_bytes=model.plan.budget_bytes + more_bytes)
    return model


@pytest.mark.parametrize(
    ("name", "cut"), [("llama", 0), ("llama", 1), ("llama", 2), ("gpt_oss", 2), ("qwen3_next", 0), ("qwen3_next", 2)]
)
def test_a_prompt_on_disk_takes_one_pass(directories: Callable[[str], Path], name: str, cut: int) -> None:
    directory = directories(name)
    with streamed(directory, cut) as model:
        steps = mlx_flash.generate_step(PROMPT, model, max_tokens=NUM_TOKENS, prefill_step_size=STEP)
        found = [(int(token), logprobs) for token, logprobs in steps]
        assert model.kv is not None and model.kv.note().num_offloaded
        assert model.counters.num_passes == NUM_TOKENS
    expected = generate_step(PROMPT, stock(directory), max_tokens=NUM_TOKENS, prefill_step_size=STEP)
    for (token, logprobs), (other, theirs) in zip(found, expected, strict=True):
        assert token == int(other) and bool(mx.array_equal(logprobs, theirs))


@pytest.mark.parametrize("cut", [0, 2])
def test_a_prompt_in_parts_continues_a_cache_with_room(directories: Callable[[str], Path], cut: int) -> None:
    """Buffers lose the room that is too small for the first part."""
    directory, prompts = directories("llama"), (PROMPT[: 8 * STEP - 20], PROMPT[: 6 * STEP])
    with streamed_whole(directory, cut=cut, prefill_step_size=STEP, context_length=2 * LENGTH) as model:
        cache, theirs = model.make_cache(), make_prompt_cache(resident := stock(directory))
        for prompt in prompts:
            num_passes = model.counters.num_passes
            [(token, logprobs)] = mlx_flash.generate_step(prompt, model, prompt_cache=cache, max_tokens=1)
            assert model.counters.num_passes == num_passes + 2
            expected = generate_step(prompt, resident, prompt_cache=theirs, max_tokens=1, prefill_step_size=STEP)
            [(other, their_logprobs)] = expected
            assert token == int(other) and bool(mx.array_equal(logprobs, their_logprobs))


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_waiting_parts_share_a_slot(directories: Callable[[str], Path], cut: int) -> None:
    with streamed(directories("llama"), cut) as model:
        assert model.kv is not None
        cache = model.make_cache()
        model.advance([model.row(PROMPT[None, : 4 * STEP], cache, STEP, wants_logits=False)])
        for entry in cache:
            if not entry.is_on_disk:
                entry.offload()
        row = model.row(PROMPT[None, 4 * STEP :], cache, STEP, wants_logits=False)
        num_parts = len(row.left)
        counted = (
            waiting_bytes(model.plan, [row.left], on_disk=True)[-1]
            + need(model.plan, [row.lane(num_parts)]).activations
        )
        counted += (model.plan.kv.limit or 0) - model.kv.memory_bytes
        absent = model.kv.memory_bytes - model.kv.note().reserved_bytes  # slots that are yet to come
        num_passes, active = model.counters.num_passes, mx.get_active_memory()
        mx.reset_peak_memory()
        model.advance([row])
        assert row.is_done and row.error is None and model.counters.num_passes == num_passes + 1
        peak = mx.get_peak_memory() - active
        slot = model.plan.cache.largest_row * LENGTH
        assert peak <= counted + absent and peak < 4 * slot
        assert counted < 4 * slot


@pytest.mark.parametrize("cut", [0, 2])
def test_slots_of_short_sequences_are_as_short(directories: Callable[[str], Path], cut: int) -> None:
    """They share a pass with the parts of a long prompt, whose slots are thirty times as large."""
    with streamed(directories("llama"), cut) as model:
        assert model.kv is not None
        caches = [model.make_cache() for _ in range(9)]
        for cache, length in zip(caches, [2 * STEP, *[16] * 8], strict=True):
            model.advance([model.row(PROMPT[None, :length], cache, STEP, wants_logits=False)])
            for entry in cache:
                if not entry.is_on_disk:
                    entry.offload()
        long = model.row(PROMPT[None, 2 * STEP :], caches[0], STEP, wants_logits=False)
        rows = [long, *(model.row(PROMPT[None, :1], cache, STEP) for cache in caches[1:])]
        lanes = [row.lane(len(row.left)) for row in rows]
        waits = waiting_bytes(model.plan, [row.left for row in rows], on_disk=True)[-1]
        held = model.plan.ledger.slots_held([lane.tokens for lane in lanes])
        counted = waits + held + need(model.plan, lanes).activations + (model.plan.kv.limit or 0)
        model.plan = replace(model.plan, kv=replace(model.plan.kv, limit=10**9))
        num_passes, active = model.counters.num_passes, mx.get_active_memory() - model.kv.note().reserved_bytes
        mx.reset_peak_memory()
        model.advance(rows)
        assert all(row.is_done and row.error is None for row in rows) and model.counters.num_passes == num_passes + 1
        assert mx.get_peak_memory() - active <= counted


@pytest.mark.parametrize(("num_more", "most_passes"), [(0, 7), (1, 6), (3, 4), (5, 3), (9, 2)])
def test_as_many_parts_share_a_pass_as_memory_allows(
    directories: Callable[[str], Path], num_more: int, most_passes: int
) -> None:
    directory = directories("llama")
    with streamed(directory, 2) as model:
        row = model.row(PROMPT[None], model.make_cache(), STEP)
        ledger = model.plan.ledger
        least = need(model.plan, [row.lane(len(row.left))]).total + ledger.on_disk([LENGTH], STEP, 1)
        each = ledger.part_waiting(STEP, 1, LENGTH, on_disk=True)
        model.plan = replace(model.plan, budget_bytes=least + num_more * each)
        while not row.is_done:
            model.advance([row])
        assert row.error is None
        assert LENGTH // STEP / (num_more + 5) <= model.counters.num_passes <= most_passes
    caches = make_prompt_cache(resident := stock(directory))
    logits = [resident(PROMPT[None, start : start + STEP], cache=caches) for start in range(0, LENGTH, STEP)]
    assert mx.array_equal(row.outputs[-1][:, -1], logits[-1][:, -1])


def test_keys_and_values_that_do_not_fit_go_to_disk_in_the_shared_pass(directories: Callable[[str], Path]) -> None:
    """A prompt is longer than the plan had in mind: they take what is free, which is less than all of them need."""
    with streamed_whole(directories("llama"), cut=2, prefill_step_size=STEP, kv_step=16, context_length=STEP) as model:
        ledger, row = model.plan.ledger, model.row(PROMPT[None], model.make_cache(), STEP)
        each = ledger.part_waiting(STEP, 1, LENGTH, on_disk=True)
        least = need(model.plan, [row.lane(len(row.left))]).total + ledger.on_disk([LENGTH], STEP, 1)
        model.plan = replace(model.plan, budget_bytes=least + 9 * each, kv=replace(model.plan.kv, limit=None))
        assert model.kv is not None
        while not row.is_done:
            model.advance([row])
        assert row.error is None and model.kv.note().num_offloaded
        assert model.counters.num_passes <= 2


@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 9])
def test_prompts_on_disk_take_the_passes_that_the_plan_predicts(
    directories: Callable[[str], Path], cut: int, num_slots: int
) -> None:
    """Parts at the beginning wait with shorter slots than those at the end, for which all are counted."""
    with streamed(directories("llama"), cut) as model:
        ledger = model.plan.ledger
        each = ledger.part_waiting(STEP, 1, LENGTH, on_disk=True)
        model.plan = replace(model.plan, budget_bytes=model.plan.peak_bytes + num_slots * each)
        for length in (100, 400, LENGTH):
            before = model.counters.num_passes
            row = model.row(PROMPT[None, :length], model.make_cache(), STEP, wants_logits=False)
            while not row.is_done:
                model.advance([row])
            counted, predicted = model.counters.num_passes - before, model.plan.prompt_passes(length)
            assert row.error is None
            assert counted - 1 <= predicted <= 2 * counted + 1
    assert model.kv is not None and model.kv.note().num_offloaded
