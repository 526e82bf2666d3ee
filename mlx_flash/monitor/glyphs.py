"""Characters to draw with: block elements, or ASCII where the encoding has nothing else."""

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
"""A cell of several layers shows the first of these states."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """A set of characters, each one column wide.

    Attributes:
        states: of a unit, by state.
        parts: of a bar, from its first part on.
        rest: the rest of a bar.
        levels: of a sparkline, the lowest first.
        gap: of a sparkline, where no sample lies.
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
    parts="█▓▒░◆▚▞",
    rest="·",
    levels="▁▂▃▄▅▆▇█",
    gap=" ",
    marker="▶",
)
ASCII = Glyphs(
    states={"pinned": "#", "waiting": ".", "reading": "r", "resident": "s", "computing": ">", "done": "-"},
    parts="#=+~*%@",
    rest=".",
    levels="_.-:=+*#",
    gap=" ",
    marker=">",
)


def choose(encoding: str) -> Glyphs:
    """Return the characters for an encoding."""
    return UNICODE if encoding.lower().replace("-", "").replace("_", "") in {"utf8", "utf8sig"} else ASCII


def sparkline(values: Sequence[float | None], top: float, glyphs: Glyphs) -> str:
    """Return one character for each value. Values are clamped to 0 and ``top``."""
    last = len(glyphs.levels) - 1
    scale = last / top if top > 0 else 0.0
    levels = (None if value is None else min(last, max(0, round(value * scale))) for value in values)
    return "".join(glyphs.gap if level is None else glyphs.levels[level] for level in levels)


def chart(values: Sequence[float | None], top: float, num_rows: int, glyphs: Glyphs) -> list[str]:
    """Return a bar chart of several rows, the highest first; of one row, a sparkline."""
    scale, rows = num_rows / top if top > 0 else 0.0, []
    for row in reversed(range(num_rows)):
        heights = (None if value is None else value * scale - row for value in values)
        shown = [None if height is None or (row and height <= 0) else height for height in heights]
        rows.append(sparkline(shown, 1.0, glyphs))
    return rows


def bar(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Return the columns of each part of a bar.

    Args:
        parts: sizes; together at most about ``whole``.
        whole: size of the full width.
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
    """Return a strip of units as rows of states, one cell for each unit or, when there are too many, for several.

    Args:
        units: in calling order.
        width: cells in a row at most.
        max_rows: rows at most.
    """
    per_cell = max(1, -(-len(units) // max(1, width * max_rows)))
    states = [unit.state for unit in units]
    cells = [min(states[i : i + per_cell], key=_MOST_TO_SEE.index) for i in range(0, len(units), per_cell)]
    num_rows = max(1, -(-len(cells) // max(1, width)))
    in_row = -(-len(cells) // num_rows)
    return [cells[i : i + in_row] for i in range(0, len(cells), in_row)] if cells else []
