"""A folder imports only from folders below it, and design.md shows the floors as they are."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from children import ROOT
from mlx_flash.commands.arguments import COMMANDS
from models import script

PACKAGE = ROOT / "mlx_flash"

FLOORS = [
    ["errors", "forks", "logs", "version"],
    ["compat", "files"],
    ["config", "enginethread", "memory"],
    ["storage", "telemetry"],
    ["layout"],
    ["convert", "kv", "ranks"],
    ["prefixes", "speculation", "streaming"],
    ["experts"],
    ["residency"],
    ["engine"],
    ["model"],
    ["generation"],
    ["loading"],
    ["vision"],
    ["modelfile", "monitor"],
    ["disk_kv_cache", "integration"],
    ["server"],
    ["commands"],
    ["cli"],
]
"""Folders and modules of ``mlx_flash/``, from the lowest floor up. Those of one floor do not import each other."""

FREE = {"__init__", "__main__"}
"""Package fronts: they re-export and start, and hold no code."""


NAMES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}


@cache
def modules() -> dict[str, Path]:
    paths = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name: path for path, name in paths.items() if name.rsplit(".", 1)[-1] not in FREE}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "mlx_flash":
                found |= {alias.name for alias in node.names} & NAMES
            elif node.module and node.module.startswith("mlx_flash."):
                module = node.module.removeprefix("mlx_flash.")
                inside = {f"{module}.{alias.name}" for alias in node.names} & NAMES
                found |= inside or {module}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("mlx_flash.") for alias in node.names if "mlx_flash." in alias.name}
    return found


def floor_of(name: str) -> str:
    """The folder of a module, or the module itself where it lies at the top."""
    return name.split(".")[0]


def test_every_folder_has_a_floor() -> None:
    assert {floor_of(name) for name in modules()} == {name for floor in FLOORS for name in floor}


def test_folders_import_only_from_lower_floors() -> None:
    rank = {name: i for i, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{name} (floor {rank[floor_of(name)]}) imports {other} (floor {rank[floor_of(other)]})"
        for name, path in modules().items()
        for other in imports(path)
        if floor_of(other) != floor_of(name) and rank[floor_of(other)] >= rank[floor_of(name)]
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: imports(path) & modules().keys() for name, path in modules().items()}
    TopologicalSorter(graph).prepare()


def test_every_module_is_used() -> None:
    used = set().union(*(imports(path) for path in PACKAGE.rglob("*.py")))
    used |= {f"commands.{(command.place or name).partition('.')[0]}" for name, command in COMMANDS.items()}
    assert set(modules()) - used <= {"cli", "disk_kv_cache", "integration.lmstudio"}  # what users name


def test_the_design_document_shows_the_floors() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.M)
    assert [re.findall(r"`(\w+)", names) for _, names in rows] == FLOORS


def test_the_ways_of_a_token_a_page_and_a_plan_name_functions_that_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    section = text[text.index("### One token") : text.index("## Decisions")]
    steps = [line.split("|")[2] for line in section.splitlines() if "`" in line and line.startswith("|")]
    assert len(steps) > 40
    for step in steps:
        path = None
        for name in re.findall(r"`([^`]+)`", step):
            if name.endswith(".py"):
                path = PACKAGE / name
            else:
                assert path is not None
                functions = [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
                assert name in functions, f"{path} has no function {name}"


def test_private_parts_of_mlx_are_used_in_compat_only() -> None:
    """No other module imports a private name of MLX or mlx-lm, reads one as an attribute, or looks at function code."""
    wrong = [
        (name, found)
        for name, path in modules().items()
        if floor_of(name) != "compat"
        for found in foreign_privates(tree_of(path))
        if (name, found) != ("engine.call", "__code__")  # of any caller's function
    ]
    assert not wrong


def foreign_privates(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"mlx", "mlx_lm"}:
            found += [alias.name for alias in node.names if alias.name.startswith("_")]
        elif isinstance(node, ast.Attribute) and (node.attr == "__code__" or re.match(r"_.*(?<!__)$", node.attr)):
            found += {node.attr} - own_privates()
        elif isinstance(node, ast.Constant) and node.value == "__code__":
            found.append(node.value)
    return found


@cache
def own_privates() -> set[str]:
    """Attributes and functions that the package defines, outside of ``compat``, and names of Python's own."""
    found = {"_replace", "_getframe", "_exit"}
    trees = [tree_of(path) for path in PACKAGE.rglob("*.py") if path.parent.name != "compat"]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
    return found


def test_assertions_change_nothing() -> None:
    """``python -O`` leaves assertions out."""
    nodes = [node for path in modules().values() for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
    parts = [part for node in nodes for part in ast.walk(node.test) if isinstance(part, ast.NamedExpr | ast.Call)]
    assert nodes and {ast.unparse(getattr(part, "func", part)) for part in parts} <= {"isinstance", "len", "all", "any"}


def test_the_picture_of_the_design_has_the_folders_of_today() -> None:
    draw_imports = script("draw_imports")
    picture = (ROOT / "docs" / "images" / "imports.svg").read_text()
    floors = draw_imports.read_floors((ROOT / "docs" / "design.md").read_text())
    missing = [name for floor in floors for name in floor if f">{name}<" not in picture]
    assert not missing, "Hint: python scripts/draw_imports.py docs/images/imports.svg"
    assert {name for floor in floors for name in floor} >= {*sum(draw_imports.count_imports(PACKAGE), ())}
