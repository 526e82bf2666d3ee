"""What each rank of ``test_ranks.py`` runs: models whose layers take turns between ranks, against stock mlx-lm.

Prints a line of JSON for each model: rank, model, whether all logits and tokens are equal, layers that were read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step as stock_generate_step

from mlx_flash.engine import prepare
from mlx_flash.errors import FlashError
from mlx_flash.generation import generate_step
from models import PREFILL_AND_DECODE, run, same_bits, stock
from test_model import streamed_whole

PROMPT = mx.array([1, 5, 9, 30, 2, 7])


def tokens_of(step: Any, model: Any) -> list[int]:
    return [token for token, _ in step(PROMPT, model, max_tokens=4)]


def main(root: str, names: list[str], fault: str = "") -> None:
    group = mx.distributed.init()
    prepare.share_layers = lambda layers, ranks: [i % len(ranks) for i in range(len(layers))]
    for name in names:
        directory = Path(root) / name
        model = stock(directory)
        expected, tokens = run(model, PREFILL_AND_DECODE), tokens_of(stock_generate_step, model)
        try:
            with streamed_whole(directory, pool_slots=0 if "moe" in name else None, group=group) as streamed:
                if fault == "dies" and group.rank() == 1:
                    sys.exit(3)
                other = [[3, 3, 3]] if fault == "other tokens" and group.rank() == 1 else PREFILL_AND_DECODE
                is_equal = same_bits(run(streamed, other), expected) and tokens == tokens_of(generate_step, streamed)
                units = [unit.name for unit in streamed.engine.stream.units]
            is_equal = is_equal and same_bits(run(model, PREFILL_AND_DECODE), expected)
            assert streamed.name == f"test (rank {group.rank()} of {group.size()})"  # what flash-monitor shows
            print(json.dumps([group.rank(), name, is_equal, units]), flush=True)
        except FlashError as error:
            print(json.dumps([group.rank(), name, type(error).__name__, str(error)]), flush=True)
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), *sys.argv[3:])
