"""Makes every program of a Python environment stream the models that it loads through mlx-lm or mlx-vlm.

For programs that cannot be changed, such as LM Studio's engine: docs/lmstudio_integration.md says where it goes. When
Python starts it imports nothing; the import of mlx-lm or mlx-vlm brings mlx-flash in, with the settings of the
environment variables MLX_FLASH_... and of the settings file. Where mlx-flash cannot start, a line on stderr says
why, and the program goes on without it.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAMES = ("mlx_lm.utils", "mlx_vlm.utils")


class FlashFinder(MetaPathFinder):
    """Waits for the import of a module that loads models, which the patch follows."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Is asked for every module that is imported; finds one of them, once."""
        if name not in NAMES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = patched(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def patched(execute: Any) -> Any:
    """Return a loader that runs a module's code and then applies the patch."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            from mlx_flash import apply_flash_patch

            apply_flash_patch()
        except Exception as error:  # noqa: BLE001  # whatever is wrong with mlx-flash, its host works without it
            print(f"mlx-flash does not stream models here: {type(error).__name__}: {error}", file=sys.stderr)

    return exec_module


sys.meta_path.insert(0, FlashFinder())
