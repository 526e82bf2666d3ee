"""Prompts that the prefix cache knows, in passes that several sequences share."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_flash
from kv_settings import same
from mlx_flash import FlashLLM
from mlx_flash.engine.passes import Passes, waiting_bytes
from mlx_flash.prefixes.prefixcache import prefix_directory
from mlx_flash.prefixes.store import clear_prefixes
from models import GEMMA3, MAMBA2, NARROW_LLAMA, save, stock
from noting import noted
from prefix_runs import PROMPT, STEP, generated, loaded, restored
from saved_models import model_fixture
from zoo import configuration

llama = model_fixture(NARROW_LLAMA | {"num_hidden_layers": 2})


def streamed(folder: Path, mode: str = "exact", **settings: Any) -> FlashLLM:
    """A model that reads its weights in each pass, and has room for all parts of a prompt in one."""
    model = loaded(folder, mode, prefill_step_size=STEP, **settings)
    model.start()
    model.plan = replace(model.plan, budget_bytes=10**11)
    return model


def computed(model: FlashLLM, prompt: list[int], num: int = 3) -> list[tuple[int, mx.array]]:
    """As a program would, by this project's own loop."""
    steps = mlx_flash.generate_step(mx.array(prompt), model, max_tokens=num, prefill_step_size=STEP)
    found = [(int(token), logprobs) for token, logprobs in steps]
    mx.eval([logprobs for _, logprobs in found])
    return found


@pytest.mark.parametrize("kv_cache", [None, "stock", "disk"])
def test_parts_of_a_prompt_share_a_pass(llama: Path, kv_cache: str) -> None:
    """What is kept is what one part after another would have left, and is found again in either way."""
    expected = generated(stock(llama), num=3)
    for first, second in ((computed, generated), (generated, computed)):
        clear_prefixes(prefix_directory())
        with streamed(llama, kv_cache=kv_cache) as model:
            assert model.plan.read_bytes and same(first(model, PROMPT, num=3), expected)
            num_passes = model.counters.num_passes
            assert model.prefixes is not None and model.prefixes.counters.num_computed >= len(PROMPT) - 1
            assert num_passes == 3 if first is computed else num_passes >= 3 + 3
        with streamed(llama, kv_cache=kv_cache) as model:
            found = second(model, PROMPT, num=3)
            assert restored(model) == len(PROMPT) - 1 and same(found, expected)


def test_parts_after_one_that_was_cut_are_found_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget had room for smaller parts only, both times."""
    noted(monkeypatch, Passes, "choose", lambda _, rows: rows[0].cut() if rows[0].length == STEP else None)
    clear_prefixes(prefix_directory())
    for num_restored in (0, len(PROMPT) - 1):
        with streamed(llama) as model:
            assert len(computed(model, PROMPT)) == 3 and restored(model) == num_restored


WINDOWS = GEMMA3 | {"num_hidden_layers": 3, "sliding_window": 300}
HYBRID = configuration("qwen3_next") | {"num_hidden_layers": 4, "full_attention_interval": 2}


@pytest.mark.parametrize("config", [NARROW_LLAMA, WINDOWS, MAMBA2, HYBRID], ids=["rows", "windows", "states", "hybrid"])
def test_states_are_kept_after_each_part(tmp_path: Path, config: dict[str, Any]) -> None:
    """They share a pass. Another prompt goes on after two common parts, whichever way either is computed."""
    folder = save(tmp_path / "model", config | {"vocab_size": 1000})
    other = [*PROMPT[: 2 * STEP], *reversed(PROMPT[2 * STEP :])]
    expected = [generated(stock(folder), prompt, num=3) for prompt in (PROMPT, other)]
    for first, second in ((computed, generated), (generated, computed)):
        clear_prefixes(prefix_directory())
        with streamed(folder) as model:
            assert same(first(model, PROMPT, num=3), expected[0])
            assert model.counters.num_passes == 3 if first is computed else model.counters.num_passes > 3
        with streamed(folder) as model:
            assert same(second(model, other, num=3), expected[1]) and restored(model) == 2 * STEP


def test_states_that_wait_are_counted(tmp_path: Path) -> None:
    """A window's arrays have as many tokens more as came with the part."""
    folder, step = save(tmp_path / "model", WINDOWS | {"vocab_size": 1000}), 64
    with streamed(folder) as model, streamed(folder, "off") as other:
        row = sum(each for each, _ in model.plan.cache.windows)
        ledgers = model.plan.ledger, other.plan.ledger
        for context in (step, 4 * STEP):
            kept = row * min(context, 300 + step)
            for is_first in (True, False):
                known, unknown = (ledger.part_waiting(step, 1, context, is_first=is_first) for ledger in ledgers)
                assert known - unknown == kept > 0
        left = model.row(mx.array([PROMPT]), model.make_cache(), STEP).left
        waiting = [waiting_bytes(plan, [left]) for plan in (model.plan, replace(model.plan, keeps_states=False))]
        kept = [model.plan.cache.states_bytes(*part) for part in ((256, 256), (256, 512), (187, 699))]
        assert [known - unknown for known, unknown in zip(*waiting, strict=True)] == [*accumulate(kept)]
