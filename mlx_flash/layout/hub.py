"""Models of Hugging Face: their names, downloads into its cache folder, and its errors. Complete files are kept."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlx_flash.config import did_you_mean
from mlx_flash.errors import CheckpointNotFoundError, ConfigError, ReadError
from mlx_flash.files import free_bytes
from mlx_flash.layout.names import known_models
from mlx_flash.storage.safetensors import read_checkpoint

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
    """Refuse (CheckpointNotFoundError) a name of Ollama, which cannot be one of Hugging Face."""
    if found := _OLLAMA.fullmatch(name):
        raise CheckpointNotFoundError(
            f"{name!r} is a name of Ollama, not of a folder or Hugging Face repository. Hint: look for {found[1]} in "
            f"MLX's format at https://huggingface.co/mlx-community, and give the whole name, such as {_EXAMPLE}."
        )


def not_found(name: str, error: Exception) -> CheckpointNotFoundError:
    """Return the error for a model that is no folder, and that Hugging Face does not give."""
    found = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error  # of a dry run
    words = "Hugging Face has no such model here: " + " ".join(str(found).split()).rstrip(".")
    if constants.HF_HUB_OFFLINE:
        words = "HF_HUB_OFFLINE is set, and no such model was downloaded before"
    elif isinstance(found, DOWNLOAD_ERRORS) and not isinstance(found, HfHubHTTPError):
        words = f"Hugging Face cannot be reached: {type(found).__name__}"
    return CheckpointNotFoundError(
        f"there is no directory {name!r}; {words}. Hint: names are "
        f"NAMESPACE/NAME, such as {_EXAMPLE}; private and gated models need `hf auth login`"
        + did_you_mean(name, known_models())
    )


def is_downloaded(name: str) -> bool:
    """Return whether all files of a repository are on this machine. Hugging Face is not asked."""
    try:
        read_checkpoint(Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, local_files_only=True)))
    except NOT_FOUND_ERRORS:
        return False
    return True


def missing_bytes(name: str, revision: str | None = None) -> int:
    """Return the bytes of the files that are not downloaded yet.

    Raises: CheckpointNotFoundError: it is not to be had. ConfigError: the disk has no room.
    """
    check_name(name)
    try:
        files = snapshot_download(name, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True)
    except NOT_FOUND_ERRORS as error:
        raise not_found(name, error) from error
    nbytes = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    if nbytes > (free := free_bytes(cache)):
        raise ConfigError(
            f"{name}: {nbytes / 1e6:.0f} MB do not fit the disk of {cache}, which has {free / 1e6:.0f} MB free. "
            "Hint: set HF_HUB_CACHE to a folder on another disk, or remove models with `hf cache rm`."
        )
    return nbytes


def download(name: str, revision: str | None = None) -> Path:
    """Download a model, and return its folder. Raises: ReadError: the download broke off."""
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS)
    except DOWNLOAD_ERRORS as error:
        raise ReadError(
            f"the download of {name} broke off: {' '.join(str(error).split())}. Hint: the same command goes on, "
            "and keeps every file that is complete."
        ) from error
    return Path(folder)
