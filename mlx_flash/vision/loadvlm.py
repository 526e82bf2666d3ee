"""``load_vlm``, for programs that stream models of mlx-vlm without the patch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_flash.compat.arrays import LoadingStreams
from mlx_flash.compat.vlm import (
    VlmLoadModel,
    current_vlm_load_model,
    get_model_path,
    installed_vlm,
    language_part,
    load_processor,
    loaded_tensors,
    make_vlm_cache,
)
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.engine.prepared import Prepared
from mlx_flash.enginethread import Progress
from mlx_flash.errors import CheckpointError, ConfigError, FlashError
from mlx_flash.layout.load import (
    LoadedModel,
    Sources,
    checked_config,
    direct_arrays,
    failure_explained,
    model_name,
    stock_folder,
)
from mlx_flash.residency.ledger import refuse_all_but
from mlx_flash.storage.safetensors import Checkpoint
from mlx_flash.vision.flashvlm import FlashVLM


def load_vlm(
    path_or_hf_repo: str | Path,
    config: FlashConfig | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[FlashVLM, Any]:
    """Load a model that sees and its processor, like ``mlx_vlm.load``.

    Args:
        path_or_hf_repo: a model directory, or a Hugging Face repository that is downloaded first.
        config: how to stream; None takes what environment and settings file say (:meth:`FlashConfig.resolve`).
        revision: of the repository.
        progress: called with (bytes done, bytes to do) while pinned weights are read.
        options: of the processor, as of ``mlx_vlm.load``.

    Raises:
        CheckpointError: the model directory is not a usable checkpoint.
        ConfigError: a setting is wrong or not available; BudgetError when the budget is too small.
    """
    path = Path(get_model_path(str(path_or_hf_repo), revision=revision))
    model = load_vlm_model(path, config or FlashConfig.resolve())
    processor = load_processor_of(path, model, **options)
    model.start(progress)
    return model, processor


def load_processor_of(path: Path, model: FlashVLM, **options: Any) -> Any:
    """Return the processor of texts and pictures in a model's folder."""
    try:
        return load_processor(path, model, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot load the processor of {path}. Hint: copy the tokenizer's files and preprocessor_config.json from "
            f"the model's repository. ({' '.join(str(error).split())})"
        ) from error


def load_vlm_model(
    path: Path | str, config: FlashConfig, load_model: VlmLoadModel | None = None, **loading: Any
) -> FlashVLM:
    """Load a model of mlx-vlm that streams from its first call on. No processor is needed."""
    if not config.enabled:
        raise ConfigError("enabled is False, which leaves models to mlx-vlm. Hint: load this one with mlx_vlm.load.")
    config = _settings_of_vlm(config)
    return FlashVLM(prepare_vlm(path, config, load_model=load_model, **loading), config, model_name(path))


def prepare_vlm(path: Path | str, config: FlashConfig, **loading: Any) -> Prepared:
    """Load a model of mlx-vlm lazily, find its units, and plan. Reads headers, no weights."""
    try:
        return prepare(path, _settings_of_vlm(config), loader=load_vlm_lazily, **loading)
    except FlashError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot find the units of {path}: mlx-vlm raised {type(error).__name__}: {error}, when it built the model "
            "or called its language model with tokens alone. Hint: load it with mlx_vlm, without the patch."
        ) from error


def _settings_of_vlm(config: FlashConfig) -> FlashConfig:
    """Return settings with the caches that models of mlx-vlm can have: their own, unless others are asked for."""
    refuse_all_but(config, "for models of mlx-vlm", kv_max_tokens=None, kv_prefixes="off")
    is_open = config.kv_cache is None and config.kv_ram_gb is None
    return replace(config, kv_cache="stock" if is_open else config.kv_cache, kv_prefixes="off")


def load_vlm_lazily(
    directory: Path,
    checkpoint: Checkpoint,
    model_config: dict[str, Any] | None = None,
    *,
    load_model: VlmLoadModel | None = None,
    **loading: Any,
) -> LoadedModel:
    """Build mlx-vlm's model without reading its weights, and remember which array came from which tensors."""
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
