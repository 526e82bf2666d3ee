"""Prefixes of prompts on disk, for every later session and process.

A page's name covers all that decides its bytes, so sessions share pages without knowing of each other. A fault of the
disk costs a page, or the storing of new ones, and a warning; never a run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from mlx_flash.errors import ClosedError, ReadError
from mlx_flash.kv.options import PAGE_TOKENS
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.prefixes.folder import PageFolder
from mlx_flash.prefixes.pages import (
    Blob,
    PageFile,
    PageKey,
    Place,
    Tokens,
    encode_page,
    full_pages,
    page_names,
    root_name,
    snapshot_name,
)

QUEUE_BYTES = 64 << 20
"""Two pages of an 8B model at 16 bits."""

REASONS = ("stopped", "parent", "queue", "room", "wear")
"""Reasons for not storing a page: storing has stopped, the page before it is missing, too much waits to be written, the
disk or the limit is full, the cap of daily writes is reached."""

_WARNINGS = {
    "room": "the disk, or the cache's share of it, is full, and all of its pages are in use.",
    "wear": "the cap of today's disk writes is reached. Hint: it is ssd_write_gb_per_day.",
}
"""Texts for reasons that users can change."""

_log = logging.getLogger("mlx_flash")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cached prefix of a prompt: with how many tokens its pages end, and the names of pages and snapshot, if any."""

    ends: tuple[int, ...] = ()
    pages: tuple[str, ...] = ()
    snapshot: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens it covers."""
        return self.ends[-1] if self.ends else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its pages and of its snapshot."""
        return (*self.pages, self.snapshot) if self.snapshot else self.pages


