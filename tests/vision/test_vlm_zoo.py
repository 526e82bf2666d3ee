"""Some of mlx-vlm's architectures; `scripts/zoo.py --vision` compares all that have a tiny configuration here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm")

import mlx.core as mx
from mlx_vlm.utils import load_model

from mlx_flash import FlashConfig
from mlx_flash.vision.flashvlm import load_vlm_model
from vlm_zoo import make_prompt_cache, outcome_of_model, picture_of, save

NAMES = ["deepseek_v4", "gemma4", "glm5_next", "llama4", "mllama", "phi4_siglip", "qwen3_5_moe", "smolvlm"]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal(name: str, tmp_path: Path) -> None:
    outcome = outcome_of_model(name, tmp_path)
    assert (outcome.status, outcome.sees) == ("ok", True), outcome.reason
    assert outcome.num_towers


@pytest.mark.parametrize("name", ["moondream2", "qwen3_omni_moe"])
def test_a_model_is_called_whose_language_model_is_a_part_under_another_name(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    tokens, pixels, extra = picture_of(name)

    def called(model: Any) -> mx.array:
        cache = make_prompt_cache(model.language_model)
        logits: mx.array = model(tokens, pixel_values=pixels, cache=cache, **extra).logits
        return logits

    stock = load_model(tmp_path)
    with load_vlm_model(tmp_path, FlashConfig(ram_budget_gb=1.0, telemetry=False)) as model:
        model.start()
        assert mx.array_equal(called(model), called(stock)) and model.counters.num_passes == 1
        assert model._model.keys() == stock.keys()
