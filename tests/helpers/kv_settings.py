from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_flash import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.residency.ledger import ledger_of
from mlx_flash.residency.sizes import measure
from models import LLAMA

CONTEXT = 220


STEP = 64


SMALL = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


FORMS: dict[str, dict[str, Any]] = {
    "open": {},
    "disk": {"kv_cache": "disk", "kv_step": 16},
    "disk, wide pages": {"kv_cache": "disk", "kv_step": 64},
}


def settings(directory: Path, form: str = "disk", times: float = 1.0, **changes: Any) -> FlashConfig:
    """With ``disk`` so many times the share that is just enough with every layer there."""
    common = {"ram_budget_gb": 4, "context_length": CONTEXT, "prefill_step_size": STEP, "poison_released_slots": True}
    config = FlashConfig(**{**common, **FORMS[form], **changes})
    if "disk" not in form:
        return config
    return replace(config, kv_ram_gb=(times * least_share(directory, config) + 1) / 1e9)


@functools.cache
def least_share(directory: Path, config: FlashConfig) -> int:
    """Return the share that is just enough with every layer on disk."""
    sizes = measure(prepare(directory, config).layout, {})
    context = config.context_length or 0
    ledger = ledger_of(sizes, config, context, config.prefill_step_size or 1)
    return ledger.least_rows(context, ledger.step)


@pytest.fixture(autouse=True)
def little_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of reads and writes are larger than the caches of tiny models: these would never leave memory."""
    monkeypatch.setattr("mlx_flash.kv.options.KVOptions.under_way_bytes", lambda *_: 4096)
