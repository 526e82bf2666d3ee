"""Characters to draw with: block elements, or ASCII where the output has nothing else; and words for numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_flash.monitor.state import Unit

STYLES = {
    "pinned": "blue",
    "waiting": "dim",
    "reading": "yellow",
    "resident": "cyan",
    "computing": "bold green",
    "done": "green",
}
WORDS = {"resident": "in slot"}

_MOST_TO_SEE = ("computing", "reading", "resident", "waiting", "done", "pinned")
"""Of several layers in one cell, the first of these states is shown."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """A set of characters, each one column wide.

    Attributes:
        states: of a unit, by state.
        parts: of a bar, from its first part on.
        rest: what no part of a bar takes.
        levels: of a sparkline, the lowest first.
        gap: of a sparkline, where nothing was seen.
        marker: of the chosen engine.
    """

    states: dict[str, str]
    parts: str
    rest: str
    levels: str
    gap: str
    marker: str


UNICODE = Glyphs(
    states={"pinned": "█", "waiting": "·", "reading": "░", "resident": "▒", "computing": "▶", "done": "─"},
    parts="█▓▒░◆▚",
    rest="·",
    levels="▁▂▃▄▅▆▇█",
    gap=" ",
    marker="▶",
)
ASCII = Glyphs(
    states={"pinned": "#", "waiting": ".", "reading": "r", "resident": "s", "computing": ">", "done": "-"},
    parts="#=+~*%",
    rest=".",
    levels="_.-:=+*#",
    gap=" ",
    marker=">",
)


def choose(encoding: str) -> Glyphs:
    """The characters that an encoding has."""
    return UNICODE if encoding.lower().replace("-", "").replace("_", "") in {"utf8", "utf8sig"} else ASCII


def sparkline(values: Sequence[float | None], top: float, glyphs: Glyphs) -> str:
    """One character for each value, from 0 to ``top``; what is beyond is shown as the nearer of the two."""
    last = len(glyphs.levels) - 1
    scale = last / top if top > 0 else 0.0
    levels = (None if value is None else min(last, max(0, round(value * scale))) for value in values)
    return "".join(glyphs.gap if level is None else glyphs.levels[level] for level in levels)


def bar(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Columns of each part of a bar.

    Args:
        parts: sizes; together at most about ``whole``.
        whole: what the full width stands for.
        width: in columns.
    """
    columns, done, passed = [], 0, 0.0
    for part in parts:
        passed += max(part, 0.0)
        end = min(width, round(width * passed / whole)) if whole > 0 else 0
        columns.append(end - done)
        done = end
    return columns


def strip(units: Sequence[Unit], width: int, max_rows: int) -> list[list[str]]:
    """States in rows of cells for a strip of units: a cell a unit, or, when there are too many, for several.

    Args:
        units: in calling order.
        width: cells in a row at most.
        max_rows: rows at most.
    """
    per_cell = max(1, -(-len(units) // max(1, width * max_rows)))
    cells = [_shown([unit.state for unit in units[i : i + per_cell]]) for i in range(0, len(units), per_cell)]
    num_rows = max(1, -(-len(cells) // max(1, width)))
    in_row = -(-len(cells) // num_rows)
    return [cells[i : i + in_row] for i in range(0, len(cells), in_row)] if cells else []


def _shown(states: Sequence[str]) -> str:
    return min(states, key=_MOST_TO_SEE.index)


def size(nbytes: float) -> str:
    """A number of bytes in decimal units, three digits or so."""
    if nbytes >= 1e10:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e7 else _small(nbytes)


def _small(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def percent(part: float | None) -> str:
    """A share in per cent."""
    return "-" if part is None else f"{part:.0%}"


def amount(number: float | None) -> str:
    """A mean number of things."""
    return "-" if number is None else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def rate(per_second: float | None) -> str:
    """Tokens a second."""
    if per_second is None:
        return "-"
    return f"{per_second:.1f}" if per_second >= 9.995 else f"{per_second:.2f}"
