"""``mlx-flash cache``: downloaded models, and the data that mlx-flash keeps on disk and can make again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table

from mlx_flash.commands.common import emit
from mlx_flash.commands.models import repositories
from mlx_flash.commands.report import Json
from mlx_flash.convert.derived import Copy, derived_directory, list_copies, remove
from mlx_flash.files import PARTIAL_SUFFIX
from mlx_flash.folders import cache_directory
from mlx_flash.kv.kvfiles import sessions_directory
from mlx_flash.layout.held import RESULTS as HELD
from mlx_flash.monitor.words import counted, size
from mlx_flash.prefixes.folder import StoredModel, clear_prefixes, list_prefixes
from mlx_flash.prefixes.prefixcache import prefix_directory
from mlx_flash.residency.scores import RESULTS as ATTENTION
from mlx_flash.residency.speed import SPEEDS
from mlx_flash.sessions import remove_orphans, remove_unheld
from mlx_flash.storage.probe import PROFILES
from mlx_flash.storage.selftest import RESULTS as SELF_TESTS

DAY = 24 * 3600


def cache(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash cache list`` or ``clear``."""
    copies, prefixes, disks = list_copies(), list_prefixes(prefix_directory()), sorted(PROFILES.load())
    places = {"derived_directory": derived_directory(), "prefix_directory": prefix_directory()}
    places["disk_profiles"] = PROFILES.file
    facts, words = (_clear if args.action == "clear" else _list)(copies, prefixes, len(disks))
    emit(args, {**{name: str(path) for name, path in places.items()}, "disks": disks, **facts}, words, out)
    return 0


def _list(copies: Sequence[Copy], prefixes: Sequence[StoredModel], num_disks: int) -> tuple[Json, list[RenderableType]]:
    models = list_models()
    tokens = sum(model.tokens for model in prefixes)
    table = Table.grid(padding=(0, 2))
    for copy in copies:
        when = _days_ago(copy.last_used) if copy.is_complete else "not complete"
        table.add_row(copy.model or "(cannot be read)", size(copy.nbytes), when, f"packed copy of {copy.source}")
    for model in prefixes:
        table.add_row(model.title, size(model.nbytes), _days_ago(model.last_used), f"{model.tokens} cached tokens")
    for found in models:
        table.add_row(
            found["model"], size(found["bytes"]), _days_ago(found["last_used"]), "downloaded, which clear keeps"
        )
    total = f"{counted(len(models), 'model')} of {size(sum(model['bytes'] for model in models))}"
    words: list[RenderableType] = [
        f"{_in_words(copies)} in {derived_directory()}; {num_disks} remembered disk profiles",
        f"{tokens} tokens in the prefix cache of {size(_total(prefixes))} in {prefix_directory()}",
        f"{total} downloaded from Hugging Face",
    ]
    lists = {"copies": _to_json(copies), "prefixes": [asdict(model) for model in prefixes], "models": models}
    return {"bytes": _total(copies) + _total(prefixes), **lists}, [*([table] if table.row_count else []), *words]


def list_models() -> list[Json]:
    """Return the models in the cache of Hugging Face that have safetensors files, the largest first."""
    models = [
        {"model": r.repo_id, "bytes": r.size_on_disk, "last_used": r.last_accessed, "folder": str(r.repo_path)}
        for r in repositories()
        if any(file.file_name.endswith(".safetensors") for revision in r.revisions for file in revision.files)
    ]
    return sorted(models, key=lambda model: -model["bytes"])


def _clear(
    copies: Sequence[Copy], prefixes: Sequence[StoredModel], num_disks: int
) -> tuple[Json, list[RenderableType]]:
    removed = [copy for copy in copies if remove(copy)]
    kept = [copy for copy in copies if copy not in removed]
    in_use = clear_prefixes(prefix_directory())
    _remove_small_files()
    tokens = sum(model.tokens for model in prefixes) - sum(model.tokens for model in in_use)
    nbytes = _total(prefixes) - _total(in_use)
    words: list[RenderableType] = [
        f"removed {size(copy.nbytes)} of {copy.model or '(cannot be read)'}: {copy.folder}" for copy in removed
    ]
    words += [f"kept {size(copy.nbytes)} of {copy.model}: in use, {copy.folder}" for copy in kept]
    words += [f"kept {size(model.nbytes)} of the prefix cache of {model.title}: in use" for model in in_use]
    cleared = f"{tokens} tokens in the prefix cache of {size(nbytes)}, and {num_disks} remembered disk profiles"
    lists = {"removed": _to_json(removed), "kept": _to_json(kept), "prefixes": [asdict(model) for model in in_use]}
    facts = {"bytes": _total(removed) + nbytes, "prefix_tokens": tokens, **lists}
    return facts, [*words, f"removed {_in_words(removed)}, {cleared}"]


def _remove_small_files() -> None:
    """Remove what was measured, and what killed processes have left. The count of disk writes stays."""
    for measurements in (PROFILES, SPEEDS, SELF_TESTS, ATTENTION, HELD):
        file = measurements.file
        for path in (file, file.with_name(f"{file.name}{PARTIAL_SUFFIX}")):
            path.unlink(missing_ok=True)
    for folder in (cache_directory(), cache_directory() / "verify", sessions_directory()):
        remove_orphans(folder)
    remove_unheld(derived_directory().glob("*.lock"))


def _to_json(copies: Sequence[Copy]) -> list[Json]:
    names = {"nbytes": "bytes", "is_complete": "complete"}
    found = ({names.get(name, name): value for name, value in asdict(copy).items()} for copy in copies)
    return [{**entry, "folder": str(entry["folder"])} for entry in found]


def _total(kept: Sequence[Copy] | Sequence[StoredModel]) -> int:
    return sum(each.nbytes for each in kept)


def _days_ago(last_used: float) -> str:
    days = int((time.time() - last_used) // DAY)
    return "used today" if days < 1 else f"used {counted(days, 'day')} ago"


def _in_words(copies: Sequence[Copy]) -> str:
    return f"{counted(len(copies), 'packed copy', 'packed copies')} of {size(_total(copies))}"
