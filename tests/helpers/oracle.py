from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlx_flash import FlashLLM
from mlx_flash.speculation import Source, Times


class FixedTimes(Times):
    """Times of a machine on which nothing else runs."""

    def note(self, num_rows: int, seconds: float, waited_seconds: float, reading_seconds: float) -> None:
        pass


def on_a_machine(monkeypatch: pytest.MonkeyPatch, pass_seconds: float, row_seconds: float) -> None:
    """Let passes and rows take these times, and a guess of a draft model a microsecond."""
    monkeypatch.setattr("mlx_flash.engine.lifecycle.Times", lambda *_: FixedTimes(pass_seconds, row_seconds))
    clock = itertools.count(0, 1e-6)
    monkeypatch.setattr("mlx_flash.speculation.time", SimpleNamespace(perf_counter=lambda: next(clock)))


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads for so long that five further rows are computed meanwhile."""
    on_a_machine(monkeypatch, 1.0, 0.16)


def with_room(model: FlashLLM) -> FlashLLM:
    model.plan = replace(model.plan, budget_bytes=2 * model.plan.budget_bytes)
    return model


class Oracle(Source):
    """A source that knows the tokens that the model will generate, and guesses every third one wrong."""

    guess_seconds = 0.0
    expected: Mapping[int, float] = {}

    def __init__(self, text: list[int]) -> None:
        self._text = [token if i % 3 else token ^ 1 for i, token in enumerate(text)]
        self._num_seen = 0

    def add(self, token: int) -> None:
        self._num_seen += 1

    def look(self) -> int:
        return 1

    def guess(self, number: int) -> list[int]:
        return self._text[self._num_seen :][:number] or [0]
