"""Prefixes on disk whose bytes are made from their tokens, so that a wrong page is told from the page alone.

Processes of `test_kv_store.py` import it too, each of which would spend a third of a second on pytest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from mlx_flash.kv.disk import WriteGovernor
from mlx_flash.prefixes.store import Blob, Prefix, PrefixStore, encode_page, list_prefixes, path_of
from mlx_flash.prefixes.store import clear_prefixes as clear_prefixes

STEP = 4
"""Tokens of a page."""

TOKENS = list(range(100, 100 + 6 * STEP))


def content(tokens: Sequence[int], name: str, nbytes: int = 1000) -> bytes:
    seed = hashlib.sha256(json.dumps([list(map(int, tokens)), name]).encode()).digest()
    return (seed * (nbytes // 32 + 1))[:nbytes]


def blobs(tokens: Sequence[int], nbytes: int = 1000) -> dict[str, Blob]:
    return {
        name: Blob(content(tokens, name, nbytes), "bfloat16", (1, STEP, nbytes // 2 // STEP)) for name in ("k0", "v0")
    }


def page_of(page: str, blobs: dict[str, Blob], title: str = "") -> bytes:
    """Return the file of a page."""
    return b"".join(encode_page({"page": page, "tokens": STEP, "model": "m", "title": title}, blobs))


PAGE_BYTES = len(page_of("1" * 64, blobs(TOKENS[:STEP])))
"""Of the file of a page of :func:`blobs`."""


def put(store: PrefixStore, tokens: Sequence[int], pages: Sequence[int] | None = None) -> list[bool]:
    """Puts the pages of a sequence and waits until they are written."""
    numbers = range(len(tokens) // STEP) if pages is None else pages
    taken = [bool(store.put(tokens, i, blobs(tokens[: (i + 1) * STEP]))) for i in numbers]
    store.flush()
    return taken


def read_all(store: PrefixStore, tokens: Sequence[int], prefix: Prefix) -> int:
    """How many pages of a prefix are there; whatever is there must be right."""
    assert prefix.num_tokens == STEP * len(prefix.pages) == STEP * len(prefix.ends)
    for i, page in enumerate(prefix.pages):
        found = read(store, page)
        if found is None:
            return i
        assert found == {name: blob.data for name, blob in blobs(tokens[: (i + 1) * STEP]).items()}
    return len(prefix.pages)


def read(store: PrefixStore, page: str) -> dict[str, bytes] | None:
    """Return all blobs of a page; None if it is not cached any more."""
    found = store.read(page)
    return None if found is None else {name: bytes(blob.data) for name, blob in found.items()}


def stats(store: PrefixStore) -> dict[str, Any]:
    """Return the store's telemetry, what it has on disk, and what was written."""
    models = list_prefixes(store.folder.parent)
    on_disk = {"pages": sum(model.pages for model in models), "bytes": sum(model.nbytes for model in models)}
    return {**store.telemetry(), **on_disk, "writes": store._governor.telemetry()}


def found(store: PrefixStore, tokens: Sequence[int]) -> int:
    """How many pages of a sequence are found, all of which are read and right."""
    prefix = store.find(tokens)
    assert read_all(store, tokens, prefix) == len(prefix.pages)
    return len(prefix.pages)


class Store(PrefixStore):
    """A store whose pages have ``STEP`` tokens, unless it is told where they end."""

    def find(self, tokens: Any, ends: Sequence[int] | None = None) -> Prefix:
        return super().find(tokens, range(STEP, len(tokens) + 1, STEP) if ends is None else ends)

    def put(self, tokens: Any, page_index: int, blobs: Any, ends: Sequence[int] | None = None) -> bool:
        return super().put(tokens, page_index, blobs, range(STEP, len(tokens) + 1, STEP) if ends is None else ends)


class Opener:
    """Opens stores in one directory and closes them in the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()

    def __call__(self, *, leaves_free: int | None = 0, **options: Any) -> Store:
        """Open a store that leaves so many bytes of the disk free; None for the share that users get."""
        governor = options.pop("governor", None) or WriteGovernor()
        defaults = {"model": "m", "settings": "fp16", "limit_bytes": 1 << 40, "queue_bytes": 64 << 20}
        store = self._stack.enter_context(closing(Store(self.directory, governor=governor, **(defaults | options))))
        store._free_floor = store._free_floor if leaves_free is None else leaves_free
        return store

    def close(self) -> None:
        self._stack.close()

    def path(self, page: str) -> Path:
        return path_of(self.directory / "pages", page)

    def files(self) -> list[Path]:
        return sorted((self.directory / "pages").iterdir())
