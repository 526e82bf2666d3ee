"""What was computed for the beginnings of prompts, kept on disk for every later session and process.

A page is what a model's cache holds of some 256 tokens. It is named by everything that decides its bytes, so sessions
that begin alike share pages without knowing of each other, and part at the first different token. What goes wrong with
the disk costs the use of a page, or of the store, and a warning; never a run.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_flash.errors import ReadError
from mlx_flash.kv.options import PAGE_TOKENS
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.prefixes.access import StoreAccess
from mlx_flash.prefixes.files import (
    KV,
    Blob,
    PageFile,
    PageInfo,
    PageKey,
    Tokens,
    full_pages,
    page_names,
    root_name,
    snapshot_name,
)
from mlx_flash.prefixes.writer import PageWriter

QUEUE_BYTES = 64 << 20
"""Two pages of an 8B model at 16 bits."""

_log = logging.getLogger("mlx_flash")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The stored beginning of a prompt.

    Attributes:
        ends: with how many tokens each of its pages ends.
        pages: the names of its pages, the first tokens' first.
        snapshot: the name of what is kept at its end; empty unless one was asked for.
    """

    ends: tuple[int, ...] = ()
    pages: tuple[str, ...] = ()
    snapshot: str = ""

    @property
    def num_tokens(self) -> int:
        """How many leading tokens it covers."""
        return self.ends[-1] if self.ends else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Everything it consists of."""
        return (*self.pages, self.snapshot) if self.snapshot else self.pages


class PrefixStore:
    """The pages of one model and one kind of cache, in a directory that other models, tenants and processes use too.

    Threads may use a store at the same time. Pages are written behind, by a thread of the store's own. Use it in a
    ``with`` block, or close it; a process that ends without does no harm.

    Args:
        directory: of the store; made when it is not there.
        model: fingerprint of all that decides what the model computes.
        settings: digest of all that decides how its cache keeps it: dtype, quantisation, step.
        tenant: those of different tenants share nothing.
        title: the model's name, for people.
        limit_bytes: the most that all pages in the directory may take; None for no limit but the disk.
        free_space_floor: bytes of the disk that are left free; None for a tenth of it.
        governor: counts what is written, and says when it is enough.
        page_tokens: tokens of a page.
        queue_bytes: the most that may wait to be written; what comes on top is not stored.

    Attributes:
        page_tokens: tokens of a page.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: str,
        settings: str,
        governor: WriteGovernor,
        tenant: str = "",
        title: str = "",
        limit_bytes: int | None = None,
        free_space_floor: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.page_tokens = page_tokens
        self._root = root_name(model, settings, tenant, page_tokens)
        self._model, self._title = model, title
        self._limit = limit_bytes
        self._governor = governor
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()
        self._num_damaged = 0
        self._access = StoreAccess(directory, zero_write=governor.zero_write)
        self._writer = PageWriter(self._access, governor, limit_bytes, free_space_floor, queue_bytes)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_writable(self) -> bool:
        """Whether pages are still stored."""
        return self._access.is_writable

    # --- finding and reading ---

    def find(self, tokens: Tokens, *, snapshot: str = "", ends: Sequence[int] | None = None) -> Prefix:
        """The longest stored beginning of a prompt.

        Args:
            tokens: of the prompt.
            snapshot: a kind of snapshot, which has to be there at the end of what is found.
            ends: with how many tokens each page ends; None for pages of ``page_tokens``.

        Raises:
            ClosedError: the store was closed.
        """
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        names = page_names(self._root, tokens, ends)
        count = self._access.ask(lambda index: index.leading(names))
        snapshots = [snapshot_name(name, snapshot) for name in names[:count]] if snapshot else []
        if snapshot:
            found = self._access.ask(lambda index: index.existing(snapshots))
            count = max((i + 1 for i, name in enumerate(snapshots) if name in found), default=0)
        end = snapshots[count - 1] if snapshot and count else ""
        return Prefix(tuple(ends[:count]), tuple(names[:count]), end)

    def describe(self, page: str) -> PageInfo | None:
        """The blobs of a page or snapshot: dtypes, shapes, lengths; None when it is not there any more."""
        return self._read(page, lambda file: file.info)

    def read(self, page: str) -> dict[str, bytearray] | None:
        """The checked bytes of all blobs of a page or snapshot, by name; None when it is not there any more.

        One that is damaged is removed with all that follow it, with a warning.

        Raises:
            ClosedError: the store was closed.
        """
        return self._read(page, _read_all)

    def read_into(self, page: str, into: Mapping[str, memoryview]) -> bool:
        """Reads some blobs of a page or snapshot into the caller's memory, and checks them.

        Args:
            page: its name.
            into: writable memory for every blob that is wanted, by name.

        Returns:
            Whether the memory holds them; if not, the page is not there any more, as after :meth:`read`.

        Raises:
            KeyError: there is no such blob.
            ValueError: the memory has another length than the blob.
            ClosedError: the store was closed.
        """

        def read_some(file: PageFile) -> bool:
            for name, view in into.items():
                file.read_into(name, view)
            return True

        return self._read(page, read_some) is not None

    # --- keeping ---

    def pin(self, prefix: Prefix) -> Prefix:
        """Keeps a prefix from being evicted until it is released, the store is closed, or the process ends.

        Returns:
            What of it is still there, to be released later. Without its end it has no snapshot.

        Raises:
            ClosedError: the store was closed.
        """
        names = prefix.names
        if not names:
            return prefix  # nothing is written for a prompt of which nothing is known
        with self._lock:
            count = self._access.ask(lambda index: index.pin(names))
            if count < len(names):
                count = min(count, len(prefix.pages))
                prefix = Prefix(prefix.ends[:count], prefix.pages[:count])
            self._users.update(prefix.names)
        return prefix

    def release(self, prefix: Prefix) -> None:
        """Lets go of what :meth:`pin` returned; nothing is pinned any more after the store was closed.

        Raises:
            ValueError: it is not pinned.
        """
        with self._lock:
            if self._access.is_closed:
                return
            if any(self._users[name] < 1 for name in prefix.names):
                raise ValueError(f"a prefix of {prefix.num_tokens} tokens is released that is not pinned")
            self._users.subtract(prefix.names)
            unused = [name for name in prefix.names if not self._users[name]]
            for name in unused:
                del self._users[name]
            if unused:
                self._access.ask(lambda index: index.release(unused))

    def users(self, page: str) -> int:
        """How often a page is pinned by this store: the first user brings it into memory, the last one frees it."""
        with self._lock:
            return self._users[page]

    # --- storing ---

    def put(
        self,
        tokens: Tokens,
        page_index: int,
        blobs: Mapping[str, Blob],
        *,
        snapshot: str = "",
        ends: Sequence[int] | None = None,
        waits: bool = False,
        only_new: bool = False,
    ) -> bool:
        """Stores a page, or a snapshot at its end, behind the caller's back.

        Buffers are copied unless they are ``bytes``, so the caller may use the memory again at once. What does not fit
        the queue, the limits or the day's writes is not stored, and what follows it neither.

        Args:
            tokens: of the sequence, at least up to the page's last one.
            page_index: how many pages come before it.
            blobs: what to store, by name.
            snapshot: the kind of snapshot; empty for the page itself.
            ends: with how many tokens each page ends; None for pages of ``page_tokens``.
            waits: whether to wait for room in the queue, unless it is too small for this alone.
            only_new: whether one that is there already, or waits to be written, counts as not stored: where the same
                name may stand for bytes that were computed in another way.

        Returns:
            Whether it is stored, or going to be unless the disk has no room.

        Raises:
            ValueError: there are too few tokens.
            ClosedError: the store was closed.
        """
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        return self._writer.put(self._key(tokens, ends, page_index, snapshot), blobs, waits=waits, only_new=only_new)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything that was put is on disk, or was given up.

        Args:
            timeout: the most seconds to wait; None to wait as long as it takes.

        Returns:
            Whether nothing is left to be written.
        """
        return self._writer.flush(timeout)

    def clear(self) -> None:
        """Removes the pages of this model, of all its tenants, that nobody has pinned.

        Where nothing may be written, this store forgets them.
        """
        self._access.ask(lambda index: index.clear(self._model))

    def close(self) -> None:
        """Writes what is left, lets go of what is pinned, and ends the thread. Again does nothing."""
        self._writer.close()
        self._access.close()

    def written(self) -> dict[str, int]:
        """What was stored so far, and what was not, by the reason; asks no disk."""
        return self._writer.stats()

    def stats(self) -> dict[str, Any]:
        """What the store holds and did, and what was written to the disk; JSON's types."""
        models = self._access.ask(lambda index: index.models())
        with self._lock:
            return {
                "pages": sum(model.pages for model in models),
                "bytes": sum(model.nbytes for model in models),
                "limit_bytes": self._limit,
                "is_writable": self.is_writable,
                "pinned_pages": len(self._users),
                "damaged": self._num_damaged,
                **self._writer.stats(),
                "writes": self._governor.telemetry(),
            }

    # --- inside ---

    def _read(self, page: str, use: Callable[[PageFile], T]) -> T | None:
        if not self._access.ask(lambda index: index.has(page)):
            return None
        try:
            with PageFile(self._access.folder, page) as file:
                return use(file)
        except FileNotFoundError:
            self._access.ask(lambda index: index.drop(page))  # another process removed it
        except ReadError as error:
            count = self._access.ask(lambda index: index.drop(page))
            with self._lock:
                self._num_damaged += 1
            _log.warning("%s. It is not used, nor the %d pages that follow it.", error, max(count - 1, 0))
        except OSError as error:
            _log.warning("cannot read page %s in %s: %s", page, self._access.folder, error.strerror or error)
        return None

    def _key(self, tokens: Tokens, ends: Sequence[int], page_index: int, snapshot: str) -> PageKey:
        if not 0 <= page_index < len(ends) or ends[page_index] > len(tokens):
            raise ValueError(f"page {page_index} ends with a token that is not given: there are {len(tokens)}")
        names = page_names(self._root, tokens, ends[: page_index + 1])
        kind = snapshot or KV
        page = snapshot_name(names[-1], snapshot) if snapshot else names[-1]
        parent = names[-1] if snapshot else "".join(names[-2:-1])
        count = 0 if snapshot else ends[page_index] - (ends[page_index - 1] if page_index else 0)
        return PageKey(page, parent, kind, page_index, count, self._model, self._title)


def _read_all(file: PageFile) -> dict[str, bytearray]:
    found = {name: bytearray(blob.nbytes) for name, blob in file.info.blobs.items()}
    for name, data in found.items():
        file.read_into(name, memoryview(data))
    return found