class PageWriter:
    """A queue of pages and the thread that writes them. Threads may share it."""

    def __init__(self, folder: PageFolder, governor: WriteGovernor, queue_bytes: int) -> None:
        self._folder = folder
        self._governor = governor
        self._queue_bytes = queue_bytes
        self._pending: dict[str, int] = {}
        self._changed = threading.Condition()
        self._executor = ThreadPoolExecutor(1, "mlx-flash-prefixes")
        self._is_closed = False
        self._counts: Counter[str] = Counter()

    def put(self, key: PageKey, blobs: Mapping[str, Blob], *, waits: bool, only_new: bool) -> bool:
        """Queue a page, see :meth:`PrefixStore.put`."""
        nbytes = sum(memoryview(blob.data).nbytes for blob in blobs.values())
        with self._changed:
            if self._has(key.page):
                return not only_new
            reason = self._reason_against(key, nbytes)
            if not reason and waits and nbytes <= self._queue_bytes:
                self._changed.wait_for(lambda: self._is_closed or self._fits(nbytes))
            if not reason and (self._is_closed or not self._fits(nbytes)):
                reason = "queue"
            self._count(reason)
            if reason:
                return False
            copies = {name: blob._replace(data=bytes(blob.data)) for name, blob in blobs.items()}
            self._pending[key.page] = nbytes
            self._executor.submit(self._write, key, copies).add_done_callback(Future.result)  # raises what it raised
            return True

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty, at most so many seconds. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """Write what is queued, and end the thread. Further calls do nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._executor.shutdown()

    def telemetry(self) -> dict[str, int]:
        """Return how many pages were stored and not stored, by reason, and the bytes that wait."""
        with self._changed:
            refused = {f"refused_{reason}": self._counts[reason] for reason in REASONS}
            return {"queued_bytes": sum(self._pending.values()), "stored": self._counts["stored"], **refused}

    def _has(self, page: str) -> bool:
        return page in self._pending or self._folder.listing.has(page)

    def _fits(self, nbytes: int) -> bool:
        return sum(self._pending.values()) + nbytes <= self._queue_bytes

    def _reason_against(self, key: PageKey, nbytes: int) -> str:
        if not self._folder.is_writable:
            return "stopped"
        if key.parent and not self._has(key.parent):
            return "parent"
        return "" if self._governor.may_write(sum(self._pending.values()) + nbytes) else "wear"

    def _count(self, reason: str) -> None:
        """Count a page that is not stored. Warn about the first one of a reason that users can change."""
        self._counts[reason] += 1
        if self._counts[reason] == 1 and reason in _WARNINGS:
            _log.warning("%s: pages are not stored for now: %s", self._folder.path, _WARNINGS[reason])

    def _write(self, key: PageKey, blobs: Mapping[str, Blob]) -> None:
        reason = ""
        try:
            if self._folder.is_writable:
                reason = self._folder.add(encode_page(key, blobs), self._governor.claim) or "stored"
            else:
                reason = "stopped"
        except OSError as error:
            self._folder.stop(error)
            reason = "stopped"
        finally:
            with self._changed:
                self._count(reason)
                del self._pending[key.page]
                self._changed.notify_all()


class PrefixStore(AbstractContextManager["PrefixStore"]):
    """The pages of one model and one kind of cache, in a directory shared with other models, tenants and processes.

    Threads may share a store. Close it; a process that ends without closing does no harm. After :meth:`close`, methods
    raise :class:`ClosedError`.

    Args:
        directory: of the prefix cache; made if it is missing.
        model: fingerprint of all that decides what the model computes.
        settings: digest of all that decides how its cache keeps it: dtype, quantization, step.
        tenant: different tenants share nothing.
        title: name of the model, for people.
        limit_bytes: the most that all pages in the directory may take; None for no limit but the disk.
        free_space_floor: bytes of the disk that are left free; None for a tenth of it.
        governor: counts writes and caps them.
        page_tokens: tokens of a page.
        queue_bytes: the most that may wait to be written; pages beyond it are not stored.
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
        self._lock = threading.Lock()
        self._pins: list[tuple[Prefix, int]] = []
        self._num_damaged = 0
        self._is_closed = False
        self._folder = PageFolder(directory, limit_bytes, free_space_floor)
        if not governor.zero_write:
            try:
                self._folder.open()
            except OSError as error:
                self._folder.stop(error)
        self._writer = PageWriter(self._folder, governor, queue_bytes)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_writable(self) -> bool:
        """True while pages are still stored."""
        return self._folder.is_writable

    def find(self, tokens: Tokens, *, snapshot: str = "", ends: Sequence[int] | None = None) -> Prefix:
        """Return the longest cached prefix of a prompt.

        Args:
            tokens: of the prompt.
            snapshot: a kind of snapshot that the prefix must end with.
            ends: with how many tokens each page ends; None for pages of ``page_tokens``.
        """
        self._check_open()
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        names = page_names(self._root, tokens, ends)
        count = self._folder.listing.num_leading(names)
        if not snapshot:
            return Prefix(tuple(ends[:count]), tuple(names[:count]))
        for length in range(count, 0, -1):
            name = snapshot_name(names[length - 1], snapshot)
            if self._folder.listing.has(name):
                return Prefix(tuple(ends[:length]), tuple(names[:length]), name)
        return Prefix()

    def read(self, page: str, allocate: Callable[[Place], Mapping[str, memoryview]]) -> bool:
        """Read a page or snapshot into the caller's memory, and check it.

        ``allocate`` returns writable memory for every blob that is wanted, by name. Return False if the page is not
        cached any more. A damaged page is removed with all that follow it.
        """
        self._check_open()
        if not self._folder.listing.has(page):
            return False
        try:
            with PageFile(self._folder.path, page) as file:
                for name, view in allocate(file.place).items():
                    file.read_into(name, view)
                return True
        except FileNotFoundError:
            self._folder.drop(page)  # another process removed it
        except ReadError as error:
            count = self._folder.drop(page)
            with self._lock:
                self._num_damaged += 1
            _log.warning("%s. It is not used, nor the %d pages that follow it.", error, count)
        except OSError as error:
            _log.warning("cannot read page %s in %s: %s", page, self._folder.path, error.strerror or error)
        return False

    def pin(self, prefix: Prefix) -> Prefix:
        """Keep a prefix from being evicted until it is released, the store is closed, or the process ends.

        Return the part of it that is still cached, to be released later. A shorter part has no snapshot.
        """
        self._check_open()
        count, fd = self._folder.hold(prefix.names)
        if count < len(prefix.names):
            count = min(count, len(prefix.pages))
            prefix = Prefix(prefix.ends[:count], prefix.pages[:count])
        if fd is not None:
            with self._lock:
                self._pins.append((prefix, fd))
        return prefix

    def release(self, prefix: Prefix) -> None:
        """Release what :meth:`pin` returned. Does nothing after the store was closed."""
        with self._lock:
            if self._is_closed or not prefix.pages:
                return
            number = next((i for i, (pinned, _) in enumerate(self._pins) if pinned == prefix), None)
            if number is None:
                raise ValueError(f"a prefix of {prefix.num_tokens} tokens is released that is not pinned")
            os.close(self._pins.pop(number)[1])

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
        """Store a page, or a snapshot at its end, in the background.

        A page that exceeds the queue, the limits or the day's writes is not stored, nor are those that follow it.

        Args:
            tokens: of the sequence, at least up to the page's last one.
            page_index: how many pages come before it.
            blobs: what to store, by name; copied unless they are ``bytes``.
            snapshot: the kind of snapshot; empty for the page itself.
            ends: with how many tokens each page ends; None for pages of ``page_tokens``.
            waits: whether to wait for room in the queue, unless it is too small for this page alone.
            only_new: whether a page that is cached or queued already counts as not stored, because the same name may
                stand for bytes that were computed in another way.

        Returns:
            Whether it is cached, or queued.
        """
        self._check_open()
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        return self._writer.put(self._key(tokens, ends, page_index, snapshot), blobs, waits=waits, only_new=only_new)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty, at most so many seconds. Return whether it is."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Write what is queued, release what is pinned, and end the thread. Further calls do nothing."""
        self._writer.close()
        with self._lock:
            self._is_closed = True
            while self._pins:
                os.close(self._pins.pop()[1])

    def telemetry(self) -> dict[str, int]:
        """Return how many pages were stored, not stored by reason, damaged, and are pinned; uses no disk."""
        with self._lock:
            pinned = {name for prefix, _ in self._pins for name in prefix.names}
            return {**self._writer.telemetry(), "damaged": self._num_damaged, "pinned_pages": len(pinned)}

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the prefix cache in {self._folder.path.parent} was closed")

    def _key(self, tokens: Tokens, ends: Sequence[int], page_index: int, snapshot: str) -> PageKey:
        if not 0 <= page_index < len(ends) or ends[page_index] > len(tokens):
            raise ValueError(f"page {page_index} ends with a token that is not given: there are {len(tokens)}")
        names = page_names(self._root, tokens, ends[: page_index + 1])
        if snapshot:
            names.append(snapshot_name(names[-1], snapshot))
        count = 0 if snapshot else ends[page_index] - (ends[page_index - 1] if page_index else 0)
        return PageKey(names[-1], "".join(names[-2:-1]), snapshot, page_index, count, self._model, self._title)
