"""Flags of mlx-lm's programs, read from their source: importing mlx-lm takes seconds, help must not."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_KEPT = ("nargs", "metavar", "help")
"""Keywords of ``add_argument`` that we take over. mlx-lm itself checks types and supplies defaults."""


class PassOn(argparse.Action):
    """An action that appends the flag and its values, as typed, to ``args.rest``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [values] if isinstance(values, str) else list(values or ())
        namespace.rest = [*getattr(namespace, "rest", []), option_string, *given]


def borrow_flags(parser: argparse.ArgumentParser, program: str, only: str | None = None) -> None:
    """Add the flags of one of mlx-lm's programs, such as ``server``, that the parser lacks; or ``only`` one of them."""
    for names, keywords in flags_of(program):
        if only in (None, *names):
            with contextlib.suppress(argparse.ArgumentError):  # the parser has the flag
                parser.add_argument(*names, action=PassOn, dest=f"mlx_lm_{names[0]}", **keywords)


def flags_of(program: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the names and keywords of each ``add_argument`` in the source of a module of mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    tree = ast.parse((Path(folders[0]) / f"{program}.py").read_text(encoding="utf-8"))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
            given = {keyword.arg: _value(keyword.value, constants) for keyword in node.keywords}
            keywords = {name: given[name] for name in _KEPT if given.get(name) is not None}
            if given.get("action") is not None:
                keywords["nargs"] = 0
            elif "metavar" not in keywords:
                keywords["metavar"] = _metavar(names[0], given.get("choices"))
            yield names, keywords


def _metavar(flag: str, choices: Any) -> str:
    return f"{{{','.join(choices)}}}" if choices else flag.strip("-").replace("-", "_").upper()


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    """Return the value of a literal, of a name or an f-string made of module constants; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part, constants) for part in node.elts]
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_value(part, constants)) for part in node.values)
    return _value(node.value, constants) if isinstance(node, ast.FormattedValue) else None
