"""Measurements of this machine: small JSON files in the cache folder, with an entry for each thing measured."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_flash.files import make_private, read_json_object, write_atomically
from mlx_flash.folders import cache_directory

_MOST_BYTES = 16 << 20  # of a file; an entry has some hundred


class Measurements:
    """One of the files. A fault of it costs a new measurement, never a run.

    Args:
        name: of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def file(self) -> Path:
        """Path of the file. The environment decides on the folder."""
        return cache_directory() / self._name

    def load(self) -> dict[str, Any]:
        """Return all entries; none where the file is missing, unreadable, no regular file, or not JSON."""
        return read_json_object(self.file, _MOST_BYTES)

    def save(self, key: str, entry: dict[str, Any]) -> None:
        """Add an entry, and the time."""
        entries = {**self.load(), key: {**entry, "time": time.time()}}
        with suppress(OSError):  # such as a read-only home
            make_private(self.file.parent)
            write_atomically(self.file, json.dumps(entries, indent=1))
