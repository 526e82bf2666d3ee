"""Downloads of models from Hugging Face into its cache folder. Files that are complete are kept.

``python -m mlx_flash.layout.download NAME`` prints its progress as lines of JSON. Its end ends the download.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils.tqdm import tqdm
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlx_flash.errors import CheckpointNotFoundError, ConfigError, FlashError, ReadError
from mlx_flash.files import free_bytes
from mlx_flash.layout import hub
from mlx_flash.storage.safetensors import read_checkpoint


def is_downloaded(name: str) -> bool:
    """Return whether all files of a repository are on this machine. Hugging Face is not asked."""
    try:
        read_checkpoint(Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, local_files_only=True)))
    except hub.NOT_FOUND_ERRORS:
        return False
    return True


def missing_bytes(name: str, revision: str | None = None) -> int:
    """Return the bytes of the files that are not downloaded yet.

    Raises:
        CheckpointNotFoundError: Hugging Face has no such model, or cannot be reached.
        ConfigError: the disk has no room for them.
    """
    hub.check_name(name)
    try:
        files = snapshot_download(name, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True)
    except hub.NOT_FOUND_ERRORS as error:
        raise hub.not_found(name, error) from error
    nbytes = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    if nbytes > (free := free_bytes(cache)):
        raise ConfigError(
            f"{name}: {nbytes / 1e6:.0f} MB do not fit the disk of {cache}, which has {free / 1e6:.0f} MB free. "
            "Hint: set HF_HUB_CACHE to a folder on another disk, or remove models with `mlx-flash rm`."
        )
    return nbytes


def download(name: str, revision: str | None = None, bar: type[tqdm] | None = None) -> Path:
    """Download a model, and return its folder.

    Args:
        name: the repository.
        revision: of it; None for the newest.
        bar: class of the progress bars; None takes Hugging Face's own.

    Raises:
        ReadError: the download broke off.
    """
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS, tqdm_class=bar)
    except hub.DOWNLOAD_ERRORS as error:
        raise ReadError(
            f"the download of {name} broke off: {' '.join(str(error).split())}. Hint: the same command goes on, "
            "and keeps every file that is complete."
        ) from error
    return Path(folder)


def main(name: str) -> None:
    """Download a model. Print ``completed`` and ``total`` bytes at times, and ``error`` with a ``status`` of HTTP."""
    most, lock = 0, threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, unit: str = "it", **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self.counts_bytes = unit == "B"

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most  # of bytes received, and of those written
            with lock:  # several files are downloaded at the same time
                self.n += n or 0
                if self.counts_bytes and self.n > most:
                    most = min(int(self.n), total)
                    print(json.dumps({"completed": most, "total": total}), flush=True)
            return None

    try:
        total = missing_bytes(name)
        download(name, bar=Bar)
    except FlashError as error:
        status = 404 if isinstance(error, CheckpointNotFoundError) else 500
        print(json.dumps({"error": str(error), "status": status}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
