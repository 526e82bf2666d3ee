from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_flash.compat.generation import stock_generate_step
from models import computed_once, stock

STEP = 16


PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(3 * STEP + 6)]


@computed_once
def by_mlx_lm(directory: Path, prompt: list[int], max_tokens: int = 6, **options: Any) -> list[tuple[int, mx.array]]:
    model = stock(directory)
    mx.random.seed(3)
    return list(stock_generate_step(mx.array(prompt), model, max_tokens=max_tokens, **options))
