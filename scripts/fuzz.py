"""Damaged files and settings for every parser that reads what others may have written.

Cases run in children with a limit on memory and time, so that a crash or a hang ends one child and is reported.

Example:
    python scripts/fuzz.py header --cases 100000
    python scripts/fuzz.py all --cases 10000 --seed 7
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzzing import TARGETS, run

BATCH = 500
"""Cases of a child."""

SECONDS_A_CASE = 20
MEMORY_BYTES = 4 << 30
"""Limit of a child's address space. Libraries and their threads take about a half."""


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when a case failed."""
    parser = argparse.ArgumentParser(description="Feed parsers with damaged input.")
    parser.add_argument("target", choices=("all", *TARGETS))
    parser.add_argument("--cases", type=int, default=10_000, help="of each target (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    failed = 0
    for name in TARGETS if args.target == "all" else [args.target]:
        began, failures = time.monotonic(), 0
        for first in range(args.first, args.first + args.cases, BATCH):
            numbers = range(first, min(first + BATCH, args.first + args.cases))
            failures += not batch(name, args.seed, numbers)
        print(f"{name}: {args.cases} cases in {time.monotonic() - began:.0f} s, {failures} batches failed", flush=True)
        failed += failures
    return int(failed > 0)


def batch(name: str, seed: int, numbers: range) -> bool:
    """Run some cases in a child. Return whether all went well."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _run(name, Path(folder), seed, numbers)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        print(f"{name}: signal {-status} in cases {numbers} of seed {seed}", file=sys.stderr, flush=True)
    return status == 0


def _run(name: str, folder: Path, seed: int, numbers: range) -> None:
    status = 1
    try:
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        logging.disable(logging.CRITICAL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        for number in numbers:
            signal.alarm(SECONDS_A_CASE)
            run(name, folder, seed, [number])
        status = 0
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
