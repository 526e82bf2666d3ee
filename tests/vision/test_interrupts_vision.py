"""An interrupt while a picture is rehearsed leaves every weight in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm")

from interrupt_points import Tracer, sample
from mlx_flash import FlashConfig
from mlx_flash.vision.flashvlm import FlashVLM
from mlx_flash.vision.loadvlm import load_vlm_model
from tiny_vlms import inputs, save

NAME = "qwen2_vl"
FOLDERS = ("layout/swap", "vision/", "engine/lifecycle")


def embed(model: Any) -> mx.array:
    tokens, pixels, extra = inputs(NAME, True)
    found: mx.array = model.get_input_embeddings(tokens, pixels, **extra).inputs_embeds
    mx.eval(found)
    return found


def logits(model: FlashVLM) -> mx.array:
    found: mx.array = model.language_model(mx.array([[1, 2, 3]])).logits
    mx.eval(found)
    return found


def expect(model: FlashVLM) -> None:
    tokens, pixels, extra = inputs(NAME, True)
    model.expect(20, {"input_ids": tokens, "pixel_values": pixels, **extra})


def started(model: FlashVLM) -> FlashVLM:
    model.start()
    return model


@pytest.mark.parametrize("change", ["before the start", "while it runs", "and closed"])
def test_interrupts_of_a_rehearsal(tmp_path: Path, change: str) -> None:
    folder = save(tmp_path / "model", NAME)
    config = FlashConfig(ram_budget_gb="min", telemetry=False)
    strikes: Callable[[Any], Any] = expect if change == "before the start" else embed

    def opened() -> FlashVLM:
        model = load_vlm_model(folder, config)
        return model if change == "before the start" else started(model)

    with opened() as model:
        tracer = Tracer(None, FOLDERS)
        tracer.strike(lambda: strikes(model))
        wanted = embed(started(model)), logits(model)
    num = 0
    for number in sample(tracer.count, 12, seed=4):
        with opened() as model:
            tracer = Tracer(number, FOLDERS)
            num += tracer.strike(lambda model=model: strikes(model))
            if change == "and closed":
                assert mx.array_equal(embed(model.close()), wanted[0]), tracer.where
            else:
                found = embed(started(model)), logits(model)
                assert all(map(mx.array_equal, found, wanted)), tracer.where
    assert num >= 10
