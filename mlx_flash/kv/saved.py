"""Prompt caches that mlx-lm saved, checked before mlx-lm loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.models.cache import load_prompt_cache

from mlx_flash.errors import CheckpointError
from mlx_flash.storage.safetensors import read_shard

_MOST_DIGITS = 5
"""Most digits of a layer's index: caches have fewer layers."""


def load_saved(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """Load a prompt cache and its metadata with mlx-lm's ``load_prompt_cache``.

    MLX believes the shapes in a file, and makes lists as long as the largest index in a name.

    Raises:
        CheckpointError: the file is not what ``save_prompt_cache`` writes.
    """
    shard = read_shard(path)
    names = [*(record.name for record in shard.tensors), *shard.metadata]
    numbers = [part for name in names for part in name.split(".") if part.isdecimal()]
    if any(len(number) > _MOST_DIGITS for number in numbers):
        raise CheckpointError(f"{path} is not a saved prompt cache: a name in it has a number that is too large")
    try:
        cache, metadata = load_prompt_cache(str(path), return_metadata=True)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a saved prompt cache ({type(error).__name__}: {error}). Hint: make it with "
            "`mlx_lm.cache_prompt`."
        ) from error
    return cache, metadata
