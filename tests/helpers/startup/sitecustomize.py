"""Shorter imports of transformers in the processes of the tests. Python imports this module when it starts.

transformers reads all its modules, twice, to learn their names: half of the second and a half that it takes to import
mlx-lm. Here the first process keeps the names in a file, and others take them from there.
"""

from __future__ import annotations

import importlib.machinery
import marshal
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

KEPT = os.path.join(os.path.dirname(__file__), "__pycache__")  # noqa: PTH118, PTH120 pathlib is slow to import


class Finder:
    """Finds the module of transformers that lists the others, and replaces its function."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if hasattr(module, "create_import_structure_from_path"):
                    module.create_import_structure_from_path = kept(module.create_import_structure_from_path)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def kept(names_in: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """Return the same function, which looks for the names of the modules in a file first."""

    def look_up(path: Any) -> dict[Any, Any]:
        folder = os.fspath(path).removesuffix("__init__.py").rstrip(os.sep)
        if not folder.endswith(f"{os.sep}models"):
            return names_in(path)
        found = os.stat(folder)  # noqa: PTH116
        name = f"transformers-{found.st_ino}-{found.st_mtime_ns}.{sys.implementation.cache_tag}"
        file = os.path.join(KEPT, name)  # noqa: PTH118
        try:
            with open(file, "rb") as stream:
                names: dict[Any, Any] = marshal.load(stream)
        except (OSError, EOFError, ValueError, TypeError):
            names = names_in(path)
            write(file, marshal.dumps(names))
        return names

    return look_up


def write(file: str, data: bytes) -> None:
    """Write a file whole or not at all, since others may read it now. Without it they take longer."""
    own = f"{file}.{os.getpid()}"
    try:
        os.makedirs(KEPT, exist_ok=True)  # noqa: PTH103
        with open(own, "wb") as stream:
            stream.write(data)
        os.replace(own, file)  # noqa: PTH105
    except OSError:
        return


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
