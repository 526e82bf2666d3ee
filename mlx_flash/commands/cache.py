"""``mlx-flash cache``: what is kept on disk between runs, all of which can be made again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TextIO

from rich.table import Table

from mlx_flash.commands.common import print_json, print_rich
from mlx_flash.commands.report import Json
from mlx_flash.config import GB
from mlx_flash.convert.copies import Copy, derived_directory, list_copies, remove
from mlx_flash.prefixes.cache import prefix_directory
from mlx_flash.prefixes.folder import StoredModel, clear_prefixes, list_prefixes
from mlx_flash.storage.probe import _load_profiles, _profiles_file

DAY = 24 * 3600


def cache(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash cache list`` and ``clear``."""
    return (_clear if args.action == "clear" else _list)(args, out)


def _list(args: argparse.Namespace, out: TextIO) -> int:
    copies = list_copies()
    prefixes = list_prefixes(prefix_directory())
    disks = _remembered_disks()
    if args.json:
        lists = {"copies": [_to_json(copy) for copy in copies], "prefixes": [asdict(model) for model in prefixes]}
        print_json({**_places(), "bytes": _total(copies, prefixes), **lists, "disks": disks}, out)
        return 0
    if copies:
        print_rich(_render(copies), out)
    print(f"{_in_words(copies)} in {derived_directory()}; {len(disks)} remembered disk profiles", file=out)
    if prefixes:
        print_rich(_render_prefixes(prefixes), out)
    print(f"{_prefixes_in_words(prefixes)} in {prefix_directory()}", file=out)
    return 0


def _clear(args: argparse.Namespace, out: TextIO) -> int:
    copies = list_copies()
    removed = [copy for copy in copies if remove(copy)]
    kept = [copy for copy in copies if copy not in removed]
    prefixes, in_use = _clear_prefixes()
    disks = _remembered_disks()
    _profiles_file().unlink(missing_ok=True)
    if args.json:
        lists = {"removed": [_to_json(copy) for copy in removed], "kept": [_to_json(copy) for copy in kept]}
        lists |= {"prefixes": [asdict(model) for model in prefixes]}
        print_json({**_places(), "bytes": _total(removed, prefixes), **lists, "disks": disks}, out)
        return 0
    for copy in removed:
        print(f"removed {copy.nbytes / GB:.2f} GB of {_model(copy)}: {copy.folder}", file=out)
    for copy in kept:
        print(f"kept {copy.nbytes / GB:.2f} GB of {_model(copy)}: in use, {copy.folder}", file=out)
    for model in in_use:
        print(f"kept {model.nbytes / GB:.2f} GB of the prefix cache of {model.title}: in use", file=out)
    everything = f"{_in_words(removed)}, {_prefixes_in_words(prefixes)}"
    print(f"removed {everything}, and {len(disks)} remembered disk profiles", file=out)
    return 0


def _clear_prefixes() -> tuple[list[StoredModel], list[StoredModel]]:
    """Clear the prefix cache. Return what was removed of each model, and what is left."""
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


def _remembered_disks() -> list[str]:
    """Keys of the disks whose speed is known."""
    return sorted(_load_profiles())


def _places() -> Json:
    return {
        "derived_directory": str(derived_directory()),
        "prefix_directory": str(prefix_directory()),
        "disk_profiles": str(_profiles_file()),
    }


def _total(*kept: Sequence[Copy | StoredModel]) -> int:
    return sum(each.nbytes for sequence in kept for each in sequence)


def _to_json(copy: Copy) -> Json:
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


def _render(copies: list[Copy]) -> Table:
    table = Table.grid(padding=(0, 2))
    for copy in copies:
        table.add_row(_model(copy), f"{copy.nbytes / GB:.2f} GB", _when(copy), copy.source)
    return table


def _render_prefixes(prefixes: list[StoredModel]) -> Table:
    table = Table.grid(padding=(0, 2))
    for model in prefixes:
        tokens = f"{model.tokens} tokens in the prefix cache"
        table.add_row(model.title, f"{model.nbytes / GB:.3f} GB", tokens, _days_ago(model.last_used))
    return table


def _prefixes_in_words(prefixes: list[StoredModel]) -> str:
    tokens = sum(model.tokens for model in prefixes)
    return f"{tokens} tokens in the prefix cache of {_total(prefixes) / GB:.3f} GB"


def _model(copy: Copy) -> str:
    return copy.model or "(cannot be read)"


def _when(copy: Copy) -> str:
    return _days_ago(copy.last_used) if copy.is_complete else "not complete"


def _days_ago(last_used: float) -> str:
    days = int((time.time() - last_used) // DAY)
    return "used today" if days < 1 else f"used {days} {'day' if days == 1 else 'days'} ago"


def _in_words(copies: list[Copy]) -> str:
    noun = "packed copy" if len(copies) == 1 else "packed copies"
    return f"{len(copies)} {noun} of {sum(copy.nbytes for copy in copies) / GB:.2f} GB"
