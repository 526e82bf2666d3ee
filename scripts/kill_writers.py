"""Writers that are killed at random moments, with a reader beside them.

For each trial a process writes in a loop until it is killed with SIGKILL. A second process reads meanwhile; a third one
writes and checks afterwards. Nothing corrupt may be read, the third one must succeed, and it must remove what the
killed one left unfinished.

Example:
    python scripts/kill_writers.py --times 100
    python scripts/kill_writers.py --times 10 Pack KVFiles
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from faulty import unfinished
from writers import WRITERS, Writer, make_source, tiny_models

LIMIT_SECONDS = 60


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description="Kill writers at random moments.")
    parser.add_argument("names", nargs="*", help=f"all by default: {', '.join(kind.__name__ for kind in WRITERS)}")
    parser.add_argument("--times", type=int, default=100, help="trials of each (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    dice, failed = random.Random(args.seed), 0
    for kind in WRITERS:
        if args.names and kind.__name__ not in args.names:
            continue
        counts = [0, 0]
        for _ in range(args.times):
            with tempfile.TemporaryDirectory(prefix="kill-writers-") as folder:
                is_right, had_leftovers = attempt(kind, Path(folder), dice)
            counts[0] += is_right
            counts[1] += had_leftovers
        failed += args.times - counts[0]
        print(
            f"{kind.__name__:12} killed {args.times} times, {counts[1]} times in the middle of a write: "
            f"{args.times - counts[0]} failures",
            flush=True,
        )
    return int(failed > 0)


def attempt(kind: type[Writer], folder: Path, dice: random.Random) -> tuple[bool, bool]:
    """Kill one writer. Return whether everything was right, and whether the kill left something unfinished."""
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_RUNTIME_DIR"] = str(cache)
    writer = kind(cache, folder / "model")
    # Only children use MLX, whose threads would be missing in children of a process that has used it.
    source = child(lambda: bool(make_source(folder / "model")))
    if not ended_well(source):
        return False, False
    written, begun = os.pipe()
    killed = child(lambda: write_for_ever(writer, begun))
    os.read(written, 1)  # it has written once: from now on something complete is there
    end = folder / "end"
    reader = child(lambda: looks_right(writer, end))
    time.sleep(dice.uniform(0, 0.3))
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    had_leftovers = bool(unfinished(cache))
    end.touch()
    is_right = ended_well(reader)
    os.close(written)
    os.close(begun)
    return is_right and ended_well(child(lambda: recovers(writer))), had_leftovers


def child(function: Callable[[], bool]) -> int:
    """Return the number of a new process that runs a function, and ends with status 0 if it returns True."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(LIMIT_SECONDS)
        with tiny_models():
            status = int(not function())
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        os._exit(status)


def ended_well(pid: int) -> bool:
    """Wait for a process."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        print(f"a process was ended by signal {-status}", file=sys.stderr)
    return status == 0


def write_for_ever(writer: Writer, begun: int) -> bool:
    """Write until the process is killed. Report the first time."""
    writer.write()
    os.write(begun, b"x")
    while True:
        writer.write()


def looks_right(writer: Writer, end: Path) -> bool:
    """Look until a file is there."""
    while writer.look():
        if end.exists():
            return True
    print(f"{type(writer).__name__}: a reader found something wrong", file=sys.stderr)
    return False


def recovers(writer: Writer) -> bool:
    """Look, write, and check that nothing unfinished is left."""
    was_right = writer.look()
    writer.write()
    is_right = was_right and writer.check()
    left = unfinished(writer.folder)
    if not is_right or left:
        print(f"{type(writer).__name__}: looked right {was_right}, is right {is_right}, left {left}", file=sys.stderr)
    return is_right and not left


if __name__ == "__main__":
    sys.exit(main())
