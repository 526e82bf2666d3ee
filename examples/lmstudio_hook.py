"""Makes every program of a Python environment stream the models that it loads through mlx-lm.

For programs that cannot be changed, such as LM Studio's engine: docs/lmstudio_integration.md says where it goes. When
Python starts it imports nothing; the import of mlx-lm brings mlx-flash in, with the settings of the environment
variables MLX_FLASH_... and of the settings file.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class FlashFinder(MetaPathFinder):
    """Waits for the import of ``mlx_lm.utils``, which the patch follows."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Is asked for every module that is imported; finds one of them, once."""
        if name != "mlx_lm.utils":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = patched(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def patched(execute: Any) -> Any:
    """A loader that runs a module's code and then applies the patch."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        from mlx_flash import apply_flash_patch

        apply_flash_patch()

    return exec_module


sys.meta_path.insert(0, FlashFinder())
