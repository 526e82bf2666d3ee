"""A faster start of the Python processes that tests start.

Python imports this module first in every process whose ``PYTHONPATH`` names this folder; ``conftest.py`` puts it there.

``import transformers`` reads each of its 3,000 source files twice to list their public names. That is half of the time
that ``import mlx_lm`` takes. Here the first process writes the lists to files, and later processes read them. A file's
name depends on the modification time of the folder that was listed, so that another installation gets its own files.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "transformers.utils.import_utils"
CACHE = Path(__file__).resolve().parent / "__pycache__"


class Finder(importlib.abc.MetaPathFinder):
    """Finder of the one module that lists names; `keep_lists` changes it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if hasattr(module, "define_import_structure"):
                    module.define_import_structure = keep_lists(module.define_import_structure)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def keep_lists(scan: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reads from a file what ``scan`` returned for the same folder in another process."""

    def read_or_scan(module_path: Any, prefix: str | None = None) -> Any:
        folder = Path(module_path)
        changed = (folder.parent if folder.is_file() else folder).stat().st_mtime_ns
        key = hashlib.sha256(repr((str(folder), changed, prefix)).encode()).hexdigest()[:16]
        file = CACHE / f"names-{key}.pickle"
        if file.exists():
            return pickle.loads(file.read_bytes())
        found = scan(module_path, prefix)
        CACHE.mkdir(exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(found))
        partial.replace(file)
        return found

    return read_or_scan


sys.meta_path.insert(0, Finder())
