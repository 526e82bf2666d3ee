"""Checked values from published states. Another version may lack some of them."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_flash.telemetry import Json

_LARGEST = 1e18
"""No number of bytes, tokens or seconds is this large; sums and products of smaller ones do not overflow."""

STATES = ("pinned", "waiting", "reading", "resident", "computing", "done")


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer or head.

    Attributes:
        kind: ``"layer"`` or ``"head"``.
        nbytes: its large parameters.
        streamed_bytes: those of them that are read on every pass.
        state: one of :data:`STATES`.
    """

    kind: str
    nbytes: float
    streamed_bytes: float
    state: str


def number(state: Json, section: str, key: str) -> float:
    """Return a number of the state; 0 when it is missing."""
    value = optional(state, section, key)
    return 0.0 if value is None else value


def optional(state: Json, section: str, key: str) -> float | None:
    """Return a number of the state; None when it is missing."""
    fields = state.get(section)
    value = fields.get(key) if isinstance(fields, dict) else None
    if type(value) is float or type(value) is int:
        return float(value) if -_LARGEST < value < _LARGEST else None
    return None


def count(state: Json, section: str, key: str) -> float | None:
    """Return a number of the state; None when it is missing or negative."""
    value = optional(state, section, key)
    return None if value is None or value < 0 else value


def model_name(state: Json) -> str:
    """Return the model's name without unprintable characters."""
    fields = state.get("model")
    name = fields.get("name") if isinstance(fields, dict) else None
    return printable(name) if isinstance(name, str) else "?"


def printable(text: str) -> str:
    """Replace characters that move the cursor, turn the direction of writing, or show nothing."""
    return "".join(char if char.isprintable() else "?" for char in text)


def units(state: Json) -> list[Unit]:
    """Return the layers in calling order, then the heads."""
    entries = state.get("units")
    return [_unit(entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _unit(entry: Json) -> Unit:
    fields = {"unit": entry}
    state = entry.get("state")
    return Unit(
        kind="head" if entry.get("kind") == "head" else "layer",
        nbytes=number(fields, "unit", "bytes"),
        streamed_bytes=number(fields, "unit", "streamed_bytes"),
        state=state if state in STATES else "waiting",
    )
