"""Random trials of the table, one after another.

    python -m differential.stress [--count 300] [--seed 1] [--rows llama-min] [--events burst,alarm]

The last line counts what came of the trials. Trials of a row that take more than ten minutes print the stacks of all
threads and end the program: a hang. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from differential.stock import Stock
from differential.table import ROWS, Zoo
from differential.trials import EVENTS, events_of, try_row

LIMIT = 600
"""Seconds for the trials of a row."""

IN_A_ROW = 10
"""Trials of one model, which find what the earlier ones have left."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="trials (default 300)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later (default: no limit)")
    parser.add_argument("--seed", default=str(time.time_ns() % 10**6), help="of all choices (default: a new one)")
    parser.add_argument("--rows", default="", help="parts of names of rows, with commas; all if empty")
    parser.add_argument("--events", default=",".join(EVENTS), help="names of events (default: all)")
    args = parser.parse_args(arguments)
    dice, events = random.Random(args.seed), args.events.split(",")
    rows = [row for row in ROWS if any(part in str(row) for part in args.rows.split(","))]
    rows = [row for row in rows if not set(events).isdisjoint(events_of(row))]
    print(f"seed {args.seed}, {len(rows)} rows", flush=True)
    totals = Counter({"right": 0, "wrong": 0})
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        zoo, stock = Zoo(Path(folder)), Stock()
        stock.ask("tensors", folder)  # its pipes are no descriptors that a model leaves
        end = time.monotonic() + args.seconds
        for number in range(0, args.count, IN_A_ROW):
            if time.monotonic() > end:
                break
            row = dice.choice(rows)
            chosen = [event for event in events_of(row) if event in events]
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                totals += try_row(row, dice.choices(chosen, k=IN_A_ROW), zoo, stock, f"{args.seed} {number}")
            except Exception:
                totals["wrong"] += 1
                traceback.print_exc()
            faulthandler.cancel_dump_traceback_later()
        stock.close()
    print(" · ".join(f"{name} {totals[name]}" for name in sorted(totals)))
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
