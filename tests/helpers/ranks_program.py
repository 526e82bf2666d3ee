"""What each rank of ``test_ranks.py`` runs: models whose layers take turns between ranks, against stock mlx-lm.

Prints a line of JSON for each model: rank, model, whether all logits and tokens are equal, layers that were read, and
for each of its caches of keys and values the bytes of a token, and what it publishes of all ranks.
"""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.generate import generation_stream

from local_ranks import join
from mlx_flash import ranks
from mlx_flash.engine import passes, prepare
from mlx_flash.errors import BudgetError, FlashError
from mlx_flash.generation import generate_step
from models import PREFILL_AND_DECODE, run, same_bits, stock
from streamed import streamed_whole

SUMS_ONLY = "-sums"
"""After the name of a model: ranks exchange sums only, as with NCCL."""

OWN_FILES = "-files"
"""After the name of a model: the rank's folder is the one of its number, and has a part of the shards."""

PROMPT = mx.array([1, 5, 9, 30, 2, 7])


def tokens_of(step: Any, model: Any) -> list[int]:
    return [token for token, _ in step(PROMPT, model, max_tokens=4)]


def room_for_two_tokens(need: Any, *args: Any, **options: Any) -> Any:
    """Refuse what other ranks have room for."""
    if need.lanes[0].tokens.num_at_once > 2:
        raise BudgetError("there is room for two tokens", 0)
    return need


def main(root: str, names: list[str], fault: str = "") -> None:
    group = join()
    prepare.share_layers = lambda layers, ranks: [i % len(ranks) for i in range(len(layers))]
    for name in names:
        whole = directory = Path(root) / name.removesuffix(SUMS_ONLY).removesuffix(OWN_FILES)
        if name.endswith(OWN_FILES):
            directory = whole / f"rank-{group.rank()}"
        if name.endswith(SUMS_ONLY):
            ranks._uses_nccl = lambda: True
            mx.distributed.send = mx.distributed.recv = None
        model = stock(whole)
        expected, tokens = run(model, PREFILL_AND_DECODE), tokens_of(stock_generate_step, model)
        mx.synchronize(generation_stream)  # it computes a token ahead, and the ranks would exchange two things at once
        try:
            pool_slots, more = 0 if "moe" in name else None, {"telemetry": True}
            if fault == "less room" and group.rank() == 0:
                more["prefill_step_size"] = 8
            with streamed_whole(directory, pool_slots=pool_slots, group=group, **more) as streamed:
                if fault == "dies" and group.rank() == 1:
                    sys.exit(3)
                if fault == "less room" and group.rank() == 1:
                    passes.make_room = room_for_two_tokens
                if fault == "endless":
                    ranks.TICK_SECONDS, ranks.PATIENCE_SECONDS = 0.2, 2.0
                    print(json.dumps("ready"), flush=True)
                    while True:
                        run(streamed, PREFILL_AND_DECODE)
                other = [[3, 3, 3]] if fault == "other tokens" and group.rank() == 1 else PREFILL_AND_DECODE
                told_step = streamed.plan.prefill_step_size
                assert fault != "less room" or told_step == 8, told_step
                got = expected if fault == "less room" else run(streamed, other)  # parts change last bits
                is_equal = same_bits(got, expected) and tokens == tokens_of(generate_step, streamed)
                rows, told = streamed.plan.kv.rows, streamed._life.engine._publisher._collect()["ranks"]
                units = [unit.name for unit in streamed.engine.stream.units]
            is_equal = is_equal and same_bits(run(model, PREFILL_AND_DECODE), expected)
            assert streamed.name == f"test (rank {group.rank()} of {group.size()})"  # what flash-monitor shows
            print(json.dumps([group.rank(), name, is_equal, units, rows, told]), flush=True)
        except FlashError as error:
            print(json.dumps([group.rank(), name, type(error).__name__, str(error)]), flush=True)
            sys.exit(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2].split(","), *sys.argv[3:])
    finally:
        atexit._run_exitfuncs()  # a forked child does not
