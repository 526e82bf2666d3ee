"""The patch of mlx-vlm, which is imported by others only. Every way of loading ends in ``mlx_vlm.utils.load_model``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_flash.compat.imports import ImportHook
from mlx_flash.config import FlashConfig
from mlx_flash.integration.writers import refuse_writers


class _State:
    """The patch of this process."""

    hook: ImportHook | None = None
    restore: Callable[[], None] | None = None


def patch_vlm(config_in_force: Callable[[], FlashConfig | None]) -> None:
    """Make mlx-vlm stream the models that it loads from now on, or from when it is imported."""
    if _State.hook is None:
        _State.hook = ImportHook("mlx_vlm.utils", functools.partial(_patch, config_in_force))


def restore_vlm() -> None:
    """Put mlx-vlm back as it was. Harmless when repeated."""
    if _State.hook is not None:
        _State.hook.close()
        _State.hook = None
    if _State.restore is not None:
        _State.restore()
        _State.restore = None


def _patch(config_in_force: Callable[[], FlashConfig | None]) -> None:
    from mlx_flash.compat.vlm import VLM_WRITERS, current_vlm_load_model, replace_vlm_load_model
    from mlx_flash.vision.loadvlm import load_vlm_model

    original = current_vlm_load_model()

    @functools.wraps(original)
    def load_model(model_path: Path, lazy: bool = False, **loading: Any) -> nn.Module:
        config = config_in_force()
        if config is None:
            return original(model_path, lazy, **loading)
        refuse_writers(VLM_WRITERS)
        return load_vlm_model(Path(model_path), config, original, **loading)

    replace_vlm_load_model(load_model, original)
    _State.restore = functools.partial(replace_vlm_load_model, original, load_model)
