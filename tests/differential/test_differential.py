"""Rows of the table, each on one model; and a sample of them that changes every day."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

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


def test_signals_at_random_moments(zoo: Zoo, stock: Stock) -> None:
    dice = random.Random(f"{SEED} signals")
    for row in dice.sample([row for row in ROWS if row.budget != "memory"], 6):
        events = [event for event in events_of(row) if event in SIGNALS]
        try_row(row, dice.choices(events, k=12), zoo, stock, f"{SEED} signals")
