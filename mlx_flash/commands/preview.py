"""A stand-in for a repository that was not downloaded: its small files, and its shards with headers but no weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

from mlx_flash.layout.hub import NOT_FOUND_ERRORS, not_found
from mlx_flash.layout.load import METADATA_SUFFIXES
from mlx_flash.storage.safetensors import MAX_METADATA_BYTES

_SHARDS = "model*.safetensors"
_ERRORS: tuple[type[Exception], ...] = (*NOT_FOUND_ERRORS, NotASafetensorsRepoError, SafetensorsParsingError)


def is_remote(name: str) -> bool:
    """Return whether a model is neither a folder nor in the cache of Hugging Face."""
    if Path(name).exists() or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return False
    config = try_to_load_from_cache(name, "config.json")
    return not isinstance(config, str) or not any(Path(config).parent.glob(_SHARDS))


@contextmanager
def preview(repository: str, revision: str | None = None) -> Iterator[Path]:
    """Yield a folder that can be planned for. Only headers of the shards are fetched, by ranged requests.

    Raises:
        CheckpointNotFoundError: the repository cannot be reached, or has no safetensors files.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-flash-plan-") as folder:
        path = Path(folder) / repository.replace("/", "--")
        path.mkdir()
        try:
            _fetch(repository, revision, path)
        except _ERRORS as error:
            raise not_found(repository, error) from error
        yield path


def _fetch(repository: str, revision: str | None, path: Path) -> None:
    api = HfApi()
    files = api.model_info(repository, revision=revision, files_metadata=True).siblings or []
    for file in files:
        name, nbytes = file.rfilename, file.size or 0
        if "/" in name:
            continue
        if fnmatch(name, _SHARDS):
            header = api.parse_safetensors_file_metadata(repository, name, revision=revision)
            _write_shard(path / name, nbytes, header)
        elif Path(name).suffix in METADATA_SUFFIXES and nbytes <= MAX_METADATA_BYTES:
            api.hf_hub_download(repository, name, revision=revision, local_dir=path)


def _write_shard(path: Path, nbytes: int, header: Any) -> None:
    """Write a file with a header and a hole. Tensors lie where they lie in the real one.

    Args:
        path: the file.
        nbytes: size of the real one.
        header: its header, as ``HfApi.parse_safetensors_file_metadata`` returns it.
    """
    tensors = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
        for name, tensor in header.tensors.items()
    }
    end = max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
    metadata = {"__metadata__": header.metadata} if header.metadata else {}
    text = json.dumps({**metadata, **tensors}, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(nbytes - 8 - end)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
