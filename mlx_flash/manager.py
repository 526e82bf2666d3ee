"""``FlashManager`` and ``FlashGenerationLoop``: loading, generating and closing in one object each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_flash.config import FlashConfig
from mlx_flash.engine.modelmanager import ModelManager
from mlx_flash.errors import ConfigError
from mlx_flash.generation import stream_generate
from mlx_flash.loading import load
from mlx_flash.model import FlashLLM


class FlashManager:
    """The models that a program loads with the same settings. All models of a process share one budget.

    Args:
        config: how to stream; None takes the settings of the environment and the settings file.

    Attributes:
        config: as given.
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
            prompt: text or tokens.
            options: as of :func:`mlx_flash.stream_generate`, such as ``max_tokens`` and ``sampler``.
        """
        for response in stream_generate(self.flash_model, self.tokenizer, prompt, **options):
            yield response.text

    def shutdown(self) -> None:
        """Close the model. Harmless when repeated."""
        self.flash_model.close()
