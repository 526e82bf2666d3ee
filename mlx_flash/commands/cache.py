"""``mlx-flash cache``: what is kept on disk between runs, all of which can be made again."""

from __future__ import annotations

import argparse
import time
from typing import TextIO

from rich.table import Table

from mlx_flash.checkpoint.copies import Copy, derived_directory, list_copies, remove
from mlx_flash.commands.common import print_json, print_rich
from mlx_flash.config import GB
from mlx_flash.report import Json
from mlx_flash.storage.probe import _load_profiles, _profiles_file

DAY = 24 * 3600


def cache(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash cache list`` and ``clear``."""
    return (_clear if args.action == "clear" else _list)(args, out)


def _list(args: argparse.Namespace, out: TextIO) -> int:
    copies = list_copies()
    disks = _remembered_disks()
    if args.json:
        total = sum(copy.nbytes for copy in copies)
        print_json({**_places(), "bytes": total, "copies": [_to_json(copy) for copy in copies], "disks": disks}, out)
    else:
        if copies:
            print_rich(_render(copies), out)
        print(f"{_in_words(copies)} in {derived_directory()}; {len(disks)} remembered disk profiles", file=out)
    return 0


def _clear(args: argparse.Namespace, out: TextIO) -> int:
    copies = list_copies()
    removed = [copy for copy in copies if remove(copy)]
    kept = [copy for copy in copies if copy not in removed]
    disks = _remembered_disks()
    _profiles_file().unlink(missing_ok=True)
    if args.json:
        freed = sum(copy.nbytes for copy in removed)
        lists = {"removed": [_to_json(copy) for copy in removed], "kept": [_to_json(copy) for copy in kept]}
        print_json({**_places(), "bytes": freed, **lists, "disks": disks}, out)
        return 0
    for copy in removed:
        print(f"removed {copy.nbytes / GB:.2f} GB of {_model(copy)}: {copy.folder}", file=out)
    for copy in kept:
        print(f"kept {copy.nbytes / GB:.2f} GB of {_model(copy)}: in use, {copy.folder}", file=out)
    print(f"removed {_in_words(removed)}, and {len(disks)} remembered disk profiles", file=out)
    return 0


def _remembered_disks() -> list[str]:
    """Keys of the disks whose speed is known."""
    return sorted(_load_profiles())


def _places() -> Json:
    return {"derived_directory": str(derived_directory()), "disk_profiles": str(_profiles_file())}


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


def _model(copy: Copy) -> str:
    return copy.model or "(cannot be read)"


def _when(copy: Copy) -> str:
    if not copy.is_complete:
        return "not complete"
    days = int((time.time() - copy.last_used) // DAY)
    return "used today" if days < 1 else f"used {days} {'day' if days == 1 else 'days'} ago"


def _in_words(copies: list[Copy]) -> str:
    noun = "packed copy" if len(copies) == 1 else "packed copies"
    return f"{len(copies)} {noun} of {sum(copy.nbytes for copy in copies) / GB:.2f} GB"
