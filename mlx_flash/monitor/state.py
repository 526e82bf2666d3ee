"""The parts of a published state that are no numbers: names, units, lists. Another version may lack some of them."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_flash.facts import checked
from mlx_flash.telemetry import Json

STATES = ("pinned", "waiting", "reading", "resident", "computing", "done")


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer or head (its ``kind``): its large parameters, those of them that passes read, and one of `STATES`."""

    kind: str
    nbytes: float
    streamed_bytes: float
    state: str


def model_name(state: Json) -> str:
    """Return the model's name without unprintable characters."""
    name = section(state, "model").get("name")
    return printable(name) if isinstance(name, str) else "?"


def printable(text: str) -> str:
    """Replace characters that move the cursor, turn the direction of writing, or show nothing."""
    return "".join(char if char.isprintable() else "?" for char in text)


def section(state: Json, name: str) -> Json:
    """Return a section; an empty one when it is missing."""
    found = state.get(name)
    return found if isinstance(found, dict) else {}


def entries(found: object) -> list[Json]:
    """Return the objects of a list; none when it is missing."""
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def units(state: Json) -> list[Unit]:
    """Return the layers in calling order, then the heads."""
    return [
        Unit(
            kind="head" if entry.get("kind") == "head" else "layer",
            nbytes=checked(entry.get("bytes")) or 0.0,
            streamed_bytes=checked(entry.get("streamed_bytes")) or 0.0,
            state=entry["state"] if entry.get("state") in STATES else "waiting",
        )
        for entry in entries(state.get("units"))
    ]
