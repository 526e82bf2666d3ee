"""The workflows, the Dockerfile, the source distribution and the version agree with each other and the package."""

from __future__ import annotations

import re

import pytest

from children import ROOT
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.server.access import OPEN_PATHS

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.name for path in WORKFLOWS])
def test_actions_are_pinned_by_hash(path: object) -> None:
    used = re.findall(r"uses: (.*)", (ROOT / ".github" / "workflows" / str(path)).read_text())
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action) for action in used)


def test_a_tag_replaces_the_version() -> None:
    (pattern,) = re.findall(r'sed -i "s/(.*?)/VERSION', (ROOT / ".github" / "workflows" / "release.yml").read_text())
    text = (ROOT / "mlx_flash" / "version.py").read_text()
    assert len(re.findall(pattern, text, re.M)) == 1


def test_the_image_serves_what_its_health_check_asks() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (words,) = re.findall(r"ENTRYPOINT \[(.*)\]", text)
    args = parse_arguments([*re.findall(r'"([^"]+)"', words)[1:], "--model", "qwen3-30b-a3b"])
    (port, path) = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", text)[0]
    assert (args.command, str(args.port)) == ("serve", port) and path in OPEN_PATHS
    copied = {name for line in re.findall(r"^COPY (.*) /src", text, re.M) for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


WITH_EVERY_SDIST = {"README.md", "pyproject.toml", "LICENSE", "MANIFEST.in"}
"""What setuptools adds by itself, besides the package."""


def test_what_tests_read_ships_with_them() -> None:
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    shipped = {name for command, *names in lines if command in ("graft", "include") for name in names}
    tests = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    read = set(re.findall(r'\bROOT / "([^"/]+)', tests))
    assert {"Makefile", "benchmarks", "docs", "examples", "scripts"} <= read
    assert read <= shipped | WITH_EVERY_SDIST | {"mlx_flash"}
