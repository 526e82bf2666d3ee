"""Prefixes of prompts on disk, for every later session and process: a folder of page files, which is its own index.

A page is cached when its file exists, so every process sees at once what others store and remove. Files are written
under one lock, so one process makes room at a time. Where there is no room for another page, those used longest ago
go first. The time of a file is its last use, a little earlier for each page that follows: so the end of a prefix goes
before its beginning. A page without those before it is not found, and goes when its time has come.

A page's name covers all that decides its bytes, so sessions share pages without knowing of each other. A fault of the
disk costs a page, or the storing of new ones, and a warning; never a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mlx_flash.errors import ReadError, WriteError
from mlx_flash.files import (
    PARTIAL_SUFFIX,
    HeldLock,
    atomic_file,
    flush_folder,
    free_bytes,
    free_floor,
    make_private,
    remove_unheld,
)
from mlx_flash.kv.disk import WriteBehind, WriteGovernor
from mlx_flash.kv.kvledger import PAGE_TOKENS
from mlx_flash.logs import log
from mlx_flash.memory.pagecache import drop_cached

MAGIC = b"MLXFKV\x00\x05"
FOLDER, SUFFIX = "pages", ".page"

_HEAD = struct.Struct("<8sQIII")
"""Magic, length of the file, length of the description, CRC-32 of the description, CRC-32 of the arrays behind it."""

Tokens = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Tokens of a sequence, ``(length,)``; or ``(length, n)`` where more than the token decides what is cached."""


class Blob(NamedTuple):
    """Bytes of an array in C order, and their type: the caller's name for it, such as ``bfloat16``."""

    data: bytes | bytearray | memoryview
    dtype: str
    shape: tuple[int, ...]


def root_name(model: str, settings: str, tenant: str) -> str:
    """Return the hash that the names of all pages of one kind of cache begin from."""
    kind = [MAGIC.hex(), model, settings, tenant, PAGE_TOKENS]
    return hashlib.blake2b(json.dumps(kind).encode(), digest_size=32).hexdigest()


def page_names(root: str, tokens: Tokens, ends: Sequence[int]) -> list[str]:
    """Return the names of the pages that end after these numbers of tokens, the first one first."""
    data = np.ascontiguousarray(tokens, dtype="<i8")
    names = []
    name, start = bytes.fromhex(root), 0
    for end in ends:
        name = hashlib.blake2b(name + data[start:end].tobytes(), digest_size=32).digest()
        names.append(name.hex())
        start = end
    return names


def path_of(folder: Path, page: str) -> Path:
    """Return the path of a page."""
    return folder / f"{page}{SUFFIX}"


def encode_page(key: Mapping[str, Any], blobs: Mapping[str, Blob]) -> list[memoryview]:
    """Return the parts of a page's file: head, description, arrays. Their bytes must not change until it is written."""
    data = [memoryview(blob.data) for blob in blobs.values()]
    data = [view.cast("B") if view.nbytes else memoryview(b"") for view in data]
    arrays = [(name, b.dtype, b.shape, len(view)) for (name, b), view in zip(blobs.items(), data, strict=True)]
    text, checksum = json.dumps({**key, "arrays": arrays}).encode(), 0
    for view in data:
        checksum = zlib.crc32(view, checksum)
    nbytes = _HEAD.size + len(text) + sum(map(len, data))
    head = _HEAD.pack(MAGIC, nbytes, len(text), zlib.crc32(text), checksum)
    return [memoryview(head), memoryview(text), *data]


