"""Streamed models beside mlx-lm's own, through one table of models, budgets, caches and events.

A row of the table is an architecture, a budget, and a place of keys and values. A trial is one generation of a row that
an event disturbs: an interrupt, an error in a read, a copy of the cache. The harness uses public functions only, and
compares tokens, logits, and how the cache goes on with what mlx-lm computes in a process of its own.

    python -m differential.stress --count 300 --seed 1      (in the folder `tests`)
"""

import sys
from pathlib import Path

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")
if HELPERS not in sys.path:  # pytest has it already
    sys.path.append(HELPERS)
