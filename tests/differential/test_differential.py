"""Rows of the table, each on one model; and a sample of them that changes every day."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from children import HELPERS, ROOT
from differential.stock import Stock
from differential.table import ROWS, Row, Zoo
from differential.trials import SIGNALS, events_of, try_row

SEED = os.environ.get("MLX_FLASH_DIFFERENTIAL_SEED") or f"{datetime.now(UTC):%Y-%m-%d}"
"""Of all choices: of today, unless it is set to repeat what has failed."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def stock() -> Iterator[Stock]:
    made = Stock()
    made.ask("tensors", "")  # its pipes are no descriptors that a model leaves
    yield made
    made.close()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row_with_every_event(row: Row, zoo: Zoo, stock: Stock) -> None:
    dice = random.Random(f"{SEED} {row}")
    events = [event for event in events_of(row) if event not in SIGNALS] * 2
    dice.shuffle(events)
    try_row(row, events, zoo, stock, SEED)


def test_sample_of_the_day(zoo: Zoo, stock: Stock) -> None:
    print(f"MLX_FLASH_DIFFERENTIAL_SEED={SEED!r}")
    dice = random.Random(SEED)
    for row in dice.sample(ROWS, 8):
        events = [event for event in events_of(row) if event not in SIGNALS]
        try_row(row, dice.choices(events, k=12), zoo, stock, f"{SEED} sample")


def test_signals_at_random_moments() -> None:
    """In a process of its own: pytest does not expect one in what it does with a warning."""
    rows, events = "min,small,large,layers", ",".join(sorted(SIGNALS))
    arguments = ["--count", "60", "--seconds", "45", "--seed", f"{SEED} signals", "--rows", rows, "--events", events]
    program, path = [sys.executable, "-m", "differential.stress", *arguments], map(str, (ROOT, ROOT / "tests", HELPERS))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
