"""The patch of mlx-vlm, which is imported by others only. Every way of loading ends in ``mlx_vlm.utils.load_model``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.nn as nn

from mlx_flash.compat.callers import refuse_writers
from mlx_flash.config import FlashConfig


class _State:
    """The patch of this process."""

    hook: ImportHook | None = None
    restore: Callable[[], None] | None = None


def patch_vlm(config_in_force: Callable[[], FlashConfig | None]) -> None:
    """Make mlx-vlm stream the models that it loads from now on, or from when it is imported."""
    if _State.hook is None:
        _State.hook = ImportHook("mlx_vlm.utils", functools.partial(_patch, config_in_force))


def restore_vlm() -> None:
    """Put mlx-vlm back as it was. Harmless when repeated."""
    if _State.hook is not None:
        _State.hook.close()
        _State.hook = None
    if _State.restore is not None:
        _State.restore()
        _State.restore = None


def _patch(config_in_force: Callable[[], FlashConfig | None]) -> None:
    from mlx_flash.compat.vlm import VLM_WRITERS, current_vlm_load_model, replace_vlm_load_model
    from mlx_flash.vision.flashvlm import load_vlm_model

    original = current_vlm_load_model()

    @functools.wraps(original)
    def load_model(model_path: Path, lazy: bool = False, **loading: Any) -> nn.Module:
        config = config_in_force()
        if config is None:
            return original(model_path, lazy, **loading)
        refuse_writers(VLM_WRITERS)
        return load_vlm_model(Path(model_path), config, original, **loading)

    replace_vlm_load_model(load_model, original)
    _State.restore = functools.partial(replace_vlm_load_model, original, load_model)


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
