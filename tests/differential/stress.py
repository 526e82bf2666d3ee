"""Random trials of the table, one after another.

    python -m differential.stress [--count 300] [--seed 1] [--rows llama-min] [--events burst,alarm]

The last line counts the trials that were right, wrong, uneven or hung. A trial that takes more than a minute prints the
stacks of all threads and ends the program: a hang. The exit status is 1 if anything was wrong.
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
from differential.table import ROWS, Row, Subject, Zoo
from differential.trials import EVENTS, Trial, Wrong, events_of

LIMIT = 60
"""Seconds for a trial."""

IN_A_ROW = 10
"""Trials of one model, which find what the earlier ones have left."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="trials (default 300)")
    parser.add_argument(
        "--seed", default=str(time.time_ns() % 10**6), help="of all choices (default: another each time)"
    )
    parser.add_argument("--rows", default="", help="parts of names of rows, with commas; all if empty")
    parser.add_argument("--events", default=",".join(EVENTS), help="names of events (default: all)")
    parser.add_argument("--verbose", action="store_true", help="print each trial")
    args = parser.parse_args(arguments)
    dice, events = random.Random(args.seed), args.events.split(",")
    rows = [row for row in ROWS if any(part in str(row) for part in args.rows.split(","))]
    print(f"seed {args.seed}, {len(rows)} rows", flush=True)
    totals: Counter[str] = Counter()
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        zoo, stock = Zoo(Path(folder)), Stock()
        stock.ask("tensors", folder)  # its pipes are no descriptors that a model leaves
        while number < args.count:
            row = dice.choice(rows)
            chosen = [event for event in events_of(row) if event in events]
            if not chosen:
                continue
            subject, end = None, min(args.count, number + IN_A_ROW)
            try:
                subject = Subject(row, zoo)
                faulthandler.dump_traceback_later(LIMIT, exit=True)
                Trial(subject, stock, "none", f"{args.seed} {number}").carry_out()
                while number < end:
                    faulthandler.dump_traceback_later(LIMIT, exit=True)
                    number += 1
                    _run(subject, stock, dice.choice(chosen), f"{args.seed} {number}", totals, args.verbose)
                _count_left(row, subject.close(), totals)
            except Exception as error:
                number = max(number, end - IN_A_ROW + 1)
                totals["wrong"] += not isinstance(error, Failed)
                if not isinstance(error, Failed):
                    print(f"WRONG {row} as a whole: {type(error).__name__}: {error}", flush=True)
                    traceback.print_exc()
                if subject is not None and not _closes(subject):
                    break
            finally:
                faulthandler.cancel_dump_traceback_later()
        stock.close()
    print(" · ".join(f"{name} {totals[name]}" for name in sorted({*totals, "right", "wrong", "uneven", "left"})))
    return int(totals["wrong"] + totals["uneven"] + totals["left"] > 0)


class Failed(Exception):
    """A trial was wrong, and the model is loaded again."""


def _run(subject: Subject, stock: Stock, event: str, seed: str, totals: Counter[str], is_verbose: bool) -> None:
    trial = Trial(subject, stock, event, seed)
    began = time.perf_counter()
    try:
        totals.update(trial.carry_out())
        if is_verbose:
            print(f"{time.perf_counter() - began:.2f} s {seed}: {trial}: {dict(trial.counts)}", flush=True)
    except Exception as error:
        kind = "uneven" if str(error).startswith("uneven") else "wrong"
        totals[kind] += 1
        totals[f"{kind} after {event}"] += 1
        print(f"{kind.upper()} {seed}: {trial}: {type(error).__name__}: {error}", flush=True)
        if not isinstance(error, Wrong):
            traceback.print_exc()
        raise Failed from error


def _closes(subject: Subject) -> bool:
    """Close a model of which a trial was wrong. One that stays open would take memory of the budgets of later ones."""
    try:
        subject.model.close()
    except Exception as error:
        print(f"the model of {subject.row} cannot be closed: {type(error).__name__}: {error}\nno further trials")
        return False
    return True


def _count_left(row: Row, left: list[str], totals: Counter[str]) -> None:
    totals["left"] += len(left)
    for each in left:
        print(f"LEFT by {row}: {each}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
