"""Tests of the source distribution: it has the files that its own tests read."""

from __future__ import annotations

import re

from children import ROOT

WITH_EVERY_SDIST = {"README.md", "pyproject.toml", "LICENSE", "MANIFEST.in"}
"""What setuptools adds by itself, besides the package."""


def test_what_tests_read_ships_with_them() -> None:
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    shipped = {name for command, *names in lines if command in ("graft", "include") for name in names}
    tests = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    read = set(re.findall(r'\bROOT / "([^"/]+)', tests))
    assert {"Makefile", "benchmarks", "docs", "examples", "scripts"} <= read
    assert read <= shipped | WITH_EVERY_SDIST | {"mlx_flash"}
