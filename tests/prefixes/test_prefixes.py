"""Remembered prompts: a second process computes nothing of what the first one did, and gets the same, or nothing."""

from __future__ import annotations

import copy
import functools
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count as counted
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import children
from children import HELPERS
from kv_settings import same
from mlx_flash import FlashConfig, FlashLLM, cli, generate_step
from mlx_flash.engine.prepare import prepare
from mlx_flash.files import cache_directory
from mlx_flash.kv.disk import WriteGovernor
from mlx_flash.loading import load_model
from mlx_flash.monitor.words import size
from mlx_flash.prefixes import prefixcache
from mlx_flash.prefixes.prefixcache import prefix_directory
from mlx_flash.prefixes.store import PrefixStore, clear_prefixes, list_prefixes
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, save, stock
from prefix_runs import PROMPT, STEP, Logits, config_of, generated, loaded, restored
from saved_models import model_fixture

SMALL: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
}
HYBRID: dict[str, Any] = {**GEMMA3, "hidden_size": 64, "num_hidden_layers": 3, "sliding_window": 64}

llama = model_fixture(SMALL)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Logits]]:
    """Models of each kind, and what stock mlx-lm generates, by name."""
    configs = {"llama": SMALL, "hybrid": HYBRID, "mamba2": MAMBA2 | {"num_hidden_layers": 2}, "moe": QWEN3_MOE}

    def get(name: str) -> tuple[Path, Logits]:
        directory = save(tmp_path_factory.mktemp(name), configs[name])
        return directory, generated(stock(directory))

    return functools.cache(get)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """Nor written today."""
    yield
    shutil.rmtree(prefix_directory(), ignore_errors=True)
    WriteGovernor.written.clear()


def first_run(directory: Path, **settings: Any) -> Logits:
    with loaded(directory, **settings) as model:
        found = generated(model)
        assert restored(model) == 0
    return found


# --- a second process ------------------------------------------------------------------------------------------------

RUN = """
import json, sys, hashlib
sys.path[:0] = sys.argv[2:]
import numpy as np, mlx.core as mx
import prefix_runs as t
from pathlib import Path
model = t.loaded(Path(sys.argv[1]))
read = []
def progress(done, total):
    if done < total:
        read.append(model.counters.num_passes)
found = t.generated(model, prompt_progress_callback=progress)
digest = hashlib.sha256(b"".join(np.array(logprobs).tobytes() for _, logprobs in found)).hexdigest()
print(json.dumps([read[-1], model.counters.num_tokens_in, t.restored(model), [x for x, _ in found], digest]))
model.close()
"""


def test_a_second_process_computes_nothing_of_a_known_prompt(llama: Path) -> None:
    runs = []
    for _ in range(2):
        done = children.run("-c", RUN, llama, HELPERS)
        assert done.returncode == 0, done.stderr.decode()
        runs.append(json.loads(done.stdout))
    (passes, tokens_in, none, *first), (passes_again, tokens_again, found, *again) = runs
    expected = len(PROMPT) - 1
    assert (passes, none) == (3, 0) and passes_again == 0
    assert found == expected and tokens_again == tokens_in - expected
    assert first == again


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("llama", "hybrid", "mamba2", "moe")),
        *((name, {"kv_cache": "stock"}) for name in ("llama", "hybrid")),
        ("llama", {"kv_cache": "disk"}),
    ],
)  # states are mlx-lm's own in any mode, and a mixture's keys and values are those of a dense model
def test_what_is_restored_is_what_mlx_lm_computes(kinds: Any, name: str, settings: dict[str, Any]) -> None:
    directory, expected = kinds(name)
    assert same(first_run(directory, **settings), expected)
    with loaded(directory, **settings) as model:
        assert same(generated(model), expected) and restored(model) == len(PROMPT) - 1
        assert model.counters.num_tokens_in == len(expected) + 1


@pytest.mark.parametrize("start", [0, 300])
def test_quantized_caches_are_restored(tmp_path: Path, start: int) -> None:
    directory = save(tmp_path / "llama", SMALL)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    expected = generated(stock(directory), **options)
    for count in (0, len(PROMPT) - 1):
        with loaded(directory) as model:
            assert same(generated(model, **options), expected) and restored(model) == count
    with loaded(directory) as model:
        generated(model, kv_bits=4, kv_group_size=32, quantized_kv_start=start)
        assert restored(model) == (STEP if start == 0 else 2 * STEP), "what came before was kept in the same way"


# --- which calls ------------------------------------------------------------------------------------------------------


def test_calls_of_another_length_are_others(llama: Path) -> None:
    first_run(llama)
    with loaded(llama) as model:
        for step in (300, 512):  # the pages of the second end where those that are there end
            assert same(generated(model, prefill_step_size=step), generated(stock(llama), prefill_step_size=step))
            assert restored(model) == 0
        assert same(generated(model, PROMPT[:600]), generated(stock(llama), PROMPT[:600]))
        assert restored(model) == 2 * STEP


