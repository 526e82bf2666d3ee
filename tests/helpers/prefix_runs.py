from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from mlx_flash import FlashConfig, FlashLLM
from mlx_flash.loading import load_model

PROMPT = [(37 * i + 11) % 1000 for i in range(700)]

STEP = 256
"""Of prompts: so many tokens in one forward call, three calls for all but the last token."""

Logits = list[tuple[int, mx.array]]


def loaded(directory: Path, mode: str | None = "exact", **settings: Any) -> FlashLLM:
    """As in another process: everything that is known of prompts is on disk."""
    return load_model(directory, config_of(mode, **settings))[0]


def config_of(mode: str | None, **settings: Any) -> FlashConfig:
    defaults = {"ram_budget_gb": "min", "context_length": 1024, "prefill_step_size": 512, "telemetry": False}
    return FlashConfig(kv_prefixes=mode, **(defaults | settings))  # type: ignore[arg-type]


def generated(model: Any, prompt: Sequence[int] = PROMPT, num: int = 4, **options: Any) -> Logits:
    options = {"prefill_step_size": STEP} | options
    steps = generate_step(mx.array(prompt), model, max_tokens=num, **options)
    found = [(int(token), logprobs) for token, logprobs in steps]
    mx.eval([logprobs for _, logprobs in found])
    return found


def restored(model: FlashLLM) -> int:
    assert model.prefixes is not None
    return model.prefixes.counters.num_restored
