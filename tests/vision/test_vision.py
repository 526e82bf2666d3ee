"""Models of mlx-vlm: streamed output equals mlx-vlm's, with and without pictures; towers leave memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from mlx_flash import ConfigError, FlashConfig, StreamedWeightsError, apply_flash_patch

mlx_vlm = pytest.importorskip("mlx_vlm")

from mlx_vlm import utils  # noqa: E402
from mlx_vlm.generate import generate_step  # noqa: E402
from mlx_vlm.models.cache import make_prompt_cache  # noqa: E402

import vlm_zoo  # noqa: E402
from mlx_flash.vision.flashvlm import FlashVLM, TowerRehearsal, load_vlm_model  # noqa: E402
from tiny_vlms import save  # noqa: E402

CONFIG = FlashConfig(ram_budget_gb="min", telemetry=False, poison_released_slots=True)


def inputs(name: str, has_picture: bool = True) -> tuple[mx.array, mx.array | None, dict[str, Any]]:
    """Return tokens, the numbers of a picture, and further arguments of ``get_input_embeddings``."""
    tokens, pixels, extra = vlm_zoo.picture_of(name) if has_picture else (mx.array([[1, 2, 3, 4, 5, 6, 7]]), None, {})
    return tokens, pixels, {"mask": mx.ones(tokens.shape, mx.int32), **extra}


def outputs(model: Any, name: str, has_picture: bool) -> list[mx.array]:
    """Logits of a prompt, and of two more tokens."""
    return vlm_zoo.outputs(model, *inputs(name, has_picture))


def generated(model: Any, given: Any, step: int, num_tokens: int = 6) -> list[mx.array]:
    """Tokens and their log-probabilities."""
    tokens, pixels, extra = given
    options = {"max_tokens": num_tokens, "temperature": 0, "prefill_step_size": step, **extra}
    found = generate_step(tokens, model, pixels, **options)
    return [array for token, logprobs in found for array in (mx.array(token), logprobs)]


def same(left: list[mx.array], right: list[mx.array]) -> bool:
    return all(bool(mx.array_equal(a, b)) for a, b in zip(left, right, strict=True))


def test_memory_of_results_counts_while_something_keeps_them() -> None:
    rehearsal, unit = TowerRehearsal(), cast(Any, None)
    kept = [rehearsal.call(unit, lambda: mx.zeros(100), (), {})]
    rehearsal.call(unit, lambda: mx.zeros(1000), (), {})
    assert rehearsal.retained_bytes == kept[0].nbytes
    kept.append(rehearsal.call(unit, lambda: mx.zeros(10), (), {}))
    assert rehearsal.retained_bytes == kept[0].nbytes
    rehearsal.call(unit, lambda: mx.zeros(1), (), {})
    assert rehearsal.retained_bytes == kept[0].nbytes + kept[1].nbytes


@pytest.mark.parametrize("name", vlm_zoo.MODELS)
def test_outputs_equal_and_towers_leave_memory(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, name)
    stock = utils.load_model(folder)
    text, picture = (outputs(stock, name, has_picture) for has_picture in (False, True))
    assert not mx.array_equal(text[-1], picture[-1])
    with load_vlm_model(folder, CONFIG) as model:
        assert isinstance(model, type(stock))
        for _ in range(2):
            assert same(outputs(model, name, True), picture)
            assert same(outputs(model, name, False), text)
        assert model.plan.streaming.num_units and model.layout.towers
        towers = [parameter for unit in model.layout.towers for parameter in unit.large]
        assert all(parameter.container[parameter.key] is parameter.array for parameter in towers)
        tokens, pixels, extra = inputs(name)
        whole = model(tokens, pixels, cache=make_prompt_cache(model.language_model), **extra).logits
        assert mx.array_equal(
            whole, stock(tokens, pixels, cache=make_prompt_cache(stock.language_model), **extra).logits
        )
    assert same(outputs(model._model, name, True), picture)


def test_the_patch_streams_what_mlx_vlm_loads_and_is_undone(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen2_vl")
    original = utils.load_model
    stock = utils.load_model(folder)
    given = inputs("qwen2_vl")
    with apply_flash_patch(CONFIG):
        model = utils.load_model(folder)
        assert type(model) is FlashVLM
        for step in (2048, 3):
            assert same(generated(model, given, step), generated(stock, given, step))
        with pytest.raises(StreamedWeightsError, match=r"mlx_vlm\.convert needs"):
            exec("load(folder)", {"__name__": "mlx_vlm.convert", "load": utils.load_model, "folder": folder})
    model.close()
    assert utils.load_model is original


def test_what_is_set_on_the_language_model_reaches_mlx_vlm(tmp_path: Path) -> None:
    with load_vlm_model(save(tmp_path, "qwen2_vl"), CONFIG) as model:
        model.language_model._rope_deltas = mx.array(7)
        assert int(model._model.language_model._rope_deltas) == 7


def test_settings_and_uses_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, "llava")
    for settings in ({"kv_max_tokens": 1024, "kv_cache": "disk"}, {"kv_prefixes": "exact"}):
        with pytest.raises(ConfigError, match=r"is not available for models of mlx-vlm"):
            load_vlm_model(folder, FlashConfig(**settings))
    with load_vlm_model(folder, CONFIG) as model:
        model.start()
        with pytest.raises(StreamedWeightsError):
            model.load_weights([])


def test_mlx_vlm_is_imported_by_others_only() -> None:
    program = (
        "import sys, mlx_flash; mlx_flash.apply_flash_patch(); mlx_flash.load; assert 'mlx_vlm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3_vl_moe")
    stock = utils.load_model(folder)
    given = inputs("qwen3_vl_moe")
    with load_vlm_model(folder, CONFIG) as model:
        for step in (1, 3, 2048):  # mlx-vlm computes 2 to 8 tokens as it computes them one after another
            assert same(generated(model, given, step), generated(stock, given, step))
        assert model.plan.pool is not None and model.engine is not None and model.engine.experts is not None
        stats = model.engine.experts.pool.stats
        assert stats.num_calls and stats.read_bytes and model.plan.pool.num_slots < 24


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "gemma3"])
def test_keys_and_values_may_be_on_disk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The buffers of reads and writes are larger than this model's caches.
    monkeypatch.setattr("mlx_flash.kv.kvledger.KVOptions.under_way_bytes", lambda *_: 4096)
    folder = save(tmp_path / "model", name, num_layers=6)
    stock = utils.load_model(folder)
    tokens, pixels, extra = inputs(name)
    tokens = mx.concatenate([tokens, mx.array([[5 + i % 200 for i in range(600)]])], axis=1)
    extra["mask"] = mx.ones(tokens.shape, mx.int32)
    (tmp_path / "kv").mkdir()
    settings = {"ram_budget_gb": 1, "telemetry": False, "kv_step": 16, "kv_directory": str(tmp_path / "kv")}
    settings |= {"context_length": 700, "prefill_step_size": 256}
    with pytest.raises(ConfigError, match="needs at least") as found:
        load_vlm_model(folder, FlashConfig(**settings, kv_ram_gb=1e-6))
    least = float(str(found.value).split("at least ")[1].split(":")[0])
    with load_vlm_model(folder, FlashConfig(**settings, kv_ram_gb=least)) as model:
        assert same(*(generated(each, (tokens, pixels, extra), 256, 4) for each in (model, stock)))
        kv = model.language_model.kv
        assert kv is not None and kv.usage.written_bytes and kv.usage.read_bytes
