"""Benchmark of sequences with one beginning: an exact batch with keys and values on disk, and the prefix cache.

    python scripts/make_random_model.py models/branches --layers 6 --hidden-size 256 --intermediate-size 256 --heads 4 \
        --kv-heads 2 --vocab-size 1000
    python benchmarks/branches.py --model models/branches --ram-budget-gb 0.3 --kv-ram-gb 0.03 --json out.json

Each run has a process of its own. The first one finds an empty store. Counted are the bytes of keys and values that
are written and read, without what the prefix cache writes. All runs have to generate the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import describe, describe_model, run_worker, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mlx_flash.config import FlashConfig
from mlx_flash.generation import RowGenerator
from mlx_flash.loading import load_model

MB = 10**6
NUMBERS = ("sequences", "tokens", "prefill-step-size", "ram-budget-gb", "kv-ram-gb")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run once, in this process."""
    config = FlashConfig(
        ram_budget_gb=options.ram_budget_gb,
        context_length=options.tokens + 256,
        prefill_step_size=options.prefill_step_size,
        kv_cache="disk",
        kv_ram_gb=options.kv_ram_gb,
        kv_prefixes=options.mode,
        telemetry=False,
    )
    model, settings = load_model(options.model, config)
    random = np.random.default_rng(5)
    shared = random.integers(0, settings["vocab_size"], options.tokens).tolist()
    prompts = [[*shared, *random.integers(0, settings["vocab_size"], 20 + k)] for k in range(options.sequences)]
    with model:
        model.start()
        assert model.kv is not None and model.prefixes is not None
        generator = RowGenerator(model, prefill_step_size=options.prefill_step_size)
        began, first, most_on_disk = time.perf_counter(), 0.0, 0
        uids = generator.insert([[int(token) for token in prompt] for prompt in prompts], max_tokens=[6] * len(prompts))
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        is_done = False
        while not is_done:
            prompts_done, answers = generator.next()
            first = first or (time.perf_counter() - began if answers else 0.0)
            for answer in answers:
                found[answer.uid].append(answer.token)
            usage = model.kv.note()
            most_on_disk = max(most_on_disk, usage.disk_bytes)
            is_done = not prompts_done and not answers
        return {
            "first_token_seconds": first,
            "written_bytes": usage.written_bytes,
            "read_bytes": usage.read_bytes,
            "most_disk_bytes": most_on_disk,
            "num_restored": model.prefixes.counters.num_restored,
            "tokens": [*found.values()],
        }


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ram-budget-gb", type=float, required=True)
    parser.add_argument("--kv-ram-gb", type=float, required=True)
    parser.add_argument("--mode", choices=("exact", "longest"), default="exact")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="that all sequences begin with (default: 4096)")
    parser.add_argument("--prefill-step-size", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run(options)))
        return
    runs, console = list[dict[str, Any]](), Console()
    arguments = ["--model", options.model, "--mode", options.mode, "--worker"]
    for name in NUMBERS:
        arguments += [f"--{name}", getattr(options, name.replace("-", "_"))]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs):
            label = f"run {number + 1}"
            runs.append(run_worker(__file__, arguments, label=label, environment={"XDG_CACHE_HOME": folder}))
    table = Table("run", "restored tokens", "written MB", "on disk MB", "read MB", "first token s", box=SIMPLE_HEAD)
    for number, each in enumerate(runs, 1):
        sizes = [f"{each[name] / MB:.1f}" for name in ("written_bytes", "most_disk_bytes", "read_bytes")]
        table.add_row(str(number), str(each["num_restored"]), *sizes, f"{each['first_token_seconds']:.2f}")
    console.print(table)
    write_json(
        options.json,
        {"benchmark": "branches", **describe(options.model, []), "model": describe_model(options.model), "runs": runs},
    )
    if any(each["tokens"] != runs[0]["tokens"] for each in runs):
        sys.exit("tokens differ")


if __name__ == "__main__":
    main()
