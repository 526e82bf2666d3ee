"""Tests of the script that draws which folders import which."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from children import ROOT
from models import script


@pytest.fixture
def draw_imports() -> ModuleType:
    return script("draw_imports")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two folders and a module, of which the upper ones import the lower ones."""
    files = {
        "errors.py": "import os\n",
        "low/a.py": "from pack.errors import E\nfrom pack.low.b import B\n",
        "high/c.py": "from pack.low import a, b\n\ndef f():\n    from pack.low.a import A\n",
        "__init__.py": "from pack.high.c import f\n",
    }
    for name, text in files.items():
        (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pack" / name).write_text(text)
    return tmp_path / "pack"


def test_imports_between_folders_are_counted(draw_imports: ModuleType, package: Path) -> None:
    assert draw_imports.count_imports(package) == {("low", "errors"): 1, ("high", "low"): 2}


def test_the_picture_shows_every_box_and_line(draw_imports: ModuleType, package: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    floors = draw_imports.read_floors("| 0 | `errors` | x |\n| 1 | `low`, `side` | x |\n| 2 | `high` | x |\n")
    draw_imports.draw(floors, draw_imports.count_imports(package), tmp_path / "imports.svg")
    picture = (tmp_path / "imports.svg").read_text()
    assert all(f">{name}<" in picture for name in ("errors", "low", "side", "high"))
    assert picture.count("opacity: 0.5") == 2


def test_the_picture_of_the_design_has_the_folders_of_today(draw_imports: ModuleType) -> None:
    picture = (ROOT / "docs" / "images" / "imports.svg").read_text()
    floors = draw_imports.read_floors((ROOT / "docs" / "design.md").read_text())
    missing = [name for floor in floors for name in floor if f">{name}<" not in picture]
    assert not missing, "Hint: python scripts/draw_imports.py docs/images/imports.svg"
    assert {name for floor in floors for name in floor} >= {*sum(draw_imports.count_imports(ROOT / "mlx_flash"), ())}
