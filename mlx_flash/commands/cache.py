"""``mlx-flash cache``: downloaded models, and the data that mlx-flash keeps on disk and can make again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TextIO

from huggingface_hub import CacheNotFound, scan_cache_dir
from rich.table import Table

from mlx_flash.commands.common import print_json, print_rich
from mlx_flash.commands.report import Json
from mlx_flash.convert.copies import Copy, derived_directory, list_copies, remove
from mlx_flash.monitor.words import size
from mlx_flash.prefixes.cache import prefix_directory
from mlx_flash.prefixes.folder import StoredModel, clear_prefixes, list_prefixes
from mlx_flash.storage.probe import _load_profiles, _profiles_file

DAY = 24 * 3600


def cache(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash cache list`` or ``clear``."""
    return (_clear if args.action == "clear" else _list)(args, out)


def _list(args: argparse.Namespace, out: TextIO) -> int:
    copies, prefixes = list_copies(), list_prefixes(prefix_directory())
    disks, models = sorted(_load_profiles()), list_models()
    if args.json:
        lists = {"copies": [_copy_json(copy) for copy in copies], "disks": disks, "models": models}
        _print_lists({**lists, "prefixes": [asdict(model) for model in prefixes]}, (*copies, *prefixes), out)
        return 0
    _print_rows([(_model(copy), size(copy.nbytes), _when(copy), copy.source) for copy in copies], out)
    print(f"{_copies_in_words(copies)} in {derived_directory()}; {len(disks)} remembered disk profiles", file=out)
    rows = [
        (m.title, size(m.nbytes), f"{m.tokens} tokens in the prefix cache", _days_ago(m.last_used)) for m in prefixes
    ]
    _print_rows(rows, out)
    print(f"{_prefixes_in_words(prefixes)} in {prefix_directory()}", file=out)
    _print_rows([(model["model"], size(model["bytes"]), _days_ago(model["last_used"])) for model in models], out)
    total = size(sum(model["bytes"] for model in models))
    print(f"{_counted(models, 'model')} of {total} downloaded from Hugging Face; clear keeps them", file=out)
    return 0


def list_models() -> list[Json]:
    """Return the models in the cache of Hugging Face that have safetensors files, the largest first."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [
        {
            "model": repo.repo_id,
            "bytes": repo.size_on_disk,
            "last_used": repo.last_accessed,
            "folder": str(repo.repo_path),
        }
        for repo in repositories
        if any(file.file_name.endswith(".safetensors") for revision in repo.revisions for file in revision.files)
    ]
    return sorted(models, key=lambda model: -model["bytes"])


def _clear(args: argparse.Namespace, out: TextIO) -> int:
    copies, disks = list_copies(), sorted(_load_profiles())
    removed = [copy for copy in copies if remove(copy)]
    kept = [copy for copy in copies if copy not in removed]
    prefixes, in_use = _clear_prefixes()
    _profiles_file().unlink(missing_ok=True)
    if args.json:
        lists: Json = {"removed": [_copy_json(copy) for copy in removed], "kept": [_copy_json(copy) for copy in kept]}
        _print_lists(
            {**lists, "disks": disks, "prefixes": [asdict(model) for model in prefixes]}, (*removed, *prefixes), out
        )
        return 0
    for copy in removed:
        print(f"removed {size(copy.nbytes)} of {_model(copy)}: {copy.folder}", file=out)
    for copy in kept:
        print(f"kept {size(copy.nbytes)} of {_model(copy)}: in use, {copy.folder}", file=out)
    for model in in_use:
        print(f"kept {size(model.nbytes)} of the prefix cache of {model.title}: in use", file=out)
    everything = (_copies_in_words(removed), _prefixes_in_words(prefixes))
    print(f"removed {', '.join(everything)}, and {len(disks)} remembered disk profiles", file=out)
    return 0


def _clear_prefixes() -> tuple[list[StoredModel], list[StoredModel]]:
    """Clear the prefix cache. Return the removed part of each model, and the rest."""
    before = list_prefixes(prefix_directory())
    left = clear_prefixes(prefix_directory())
    rest = {model.model: model for model in left}
    removed = []
    for model in before:
        kept = rest.get(model.model)
        if kept is not None:
            counts = {name: getattr(model, name) - getattr(kept, name) for name in ("pages", "tokens", "nbytes")}
            model = replace(model, **counts)
        removed += [model] if model.pages > 0 else []
    return removed, left


def _print_lists(lists: Json, kept: Sequence[Copy | StoredModel], out: TextIO) -> None:
    places = {
        "derived_directory": str(derived_directory()),
        "prefix_directory": str(prefix_directory()),
        "disk_profiles": str(_profiles_file()),
    }
    print_json({**places, "bytes": _total(kept), **lists}, out)


def _copy_json(copy: Copy) -> Json:
    return {
        "folder": str(copy.folder),
        "model": copy.model,
        "source": copy.source,
        "bytes": copy.nbytes,
        "created": copy.created,
        "last_used": copy.last_used,
        "versions": dict(copy.versions),
        "complete": copy.is_complete,
    }


def _print_rows(rows: Sequence[tuple[str, ...]], out: TextIO) -> None:
    if rows:
        table = Table.grid(padding=(0, 2))
        for row in rows:
            table.add_row(*row)
        print_rich(table, out)


def _total(kept: Sequence[Copy | StoredModel]) -> int:
    return sum(each.nbytes for each in kept)


def _model(copy: Copy) -> str:
    return copy.model or "(cannot be read)"


def _when(copy: Copy) -> str:
    return _days_ago(copy.last_used) if copy.is_complete else "not complete"


def _days_ago(last_used: float) -> str:
    days = int((time.time() - last_used) // DAY)
    return "used today" if days < 1 else f"used {days} {'day' if days == 1 else 'days'} ago"


def _counted(things: Sequence[Any], noun: str, plural: str | None = None) -> str:
    return f"{len(things)} {noun if len(things) == 1 else plural or noun + 's'}"


def _copies_in_words(copies: Sequence[Copy]) -> str:
    return f"{_counted(copies, 'packed copy', 'packed copies')} of {size(_total(copies))}"


def _prefixes_in_words(prefixes: Sequence[StoredModel]) -> str:
    return f"{sum(model.tokens for model in prefixes)} tokens in the prefix cache of {size(_total(prefixes))}"
