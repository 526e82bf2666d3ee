"""The loops that generate: one sequence, or several that share passes, each bit for bit as mlx-lm computes it alone."""

from mlx_flash.generation.batches import CopyingRows, RowGenerator, SharingGenerator, batch_generate
from mlx_flash.generation.steps import generate, generate_step, speculative_generate_step, stream_generate

__all__ = [
    "CopyingRows",
    "RowGenerator",
    "SharingGenerator",
    "batch_generate",
    "generate",
    "generate_step",
    "speculative_generate_step",
    "stream_generate",
]
