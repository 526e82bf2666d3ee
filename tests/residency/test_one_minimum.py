"""The smallest budget is one number, whichever command names it, and keeps the promise of a long context."""

from __future__ import annotations

import io
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from machines import make_machine, make_model
from mlx_flash import FlashConfig
from mlx_flash.commands.dispatch import run_command
from mlx_flash.engine import tokenizer
from mlx_flash.layout.cachesizes import CacheSizes
from mlx_flash.residency.budgets import table_of_budgets
from mlx_flash.residency.kv import PROMISED_CONTEXT
from models import make_random_model

COMMANDS = {
    "plan": ("plan", "--model", "MODEL"),
    "generate": ("generate", "--model", "MODEL", "--prompt", "a", "--max-tokens", "2"),
    "bench": ("bench", "--model", "MODEL", "--max-tokens", "2"),
    "serve": ("serve", "--model", "MODEL", "--port", "PORT"),
    "run": ("run", "MODEL"),
}


def test_every_command_names_the_same_smallest_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 0.217 in plan, 0.213 in bench and 0.161 in generate."""
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 400_000_000)  # the process grows
    monkeypatch.setattr(tokenizer, "footprint", lambda: 100_000_000)
    monkeypatch.setattr("sys.stdin", io.StringIO("a"))
    model = make_random_model(tmp_path / "model", "--layers=4", "--hidden-size=128", "--heads=4", "--kv-heads=2")
    named = {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, command in COMMANDS.items():
        words = [{"MODEL": str(model), "PORT": str(port)}.get(word, word) for word in command]
        assert run_command([*words, "--ram-budget-gb", "0.3"]) == 1
        errors = capsys.readouterr().err
        found = re.search(r"give (\d\.\d+) or more", errors)
        assert found is not None, (name, errors)
        named[name] = found[1]
    assert len(set(named.values())) == 1, named


def test_every_budget_in_the_table_has_the_promised_context() -> None:
    sizes = make_model()
    layers = (1700,) * len(sizes.layers)
    sizes = replace(sizes, cache=CacheSizes(token_bytes=sum(layers), largest_row=1700, rows=layers))
    rows = list(table_of_budgets(sizes, FlashConfig(), make_machine()))
    assert rows and all(row.longest_context >= PROMISED_CONTEXT for row in rows)
