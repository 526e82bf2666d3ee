"""Comparison of mlx-vlm's architectures, stock and streamed, bit for bit, with tiny random models.

Example:
    python scripts/zoo_vlm.py
    python scripts/zoo_vlm.py qwen2_vl gemma3
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import vlm_zoo

PROCESSES = multiprocessing.get_context("spawn")
"""CUDA does not survive a fork, and may start with an import."""

TIMEOUT = 240
"""Seconds for an architecture."""


def main() -> int:
    """Return 1 when the output of any architecture differs."""
    parser = argparse.ArgumentParser(description="Compare streamed models with stock mlx-vlm, bit for bit.")
    parser.add_argument("names", nargs="*", help="architectures; by default all that see")
    arguments = parser.parse_args()
    outcomes = []
    for name in arguments.names or vlm_zoo.architectures():
        outcome = in_a_process(name)
        outcomes.append(outcome)
        sees = "with a picture" if outcome.pictures else "text only"
        units = f"{outcome.num_streamed} units streamed, {outcome.num_towers} in towers"
        print(f"{outcome.status:<8} {name:<24} {outcome.text or f'{sees}, {units}'}", flush=True)
    counts = Counter(outcome.status for outcome in outcomes)
    seen = sum(outcome.pictures and outcome.status == "equal" for outcome in outcomes)
    print(
        f"{counts['equal']} equal ({seen} with a picture), {counts['differs']} differ, {counts['refused']} refused, "
        f"{counts['cannot']} cannot run stock, of {len(outcomes)} (mlx {version('mlx')}, mlx-vlm {version('mlx-vlm')})"
    )
    return int(counts["differs"] > 0)


def in_a_process(name: str) -> vlm_zoo.VlmOutcome:
    """Compare an architecture in a process of its own: some configurations end it."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=send, args=(name, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT):
            return vlm_zoo.VlmOutcome(name, "cannot", f"takes more than {TIMEOUT} s")
        found: vlm_zoo.VlmOutcome = receiver.recv()
        return found
    except EOFError:
        process.join()
        return vlm_zoo.VlmOutcome(name, "cannot", f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def send(name: str, sender: Connection) -> None:
    """Send the outcome of an architecture."""
    with tempfile.TemporaryDirectory() as folder:
        sender.send(vlm_zoo.compare(name, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
