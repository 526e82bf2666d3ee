"""Actions at the import of a module, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class ImportHook(MetaPathFinder):
    """Runs an action once, when a module has been imported; at once if it is there already."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module, and let its loader run the action afterwards."""
        if name != self._name:
            return None
        self.close()
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._action()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def close(self) -> None:
        """Forget the action. Harmless when repeated."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
