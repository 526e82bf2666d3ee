"""Sequences that share passes, each with keys and values of its own on disk: solo bits, within the budget."""

from __future__ import annotations

import errno
import gc
import itertools
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kv_settings import SMALL, least_share, little_under_way, settings
from mlx_flash import FlashLLM, load_model
from mlx_flash.errors import WriteError
from mlx_flash.generation import RowGenerator
from mlx_flash.kv import disk as kv_disk
from mlx_flash.prefixes.prefixcache import prefix_directory
from models import stock
from saved_models import model_fixture
from served import LONG, TEXTS, ask, each_alone, model, serving, together
from shared_passes import alone, check_equal
from streamed import streamed_whole

__all__ = ["little_under_way", "model"]

STEP, NUM_TOKENS = 64, 6
LENGTHS = [400, 130, 300, 70, 222, 350]
PROMPTS = [[(7 * i * i + 3 * i + k) % 300 for i in range(length)] for k, length in enumerate(LENGTHS)]

directory = model_fixture(SMALL)
wide = model_fixture(SMALL | {"num_hidden_layers": 3, "head_dim": 128})


NUM_CONTEXTS = 6


def fill(cache: list[Any], number: int) -> None:
    """Give a cache the keys and values of 700 tokens, which no model computed."""
    keys = mx.random.split(mx.random.key(number), 2 * len(cache))
    for entry, key, value in zip(cache, keys[::2], keys[1::2], strict=True):
        entry.update_and_fetch(*(mx.random.normal((1, 2, 700, 128), key=each) for each in (key, value)))
    mx.eval([entry.state for entry in cache])


@pytest.fixture(scope="module")
def stock_logits(wide: Path) -> list[mx.array]:
    """Logits of stock mlx-lm for one token more, by context."""
    model, found = stock(wide), []
    for number in range(NUM_CONTEXTS):
        cache = make_prompt_cache(model)
        fill(cache, number)
        found.append(model(mx.array([[number]]), cache=cache)[0, -1])
    mx.eval(found)
    return found


def run(model: FlashLLM, prompts: list[list[int]], arrivals: list[int] | None = None) -> tuple[list[Any], int, int]:
    """Compute all prompts. Return their tokens, and the most bytes on disk and in memory between passes."""
    generator = RowGenerator(model, prefill_step_size=STEP)
    found: dict[int, list[Any]] = {}
    most_disk = most_memory = 0
    for number in range(1000):
        for prompt, arrival in zip(prompts, arrivals or [0] * len(prompts), strict=True):
            if arrival == number:
                found[generator.insert([prompt], max_tokens=[NUM_TOKENS])[0]] = []
        progress, answers = generator.next()
        for answer in answers:
            found[answer.uid].append((answer.token, answer.logprobs))
        assert model.kv is not None
        usage = model.kv.note()
        most_disk, most_memory = max(most_disk, usage.disk_bytes), max(most_memory, usage.memory_bytes)
        if not progress and not answers and number > max(arrivals or [0]):
            break
    order = sorted(range(len(prompts)), key=lambda i: (arrivals or [0] * len(prompts))[i])
    return [tokens for _, tokens in sorted(zip(order, found.values(), strict=True))], most_disk, most_memory


JOINING = [0, 3, 1, 9, 2, 12]


@pytest.mark.parametrize(("times", "arrivals"), [(1.0, None), (1.0, JOINING), (1.5, JOINING), (3.0, None)])
def test_rows_on_disk_are_their_solo_runs(
    directory: Path, tmp_path: Path, times: float, arrivals: list[int] | None
) -> None:
    options = settings(directory, times=times, context_length=420, kv_directory=tmp_path / "kv", ram_budget_gb="min")
    with load_model(directory, options)[0] as model:
        got, most_disk, most_memory = run(model, PROMPTS, arrivals)
        assert model.kv is not None and model.kv.note().num_offloaded >= 4 * SMALL["num_hidden_layers"]
        token_bytes = sum(model.plan.cache.rows)
        assert most_disk > 1.5 * max(LENGTHS) * token_bytes  # of several sequences at once
        assert most_memory <= (model.plan.kv.limit or 0)
        gc.collect()
        assert not model.kv.note().disk_bytes
    assert not list((tmp_path / "kv").iterdir())
    for tokens, prompt in zip(got, PROMPTS, strict=True):
        check_equal(tokens, alone(directory, prompt, NUM_TOKENS, prefill_step_size=STEP))


