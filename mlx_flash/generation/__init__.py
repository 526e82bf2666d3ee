"""The loops that generate: one sequence, or several that share passes, each bit for bit as mlx-lm computes it alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_flash.generation.batches import (
    RowGenerator,
    SharingGenerator,
    batch_generate,
    generate,
    generate_step,
    speculative_generate_step,
    stream_generate,
)

if TYPE_CHECKING:
    from mlx_flash.loading import FlashGenerationLoop
    from mlx_flash.model import FlashLLM

__all__ = [
    "FlashGenerationLoop",
    "FlashLLM",
    "RowGenerator",
    "SharingGenerator",
    "batch_generate",
    "generate",
    "generate_step",
    "speculative_generate_step",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    """Import the objects that other programs import from here, at their first use: they are made of these loops."""
    if name not in ("FlashGenerationLoop", "FlashLLM"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mlx_flash"), name)
