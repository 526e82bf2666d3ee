"""``mlx-flash create``, ``show`` and ``rm``: models by name, those of Hugging Face's cache and Modelfiles."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

from huggingface_hub import CacheNotFound, scan_cache_dir
from huggingface_hub.utils.tqdm import disable_progress_bars

from mlx_flash.commands.common import make_config, note_lines, print_json
from mlx_flash.commands.modellist import Outcome, expect
from mlx_flash.commands.preview import is_remote, preview
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import CheckpointNotFoundError, ConfigError
from mlx_flash.layout import hub
from mlx_flash.modelfile.namedfiles import check_model_name, create_model, named_models
from mlx_flash.modelfile.parse import Modelfile, read_modelfile
from mlx_flash.monitor.words import counted, size
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.telemetry import Json

_ENTRIES = ("model_type", "num_hidden_layers", "hidden_size", "max_position_embeddings", "quantization")
"""The entries of ``config.json`` that are shown."""


def create(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash create``: write a Modelfile with a name."""
    check_model_name(args.name)
    modelfile = read_modelfile(args.file)
    note_lines(modelfile)
    verb = "replaced" if args.name in named_models() else "created"
    path = create_model(args.name, modelfile)
    print(f"{verb} {args.name}: {path}", file=out)
    return 0


def show(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash show``."""
    disable_progress_bars()
    path = None if Path(args.model).is_dir() else named_models().get(args.model)
    if args.modelfile:
        if path is None:
            raise ConfigError(f"show {args.model}: it is no Modelfile with a name. Hint: mlx-flash create NAME -f FILE")
        print(path.read_text(encoding="utf-8"), end="", file=out)
        return 0
    modelfile = None if path is None else read_modelfile(path)
    config = make_config(args, None if modelfile is None else modelfile.flash)
    found = {"model": args.model, "modelfile": None if modelfile is None else _describe(modelfile)}
    found |= look_at(args.model if modelfile is None else modelfile.base, config)
    if args.json:
        print_json(found, out)
    else:
        for label, words in _lines(found):
            print(f"{label:12} {words}", file=out)
    return 0


def look_at(name: str, config: FlashConfig) -> Json:
    """Return the facts about a folder or repository. Of one that is not downloaded, headers are fetched."""
    with ExitStack() as stack:
        remote = is_remote(name)
        path = stack.enter_context(preview(name)) if remote else resolve(name)
        shards = read_checkpoint(path).shards
        dtypes: Counter[str] = Counter()
        for tensor in read_checkpoint(path).tensors.values():
            dtypes[tensor.dtype] += tensor.extent.nbytes
        entries = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return {
            "base": name,
            "folder": None if remote else str(path),
            "shards": len(shards),
            "bytes": sum(dtypes.values()),
            "bytes_by_dtype": dict(dtypes.most_common()),
            "config": {key: entries[key] for key in _ENTRIES if key in entries},
            **asdict(expect(path, config)),
        }


def _describe(modelfile: Modelfile) -> Json:
    return {
        "path": str(modelfile.path),
        "system": modelfile.system,
        "parameters": modelfile.parameters.given(),
        "stop": list(modelfile.stop),
        "settings": dict(modelfile.flash),
    }


def _lines(found: Json) -> Iterator[tuple[str, str]]:
    yield "model", found["model"]
    if described := found["modelfile"]:
        yield "Modelfile", described["path"]
        yield "base", found["base"]
        for key in ("system", "parameters", "stop", "settings"):
            if value := described[key]:
                yield (
                    key,
                    str(value) if not isinstance(value, dict) else ", ".join(f"{k} {v}" for k, v in value.items()),
                )
    yield "folder", found["folder"] or "not downloaded; headers are from Hugging Face"
    dtypes = ", ".join(f"{size(nbytes)} of {dtype}" for dtype, nbytes in found["bytes_by_dtype"].items())
    yield "weights", f"{size(found['bytes'])} in {counted(found['shards'], 'file')}: {dtypes}"
    for key, value in found["config"].items():
        yield key.replace("num_hidden_", "").replace("max_position_embeddings", "context"), str(value)
    yield "plan", str(Outcome(**{field.name: found[field.name] for field in fields(Outcome)}))


@dataclass(frozen=True, slots=True)
class Removable:
    """A model that can be removed.

    Attributes:
        name: its name.
        nbytes: the disk space that becomes free.
        path: the Modelfile; None for a repository in Hugging Face's cache.
    """

    name: str
    nbytes: int
    path: Path | None = None

    def __str__(self) -> str:
        return f"{self.name} ({'Modelfile' if self.path else size(self.nbytes)})"


def remove(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash rm``: remove Modelfiles with names, and repositories from Hugging Face's cache.

    Raises:
        CheckpointNotFoundError: a name is neither.
        ConfigError: nobody can be asked.
    """
    chosen = [_find(name) for name in dict.fromkeys(args.model)]
    listed = ", ".join(map(str, chosen))
    if not args.yes and not _ask(f"remove {listed}?"):
        print("nothing was removed", file=sys.stderr)
        return 1
    for model in chosen:
        if model.path is not None:
            model.path.unlink()
        else:
            _delete_repository(model.name)
        print(f"removed {model}", file=out)
    return 0


def _find(name: str) -> Removable:
    if path := named_models().get(name):
        return Removable(name, path.stat().st_size, path)
    if Path(name).exists():
        raise ConfigError(f"rm {name}: it is a path. Hint: rm removes Modelfiles with names, and what pull downloaded.")
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        repositories = frozenset()
    for repository in repositories:
        if repository.repo_id == name and repository.repo_type == "model":
            return Removable(name, repository.size_on_disk)
    hub.check_name(name)
    raise CheckpointNotFoundError(f"rm {name}: no model of this name is on this machine. Hint: mlx-flash list")


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask. Hint: --yes removes without a question.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _delete_repository(name: str) -> None:
    """Delete all revisions of a repository."""
    cache = scan_cache_dir()
    (repository,) = (found for found in cache.repos if found.repo_id == name and found.repo_type == "model")
    cache.delete_revisions(*(revision.commit_hash for revision in repository.revisions)).execute()
