"""Names of models that are no folders, and the errors of Hugging Face about them."""

from __future__ import annotations

import re

from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mlx_flash.config import did_you_mean
from mlx_flash.errors import CheckpointNotFoundError
from mlx_flash.layout.names import known_models

DOWNLOAD_ERRORS: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
"""Errors of downloads: of the disk, of the connection, and of Hugging Face."""

NOT_FOUND_ERRORS: tuple[type[Exception], ...] = (*DOWNLOAD_ERRORS, ValueError)
"""Errors of looking for a model: those, and wrong names."""

_OLLAMA = re.compile(r"(?:[\w.-]+/)*([\w.-]+):([\w.-]+)")
_EXAMPLE = "mlx-community/Llama-3.2-3B-Instruct-4bit"


def is_ollama_name(name: str) -> bool:
    """Return True for a name with a tag, such as ``llama3.2:3b``."""
    return _OLLAMA.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Refuse a name of a model that cannot be one of Hugging Face.

    Raises:
        CheckpointNotFoundError: it is one of Ollama.
    """
    if found := _OLLAMA.fullmatch(name):
        raise CheckpointNotFoundError(
            f"{name!r} is a name of Ollama, not of a folder or Hugging Face repository. Hint: look for {found[1]} in "
            f"MLX's format at https://huggingface.co/mlx-community, and give the whole name, such as {_EXAMPLE}."
        )


def not_found(name: str, error: Exception) -> CheckpointNotFoundError:
    """Return the error for a model that is no folder, and that Hugging Face does not give."""
    found = error.__cause__ if isinstance(error, DryRunError) else error
    kinds: list[tuple[type | tuple[type, ...], str]] = [
        (GatedRepoError, "its licence has to be accepted. Hint: accept it on the model's page, then: hf auth login"),
        (RevisionNotFoundError, "there is no such revision"),
        (
            RepositoryNotFoundError,
            "there is no such repository, or it is private. Hint: names of repositories are NAMESPACE/NAME, such as "
            f"{_EXAMPLE}; for a private one: hf auth login",
        ),
        (HfHubHTTPError, " ".join(str(found).split())),
        (OfflineModeIsEnabled, "HF_HUB_OFFLINE is set, and the model was not downloaded before"),
        (
            (LocalEntryNotFoundError, HfHubHTTPError.__bases__[0]),  # the latter's other children: no connection
            "it was not downloaded before, and Hugging Face cannot be reached. Hint: check the name and the network "
            "(HF_HUB_OFFLINE, HF_ENDPOINT, proxies)",
        ),
    ]
    words = next((words for kind, words in kinds if isinstance(found, kind)), " ".join(str(error).split()))
    return CheckpointNotFoundError(
        f"there is no directory {name!r}, and Hugging Face has no such model here: {words}"
        + did_you_mean(name, known_models())
    )
