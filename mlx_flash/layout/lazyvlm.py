"""Loading of a model of mlx-vlm: a language model, and towers for pictures and sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_flash.compat.streams import LoadingStreams
from mlx_flash.compat.vlm import (
    VlmLoadModel,
    current_vlm_load_model,
    installed_vlm,
    language_part,
    loaded_tensors,
    make_vlm_cache,
)
from mlx_flash.errors import CheckpointError
from mlx_flash.layout.load import LoadedModel, Sources, checked_config, direct_arrays, failure_explained
from mlx_flash.layout.standins import stock_folder
from mlx_flash.storage.safetensors import Checkpoint


def load_vlm_lazily(
    directory: Path,
    checkpoint: Checkpoint,
    model_config: dict[str, Any] | None = None,
    *,
    load_model: VlmLoadModel | None = None,
    **loading: Any,
) -> LoadedModel:
    """Build mlx-vlm's model without reading its weights, and remember which array came from which tensors.

    Args:
        directory: the model directory.
        checkpoint: its tensors.
        model_config: not available.
        load_model: mlx-vlm's function.
        loading: as in ``mlx_vlm.utils.load_model``.

    Raises:
        CheckpointError: the model is built by code of its own, has no language model, or a parameter has no tensor.
    """
    config = checked_config(directory, checkpoint, model_config)
    sources = Sources(checkpoint)
    streams = LoadingStreams()
    load = load_model or current_vlm_load_model()
    with (
        stock_folder(directory, checkpoint) as folder,
        streams.in_force(),
        failure_explained(directory),
        sources.watching({}),
        loaded_tensors(sources.read),
    ):
        model = load(folder, lazy=True, **loading)
    streams.belong_to(model)
    language = language_part(model)
    if language is None:
        raise CheckpointError(
            f"{type(model).__module__}.{type(model).__name__} of mlx-vlm {installed_vlm()} has no language_model: it "
            "cannot be streamed. Hint: load it with mlx_vlm, without the patch."
        )
    return LoadedModel(model, config, *direct_arrays(model, sources), streams, language, make_vlm_cache)
