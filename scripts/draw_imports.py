"""Picture of the package: folders as boxes on their floors, imports as lines down to what is imported.

    python scripts/draw_imports.py docs/images/imports.svg

The floors are those of ``docs/design.md``, which ``tests/test_layering.py`` compares with the code. The width of a line
is the number of import statements, its colour that of the importer's floor. Needs the extra ``plots``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNIT, GAP, STEP, LEAST, ASIDE = 0.04, 2.2, 2.0, 3.2, (0.0, 14.0, -14.0)
"""Width of an import, gap of boxes, height of a floor, least width of a box, places of boxes alone on their floors."""
Imports = Counter[tuple[str, str]]


def read_floors(text: str) -> list[list[str]]:
    """Return the names on each floor, from the lowest up."""
    return [re.findall(r"`(\w+)", names) for names in re.findall(r"^\| \d+ \| ([^|]+) \|", text, re.M)]


def count_imports(package: Path) -> Imports:
    """Return the number of import statements from each folder, or module at the top, to each other one."""
    found = Imports()
    for path in sorted(package.rglob("*.py")):
        if path.stem in ("__init__", "__main__"):  # they only hand names on, and start the command line
            continue
        source = path.relative_to(package).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package.name}."):
                found[source, str(node.module).split(".")[1]] += 1
    return Imports({pair: n for pair, n in found.items() if pair[0] != pair[1] and not pair[0].startswith("__")})


def total(imports: Imports, name: str, end: int) -> int:
    """Return the import statements of a box (``end`` 0), or those that name it (1)."""
    return sum(n for pair, n in imports.items() if pair[end] == name)


def draw(floors: list[list[str]], imports: Imports, picture: Path) -> None:
    """Draw the boxes with their lines, which leave and arrive in the order of the boxes at their other ends."""
    from matplotlib import figure, patches, path, rc_context

    boxes: dict[str, tuple[float, int, float]] = {}
    for floor, names in reversed(list(enumerate(floors))):
        widths = {name: max(LEAST, *(UNIT * total(imports, name, end) for end in (0, 1))) for name in names}
        wish = {a: sum(boxes[b][0] * n for (b, c), n in imports.items() if c == a) for a in names}
        x = ASIDE[floor % 3] * (len(names) == 1) - (sum(widths.values()) + GAP * (len(names) - 1)) / 2
        for name in sorted(names, key=lambda name, wish=wish: wish[name] / max(1, total(imports, name, 1))):
            boxes[name] = (x + widths[name] / 2, floor, widths[name])
            x += widths[name] + GAP
    ports: dict[tuple[str, str], list[float]] = {pair: [] for pair in imports}
    for end in (0, 1):
        free = {name: x - UNIT * total(imports, name, end) / 2 for name, (x, _, _) in boxes.items()}
        for pair in sorted(imports, key=lambda pair, end=end: boxes[pair[1 - end]]):
            ports[pair].append(free[pair[end]])
            free[pair[end]] += UNIT * imports[pair]
    page = figure.Figure(figsize=(12, 11), layout="constrained")
    axes = page.add_subplot(xlim=(-18.5, 17), ylim=(-1, STEP * len(floors) - 1), frame_on=False, xticks=[])
    axes.set_yticks([STEP * floor for floor in range(len(floors))], [f"{floor}" for floor in range(len(floors))])
    axes.tick_params(length=0)
    for (source, target), (start, stop) in ports.items():
        top, bottom = STEP * boxes[source][1], STEP * boxes[target][1]
        left = [(start, top), (start, (top + bottom) / 2), (stop, (top + bottom) / 2), (stop, bottom)]
        right = [(x + UNIT * imports[source, target], y) for x, y in reversed(left)]
        shape = path.Path([*left, *right], [1, 4, 4, 4, 2, 4, 4, 4])
        axes.add_patch(patches.PathPatch(shape, fc=f"C{(3 * boxes[source][1] + 4) % 10}", alpha=0.5, lw=0))
    for name, (x, floor, width) in boxes.items():
        axes.add_patch(patches.Rectangle((x - width / 2, STEP * floor - 0.45), width, 0.9, fc="w", ec="0.3"))
        axes.text(x, STEP * floor, name, ha="center", va="center")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "imports"}):
        page.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(read_floors((ROOT / "docs/design.md").read_text()), count_imports(ROOT / "mlx_flash"), Path(sys.argv[1]))