@pytest.mark.quick
@pytest.mark.parametrize("settings", [{}, {"kv_cache": "disk"}, {"kv_cache": "stock"}])
def test_pages_that_begin_in_an_earlier_call_are_restored(llama: Path, settings: dict[str, Any]) -> None:
    """As after a system prompt that is shorter than a page: the page replaces its tokens in the cache."""

    def run(model: Any) -> Logits:
        cache = make_prompt_cache(model)
        model(mx.array([PROMPT[:100]]), cache=cache)
        return generated(model, PROMPT[100:], prompt_cache=cache)

    expected = run(stock(llama))
    for count in (0, len(PROMPT) - 101):
        with loaded(llama, **settings) as model:
            assert same(run(model), expected) and restored(model) == count


@pytest.mark.parametrize("config", [SMALL, HYBRID], ids=["rows", "windows"])
def test_pages_on_their_way_to_the_disk_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """The next prompt comes at once, and the disk is slow."""

    def slow(*args: Any) -> str:
        time.sleep(0.05)
        return add(*args)

    add = PrefixStore._add
    monkeypatch.setattr(PrefixStore, "_add", slow)
    with loaded(save(tmp_path / "model", config)) as model:
        first = generated(model, num=1)
        assert same(generated(model, num=1), first) and restored(model) == len(PROMPT) - 1


@pytest.mark.parametrize("config", [HYBRID, {**MAMBA2, "num_hidden_layers": 2}], ids=["windows", "states"])
def test_parts_that_end_inside_pages_are_restored_with_their_states(tmp_path: Path, config: dict[str, Any]) -> None:
    """A prompt in calls of 64 tokens. Those before the end of the first page are computed again."""
    directory = save(tmp_path / "model", config)
    runs = []
    for num_known in (0, len(PROMPT) - 1 - 3 * 64):
        with loaded(directory, prefill_step_size=64, ram_budget_gb=0.5) as model:
            runs.append([*generate_step(mx.array(PROMPT), model, max_tokens=4)])
            assert restored(model) == num_known
            assert model.counters.num_tokens_in == len(PROMPT) - num_known + 4
    assert same(runs[1], runs[0])


def test_states_larger_than_the_queue_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the plan is for a short context, and windows grow beyond it."""
    directory = save(tmp_path / "model", {**HYBRID, "sliding_window": 1024, "num_hidden_layers": 6})
    queue_bytes, store = 300_000, prefixcache.PrefixStore
    monkeypatch.setattr(prefixcache, "PrefixStore", lambda *a, **b: store(*a, **{**b, "queue_bytes": queue_bytes}))
    runs = []
    for num_known in (0, 699):
        with loaded(directory) as model:
            assert model.prefixes is not None
            runs.append(generated(model))
            assert restored(model) == num_known
            if not num_known:
                model.prefixes.store.flush()
                pages = [path.stat().st_size for path in (prefix_directory() / "pages").iterdir()]
                assert sorted(pages)[-2] > queue_bytes  # or this test tests nothing
    assert same(runs[1], runs[0])


def test_speculative_decoding(llama: Path, tmp_path: Path) -> None:
    draft = stock(save(tmp_path / "draft", {**SMALL, "num_hidden_layers": 1}))

    def run(model: Any) -> list[int]:
        steps = speculative_generate_step(mx.array(PROMPT), model, draft, max_tokens=12, prefill_step_size=STEP)
        return [int(token) for token, _, _ in steps]

    expected = run(stock(llama))
    for again in (False, True):
        with loaded(llama) as model:
            assert run(model) == expected and bool(restored(model)) == again


def test_a_cache_that_came_from_elsewhere_is_not_taken_for_another(llama: Path) -> None:
    reference = stock(llama)
    with loaded(llama) as model:
        generated(model)
        for used in (model, reference):
            cache = make_prompt_cache(used)
            reference(mx.array([[1, 2, 3]]), cache=cache)
            found = generated(used, prompt_cache=cache)
            assert can_trim_prompt_cache(cache)
            if used is model:
                first, count = found, restored(model)
        assert same(first, found) and count == 0
        mixed = make_prompt_cache(model)
        generated(model, PROMPT[:300], prompt_cache=mixed)
        mixed[1] = copy.deepcopy(mixed[1])
        count = restored(model)
        generated(model, PROMPT[300:], prompt_cache=mixed)
        assert count and restored(model) == count


# --- what shares nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"kv_prefix_tenant": "bob"}, {"model_config": {"rms_norm_eps": 1e-3}}])
def test_others_find_nothing(llama: Path, other: dict[str, Any]) -> None:
    first_run(llama, kv_prefix_tenant="alice")
    model_config = other.pop("model_config", None)
    config = config_of("exact", **({"kv_prefix_tenant": "alice"} | other))
    with load_model(llama, config, model_config=model_config)[0] as model:
        generated(model)
        assert restored(model) == 0
    with loaded(llama, kv_prefix_tenant="alice") as model:
        generated(model)
        assert restored(model) == len(PROMPT) - 1


def test_a_device_with_other_memory_free_is_the_same(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLX describes CUDA's, anew at every look."""
    device, looks = mx.device_info(), counted()
    monkeypatch.setattr(mx, "device_info", lambda: {**device, "free_memory": next(looks)})
    first_run(llama)
    with loaded(llama) as model:
        generated(model)
        assert restored(model) == len(PROMPT) - 1
    for changed in ("device", "variable"):
        with monkeypatch.context() as patch:
            if changed == "device":
                patch.setattr(mx, "device_info", lambda: {**device, "device_name": "another"})
            else:
                patch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "0")
            with loaded(llama) as model:
                generated(model, PROMPT[:300])
                assert restored(model) == 0


