"""``mlx-flash cache``: downloaded models, and the data that mlx-flash keeps on disk and can make again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TextIO

from huggingface_hub import CacheNotFound, scan_cache_dir
from rich.table import Table

from mlx_flash.commands.common import print_json, print_rich
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
    return (_clear if args.action == "clear" else _list)(args, out)


def _list(args: argparse.Namespace, out: TextIO) -> int:
    copies, prefixes, models = list_copies(), list_prefixes(prefix_directory()), list_models()
    disks = sorted(PROFILES.load())
    if args.json:
        lists = {"copies": _to_json(copies), "prefixes": [asdict(model) for model in prefixes], "models": models}
        print_json({**_places(), "bytes": _total(copies) + _total(prefixes), "disks": disks, **lists}, out)
        return 0
    _print_rows(((_name(c), size(c.nbytes), _when(c), c.source) for c in copies), out)
    print(f"{_in_words(copies)} in {derived_directory()}; {len(disks)} remembered disk profiles", file=out)
    _print_rows(((m.title, size(m.nbytes), f"{m.tokens} tokens", _days_ago(m.last_used)) for m in prefixes), out)
    tokens = sum(model.tokens for model in prefixes)
    print(f"{tokens} tokens in the prefix cache of {size(_total(prefixes))} in {prefix_directory()}", file=out)
    _print_rows(((m["model"], size(m["bytes"]), _days_ago(m["last_used"])) for m in models), out)
    total = f"{counted(len(models), 'model')} of {size(sum(model['bytes'] for model in models))}"
    print(f"{total} downloaded from Hugging Face; clear keeps them", file=out)
    return 0


def list_models() -> list[Json]:
    """Return the models in the cache of Hugging Face that have safetensors files, the largest first."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [
        {"model": r.repo_id, "bytes": r.size_on_disk, "last_used": r.last_accessed, "folder": str(r.repo_path)}
        for r in repositories
        if any(file.file_name.endswith(".safetensors") for revision in r.revisions for file in revision.files)
    ]
    return sorted(models, key=lambda model: -model["bytes"])


def _clear(args: argparse.Namespace, out: TextIO) -> int:
    copies, prefixes, disks = list_copies(), list_prefixes(prefix_directory()), sorted(PROFILES.load())
    removed = [copy for copy in copies if remove(copy)]
    kept = [copy for copy in copies if copy not in removed]
    in_use = clear_prefixes(prefix_directory())
    _remove_small_files()
    tokens = sum(model.tokens for model in prefixes) - sum(model.tokens for model in in_use)
    nbytes = _total(prefixes) - _total(in_use)
    if args.json:
        lists = {"removed": _to_json(removed), "kept": _to_json(kept), "prefixes": [asdict(m) for m in in_use]}
        numbers = {"bytes": _total(removed) + nbytes, "prefix_tokens": tokens, "disks": disks}
        print_json({**_places(), **numbers, **lists}, out)
        return 0
    for copy in copies:
        verb, state = ("removed", "") if copy in removed else ("kept", "in use, ")
        print(f"{verb} {size(copy.nbytes)} of {_name(copy)}: {state}{copy.folder}", file=out)
    for model in in_use:
        print(f"kept {size(model.nbytes)} of the prefix cache of {model.title}: in use", file=out)
    words = f"{tokens} tokens in the prefix cache of {size(nbytes)}"
    print(f"removed {_in_words(removed)}, {words}, and {len(disks)} remembered disk profiles", file=out)
    return 0


def _remove_small_files() -> None:
    """Remove what was measured, and what killed processes have left. The count of disk writes stays."""
    for measurements in (PROFILES, SPEEDS, SELF_TESTS, ATTENTION, HELD):
        file = measurements.file
        for path in (file, file.with_name(f"{file.name}{PARTIAL_SUFFIX}")):
            path.unlink(missing_ok=True)
    for folder in (cache_directory(), cache_directory() / "verify", sessions_directory()):
        remove_orphans(folder)
    remove_unheld(derived_directory().glob("*.lock"))


def _places() -> Json:
    places = {"derived_directory": derived_directory(), "prefix_directory": prefix_directory()}
    return {name: str(path) for name, path in {**places, "disk_profiles": PROFILES.file}.items()}


def _to_json(copies: Sequence[Copy]) -> list[Json]:
    names = {"nbytes": "bytes", "is_complete": "complete"}
    found = ({names.get(name, name): value for name, value in asdict(copy).items()} for copy in copies)
    return [{**entry, "folder": str(entry["folder"])} for entry in found]


def _print_rows(rows: Iterable[tuple[str, ...]], out: TextIO) -> None:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        print_rich(table, out)


def _total(kept: Sequence[Copy] | Sequence[StoredModel]) -> int:
    return sum(each.nbytes for each in kept)


def _name(copy: Copy) -> str:
    return copy.model or "(cannot be read)"


def _when(copy: Copy) -> str:
    return _days_ago(copy.last_used) if copy.is_complete else "not complete"


def _days_ago(last_used: float) -> str:
    days = int((time.time() - last_used) // DAY)
    return "used today" if days < 1 else f"used {counted(days, 'day')} ago"


def _in_words(copies: Sequence[Copy]) -> str:
    return f"{counted(len(copies), 'packed copy', 'packed copies')} of {size(_total(copies))}"
