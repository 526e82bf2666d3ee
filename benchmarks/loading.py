"""Time to load a model that fits into memory, to its first token, and its speed after that: mlx-flash and mlx-lm.

    python benchmarks/loading.py models/a models/b --rounds 3 --json out.json

Every run is a process of its own. A run loads the model until all weights are in memory, then decodes a short prompt.
mlx-flash has a budget that holds everything. Before a cold run the disk is probed with the same files, and their cached
pages are dropped; before a warm run all files are read through the page cache. Then another process takes half of the
free memory, and ends. A virtual machine gets memory from its host when it is written to, and keeps it for a while:
getting it can take longer than reading the weights. Half, because a run need not get the pages that were free last.
mlx-flash and mlx-lm alternate, and so does the one that comes first. The table shows medians.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from disk import DiskProbe
from harness import (
    Run,
    describe,
    describe_cold,
    describe_model,
    make_cold,
    take_memory,
    write_json,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runs import Job, run_job

from mlx_flash.config import GB
from mlx_flash.storage.probe import disk_profile
from mlx_flash.storage.safetensors import read_checkpoint

PROGRAMS = ("mlx-flash", "mlx-lm")
ROOM_GB = 1.5
"""Budget beside the weights: the process, the KV cache and intermediate results."""

BLOCK = 16 << 20


def rounds_of(path: Path, options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of a model."""
    files = [shard.path for shard in read_checkpoint(path).shards]
    profile = disk_profile(max(files, key=lambda file: file.stat().st_size), direct=True)
    nbytes = sum(file.stat().st_size for file in files)
    probe = DiskProbe(files, [(profile.read_size, profile.queue_depth)], nbytes)
    stock = Job(str(path), options.tokens, options.prompt_tokens)
    jobs = {"mlx-flash": replace(stock, budget=nbytes * 1.05 / GB + ROOM_GB), "mlx-lm": stock}
    for number in range(options.rounds):
        for program in PROGRAMS[:: 1 - 2 * (number % 2)]:
            for state in ("cold", "warm"):
                raw = None
                if state == "cold":
                    make_cold(files)
                    raw = probe.measure()[0]["bytes_per_second"]
                    make_cold(files)
                else:
                    read_through_cache(files)
                take_memory()
                run = run_job(jobs[program])
                if run["budget"] is not None and run["plan"]["read_bytes"]:
                    raise SystemExit(f"the budget of {run['budget']:.2f} GB does not hold {path}")
                run |= {"first_token_seconds": run["load_seconds"] + run["first_token_seconds"]}
                yield run | {"model": path.name, "nbytes": nbytes, "program": program, "state": state, "raw": raw}


def read_through_cache(files: Sequence[Path]) -> None:
    """Bring files into the page cache."""
    buffer = bytearray(BLOCK)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def summarize(runs: Sequence[Run]) -> list[Run]:
    """Return medians for each model, state and program."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["model"], run["state"], run["program"]), []).append(run)
    rows = []
    for (model, state, program), group in groups.items():
        names = ("nbytes", "load_seconds", "first_token_seconds", "tokens_per_second", "peak_bytes")
        row = {name: median(run[name] for run in group) for name in names}
        raw = [run["nbytes"] / run["load_seconds"] / run["raw"] for run in group if run["raw"]]
        same = all(run["token_ids"] == run_["token_ids"] for run in group for run_ in runs if run_["model"] == model)
        about = {"model": model, "state": state, "program": program, "of_raw": median(raw) if raw else None}
        rows.append(about | row | {"same": same})
    return rows


def table_of(rows: Sequence[Run]) -> Table:
    """Return the table for people."""
    names = ("model", "state", "program", "load, s", "GB/s", "of raw disk", "first token, s", "tokens/s", "peak, GB")
    table = Table(*names, box=SIMPLE_HEAD)
    for row in rows:
        numbers = [row["load_seconds"], row["nbytes"] / GB / row["load_seconds"]]
        more = [row["first_token_seconds"], row["tokens_per_second"], row["peak_bytes"] / GB]
        of_raw = "" if row["of_raw"] is None else f"{row['of_raw']:.2f}"
        cells = [*(f"{number:.2f}" for number in numbers), of_raw, *(f"{number:.2f}" for number in more)]
        table.add_row(row["model"], row["state"], row["program"], *cells)
    return table


def main() -> None:
    """Run all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="default: 16")
    parser.add_argument("--tokens", type=int, default=5, help="to decode (default: 5)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: list[Run] = []
    for path in options.models:
        for run in rounds_of(path, options):
            runs.append(run)
            print(f"{run['model']} {run['state']} {run['program']}: {run['load_seconds']:.2f} s", file=sys.stderr)
    rows = summarize(runs)
    Console(width=110).print(table_of(rows))
    about = describe(options.models[0], describe_cold())
    models = [describe_model(path) for path in options.models]
    write_json(options.json, about | {"models": models, "summary": rows, "runs": runs})


if __name__ == "__main__":
    main()
