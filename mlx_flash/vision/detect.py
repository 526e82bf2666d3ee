"""Answers from a model's folder: whether it sees, and which library loads it. mlx-vlm is not imported for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mlx_flash.compat.loaders import model_classes
from mlx_flash.errors import ConfigError
from mlx_flash.layout.load import load_config

_PARTS = {"vision_config", "mm_vision_tower", "image_token_id", "image_token_index", "img_processor", "vision_tower"}
"""Keys of ``config.json`` that models have which see."""


def sees(path: Path) -> bool:
    """Return whether a checkpoint has a part for pictures, by its ``config.json``."""
    return not _PARTS.isdisjoint(load_config(path))


def is_known_to_mlx_lm(path: Path) -> bool:
    """Return whether mlx-lm has a model's architecture: as text alone, if the model sees."""
    try:
        model_classes(config=load_config(path))
    except (KeyError, ValueError):
        return False
    return True


def loads_with_vlm(path: Path, wish: bool | None, *, prefers: bool) -> bool:
    """Return whether mlx-vlm loads a model. A wish is for models that see; None leaves it open.

    ``prefers`` takes mlx-vlm, if it is installed, for a model that mlx-lm could load as text alone.
    """
    if wish is False or not sees(path):
        return False
    if wish is None and is_known_to_mlx_lm(path):
        return prefers and is_installed()
    check_installed(f"the model in {path}, which sees" + (" and is not known to mlx-lm," if wish is None else ","))
    return True


def is_installed() -> bool:
    """Return whether mlx-vlm can be imported."""
    return find_spec("mlx_vlm") is not None


def check_installed(asked: str) -> None:
    """Check that mlx-vlm is there."""
    if not is_installed():
        raise ConfigError(f"{asked} needs mlx-vlm, which is not installed. Hint: pip install mlx-vlm.")
