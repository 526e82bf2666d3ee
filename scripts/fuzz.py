"""Damaged files and settings for every parser that reads what others may have written.

Cases run in children with a limit on memory and time, so that a crash or a hang ends one child and is reported. Targets
share the children and the time equally.

Example:
    python scripts/fuzz.py header --cases 1000000
    python scripts/fuzz.py all --jobs 16 --seconds 100 --cases 10000000 --json fuzz.json
    python scripts/fuzz.py header --seed 7 --first 123400 --cases 100
    pip install atheris && python scripts/fuzz.py header --guided --seconds 300
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
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
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import mlx.core as mx

from fuzzing import CHUNK, TARGETS, ByteDice, run

BATCHES = dict.fromkeys(TARGETS, 50_000) | {"config": 10_000, "state": 10_000, "prompt_cache": 20_000}
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
    parser = make_parser()
    args = parser.parse_args(arguments)
    names = list(TARGETS) if args.target == "all" else [args.target]
    if args.guided or args.kept:
        if importlib.util.find_spec("atheris") is None:
            parser.error("--guided and --kept need atheris. Hint: pip install atheris")
        options = args.kept or [f"-max_total_time={args.seconds or 60:.0f}", f"-seed={args.seed + 1}"]  # 0 is any seed
        failed = [name for name in names if run_guided(name, options)]
        return int(bool(failed))
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
    parser.add_argument(
        "--guided",
        action="store_true",
        help="let atheris choose the cases by the code that they reach; takes --seconds (default: 60) and --seed alone",
    )
    parser.add_argument("--kept", nargs=1, metavar="FILE", help="run the case that atheris kept as FILE")
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
    """Run some cases in a child. Return its number."""
    return in_child(folder, lambda: run(name, folder, seed, numbers, lambda: signal.alarm(SECONDS_A_CHUNK)))


def in_child(folder: Path, work: Callable[[], object]) -> int:
    """Do some work in a child with limits. Return the child's number."""
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
        work()
        status = 0
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        os._exit(status)


def run_guided(name: str, options: list[str]) -> int:
    """Let atheris choose cases of a target. Return the exit status of the child that runs them."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        _, status = os.waitpid(in_child(Path(folder), lambda: fuzz_guided(name, Path(folder), options)), 0)
    return os.waitstatus_to_exitcode(status)


def fuzz_guided(name: str, folder: Path, options: list[str]) -> None:
    """Run a target in this process, which atheris ends."""
    import atheris  # type: ignore[import-not-found]

    functions: list[Any] = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    for function in functions:
        if str(function.__module__).startswith("mlx_flash"):
            atheris.instrument_func(function)
    limits = [f"-timeout={SECONDS_A_CHUNK}", "-max_len=600", f"-artifact_prefix={name}-"]
    with TARGETS[name](folder) as case:
        atheris.Setup([name, *limits, *options], lambda data: case(ByteDice(data)))
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
