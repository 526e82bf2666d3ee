"""Run mlx-lm models larger than memory, bit for bit."""

from importlib import import_module

from mlx_flash.errors import *  # noqa: F403 every error is public
from mlx_flash.errors import mlx_explained
from mlx_flash.version import VERSION

TYPE_CHECKING = False
"""That of ``typing``, which takes longer to import than this module."""

if TYPE_CHECKING:
    from typing import Any

    from mlx_flash.config import FlashConfig as FlashConfig
    from mlx_flash.config import parse_budget as parse_budget
    from mlx_flash.generation import batch_generate as batch_generate
    from mlx_flash.generation import generate as generate
    from mlx_flash.generation import generate_step as generate_step
    from mlx_flash.generation import stream_generate as stream_generate
    from mlx_flash.integration.mlx_lm import FlashPatch as FlashPatch
    from mlx_flash.integration.mlx_lm import apply_flash_patch as apply_flash_patch
    from mlx_flash.integration.mlx_lm import remove_flash_patch as remove_flash_patch
    from mlx_flash.integration.modelfile import parse_flash_directives as parse_flash_directives
    from mlx_flash.kv.kvpool import DiskKVCache as DiskKVCache
    from mlx_flash.loading import FlashGenerationLoop as FlashGenerationLoop
    from mlx_flash.loading import FlashManager as FlashManager
    from mlx_flash.loading import load as load
    from mlx_flash.loading import load_model as load_model
    from mlx_flash.model import FlashLLM as FlashLLM
    from mlx_flash.vision.flashvlm import load_vlm as load_vlm

__version__ = VERSION

_HOMES = {
    "config": ("FlashConfig", "parse_budget"),
    "generation": ("batch_generate", "generate", "generate_step", "stream_generate"),
    "integration.mlx_lm": ("FlashPatch", "apply_flash_patch", "remove_flash_patch"),
    "integration.modelfile": ("parse_flash_directives",),
    "kv.kvpool": ("DiskKVCache",),
    "loading": ("FlashGenerationLoop", "FlashManager", "load", "load_model"),
    "model": ("FlashLLM",),
    "vision.flashvlm": ("load_vlm",),
}
_HOME_OF = {name: f"mlx_flash.{home}" for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # type checkers cannot read it: they take all names above
    __all__ = [*sorted(name for name in globals() if name.endswith("Error")), *_HOME_OF]


def __getattr__(name: str) -> "Any":
    """Import a public name at its first use: the monitor and the like need no MLX."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with mlx_explained():
        value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
