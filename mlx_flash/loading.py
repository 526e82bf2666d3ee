"""``load``, ``load_model`` and objects that load and generate, for programs that stream without the patch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from mlx_flash.config import FlashConfig
from mlx_flash.engine.lifecycle import ModelManager
from mlx_flash.engine.prepare import load_tokenizer, prepare, resolve
from mlx_flash.enginethread import Progress
from mlx_flash.errors import ConfigError
from mlx_flash.generation import stream_generate
from mlx_flash.layout.load import check_adapter, mismatch_explained, model_name
from mlx_flash.model import FlashLLM


def load(
    path_or_hf_repo: str,
    config: FlashConfig | None = None,
    *,
    adapter_path: str | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    group: mx.distributed.Group | None = None,
) -> tuple[FlashLLM, Any]:
    """Load a model and its tokenizer, like ``mlx_lm.load``.

    Args:
        path_or_hf_repo: a model directory, or a Hugging Face repository that is downloaded first.
        config: how to stream; None takes what environment and settings file say (:meth:`FlashConfig.resolve`).
        adapter_path: folder of a LoRA or DoRA adapter to apply.
        tokenizer_config: settings of the tokenizer.
        model_config: entries that replace those of ``config.json``.
        revision: of the repository.
        progress: called with (bytes done, bytes to do) while pinned weights are read, and before, the first time that
            a checkpoint is loaded which mlx-lm rearranges, while the rearranged weights are written to the cache.
        group: ranks that share the model, such as ``mx.distributed.init()``. All of them load it, call it with the same
            tokens, and get the same logits.

    Returns:
        The model and mlx-lm's tokenizer wrapper; ``mlx_lm.stream_generate`` and its kin take both as they are.

    Raises:
        CheckpointError: the model directory is not a usable checkpoint.
        ConfigError: a setting is wrong; BudgetError when the budget is too small.
    """
    config = config or FlashConfig.resolve()
    path = resolve(path_or_hf_repo, revision)
    tokenizer = load_tokenizer(path, tokenizer_config, config)
    model, _ = load_model(
        path, config, adapter_path=adapter_path, model_config=model_config, progress=progress, group=group
    )
    model.belongs_with(tokenizer, stream_generate)
    return model, tokenizer


def load_model(
    model_path: Path | str,
    config: FlashConfig | None = None,
    *,
    adapter_path: str | None = None,
    model_config: dict[str, Any] | None = None,
    progress: Progress | None = None,
    group: mx.distributed.Group | None = None,
    needed_context: int | None = None,
) -> tuple[FlashLLM, dict[str, Any]]:
    """Load a model from a directory, like ``mlx_lm.utils.load_model``; no tokenizer is needed.

    Args:
        needed_context: tokens of prompt and answer, if the caller knows them.
        model_path, config, adapter_path, model_config, progress, group: as in :func:`load`.

    Raises: as :func:`load`.

    Returns:
        The model and its configuration.
    """
    config = config or FlashConfig.resolve()
    if not config.enabled:
        raise ConfigError("enabled is False, which leaves models to mlx-lm. Hint: load this one with mlx_lm.load.")
    prepared = prepare(model_path, config, model_config, progress=progress, group=group, needed_context=needed_context)
    model = FlashLLM(prepared, config, model_name(model_path))
    try:
        if adapter_path is not None:
            apply_adapter(model, adapter_path)
        model.start(progress)
    except BaseException:
        model.close()  # as long as it waits for its first call, it shares the budget
        raise
    return model, prepared.loaded.config


def apply_adapter(model: nn.Module, folder: str) -> None:
    """Apply a LoRA or DoRA adapter, or a full fine-tune, as ``mlx_lm.load`` does.

    Raises:
        CheckpointError: its files are damaged, or it is another model's.
    """
    check_adapter(Path(folder))
    with mismatch_explained(Path(folder)):
        mlx_lm_utils.load_adapters(model, folder)
    model.eval()  # new layers train, and drop out


class FlashManager:
    """The models that a program loads with the same settings: those given, or of environment and settings file.

    All models of a process share one budget.

    Attributes:
        models: the models that it loaded and did not close.
    """

    def __init__(self, config: FlashConfig | None = None) -> None:
        self.config = config
        self.models: list[FlashLLM] = []

    @staticmethod
    def of_process() -> ModelManager:
        """Return the manager of all models of this process."""
        return ModelManager.of_process()

    def load(self, path_or_hf_repo: str | Path, **options: Any) -> tuple[FlashLLM, Any]:
        """Load a model and its tokenizer, as :func:`mlx_flash.load` with the manager's settings."""
        model, tokenizer = load(str(path_or_hf_repo), self.config, **options)
        self.models.append(model)
        return model, tokenizer

    def shutdown(self) -> None:
        """Close the models that this manager loaded. Harmless when repeated."""
        while self.models:
            self.models.pop().close()

    def __enter__(self) -> FlashManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class FlashGenerationLoop:
    """A streamed model and its tokenizer, from prompts to text.

    Args:
        model: a streamed model; or a folder or repository, which is loaded.
        tokenizer: of the model. After a path, the settings may stand in its place.
        config: how to stream a model that is loaded here.

    Attributes:
        flash_model: the streamed model.
        tokenizer: its tokenizer.

    Raises:
        ConfigError: a model without a tokenizer, or settings for a model that streams already.
    """

    def __init__(self, model: FlashLLM | str | Path, tokenizer: Any = None, config: FlashConfig | None = None) -> None:
        if isinstance(tokenizer, FlashConfig):
            tokenizer, config = None, tokenizer
        if isinstance(model, str | Path):
            self.flash_model, loaded = load(str(model), config)
            self.tokenizer = tokenizer or loaded
            return
        if tokenizer is None or config is not None:
            raise ConfigError(
                "FlashGenerationLoop takes a streamed model and its tokenizer, or a path and settings. Hint: "
                "model, tokenizer = mlx_flash.load(path, config)"
            )
        self.flash_model, self.tokenizer = model, tokenizer

    def stream_generate(self, prompt: str | list[int], **options: Any) -> Iterator[str]:
        """Yield the text that follows a prompt, in parts.

        Args:
            options: as of :func:`mlx_flash.stream_generate`, such as ``max_tokens`` and ``sampler``.
        """
        for response in stream_generate(self.flash_model, self.tokenizer, prompt, **options):
            yield response.text

    def shutdown(self) -> None:
        """Close the model. Harmless when repeated."""
        self.flash_model.close()
