"""Comparison of mlx-vlm's architectures, stock and streamed, bit for bit, with tiny random models.

Example:
    python scripts/zoo_vlm.py
    python scripts/zoo_vlm.py qwen2_vl gemma3
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import vlm_zoo
from zoo.pool import Case, outcome_of

TIMEOUT = 240
"""Seconds for an architecture."""


def main() -> int:
    """Return 1 when the output of any architecture differs."""
    parser = argparse.ArgumentParser(description="Compare streamed models with stock mlx-vlm, bit for bit.")
    parser.add_argument("names", nargs="*", help="architectures; by default all that see")
    arguments = parser.parse_args()
    outcomes = []
    for name in arguments.names or vlm_zoo.architectures():
        outcome = outcome_of(Case(name, "fp32"), TIMEOUT, vlm_zoo.compare)
        outcomes.append(outcome)
        sees = "with a picture" if outcome.sees else "text only"
        units = f"{outcome.num_streamed} units streamed, {outcome.num_towers} in towers"
        print(f"{outcome.status:<8} {name:<24} {outcome.reason or f'{sees}, {units}'}", flush=True)
    counts = Counter(outcome.status for outcome in outcomes)
    seen = sum(outcome.sees and outcome.status == "ok" for outcome in outcomes)
    print(
        f"{counts['ok']} equal ({seen} with a picture), {counts['failed']} differ, {counts['refused']} refused, "
        f"{counts['cannot']} cannot run stock, of {len(outcomes)} (mlx {version('mlx')}, mlx-vlm {version('mlx-vlm')})"
    )
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
