"""Damaged files and settings for every parser that reads what others may have written.

Cases run in children with a limit on memory and time, so that a crash or a hang ends one child and is reported. Targets
share the children and the time equally.

Example:
    python scripts/fuzz.py header --cases 1000000
    python scripts/fuzz.py all --jobs 16 --seconds 100 --cases 10000000 --json fuzz.json
    python scripts/fuzz.py header --seed 7 --first 123400 --cases 100
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import mlx.core as mx

from fuzzing import CHUNK, TARGETS, run

BATCHES = dict.fromkeys(TARGETS, 50_000) | {"config": 10_000, "prompt_cache": 20_000}
"""Cases of a child."""

SECONDS_A_CHUNK = 20
MEMORY_BYTES = 4 << 30
"""Limit of a child's address space. Libraries and their threads take about a half."""


@dataclass
class Progress:
    """The work done for a target.

    Attributes:
        target: its name.
        next: number of the first case that no child has been given.
        cases: in children that ended well.
        child_seconds: processor time of all children.
        peak_bytes: the largest resident set of a child.
        failures: first case, number of cases, and exit status or signal of the children that failed.
    """

    target: str
    next: int
    cases: int = 0
    child_seconds: float = 0.0
    peak_bytes: int = 0
    failures: list[dict[str, int]] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when a case failed."""
    args = make_parser().parse_args(arguments)
    names = list(TARGETS) if args.target == "all" else [args.target]
    began = time.monotonic()
    deadline = began + args.seconds if args.seconds else float("inf")
    targets = [Progress(name, args.first - args.first % CHUNK) for name in names]

    def save() -> None:
        if args.json:
            numbers = {"seed": args.seed, "first": args.first, "jobs": args.jobs, "seconds": time.monotonic() - began}
            text = json.dumps({**numbers, "targets": [asdict(each) for each in targets]}, indent=1)
            args.json.write_text(f"{text}\n")

    run_all(targets, args, deadline, save)
    for each in targets:
        rate = each.cases / each.child_seconds if each.child_seconds else 0
        print(
            f"{each.target}: {each.cases} cases, {rate:.0f} a second and core, peak {each.peak_bytes / 1e6:.0f} MB, "
            f"{len(each.failures)} batches failed"
        )
    return int(any(each.failures for each in targets))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Feed parsers with damaged input.")
    parser.add_argument("target", choices=("all", *TARGETS))
    parser.add_argument("--cases", type=int, default=10_000, help="of each target (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help=f"number of the first case, a multiple of {CHUNK}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="children at once (default: 1)")
    parser.add_argument("--seconds", type=float, help="begin no child after this time")
    parser.add_argument("--json", type=Path, help="file for all numbers, written after each child")
    return parser


def run_all(targets: list[Progress], args: argparse.Namespace, deadline: float, save: Callable[[], None]) -> None:
    """Run children until all cases are done or the time is over. Call ``save`` after each."""
    end = args.first + args.cases
    running: dict[int, tuple[Progress, range, tempfile.TemporaryDirectory[str]]] = {}
    gc.freeze()
    while True:
        waiting = [each for each in targets if each.next < end] if time.monotonic() < deadline else []
        if waiting and len(running) < args.jobs:
            given = Counter(target.target for target, *_ in running.values())
            target = min(waiting, key=lambda each: (given[each.target], each.child_seconds))
            numbers = range(target.next, min(target.next + BATCHES[target.target], end))
            target.next = numbers.stop
            folder = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
            running[start(target.target, Path(folder.name), args.seed, numbers)] = target, numbers, folder
        elif running:
            pid, status, usage = os.wait4(-1, 0)
            note(*running.pop(pid), os.waitstatus_to_exitcode(status), usage, args.seed)
            save()
        else:
            return


def note(
    target: Progress,
    numbers: range,
    folder: tempfile.TemporaryDirectory[str],
    status: int,
    usage: resource.struct_rusage,
    seed: int,
) -> None:
    """Add what a child did."""
    folder.cleanup()
    target.child_seconds += usage.ru_utime + usage.ru_stime
    target.peak_bytes = max(target.peak_bytes, usage.ru_maxrss * 1024)
    if status == 0:
        target.cases += len(numbers)
        return
    target.failures.append({"first": numbers.start, "cases": len(numbers), "status": status})
    how = f"signal {-status}" if status < 0 else f"status {status}"
    print(f"{target.target}: {how} in cases {numbers} of seed {seed}", file=sys.stderr, flush=True)


def start(name: str, folder: Path, seed: int, numbers: range) -> int:
    """Run some cases in a child with limits. Return its number."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        mx.set_default_device(mx.cpu)  # a GPU's libraries would take all of the address space
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        logging.disable(logging.CRITICAL)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        run(name, folder, seed, numbers, lambda: signal.alarm(SECONDS_A_CHUNK))
        status = 0
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
