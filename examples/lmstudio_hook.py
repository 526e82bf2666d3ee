"""Makes every program of a Python environment stream the models that it loads through mlx-lm or mlx-vlm.

It is for programs that cannot be changed, such as LM Studio's engine; docs/clients.md names its folder.
When Python starts, the hook imports nothing. The import of mlx-lm or mlx-vlm loads mlx-flash, with the settings of the
environment variables MLX_FLASH_... and of the settings file. If mlx-flash cannot start, a line on stderr gives the
reason, and the program continues without it.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAMES = ("mlx_lm.utils", "mlx_vlm.utils")


class FlashFinder(MetaPathFinder):
    """Waits for the import of a module that loads models, to apply the patch after it."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec, with a loader that applies the patch, for the first of the modules; else None."""
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
        except Exception as error:  # noqa: BLE001  # the host program works without mlx-flash, whatever the error
            print(f"mlx-flash does not stream models here: {type(error).__name__}: {error}", file=sys.stderr)

    return exec_module


sys.meta_path.insert(0, FlashFinder())
