"""Speed of a compressed copy of a model and of an uncompressed one, decoding by turns.

    python benchmarks/compressed.py --model models/llama --budget 1 --disk-mb-per-second 300 1000 --json out.json

Both copies are made by ``mlx-flash pack``, beside the model. Each run is a process of its own, with reads past the page
cache. A slower disk is a limit of the block-I/O controller (needs root). The order alternates by round. The tokens must
be equal. The JSON has all runs and the codec's speed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import runs
from harness import (
    Run,
    describe,
    describe_cold,
    describe_model,
    in_group,
    last_json,
    make_cold,
    run_command,
    slow_disk,
    write_json,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mlx_flash.config import GB, parse_budget
from mlx_flash.convert.pack import pack
from mlx_flash.errors import FlashError
from mlx_flash.storage.blocks import decode_speed
from mlx_flash.storage.shards import weight_files

NAMES = ("plain", "compressed")


def make_copies(model: Path, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Write both copies. Return what packing reported."""
    reports = {}
    for name in NAMES:
        report = pack(model, folder / name, compress=(lambda ratio: True) if name == "compressed" else None)
        say(f"{name}: {report.ratio:.3f} of {report.nbytes / GB:.2f} GB, packed in {report.seconds:.0f} s")
        reports[name] = {"nbytes": report.nbytes, "ratio": report.ratio, "seconds": report.seconds}
    return reports


def decode(folder: Path, name: str, options: argparse.Namespace, disk: float | None) -> Run:
    """Decode with one of the copies, in a process of its own."""
    model = folder / name
    make_cold(weight_files(model), drop_caches=False)
    settings = {"io": "direct", "telemetry": False}
    job = runs.Job(str(model), options.tokens, 16, parse_budget(options.budget), settings=settings)
    command: list[object] = [sys.executable, runs.__file__, json.dumps(asdict(job))]
    with ExitStack() as stack:
        if disk is not None:
            command = in_group(stack.enter_context(slow_disk(model, int(disk * 1e6))), command)
        kept = {"XDG_CACHE_HOME": str(folder / f"cache-{disk}")}  # speeds that runs reached
        return last_json(run_command(command, label=name, environment=kept))


def compare(folder: Path, options: argparse.Namespace, disk: float | None, say: Callable[[str], None]) -> Run:
    """Run all rounds with one disk."""
    found: dict[str, list[Run]] = {name: [] for name in NAMES}
    for number in range(options.rounds):
        for name in NAMES if number % 2 == 0 else NAMES[::-1]:
            run = decode(folder, name, options, disk)
            found[name].append(run)
            say(f"  {_disk(disk)}, {name}: {run['tokens_per_second']:.3f} tokens/s, waits {run['wait_share']:.0%}")
    rates = {name: [run["tokens_per_second"] for run in found[name]] for name in NAMES}
    ratios = [fast / slow for slow, fast in zip(rates["plain"], rates["compressed"], strict=True)]
    tokens = [run["token_ids"] for runs_ in found.values() for run in runs_]
    return {
        "disk_mb_per_second": disk,
        **{name: median(rates[name]) for name in NAMES},
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "identical": all(ids == tokens[0] for ids in tokens),
        "runs": found,
    }


def _disk(disk: float | None) -> str:
    return "the disk as it is" if disk is None else f"{disk:g} MB/s"


def print_table(console: Console, result: dict[str, Any]) -> None:
    table = Table("disk", "plain, tokens/s", "compressed", "ratio", "min", "max", "tokens", box=SIMPLE_HEAD)
    for found in result["disks"]:
        rates = (f"{found[name]:.3f}" for name in NAMES)
        ratios = (f"{found[name]:.2f}" for name in ("ratio", "ratio_min", "ratio_max"))
        table.add_row(_disk(found["disk_mb_per_second"]), *rates, *ratios, "equal" if found["identical"] else "DIFFER")
    console.print(table)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--beside", type=Path, help="folder for both copies (default: that of the model)")
    parser.add_argument("--disk-mb-per-second", type=float, nargs="*", default=[], help="speeds to limit the disk to")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--budget", default="min", help="a number of GB, or 'min' (default)")
    parser.add_argument("--tokens", type=int, default=5, help="to decode in every run; at least 2 (default: 5)")
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.rounds < 1:
        parser.error("--tokens must be at least 2, --rounds at least 1")
    return options


def main() -> None:
    options, console = parse_arguments(sys.argv[1:]), Console()

    def say(line: str) -> None:
        console.print(line, highlight=False)

    folder = Path(tempfile.mkdtemp(prefix="compressed-", dir=options.beside or options.model.resolve().parent))
    try:
        copies = make_copies(options.model, folder, say)
        disks = [compare(folder, options, disk, say) for disk in [*options.disk_mb_per_second, None]]
    except FlashError as error:
        raise SystemExit(str(error)) from None
    finally:
        shutil.rmtree(folder)
    result = {
        **describe(options.model, describe_cold(is_direct=True)),
        "model": describe_model(options.model, copies["plain"]["nbytes"]),
        "copies": copies,
        "decode_bytes_per_second": decode_speed(),
        "budget": options.budget,
        "disks": disks,
    }
    write_json(options.json, result)
    print_table(console, result)


if __name__ == "__main__":
    main()
