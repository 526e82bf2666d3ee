"""Damaged files and settings for every parser that reads what others may have written.

Cases run in processes with a limit on memory and time, so that a crash or a hang ends one and is reported.

Example:
    python scripts/fuzz.py header --cases 1000000
    python scripts/fuzz.py all --jobs 16 --seconds 100 --cases 10000000
    python scripts/fuzz.py header --seed 7 --first 123400 --cases 100
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import mlx.core as mx

from fuzzing import CHUNK, TARGETS, run

BATCH = 10_000
"""Cases of a process."""

SECONDS_A_CHUNK = 20
MEMORY_BYTES = 4 << 30
"""Limit of a process's address space. Libraries and their threads take about a half."""


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when a case failed."""
    args = make_parser().parse_args(arguments)
    if args.here:
        run_here(args.target, args.seed, range(args.first, args.first + args.cases))
        return 0
    deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
    first, end = args.first - args.first % CHUNK, args.first + args.cases
    done, failed = Counter[str](), Counter[str]()

    def run_batch(batch: tuple[int, str]) -> None:
        start, name = batch
        if time.monotonic() > deadline:
            return
        number = min(BATCH, end - start)
        words = [name, "--here", "--seed", args.seed, "--first", start, "--cases", number]
        status = subprocess.run([sys.executable, __file__, *map(str, words)]).returncode
        done[name] += number
        if status:
            failed[name] += 1
            how = f"signal {-status}" if status < 0 else f"status {status}"
            print(f"{name}: {how} in {number} cases from {start} of seed {args.seed}", file=sys.stderr, flush=True)

    names = list(TARGETS) if args.target == "all" else [args.target]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run_batch, product(range(first, end, BATCH), names)))
    for name in names:
        print(f"{name}: {done[name]} cases, {failed[name]} batches failed")
    return int(any(failed.values()))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Feed parsers with damaged input.")
    parser.add_argument("target", choices=("all", *TARGETS))
    parser.add_argument("--cases", type=int, default=10_000, help="of each target (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help=f"number of the first case, a multiple of {CHUNK}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: 1)")
    parser.add_argument("--seconds", type=float, help="begin no process after this time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser


def run_here(name: str, seed: int, numbers: range) -> None:
    """Run some cases in this process, with limits."""
    mx.set_default_device(mx.cpu)  # a GPU's libraries would take all of the address space
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        run(name, Path(folder), seed, numbers, lambda: signal.alarm(SECONDS_A_CHUNK))


if __name__ == "__main__":
    sys.exit(main())