def test_other_weights_find_nothing(llama: Path, tmp_path: Path) -> None:
    first_run(llama)
    other = save(tmp_path / "llama", SMALL, mx.float16)
    with loaded(other) as model:
        assert same(generated(model), generated(stock(other))) and restored(model) == 0


def adapted(directory: Path, seed: int, scale: float = 20.0) -> FlashLLM:
    """With an adapter, applied as mlx-lm does: after loading, before the first call."""
    config = config_of("exact")
    model = FlashLLM(prepare(directory, config), config, "llama")
    mx.random.seed(seed)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": scale, "dropout": 0.0})
    for _, module in model.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_b = mx.random.normal(module.lora_b.shape)
    model.eval()
    return model


def test_adapters_find_their_own_only(llama: Path) -> None:
    plain = first_run(llama)
    runs = []
    for seed, scale, count in ((1, 20.0, 0), (1, 20.0, 699), (2, 20.0, 0), (1, 10.0, 0)):
        with adapted(llama, seed, scale) as model:
            runs.append(generated(model))
            assert restored(model) == count, (seed, scale)
    assert same(runs[0], runs[1]) and not same(runs[0], runs[2]) and not same(runs[0], runs[3])
    with loaded(llama) as model:
        assert same(generated(model), plain) and restored(model) == len(PROMPT) - 1


# --- damage, and disks that may not be written ------------------------------------------------------------------------


def tree(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.rglob("*")}


def test_zero_write_mode_uses_what_is_there_and_writes_nothing(llama: Path) -> None:
    frugal = {"ssd_write_gb_per_day": 0.0}
    expected = first_run(llama)
    before = tree(cache_directory())
    with loaded(llama, **frugal) as model:
        assert same(generated(model), expected) and restored(model) == len(PROMPT) - 1
        assert same(generated(model, PROMPT[::-1]), generated(stock(llama), PROMPT[::-1]))
    assert tree(cache_directory()) == before
    for path in sorted((prefix_directory() / "pages").iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-5000] + bytes(1000) + data[-4000:])
        with loaded(llama, **frugal) as model:
            assert same(generated(model), expected) and restored(model) < len(PROMPT) - 1
        path.write_bytes(data)
    clear_prefixes(prefix_directory())
    with loaded(llama, **frugal) as model:
        assert same(generated(model), expected) and restored(model) == 0
    assert list_prefixes(prefix_directory()) == []


def test_settings_limit_the_cache_and_the_writes_of_a_day(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Four prompts of 0.7 MB each. A cap that is reached is told once."""
    with loaded(llama, kv_prefix_gb=0.001, ssd_write_gb_per_day=0.002) as model, caplog.at_level(logging.WARNING):
        for i in range(4):
            generated(model, [i, *PROMPT], num=1)
        assert model.prefixes is not None
        model.prefixes.store.flush()
        told, stored = model._life.governor.telemetry(), model.prefixes.store.telemetry()["stored"]
    assert 1_000_000 < told["day_bytes"] <= 2_000_000 == told["day_limit_bytes"] and told["refused_bytes"]
    assert caplog.text.count("ssd_write_gb_per_day") == 1
    (kept,) = list_prefixes(prefix_directory())
    assert kept.pages < stored and kept.nbytes <= 1_000_000


def test_by_default_nothing_is_remembered(llama: Path) -> None:
    assert FlashConfig().kv_prefixes is None
    with loaded(llama, None) as model:
        generated(model)
        assert model.prefixes is None
    assert not prefix_directory().exists()


# --- telling ----------------------------------------------------------------------------------------------------------


def test_the_monitor_and_the_cache_command_show_them(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the user may run other engines
    first_run(llama)
    with loaded(llama, telemetry=True) as model:
        generated(model)
        generated(model, PROMPT[::-1])
        assert model.prefixes is not None
        model.prefixes.store.flush()
        text, deadline = "", time.monotonic() + 20
        while "3 pages stored" not in text and time.monotonic() < deadline:
            assert cli.main(["monitor", "--once"]) == 0
            text = capsys.readouterr().out
        nbytes = size(model.prefixes.counters.restored_bytes)
    assert f"699 tokens restored ({nbytes}), 699 computed; 3 pages stored" in text and "today of 20.0 GB" in text
    assert cli.main(["cache", "list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["prefixes"]
    assert (entry["tokens"], entry["pages"], entry["title"]) == (2 * 699, 6, llama.name)
    assert cli.main(["cache", "clear"]) == 0
    assert "1398 tokens in the prefix cache" in capsys.readouterr().out
    assert list_prefixes(prefix_directory()) == []