def _open(folder: Path, page: str) -> BinaryIO:
    # a FIFO would wait; `open` closes what is no file, which `fdopen` leaves open
    return open(path_of(folder, page), "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


_KINDS = {"page": str, "tokens": int, "model": str, "title": str}
_FAULTS = (ValueError, TypeError, KeyError, RecursionError)
"""Errors of parsing what someone made who knows the checksums."""


def _describe(file: BinaryIO, page: str) -> tuple[dict[str, Any], int, int]:
    """Return what a page file says about itself, and length and checksum of what follows. Raises: one of _FAULTS."""
    data, size = file.read(_HEAD.size) or b"", os.fstat(file.fileno()).st_size
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise ValueError("it is no page of this version")
    _, nbytes, length, of_text, of_arrays = _HEAD.unpack(data)
    if size != nbytes or _HEAD.size + length > size:
        raise ValueError(f"it has {size} bytes, not {nbytes}")
    if zlib.crc32(text := file.read(length)) != of_text:
        raise ValueError("the checksum of its description is wrong")
    described: dict[str, Any] = json.loads(text)
    if any(type(described[name]) is not kind for name, kind in _KINDS.items()) or described["page"] != page:
        raise ValueError("it describes another page")
    return described, size - _HEAD.size - length, of_arrays


def read_page(folder: Path, page: str) -> dict[str, Blob]:
    """Return the arrays of a page. Raises: OSError; ReadError: it is damaged."""
    with _open(folder, page) as file:
        try:
            described, nbytes, checksum = _describe(file, page)
            sizes = [size for *_, size in described["arrays"]]
            if sum(sizes) != nbytes or min(sizes, default=0) < 0:
                raise ValueError(f"its arrays have {sum(sizes)} bytes, not {nbytes}")
            data, at, found = memoryview(bytearray(nbytes)), 0, dict[str, Blob]()
            if file.readinto(data) < nbytes or zlib.crc32(data) != checksum:  # type: ignore[attr-defined]
                raise ValueError("the checksum of its arrays is wrong")
            for name, dtype, shape, size in described["arrays"]:
                found[name] = Blob(data[at : at + size], dtype, tuple(shape))
                at += size
        except _FAULTS as error:
            raise ReadError(f"{path_of(folder, page)} is damaged: {error}") from error
        drop_cached(file.fileno(), 0, os.fstat(file.fileno()).st_size)  # weights need the memory
    return found


LOCK_SECONDS = 20.0
"""Longest wait for the lock. Others hold it while they write a page, so a longer wait is for a stopped process."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The pages of one model; ``last_used`` is in seconds since 1970.

    Pages that cannot be read, such as those of older versions, have an empty model and title.
    """

    model: str
    title: str
    pages: int
    tokens: int
    nbytes: int
    last_used: float


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Return time of the last use, size and path of all files, the one used longest ago first. Folders are no files."""
    found = []
    for entry in os.scandir(folder) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # it was removed meanwhile
            status = entry.stat(follow_symlinks=False)
            found += [] if stat.S_ISDIR(status.st_mode) else [(status.st_mtime_ns, status.st_size, Path(entry.path))]
    return sorted(found)


def list_prefixes(directory: Path) -> list[StoredModel]:
    """Return what a prefix cache holds of each model, the one used last first; in the end what cannot be read.

    The directory need not exist.
    """
    groups: dict[str, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for used, nbytes, path in _files(directory / FOLDER):
        if path.suffix == SUFFIX:
            with suppress(OSError), _open(path.parent, path.stem) as file:
                try:
                    described = _describe(file, path.stem)[0]
                except _FAULTS:
                    described = {"model": "", "title": "", "tokens": 0}
                groups[described["model"]].append((used, nbytes, described))
    models = [
        StoredModel(
            model,
            title=max(described["title"] for _, _, described in pages),
            pages=len(pages),
            tokens=sum(described["tokens"] for _, _, described in pages),
            nbytes=sum(nbytes for _, nbytes, _ in pages),
            last_used=max(used for used, _, _ in pages) / 1e9,
        )
        for model, pages in groups.items()
    ]
    return sorted(models, key=lambda model: (model.model != "", model.last_used), reverse=True)


def clear_prefixes(directory: Path) -> None:
    """Remove the pages of all models. Raises: WriteError."""
    try:
        for _, _, path in _files(directory / FOLDER):
            if path.suffix == SUFFIX:
                path.unlink(missing_ok=True)
            elif path.suffix == PARTIAL_SUFFIX:
                remove_unheld(path)
    except OSError as error:
        raise WriteError(f"cannot clear {directory}: {error}. Hint: check who may write there.") from error


REASONS = ("stopped", "room", "wear")
"""Reasons for not storing a page: storing has stopped, the disk or the limit is full, the cap of daily writes is
reached."""

_WARNINGS = {
    "room": "the disk, or the cache's share of it, is full.",
    "wear": "the cap of today's disk writes is reached. Hint: it is ssd_write_gb_per_day.",
}
"""Texts for reasons that users can change."""


class Prefix(NamedTuple):
    """A cached prefix of a prompt."""

    ends: tuple[int, ...] = ()  # with how many tokens its pages end
    pages: tuple[str, ...] = ()  # their names

    @property
    def num_tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def cut(self, ends: Collection[int]) -> Prefix:
        """Return the longest part of it that ends with one of these numbers of tokens."""
        count = next((number for number in range(len(self.ends), 0, -1) if self.ends[number - 1] in ends), 0)
        return Prefix(self.ends[:count], self.pages[:count])


class PrefixStore:
    """The pages of one model and one kind of cache, in a directory shared with other models, tenants and processes.

    One thread uses a store, another one of its own writes pages in the background. Close the store; a process that ends
    without closing does no harm. A closed store stores nothing.

    Attributes:
        folder: the page files of all.
        is_writable: False once nothing is stored any more; pages are still read.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: str,  # fingerprint of all that decides what it computes
        settings: str,  # all that decides how its cache keeps it: dtype, quantization, step
        governor: WriteGovernor,
        tenant: str = "",  # different ones share nothing
        title: str = "",  # name of the model, for people
        limit_bytes: int,  # the most that all pages in the directory may take
        queue_bytes: int,  # the most that may wait to be written
    ) -> None:
        self._root = root_name(model, settings, tenant)
        self._model, self._title = model, title
        self._governor = governor
        self._limit, self._free_floor = limit_bytes, 0
        self._directory, self.folder, self.is_writable = directory, directory / FOLDER, False
        if not governor.zero_write:
            try:
                make_private(self.folder)
                self._free_floor = free_floor(self.folder)
                for path in self.folder.glob(f"*{PARTIAL_SUFFIX}"):  # killed processes have left it
                    remove_unheld(path)
                self.is_writable = True
            except OSError as error:
                self._stop(error)
        self._writer = WriteBehind(queue_bytes, "prefixes")
        self._lock = threading.Lock()  # of the counts
        self._counts: Counter[str] = Counter()

    def _stop(self, error: OSError) -> None:
        """Add and remove nothing any more; pages are still read."""
        self.is_writable = False
        text = "nothing more is stored in %s: %s. Cached pages are still read. Hint: make room, or check who may write."
        log.warning(text, self._directory, str(error))  # without its traceback, which has pages

    def _has(self, page: str) -> bool:
        return os.access(f"{self.folder}/{page}{SUFFIX}", os.F_OK)  # a Path object would take ten times as long

    def find(self, tokens: Tokens, ends: Sequence[int]) -> Prefix:
        """Return the longest cached prefix of a prompt, each of whose pages ends after so many tokens.

        Pages that wait to be written are waited for, those of other prompts too: computing tokens again takes longer.
        """
        self.flush()
        names = page_names(self._root, tokens, ends)
        count = next((i for i, page in enumerate(names) if not self._has(page)), len(names))
        return Prefix(tuple(ends[:count]), tuple(names[:count]))

    def touch(self, prefix: Prefix) -> None:
        """Note that a prefix is used. Only the order of eviction depends on it."""
        now = time.time_ns()
        for number, page in enumerate(prefix.pages if self.is_writable else ()):
            with suppress(OSError):
                os.utime(path_of(self.folder, page), ns=(now - number, now - number))

    def read(self, page: str) -> dict[str, Blob] | None:
        """Return the arrays of a page; None if it is not cached any more. A damaged page is removed."""
        try:
            return read_page(self.folder, page)
        except FileNotFoundError:
            pass  # another process removed it
        except ReadError as error:
            self._drop(page)
            self._count("damaged")
            log.warning("%s. It is not used; its tokens are computed again when they are needed.", error)
        except OSError as error:
            log.warning("cannot read page %s in %s: %s", page, self.folder, error.strerror or error)
        return None

    def put(
        self,
        tokens: Tokens,
        page_index: int,  # how many pages come before it
        blobs: Mapping[str, Blob],
        ends: Sequence[int],  # with how many tokens each page ends
    ) -> bool:
        """Store a page in the background. Return whether it is cached, or queued.

        While too much is queued, the call waits. Blobs are copied, unless they exceed the queue: then the call waits
        until they are written. The writer refuses what exceeds the limits or the day's writes.
        """
        names = page_names(self._root, tokens, ends[: page_index + 1])
        if self._has(names[-1]):
            return True
        if not self.is_writable:
            self._count("stopped")
            return False
        if page_index and not self._writer.queued_bytes and not self._has(names[-2]):  # the queue first: it writes
            return False  # the page before it was refused
        nbytes = sum(memoryview(blob.data).nbytes for blob in blobs.values())
        is_large = nbytes > self._writer.limit_bytes
        self._writer.make_room(nbytes)
        if not is_large:
            blobs = {name: blob._replace(data=bytes(blob.data)) for name, blob in blobs.items()}
        num_tokens = ends[page_index] - (ends[page_index - 1] if page_index else 0)
        key = {"page": names[-1], "tokens": num_tokens, "model": self._model, "title": self._title}
        self._writer.submit(nbytes, partial(self._write, key, blobs, names))
        if is_large:
            self.flush()
        return True

    def _drop(self, page: str) -> None:
        if self.is_writable:
            try:
                path_of(self.folder, page).unlink(missing_ok=True)
            except OSError as error:
                self._stop(error)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        """Write what is queued, and end the thread. Further calls do nothing."""
        self.flush()
        self.is_writable = False
        self._writer.close()

    def telemetry(self) -> dict[str, int]:
        """Return how many pages were stored, not stored by reason, and damaged, and the bytes that wait."""
        with self._lock:
            refused = {f"refused_{reason}": self._counts[reason] for reason in REASONS}
            counts = {name: self._counts[name] for name in ("stored", "damaged")}
        return {"queued_bytes": self._writer.queued_bytes, **counts, **refused}

    def _count(self, what: str) -> None:
        """Count a page. Warn about the first one that is not stored for a reason that users can change."""
        with self._lock:
            self._counts[what] += 1
            is_first = self._counts[what] == 1
        if is_first and what in _WARNINGS:
            log.warning("%s: pages are not stored for now: %s", self.folder, _WARNINGS[what])

    def _write(self, key: Mapping[str, Any], blobs: Mapping[str, Blob], names: Sequence[str]) -> None:
        """Write a page, in the store's own thread."""
        try:
            if not self.is_writable:
                self._count("stopped")
                return
            self._count(self._add(names, encode_page(key, blobs)) or "stored")
        except OSError as error:
            self._stop(error)
            self._count("stopped")
        except BaseException:
            log.exception("a page for %s was not stored", self.folder)
            raise

    def _add(self, names: Sequence[str], parts: Sequence[memoryview]) -> str:
        """Write the last of some pages that follow one another, unless it is cached. An error leaves nothing of it.

        Return the reason why it is not cached now, of :data:`REASONS`; an empty text if it is.
        """
        nbytes = sum(map(len, parts))
        with HeldLock(self._directory / "lock", create=0o600, wait=LOCK_SECONDS):
            if self._has(names[-1]):
                return ""
            if not self._make_room(nbytes, names[:-1]):
                return "room"
            if not self._governor.claim(nbytes):
                return "wear"
            # macOS leaves it to the disk when to write what it was sent; after a loss of power checksums tell
            with atomic_file(path_of(self.folder, names[-1])) as file:
                for part in parts:
                    file.write(part)
                os.fsync(file.fd)
                drop_cached(file.fd, 0, nbytes)  # weights need the memory
            self.touch(Prefix(pages=tuple(names)))
        flush_folder(self.folder)
        return ""

    def _make_room(self, nbytes: int, spared: Sequence[str]) -> bool:
        """Evict pages until another one has room. Return whether it does. The caller has the lock.

        ``spared`` are the pages before it, which stay.
        """
        files = _files(self.folder)
        excess = nbytes + max(-self._spare_bytes(), sum(size for _, size, _ in files) - self._limit)
        kept = {f"{page}{SUFFIX}" for page in spared}
        pages = [(size, path) for _, size, path in files if path.suffix == SUFFIX and path.name not in kept]
        if excess > sum(size for size, _ in pages):
            return False  # evicting all would not be enough
        for size, path in pages:
            if excess > 0:
                path.unlink(missing_ok=True)
                excess -= size
        return nbytes <= self._spare_bytes()

    def _spare_bytes(self) -> int:
        return free_bytes(self.folder) - self._free_floor