def offloaded(model: FlashLLM) -> list[Any]:
    """Return the caches of several sequences, filled and on disk."""
    caches = [make_prompt_cache(model) for _ in range(NUM_CONTEXTS)]
    for number, cache in enumerate(caches):
        fill(cache, number)
        for entry in cache:
            entry.offload()
    return caches


@pytest.mark.parametrize("cut", [0, 1, 2, "tiles"])
@pytest.mark.parametrize("has_room", [True, False])
def test_slots_that_waiting_rows_hold_count(wide: Path, stock_logits: list[mx.array], cut: Any, has_room: bool) -> None:
    """Where units are smaller than layers, rows wait inside their attention, each with a layer's keys and values."""
    share = least_share(wide, settings(wide, context_length=720))
    options = {"kv_cache": "disk", "kv_step": 16, "kv_ram_gb": 20 * share / 1e9, "context_length": 720}
    with streamed_whole(wide, cut=cut, prefill_step_size=STEP, **options) as model:
        model.plan = replace(model.plan, budget_bytes=10**9)
        assert model.kv is not None
        caches = offloaded(model)
        slot = model.plan.cache.largest_row * 704
        if not has_room:
            model.plan = replace(model.plan, kv=replace(model.plan.kv, limit=model.kv.memory_bytes + 2 * slot))
        rows = [model.row(mx.array([[k]]), cache, STEP) for k, cache in enumerate(caches)]
        num_passes, active = model.counters.num_passes, mx.get_active_memory()
        mx.reset_peak_memory()
        model.advance(rows)
        assert all(row.is_done and row.error is None for row in rows)
        num_passes, peak = model.counters.num_passes - num_passes, mx.get_peak_memory() - active
        assert num_passes == 1 if has_room or not cut else 1 < num_passes <= 6
        assert peak < (8 if has_room and cut else 5) * slot
    for row, logits in zip(rows, stock_logits, strict=True):
        assert mx.array_equal(row.outputs[0][0, -1], logits)


def test_slots_count_whole(wide: Path) -> None:
    """Sequences that wait hold a slot for the longest each, however short they are."""
    options = {"kv_cache": "disk", "kv_step": 16, "kv_ram_gb": 0.1, "context_length": 1500}
    with streamed_whole(wide, cut=2, prefill_step_size=STEP, **options) as model:
        assert model.kv is not None
        caches = offloaded(model)
        for entry in itertools.chain(*caches[1:]):
            entry.trim(680)
        slot = model.kv.options.slot_bytes(model.plan.cache.largest_row, 700)
        before = mx.get_active_memory() - model.kv.note().reserved_bytes
        room = 5 * slot + model.kv.options.step * sum(model.plan.cache.rows) * NUM_CONTEXTS
        model.plan = replace(model.plan, budget_bytes=10**9, kv=replace(model.plan.kv, limit=room))
        rows = [model.row(mx.array([[k]]), cache, STEP) for k, cache in enumerate(caches)]
        num_passes = model.counters.num_passes
        mx.reset_peak_memory()
        model.advance(rows)
        assert all(row.is_done and row.error is None for row in rows)
        assert model.counters.num_passes > num_passes + 1
        assert mx.get_peak_memory() - before <= room + slot  # and what computes


