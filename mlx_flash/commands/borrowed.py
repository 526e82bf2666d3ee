"""Flags of mlx-lm's programs, read from their source: importing mlx-lm takes seconds, help must not."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_flash.commands.flagtypes import OF_MLX_LM, count

_TYPES = {"int": int, "float": float, "str": str}

_WORDS = "most tokens to guess at a time with a draft model (default: as many as pay)"
DRAFTED: tuple[list[str], dict[str, Any]] = (["--num-draft-tokens"], {"type": count, "metavar": "N", "help": _WORDS})
"""A flag of mlx-lm that has no default here."""


def borrow_flags(
    parser: argparse.ArgumentParser,
    program: str,
    without: Sequence[str] = (),
    described: Sequence[str] = (),
) -> None:
    """Add the flags of one of mlx-lm's programs that the parser lacks, with mlx-lm's defaults.

    Args:
        parser: the parser.
        program: module of mlx-lm, such as ``server``.
        without: flags to leave out.
        described: flags whose values a Modelfile may give. Their default is None.
    """
    for names, keywords in flags_of(program):
        if names[0] not in without:
            options = {**keywords, **_type_of(names)}
            if names[0] in described:
                words = f"{options['help']} (default: the Modelfile's, or {options['default']})"
                options |= {"default": None, "help": words}
            with contextlib.suppress(argparse.ArgumentError):  # the parser has the flag
                parser.add_argument(*names, **options)


def _type_of(names: Sequence[str]) -> dict[str, Any]:
    return {"type": OF_MLX_LM[names[0]]} if names[0] in OF_MLX_LM else {}


@functools.cache
def flags_of(program: str) -> Sequence[tuple[list[str], dict[str, Any]]]:
    """Return the names and keywords of each ``add_argument`` in the source of a module of mlx-lm."""
    tree = _parse(program)
    constants, found = _TYPES | _constants(tree), []
    for node in _calls(tree.body):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
            given = {str(keyword.arg): _value(keyword.value, constants) for keyword in node.keywords}
            found.append((names, {name: value for name, value in given.items() if value is not None}))
    return found


def default_of(program: str, flag: str) -> Any:
    """Return mlx-lm's default of a flag."""
    return next(options["default"] for names, options in flags_of(program) if flag in names)


def _parse(module: str) -> ast.Module:
    spec = importlib.util.find_spec("mlx_lm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return ast.parse((Path(folders[0]) / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the constants that a module defines, or imports from its neighbours."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.level and node.module:
            names = [alias.name for alias in node.names if alias.name.isupper()]
            imported = _constants(_parse(node.module)) if names else {}
            found |= {name: imported[name] for name in names if name in imported}
    return found


def _calls(statements: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """Yield the calls that are statements of their own, in blocks too: most nodes are inside other expressions."""
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield statement.value
        for name in ("body", "orelse", "finalbody"):
            yield from _calls(getattr(statement, name, ()))


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    """Return the value of a literal, of a name or an f-string made of module constants; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_value(part, constants) for part in node.elts)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_value(part, constants)) for part in node.values)
    return _value(node.value, constants) if isinstance(node, ast.FormattedValue) else None
