"""Adapters, as commands apply them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import utils as mlx_lm_utils

from adapters import save_adapter
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.commands.generate import load
from mlx_flash.model import FlashLLM
from models import make_random_model, run, same_bits, stock

SHAPE = "--layers 3 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 300"
CHUNKS = [[5, 6, 7, 8], [9], [10]]


@pytest.mark.parametrize("with_draft", [False, True])
def test_an_adapter_that_was_trained_with_dropout_drops_nothing_out(tmp_path: Path, with_draft: bool) -> None:
    base = make_random_model(tmp_path / "base", *SHAPE.split())
    adapter = save_adapter(tmp_path / "adapter", base, "lora", 2)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["lora_parameters"]["dropout"] = 0.5
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    expected = mlx_lm_utils.load_adapters(stock(base), str(adapter))
    expected.eval()
    mode = ["--ram-budget-gb", "1", *(["--draft-model", str(base)] if with_draft else [])]
    command = ["generate", "--model", str(base), "--prompt", "x", "--adapter-path", str(adapter), *mode]
    model, draft = load(base, parse_arguments(command), 8)
    try:
        assert same_bits(run(model, CHUNKS), run(expected, CHUNKS))
    finally:
        for streamed in (model, draft):
            if isinstance(streamed, FlashLLM):
                streamed.close()
    mx.clear_cache()
