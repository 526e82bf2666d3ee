"""The index of a checkpoint: which shard each tensor was in when the index was written.

mlx-lm never reads it, and many folders have one of an earlier conversion. So it only explains missing parameters.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_flash.files import read_regular
from mlx_flash.storage.safetensors import INDEX_NAME, MAX_METADATA_BYTES


def absent_shards(directory: Path) -> list[str]:
    """Return the files that a folder's index names and that are not there. None are if there is no readable index."""
    try:
        named = json.loads(read_regular(directory / INDEX_NAME, MAX_METADATA_BYTES))["weight_map"].values()
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []
    present = {path.name for path in directory.iterdir() if path.exists()}
    return sorted({name for name in named if isinstance(name, str) and name.isprintable()} - present)
