"""Run mlx-lm models larger than memory, bit for bit."""

from importlib import import_module

from mlx_flash.version import VERSION

TYPE_CHECKING = False
"""That of ``typing``, which takes longer to import than this module."""

if TYPE_CHECKING:
    from typing import Any

    from mlx_flash.config import FlashConfig, parse_budget
    from mlx_flash.errors import (
        BudgetError,
        CacheError,
        CheckpointError,
        CheckpointNotFoundError,
        ClosedError,
        CompatibilityError,
        CompilerError,
        ConfigError,
        FileChangedError,
        FlashError,
        HeaderError,
        IndexFileError,
        PeerError,
        PictureError,
        ReadError,
        RefusedError,
        SelfTestError,
        StreamedWeightsError,
        TruncatedFileError,
        WriteError,
    )
    from mlx_flash.generation import batch_generate, generate, generate_step, stream_generate
    from mlx_flash.integration.mlx_lm import FlashPatch, apply_flash_patch, remove_flash_patch
    from mlx_flash.integration.modelfile import parse_flash_directives
    from mlx_flash.kv.diskcache import DiskKVCache
    from mlx_flash.loading import FlashGenerationLoop, FlashManager, load, load_model
    from mlx_flash.model import FlashLLM
    from mlx_flash.vision.flashvlm import load_vlm

__version__ = VERSION

__all__ = [
    "BudgetError",
    "CacheError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "CompatibilityError",
    "CompilerError",
    "ConfigError",
    "DiskKVCache",
    "FileChangedError",
    "FlashConfig",
    "FlashError",
    "FlashGenerationLoop",
    "FlashLLM",
    "FlashManager",
    "FlashPatch",
    "HeaderError",
    "IndexFileError",
    "PeerError",
    "PictureError",
    "ReadError",
    "RefusedError",
    "SelfTestError",
    "StreamedWeightsError",
    "TruncatedFileError",
    "WriteError",
    "apply_flash_patch",
    "batch_generate",
    "generate",
    "generate_step",
    "load",
    "load_model",
    "load_vlm",
    "parse_budget",
    "parse_flash_directives",
    "remove_flash_patch",
    "stream_generate",
]

_HOMES = {
    "mlx_flash.config": {"FlashConfig", "parse_budget"},
    "mlx_flash.generation": {"batch_generate", "generate", "generate_step", "stream_generate"},
    "mlx_flash.integration.mlx_lm": {"FlashPatch", "apply_flash_patch", "remove_flash_patch"},
    "mlx_flash.integration.modelfile": {"parse_flash_directives"},
    "mlx_flash.kv.diskcache": {"DiskKVCache"},
    "mlx_flash.loading": {"FlashGenerationLoop", "FlashManager", "load", "load_model"},
    "mlx_flash.model": {"FlashLLM"},
    "mlx_flash.vision.flashvlm": {"load_vlm"},
}


def __getattr__(name: str) -> "Any":
    """Import a public name at its first use: the monitor and the like need no MLX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "mlx_flash.errors")
    from mlx_flash.errors import mlx_explained

    with mlx_explained():
        value = getattr(import_module(home), name)
    globals()[name] = value  # the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
