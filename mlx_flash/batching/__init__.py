"""Exact batches: sequences that share passes over the weights, each bit for bit as if it were computed alone."""

from mlx_flash.batching.rows import CopyingRows, RowGenerator, SharingGenerator, batch_generate

__all__ = ["CopyingRows", "RowGenerator", "SharingGenerator", "batch_generate"]
