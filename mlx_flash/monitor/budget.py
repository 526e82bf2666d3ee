"""Words about changes of the budget."""

from __future__ import annotations

import time

from mlx_flash.monitor.state import number, printable
from mlx_flash.monitor.words import duration, size
from mlx_flash.telemetry import Json


def budget_bytes(state: Json) -> float:
    """Return the budget in force."""
    return number(state, "budget", "bytes") or number(state, "plan", "budget_bytes")


def change_words(state: Json) -> list[str]:
    """Return words about the last change of the budget, if there was one."""
    section = state.get("budget")
    changes = section.get("changes") if isinstance(section, dict) else None
    if not isinstance(changes, list) or not changes or not isinstance(changes[-1], dict):
        return []
    last = {"change": changes[-1]}
    at, before, after = (number(last, "change", key) for key in ("at", "before", "after"))
    words = f"{size(before)} to {size(after)} {duration(max(0.0, time.time() - at))} ago"
    return [f"{words}: {printable(str(changes[-1].get('reason')))}"]
