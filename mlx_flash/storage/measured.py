"""Measurements of this machine: small JSON files in the cache folder, with an entry for each thing measured."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_flash.files import make_private, read_regular, write_atomically
from mlx_flash.folders import cache_directory

_MOST_BYTES = 16 << 20  # of a file; an entry has some hundred


class Measurements:
    """One of the files. A fault of it costs a new measurement, never a run.

    Args:
        name: of the file.
        max_age: entries that are older, in seconds, are dropped when another one is saved.
    """

    def __init__(self, name: str, max_age: float = math.inf) -> None:
        self._name = name
        self._max_age = max_age

    @property
    def file(self) -> Path:
        """Path of the file. The environment decides on the folder."""
        return cache_directory() / self._name

    def load(self) -> dict[str, Any]:
        """Return all entries; none where the file is missing, unreadable, no regular file, or not JSON."""
        try:
            entries = json.loads(read_regular(self.file, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def save(self, key: str, entry: dict[str, Any]) -> None:
        """Add an entry, and the time."""
        now = time.time()
        kept = {name: known for name, known in self.load().items() if self._is_fresh(known, now)}
        self._write({**kept, key: {**entry, "time": now}})

    def drop(self, start: str) -> None:
        """Drop all entries whose keys begin with some text."""
        self._write({name: known for name, known in self.load().items() if not name.startswith(start)})

    def _write(self, entries: dict[str, Any]) -> None:
        with suppress(OSError):  # such as a read-only home
            make_private(self.file.parent)
            write_atomically(self.file, json.dumps(entries, indent=1))

    def _is_fresh(self, entry: object, now: float) -> bool:
        written = entry.get("time") if isinstance(entry, dict) else None
        return isinstance(written, float) and 0 <= now - written <= self._max_age
