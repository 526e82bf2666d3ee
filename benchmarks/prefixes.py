"""Benchmark of the prefix cache: the same long prompt in one process after another.

    python scripts/make_random_model.py models/prefix --architecture qwen3_moe --hidden-size 512 \
        --intermediate-size 512 --layers 5 --heads 8 --kv-heads 4 --experts 64 --experts-per-token 2 \
        --vocab-size 8000 --dtype float32
    python benchmarks/prefixes.py --model models/prefix --ram-budget-gb 0.5 --prefill-step-size 256 --json out.json

Each run has a process of its own: one without the prefix cache, one that fills an empty store, then runs that restore
the prompt. Before each run the checkpoint and the store are dropped from the page cache. Every run has to generate the
same tokens as the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from harness import describe, describe_cold, describe_model, make_cold, run_worker, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mlx_flash import generate_step
from mlx_flash.config import GB, FlashConfig
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import peak_footprint

SEED = 5


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run once, in this process."""
    config = FlashConfig(
        ram_budget_gb=options.ram_budget_gb,
        context_length=options.prompt_tokens + 256,
        prefill_step_size=options.prefill_step_size,
        kv_prefixes=options.mode,
        telemetry=False,
    )
    began = time.perf_counter()
    model, settings = load_model(options.model, config)
    with model:
        loaded = time.perf_counter()
        before = model.engine.reader.stats.nbytes if model.engine else 0
        prompt = np.random.default_rng(SEED).integers(0, settings["vocab_size"], options.prompt_tokens)
        tokens = []
        steps = generate_step(
            mx.array(prompt),
            model,
            max_tokens=options.tokens,
            prefill_step_size=options.prefill_step_size,
        )
        for token, _ in steps:
            tokens.append(int(token))
            if len(tokens) == 1:
                first, read = time.perf_counter(), (model.engine.reader.stats.nbytes if model.engine else 0) - before
        counts = model.prefixes.telemetry() if model.prefixes is not None else {}
        writes = model._life.governor.telemetry() if model.prefixes is not None else {}
        result = {
            "load_seconds": loaded - began,
            "first_token_seconds": first - loaded,
            "weight_bytes_to_first_token": read,
            "tokens": tokens,
            "peak_bytes": peak_footprint(),
            "prompts": counts,
            "plan": {
                "budget_bytes": model.plan.budget_bytes,
                "streamed_bytes_per_pass": model.plan.read_bytes,
                "prefill_step_size": model.plan.prefill_step_size,
                "prefix_bytes": model.plan.prefix_bytes,
            },
        }
    return {**result, "seconds": time.perf_counter() - began, "writes": writes}


def run_apart(options: argparse.Namespace, cache: Path, mode: str) -> dict[str, Any]:
    """Run once, cold, in a process of its own."""
    paths = [*options.model.glob("*.safetensors"), *cache.rglob("*.page")]
    make_cold(paths)
    arguments = ["--model", options.model, "--ram-budget-gb", options.ram_budget_gb, "--mode", mode, "--worker"]
    arguments += ["--prompt-tokens", options.prompt_tokens, "--tokens", options.tokens]
    arguments += ["--prefill-step-size", options.prefill_step_size]
    found = run_worker(__file__, arguments, label=f"the run with {mode}", environment={"XDG_CACHE_HOME": str(cache)})
    return {"mode": mode, **found, "store_bytes": sum(path.stat().st_size for path in cache.rglob("*.page"))}


def bench(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run all modes and describe the runs."""
    runs = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for mode in ["off"] + [options.mode] * (1 + options.repeats):
            runs.append(run_apart(options, Path(folder), mode))
            runs[-1]["equal_tokens"] = runs[-1]["tokens"] == runs[0]["tokens"]
            console.print(f"{len(runs)}: {mode}, first token {runs[-1]['first_token_seconds']:.2f} s")
    return {
        "benchmark": "prefixes",
        **describe(options.model, describe_cold("checkpoint and the store")),
        "model": describe_model(options.model),
        "runs": runs,
    }


def table(result: dict[str, Any]) -> Table:
    """Return a table of the runs."""
    columns = ("run", "first token s", "weights read for it GB", "restored", "store GB", "peak GB", "equal")
    found = Table(*columns, box=SIMPLE_HEAD)
    for i, each in enumerate(result["runs"]):
        found.add_row(
            f"{i + 1}, {each['mode']}",
            f"{each['first_token_seconds']:.2f}",
            f"{each['weight_bytes_to_first_token'] / GB:.3f}",
            str(each["prompts"].get("num_restored", "")),
            f"{each['store_bytes'] / GB:.3f}",
            f"{each['peak_bytes'] / GB:.3f}",
            "yes" if each["equal_tokens"] else "NO",
        )
    return found


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ram-budget-gb", type=float, required=True)
    parser.add_argument("--mode", choices=("off", "exact"), default="exact")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--prefill-step-size", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2, help="runs that find the prompt (default: 2)")
    parser.add_argument("--directory", type=Path, help="where the store is made; the disk to measure")
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run(options)))
        return
    console = Console()
    result = bench(options, console)
    console.print(table(result))
    write_json(options.json, result)
    if not all(each["equal_tokens"] for each in result["runs"]):
        sys.exit("tokens differ")


if __name__ == "__main__":
    main()
