"""Decoding with keys and values that are larger than their share of the budget, by a streamed model.

    python scripts/make_random_model.py models/deep --architecture llama --layers 32 --hidden-size 256 \\
        --intermediate-size 512 --heads 2 --kv-heads 2 --vocab-size 4000 --dtype float32
    python benchmarks/context.py --model models/deep --tokens 32768 --ram-budget-gb 0.45 --json out.json

Attention over a prompt of this length would take an hour of a CPU. So each layer's cache gets random keys and values
instead, the same ones in every run, in the steps and under the checks of a prompt's calls. Then tokens are decoded,
first with mlx-lm's own caches, then with the cache on disk, each in a process of its own. With ``--limit`` the latter
runs in a kernel memory limit of the budget plus 5 %. Tokens and a digest of all logits are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from harness import describe, describe_cold, describe_model, make_cold, run_worker, write_json
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from servers import LIMIT_ROOM

from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine.call import Lane, make_room, need, parse_call
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import peak_footprint
from mlx_flash.model import FlashLLM

FILL_STEP = 1024
"""Tokens that are added at a time, without attention: a cache on disk is read once for each of these."""

MODES = ("stock", "disk")
SEED = 11


def run(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Run once, in this process. Mode ``stock`` streams the weights too, so that only the caches differ."""
    config = FlashConfig(
        ram_budget_gb=options.ram_budget_gb if mode == "disk" else options.stock_budget_gb,
        context_length=options.tokens + options.generate + 1,
        prefill_step_size=options.prefill_step_size,
        kv_cache=mode,
        telemetry=False,
    )
    model, _ = load_model(options.model, config)
    with model:
        model.start()
        cache = make_prompt_cache(model)
        began = time.perf_counter()
        fill(model, cache, options)
        filled = time.perf_counter()
        ids, digest, times, read = [], hashlib.sha256(), [time.perf_counter()], []
        for token, logprobs in generate_step(
            mx.array([7]),
            model,
            prompt_cache=cache,
            max_tokens=options.generate,
            prefill_step_size=options.prefill_step_size,
        ):
            ids.append(int(token))
            digest.update(np.array(logprobs.astype(mx.float32)).tobytes())
            times.append(time.perf_counter())
            read.append(model.kv.note().read_bytes if model.kv else 0)
        kv, seconds = model.kv, times[-1] - times[1]
        return {
            "mode": mode,
            "token_ids": ids,
            "digest": digest.hexdigest(),
            "fill_seconds": filled - began,
            "first_token_seconds": times[1] - times[0],
            "tokens_per_second": (len(ids) - 1) / seconds,
            "kv_read_bytes_per_second": (read[-1] - read[0]) / seconds,
            "disk_bytes_per_second": model.plan.disk_bytes_per_second,
            "kv_bytes": model.plan.kv_bytes_per_token * options.tokens,
            "kv_share_bytes": model.plan.kv_bytes,
            "kv_memory_bytes": kv.memory_bytes if kv else None,
            "kv_disk_bytes": kv.note().disk_bytes if kv else 0,
            "kv_read_bytes": kv.note().read_bytes if kv else 0,
            "budget_bytes": model.plan.budget_bytes,
            "peak_bytes": peak_footprint(),
        }


def fill(model: FlashLLM, cache: list[Any], options: argparse.Namespace) -> None:
    """Give every layer keys and values of ``options.tokens`` tokens, as a prompt's calls would."""
    args = model.args
    width = getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads
    dtype = model.layout.embeddings[0].large[0].array.dtype
    generator = np.random.default_rng(SEED)
    for start in range(0, options.tokens, FILL_STEP):
        num_new = min(FILL_STEP, options.tokens - start)
        call = parse_call((mx.zeros((1, num_new), mx.int32), cache), {}, wants_logits=False)
        make_room(need(model.plan, [Lane(call, step=options.prefill_step_size)]))
        for entry in cache:
            shape = (2, 1, args.num_key_value_heads, num_new, width)
            keys, values = mx.array(generator.standard_normal(shape, np.float32)).astype(dtype)
            mx.eval(entry.update_and_fetch(keys, values))


def main() -> int:
    options = parse_arguments()
    if options.worker:
        print(json.dumps(run(options, options.worker)))
        return 0
    limit = int(LIMIT_ROOM * options.ram_budget_gb * GB) if options.limit else None
    done = []
    for mode in MODES:
        make_cold(options.model.glob("*.safetensors"))
        arguments, label = [*sys.argv[1:], "--worker", mode], f"the run with {mode} caches"
        done.append(run_worker(__file__, arguments, label=label, limit_bytes=limit if mode == "disk" else None))
    Console(stderr=True).print(table(done))
    entry = {
        **describe(options.model, describe_cold(limited=options.limit)),
        "model": describe_model(options.model),
        "tokens": options.tokens,
        "runs": done,
    }
    write_json(options.json, entry)
    identical = len({(entry["digest"], *entry["token_ids"]) for entry in done}) == 1
    print("identical" if identical else "DIFFERENT", file=sys.stderr)
    return int(not identical or any(entry["peak_bytes"] > entry["budget_bytes"] for entry in done))


def table(runs: list[dict[str, Any]]) -> Table:
    """Return a table of the runs."""
    shown = Table(box=SIMPLE_HEAD)
    for title in ("KV cache", "size, GB", "share", "on disk", "peak", "budget", "tokens/s", "GB/s read"):
        shown.add_column(title, justify="right")
    for entry in runs:
        sizes = ("kv_bytes", "kv_share_bytes", "kv_disk_bytes", "peak_bytes", "budget_bytes")
        shown.add_row(
            entry["mode"],
            *(f"{entry[name] / GB:.3f}" for name in sizes),
            f"{entry['tokens_per_second']:.2f}",
            f"{entry['kv_read_bytes_per_second'] / GB:.2f}",
        )
    return shown


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Decode with a long context on disk, and compare with mlx-lm's own.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32768, metavar="N", help="of context; default: %(default)s")
    parser.add_argument(
        "--prefill-step-size",
        type=int,
        default=64,
        metavar="N",
        help="tokens of a call; the attention of more may need more memory than the context; default: %(default)s",
    )
    parser.add_argument("--generate", type=int, default=8, metavar="N", help="tokens to decode; default: %(default)s")
    parser.add_argument("--ram-budget-gb", type=float, required=True, metavar="GB")
    parser.add_argument("--stock-budget-gb", type=float, default=16.0, metavar="GB", help="of the run to compare with")
    parser.add_argument("--limit", action="store_true", help="run in a kernel memory limit of 1.05 budgets")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