def test_the_server_answers_with_keys_and_values_on_disk(model: str) -> None:
    texts = [LONG + text for text in TEXTS]
    expected = each_alone(model, texts)
    options = {"ram_budget_gb": "min", "context_length": 2048, "lend_reserves": False, "kv_cache": "disk"}
    with serving(model, **options, kv_step=16, kv_ram_gb=0.0015) as mine:
        assert together(mine, texts) == expected
        assert mine.pool.note().num_offloaded > 4 and mine.pool.note().read_bytes
        assert mine.pool.note().memory_bytes <= 1_500_000
        assert ask(mine, texts[0]) == expected[0]


# --- prefixes -------------------------------------------------------------------------------------------------------

SHARED = [(37 * i + 11) % 300 for i in range(4 * STEP)]
"""Four pages, one for each step."""

BRANCHES = [[*SHARED, *((7 * i + k) % 300 for i in range(20 + k))] for k in range(4)]


def with_prefixes(directory: Path, **changes: Any) -> FlashLLM:
    """Return a model that has no room for keys and values in memory."""
    options = {"kv_prefixes": "exact", "kv_step": 16, "context_length": 420, "times": 1.2, **changes}
    return load_model(directory, settings(directory, "disk", **options))[0]


def check_branches(directory: Path, got: list[Any]) -> None:
    for tokens, prompt in zip(got, BRANCHES, strict=True):
        check_equal(tokens, alone(directory, prompt, NUM_TOKENS, prefill_step_size=STEP))


@pytest.fixture
def pages() -> Iterator[Path]:
    """The files of the prefix cache, which are removed in the end."""
    yield prefix_directory() / "pages"
    shutil.rmtree(prefix_directory(), ignore_errors=True)


def test_conversations_on_disk_begin_with_cached_prompts(directory: Path, pages: Path, tmp_path: Path) -> None:
    """All files of a call are accounted for, and go with it. Damaged pages are computed again."""
    base = tmp_path / "kv"
    for turn in range(3):
        with with_prefixes(directory, context_length=5 * STEP, kv_directory=base) as model:
            got, most_disk, _ = run(model, BRANCHES)
            assert model.kv is not None and model.prefixes is not None
            usage, num_restored = model.kv.note(), model.prefixes.counters.num_restored
            assert turn == 2 or (num_restored >= 4 * len(SHARED)) == (turn == 1)
            assert model.kv.note().num_offloaded > 2 * SMALL["num_hidden_layers"] and usage.read_bytes
            assert 0 < most_disk <= usage.written_bytes
        assert not list(base.iterdir())
        check_branches(directory, got)
        for path in sorted(pages.iterdir())[: 3 * turn]:
            data = bytearray(path.read_bytes())
            data[-5000] ^= 1
            path.write_bytes(data)


def test_a_disk_that_is_full_ends_the_copy_of_a_cached_prompt(
    directory: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is as before, and the next prompt is copied whole, and counted."""
    with with_prefixes(directory) as model:
        run(model, BRANCHES[:1])
    with with_prefixes(directory) as model:
        assert model.kv is not None and model.prefixes is not None
        with monkeypatch.context() as patch:
            fault = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(kv_disk, "write_at", Mock(side_effect=[*[None] * 3, *[fault] * 1000]))
            cache = make_prompt_cache(model)
            row = model.row(mx.array([BRANCHES[0]]), cache, STEP)
            model.advance([row])
            assert isinstance(row.error, WriteError)
            assert re.search(r"cannot write \d+ bytes .* at offset \d+ of .*\.kv: No space left", str(row.error))
            assert [entry.offset for entry in cache] == [0] * len(cache) and not model.counters.num_passes
            model.kv.files.writer.flush()
        written, governor = model.kv.note().written_bytes, model._life.governor
        counted = governor.telemetry()["session_bytes"]
        got, _, _ = run(model, BRANCHES[:1])
        assert model.prefixes.counters.num_restored == len(BRANCHES[0]) - 1
        model.kv.files.writer.flush()
        copied = model.kv.note().written_bytes - written
        assert governor.telemetry()["session_bytes"] == counted + copied > counted
    check_equal(got[0], alone(directory, BRANCHES[0], NUM_TOKENS, prefill_step_size=STEP))
