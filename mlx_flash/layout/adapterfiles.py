"""The files of an adapter, checked before mlx-lm applies it: its errors name neither the file nor the setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_flash.errors import CheckpointError, FlashError
from mlx_flash.layout.load import UNCLEAR_ERRORS, read_object
from mlx_flash.storage.safetensors import read_shard, refuse_unreadable

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapters.safetensors"

_PAIR = ("lora_a", "lora_b")
_HINT = "Hint: train or copy the adapter again."


def check_adapter(folder: Path) -> None:
    """Check the files of an adapter, but not whether it suits a model.

    Raises: CheckpointError: a file is missing, damaged or no regular file, or mlx-lm would use random numbers for a
    tensor.
    """
    try:
        config = read_object(folder / CONFIG_NAME)
    except OSError as fault:
        refuse_unreadable(folder / CONFIG_NAME, "file", fault)
    is_full = config.get("fine_tune_type") == "full"
    if not is_full:
        _check_settings(folder / CONFIG_NAME, config)
    path = folder / WEIGHTS_NAME
    names = [record.name for record in read_shard(path).tensors]
    if not is_full and (missing := next(_missing(names), None)):
        raise CheckpointError(f"{path} has no tensor {missing!r}, but its counterpart. {_HINT}")


@contextmanager
def mismatch_explained(folder: Path) -> Iterator[None]:
    """Raise a `CheckpointError` where mlx-lm cannot apply the adapter of a folder to a model."""
    try:
        yield
    except FlashError:
        raise
    except (ValueError, *UNCLEAR_ERRORS) as error:
        first, *found = [line.strip() for line in str(error).splitlines()] or [""]
        if found:  # of each tensor a line
            first = f"{found[0]} (and {len(found) - 1} other tensors)" if found[1:] else found[0]
        raise CheckpointError(
            f"{folder}: mlx-lm cannot apply this adapter ({type(error).__name__}: {first}). "
            f"Hint: compare {CONFIG_NAME}; the adapter may be another model's."
        ) from error


def _check_settings(path: Path, config: dict[str, Any]) -> None:
    if "peft_type" in config:
        raise CheckpointError(f"{path} is of an adapter of PEFT. Hint: mlx-lm takes those that mlx_lm.lora trains.")
    settings = config.get("lora_parameters")
    scale = settings.get("scale") if isinstance(settings, dict) else 1  # mlx-lm refuses other wrong settings itself
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise CheckpointError(f"{path}: scale must be a finite number, found {scale!r:.80}. {_HINT}")


def _missing(names: Iterable[str]) -> Iterator[str]:
    """Yield the absent tensors of pairs of which the other one is there."""
    found = set(names)
    for name in found:
        stem, _, leaf = name.rpartition(".")
        yield from (f"{stem}.{other}" for other in _PAIR if leaf in _PAIR and f"{stem}.{other}" not in found)
