"""Prefixes of prompts on disk, for every later session and process: a folder of page files, which is its own index.

A page is cached when its file exists, so every process sees at once what others store and remove. Files are added and
removed under one lock. Where there is no room for another page, those used longest ago go first. The time of a file is
its last use, a little earlier for each page that follows: so the end of a prefix goes before its beginning. A page
without those before it is not found, and goes when its time has come.

A page's name covers all that decides its bytes, so sessions share pages without knowing of each other. A fault of the
disk costs a page, or the storing of new ones, and a warning; never a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_flash.errors import ReadError, WriteError
from mlx_flash.files import (
    PARTIAL_SUFFIX,
    HeldLock,
    flush_folder,
    free_bytes,
    free_floor,
    make_private,
    remove_unheld,
    write_at,
)
from mlx_flash.kv.disk import Write, WriteBehind
from mlx_flash.kv.options import PAGE_TOKENS
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.logs import log
from mlx_flash.memory.pagecache import aligned_offsets, drop_cached, round_up

MAGIC = b"MLXFKV\x00\x04"
SUFFIX = ".page"

_HEAD = struct.Struct("<8sQII")
_LENGTHS = struct.Struct("<QI")
_FIRST_READ = 8 << 10
"""Bytes that hold nearly every description; a longer one takes a second read."""

FILE_ALIGNMENT = 4096
"""Alignment of arrays in a page file, on every machine: pages of memory may be larger."""

Tokens = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Tokens of a sequence, ``(length,)``; or ``(length, n)`` where more than the token decides what is cached."""


class Blob(NamedTuple):
    """Bytes of an array in C order, and their type: the caller's name for it, such as ``bfloat16``."""

    data: bytes | bytearray | memoryview
    dtype: str
    shape: tuple[int, ...]


class BlobInfo(NamedTuple):
    """An array in a page file. The file describes it in this order, without the offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int  # CRC-32
    offset: int


@dataclass(frozen=True, slots=True)
class PageKey:
    """The identity of a page."""

    page: str  # its name, 64 hexadecimal digits
    parent: str  # the page before it; empty for a first one
    number: int  # how many pages come before it
    tokens: int  # how many it holds
    model: str  # fingerprint of the model
    title: str  # name of the model, for people


def root_name(model: str, settings: str, tenant: str, page_tokens: int) -> str:
    """Return the hash that the names of all pages of one kind of cache begin from."""
    return hashlib.blake2b(json.dumps([model, settings, tenant, page_tokens]).encode(), digest_size=32).hexdigest()


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


def full_pages(num_tokens: int, page_tokens: int) -> range:
    """Return the ends of the pages that are full of tokens."""
    return range(page_tokens, num_tokens + 1, page_tokens)


def path_of(folder: Path, page: str) -> Path:
    """Return the path of a page."""
    return folder / f"{page}{SUFFIX}"


class EncodedPage(NamedTuple):
    """The content of a page file."""

    key: PageKey
    nbytes: int  # the length of the file
    head: bytes  # everything before the blobs
    blobs: Sequence[tuple[int, memoryview]]  # with their offsets

    def write(self, fd: int) -> None:
        """Write the whole file."""
        for offset, data in ((0, memoryview(self.head)), *self.blobs):
            write_at(fd, data.cast("B") if data.nbytes else memoryview(b""), offset)


def encode_page(key: PageKey, blobs: Mapping[str, Blob]) -> EncodedPage:
    """Return the file of a page: its description, and the blobs, whose bytes must not change until it is written."""
    data = {name: memoryview(blob.data) for name, blob in blobs.items()}
    table = [(n, b.dtype, b.shape, data[n].nbytes, zlib.crc32(data[n])) for n, b in blobs.items()]
    text = f"{json.dumps(asdict(key))}\n{json.dumps(table)}".encode()
    room = round_up(_HEAD.size + len(text), FILE_ALIGNMENT)
    *offsets, end = aligned_offsets([view.nbytes for view in data.values()], FILE_ALIGNMENT, room)
    text = text.ljust(room - _HEAD.size)
    head = _HEAD.pack(MAGIC, end, len(text), zlib.crc32(_LENGTHS.pack(end, len(text)) + text))
    return EncodedPage(key, end, head + text, [*zip(offsets, data.values(), strict=True)])


class PageFile:
    """An open page file, which is a context manager. A damaged one raises :class:`ReadError`."""

    def __init__(self, folder: Path, page: str) -> None:
        self._path = f"{folder}/{page}{SUFFIX}"  # Path objects take most of the time of a look at a folder
        self._page = page
        self._is_read = False
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait
        try:
            self.key, self._table, self._start, self._end = self._parse()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, ValueError | TypeError | RecursionError):
                raise self._damaged(f"{error}") from error
            raise

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_read:
            drop_cached(self._fd, 0, os.fstat(self._fd).st_size)  # weights need the memory
        os.close(self._fd)

    def read_into(self, name: str, into: memoryview) -> None:
        """Read a blob into writable memory of its length, and check it. Raises: ReadError: it is damaged."""
        blob = self.blobs[name]
        view = into.cast("B") if into.nbytes else memoryview(b"")
        self._is_read = True
        done = 0
        while done < blob.nbytes:
            count = os.preadv(self._fd, [view[done:]], blob.offset + done)
            if count == 0:
                raise self._damaged(f"it ends before {name!r} does")
            done += count
        if zlib.crc32(view) != blob.checksum:
            raise self._damaged(f"the checksum of {name!r} is wrong")

    @cached_property
    def blobs(self) -> dict[str, BlobInfo]:
        """The blobs in the file, by name. A scan of the whole folder does not need them."""
        blobs, offset = {}, self._start
        try:
            for name, dtype, shape, nbytes, checksum in json.loads(self._table):
                if not (isinstance(name, str) and type(nbytes) is int and 0 <= nbytes):
                    raise ValueError(f"blob {name!r} has {nbytes!r} bytes")
                if offset + nbytes > self._end:
                    raise ValueError(f"blob {name!r} ends at {offset + nbytes}, after the end of the file")
                blobs[name] = BlobInfo(name, dtype, tuple(shape), nbytes, checksum, offset)
                offset += round_up(nbytes, FILE_ALIGNMENT)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"{error}") from error
        return blobs

    def _parse(self) -> tuple[PageKey, bytes, int, int]:
        data = os.pread(self._fd, _FIRST_READ, 0)
        if len(data) < _HEAD.size or not data.startswith(MAGIC):
            raise ValueError("it is no page of this version")
        _, nbytes, length, checksum = _HEAD.unpack_from(data)
        start, size = _HEAD.size + length, os.fstat(self._fd).st_size
        if size != nbytes or start > size:
            raise ValueError(f"it has {size} bytes, not {nbytes}")
        if start > len(data):
            data = os.pread(self._fd, start, 0)
        text = data[_HEAD.size : start]
        if zlib.crc32(_LENGTHS.pack(nbytes, length) + text) != checksum:
            raise ValueError("the checksum of its description is wrong")
        line, _, table = text.partition(b"\n")
        described = {**json.loads(line)}
        described.pop("kind", None)  # earlier versions had files of their own for states: nobody looks for those
        key = PageKey(**described)
        for field in fields(key):
            if type(getattr(key, field.name)).__name__ != field.type:
                raise ValueError(f"{field.name} is not of the type {field.type}")
        if key.page != self._page:
            raise ValueError(f"it describes page {key.page}")
        return key, table, round_up(start, FILE_ALIGNMENT), size

    def _damaged(self, reason: str) -> ReadError:
        return ReadError(f"{self._path} is damaged: {reason}")


LOCK_SECONDS = 10.0
"""Longest wait for the lock. Others hold it for milliseconds, so a longer wait is for a stopped process."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The pages of one model; ``last_used`` is in seconds since 1970."""

    model: str
    title: str
    pages: int
    tokens: int
    nbytes: int
    last_used: float


class PageFolder:
    """The page files in a directory. Threads and processes may share the folder.

    The directory need not exist. ``limit`` is the most bytes of all pages; None for no limit. ``free_floor`` are bytes
    of the disk that are left free; None for a tenth of it, which :meth:`open` finds out.
    """

    def __init__(self, directory: Path, limit: int | None = None, free_floor: int | None = None) -> None:
        self.path = directory / "pages"
        self.is_writable = False  # whether pages can be added and removed: from :meth:`open` until :meth:`stop`
        self.directory = directory
        self.limit = limit
        self.free_floor = free_floor

    def open(self) -> None:
        """Make the folder writable, and remove what killed processes have left in it."""
        make_private(self.path)
        if self.free_floor is None:
            self.free_floor = free_floor(self.path)
        with self.locked():
            for path in self.path.glob(f"*{PARTIAL_SUFFIX}"):
                remove_unheld(path)
        self.is_writable = True

    def stop(self, error: OSError) -> None:
        """Add and remove nothing any more; pages are still read."""
        self.is_writable = False
        text = "nothing more is stored in %s: %s. Cached pages are still read. Hint: make room, or check who may write."
        log.warning(text, self.directory, str(error))  # without its traceback, which has pages

    def locked(self) -> AbstractContextManager[int]:
        """Hold the lock under which files are added and removed. Raises: BlockingIOError: another process has it."""
        return HeldLock(self.directory / "lock", create=0o600, wait=LOCK_SECONDS)

    def has(self, page: str) -> bool:
        """Return whether a page is cached."""
        return os.access(f"{self.path}/{page}{SUFFIX}", os.F_OK)  # a Path object would take ten times as long

    def has_parent(self, key: PageKey) -> bool:
        """Return whether the page before another one is cached, or not needed."""
        return not key.parent or self.has(key.parent)

    def num_leading(self, pages: Sequence[str]) -> int:
        """Return how many of the pages are cached, up to the first that is not."""
        return next((i for i, page in enumerate(pages) if not self.has(page)), len(pages))

    def touch(self, pages: Sequence[str]) -> None:
        """Note that pages that follow one another are used. Only the order of eviction depends on it."""
        now = time.time_ns()
        for number, page in enumerate(pages):
            with suppress(OSError):
                os.utime(path_of(self.path, page), ns=(now - number, now - number))

    def files(self) -> list[tuple[int, int, Path]]:
        """Return time of the last use, size and path of all files, the one used longest ago first."""
        found = []
        for entry in os.scandir(self.path) if self.path.is_dir() else ():
            with suppress(FileNotFoundError):  # it was removed meanwhile
                status = entry.stat()
                found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        return sorted(found)

    def drop(self, page: str) -> None:
        """Remove a damaged page, also one in use."""
        if self.is_writable:
            try:
                with self.locked():
                    path_of(self.path, page).unlink(missing_ok=True)
            except OSError as error:
                self.stop(error)


def list_prefixes(directory: Path) -> list[StoredModel]:
    """Return what a prefix cache holds of each model, the one used last first. The directory need not exist."""
    folder = PageFolder(directory)
    groups: dict[str, list[tuple[int, int, PageKey]]] = defaultdict(list)
    for used, nbytes, path in folder.files():
        if path.suffix == SUFFIX:
            with suppress(OSError, ReadError), PageFile(folder.path, path.stem) as file:
                groups[file.key.model].append((used, nbytes, file.key))
    models = [
        StoredModel(
            model,
            title=max(key.title for _, _, key in pages),
            pages=len(pages),
            tokens=sum(key.tokens for _, _, key in pages),
            nbytes=sum(nbytes for _, nbytes, _ in pages),
            last_used=max(used for used, _, _ in pages) / 1e9,
        )
        for model, pages in groups.items()
    ]
    return sorted(models, key=lambda model: model.last_used, reverse=True)


def make_room(folder: PageFolder, nbytes: int, spared: Sequence[str]) -> bool:
    """Evict pages until another one has room. Return whether it does. The caller has the lock.

    ``spared`` are the pages before it, which stay.
    """
    excess = nbytes - _spare_bytes(folder)
    if folder.limit is None and excess <= 0:
        return True
    files = folder.files()
    if folder.limit is not None:
        excess = max(excess, sum(size for _, size, _ in files) + nbytes - folder.limit)
    kept = {f"{page}{SUFFIX}" for page in spared}
    pages = [(size, path) for _, size, path in files if path.suffix == SUFFIX and path.name not in kept]
    if excess > sum(size for size, _ in pages):
        return False  # evicting all would not be enough
    for size, path in pages:
        if excess > 0:
            path.unlink(missing_ok=True)
            excess -= size
    return nbytes <= _spare_bytes(folder)


def clear_prefixes(directory: Path) -> None:
    """Remove the pages of all models. Raises: WriteError."""
    folder = PageFolder(directory)
    if not folder.path.is_dir():
        return
    try:
        folder.open()
        with folder.locked():
            for _, _, path in folder.files():
                if path.suffix == SUFFIX:
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"cannot clear {directory}: {error}. Hint: check who may write there.") from error


def _spare_bytes(folder: PageFolder) -> int:
    return free_bytes(folder.path) - (folder.free_floor or 0)


REASONS = ("stopped", "parent", "room", "wear")
"""Reasons for not storing a page: storing has stopped, the page before it is missing, the disk or the limit is full,
the cap of daily writes is reached."""

_WARNINGS = {
    "room": "the disk, or the cache's share of it, is full.",
    "wear": "the cap of today's disk writes is reached. Hint: it is ssd_write_gb_per_day.",
}
"""Texts for reasons that users can change."""

QUEUE_BYTES = 64 << 20
"""Two pages of an 8B model at 16 bits."""

_MOST_SECONDS = 10.0
"""The longest time that a prompt waits for its pages to be written, on a disk that does not answer."""


class Prefix(NamedTuple):
    """A cached prefix of a prompt."""

    ends: tuple[int, ...] = ()  # with how many tokens its pages end
    pages: tuple[str, ...] = ()  # their names

    @property
    def num_tokens(self) -> int:
        """Number of tokens it covers."""
        return self.ends[-1] if self.ends else 0

    def cut(self, ends: Collection[int]) -> Prefix:
        """Return the longest part of it that ends with one of these numbers of tokens."""
        count = next((number for number in range(len(self.ends), 0, -1) if self.ends[number - 1] in ends), 0)
        return Prefix(self.ends[:count], self.pages[:count])


class PrefixStore:
    """The pages of one model and one kind of cache, in a directory shared with other models, tenants and processes.

    One thread uses a store, another one of its own writes pages in the background. Close the store; a process that ends
    without closing does no harm. A closed store stores nothing.
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
        limit_bytes: int | None = None,  # the most that all pages in the directory may take
        free_space_floor: int | None = None,  # bytes of the disk that are left free; None for a tenth of it
        page_tokens: int = PAGE_TOKENS,
        queue_bytes: int = QUEUE_BYTES,  # the most that may wait to be written
    ) -> None:
        self.page_tokens = page_tokens
        self._root = root_name(model, settings, tenant, page_tokens)
        self._model, self._title = model, title
        self._governor = governor
        self._folder = PageFolder(directory, limit_bytes, free_space_floor)
        if not governor.zero_write:
            try:
                self._folder.open()
            except OSError as error:
                self._folder.stop(error)
        self._writer = WriteBehind(queue_bytes, "prefixes")
        self._queued: dict[str, Write] = {}  # pages that wait to be written, by name
        self._lock = threading.Lock()  # of the counts
        self._counts: Counter[str] = Counter()

    @property
    def is_writable(self) -> bool:
        """True while pages are still stored."""
        return self._folder.is_writable

    def find(self, tokens: Tokens, *, ends: Sequence[int] | None = None) -> Prefix:
        """Return the longest cached prefix of a prompt. Pages of it that wait to be written are waited for.

        ``ends`` are with how many tokens each page ends; None for pages of ``page_tokens``.
        """
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        names = page_names(self._root, tokens, ends)
        count = self._folder.num_leading(names)
        if not self._queued.keys().isdisjoint(names[count:]):  # it is faster than computing them
            self.flush(_MOST_SECONDS)
            count = self._folder.num_leading(names)
        return Prefix(tuple(ends[:count]), tuple(names[:count]))

    def touch(self, prefix: Prefix) -> None:
        """Note that a prefix is used."""
        if self._folder.is_writable:
            self._folder.touch(prefix.pages)

    def read(self, page: str, allocate: Callable[[Mapping[str, BlobInfo]], Mapping[str, memoryview]]) -> bool:
        """Read a page into the caller's memory, and check it.

        ``allocate`` returns writable memory for every blob that is wanted, by name. Return False if the page is not
        cached any more. A damaged page is removed.
        """
        try:
            with PageFile(self._folder.path, page) as file:
                for name, view in allocate(file.blobs).items():
                    file.read_into(name, view)
                return True
        except FileNotFoundError:
            pass  # another process removed it
        except ReadError as error:
            self._folder.drop(page)
            self._count("damaged")
            log.warning("%s. It is not used; its tokens are computed again when they are needed.", error)
        except OSError as error:
            log.warning("cannot read page %s in %s: %s", page, self._folder.path, error.strerror or error)
        return False

    def put(
        self,
        tokens: Tokens,
        page_index: int,  # how many pages come before it
        blobs: Mapping[str, Blob],
        *,
        ends: Sequence[int] | None = None,  # with how many tokens each page ends; None for pages of ``page_tokens``
    ) -> str:
        """Store a page in the background. Return its name if it is cached, or queued; an empty text if it is not.

        While too much is queued, the call waits. Blobs are copied, unless they exceed the queue: then the call waits
        until they are written. The writer refuses what exceeds the limits or the day's writes.
        """
        ends = full_pages(len(tokens), self.page_tokens) if ends is None else ends
        names = page_names(self._root, tokens, ends[: page_index + 1])
        num_tokens = ends[page_index] - (ends[page_index - 1] if page_index else 0)
        key = PageKey(names[-1], "".join(names[-2:-1]), page_index, num_tokens, self._model, self._title)
        nbytes = sum(memoryview(blob.data).nbytes for blob in blobs.values())
        is_large = nbytes > self._writer.limit_bytes
        if self._is_queued(key.page) or self._folder.has(key.page):
            return key.page
        has_parent = self._is_queued(key.parent) or self._folder.has_parent(key)
        if not (self._folder.is_writable and has_parent):
            self._count("parent" if self._folder.is_writable else "stopped")
            return ""
        self._writer.make_room(nbytes)
        if not is_large:
            blobs = {name: blob._replace(data=bytes(blob.data)) for name, blob in blobs.items()}
        self._queued = {page: write for page, write in self._queued.items() if not write.is_done}
        self._queued[key.page] = self._writer.submit(nbytes, partial(self._write, key, blobs, names))
        if is_large:
            self.flush()
        return key.page

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty, at most so many seconds. Return whether it is."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Write what is queued, and end the thread. Further calls do nothing."""
        self.flush()
        self._folder.is_writable = False
        self._writer.close()

    def telemetry(self) -> dict[str, int]:
        """Return how many pages were stored, not stored by reason, and damaged, and the bytes that wait."""
        with self._lock:
            refused = {f"refused_{reason}": self._counts[reason] for reason in REASONS}
            counts = {name: self._counts[name] for name in ("stored", "damaged")}
        return {"queued_bytes": self._writer.queued_bytes, **counts, **refused}

    def _is_queued(self, page: str) -> bool:
        return page in self._queued and not self._queued[page].is_done

    def _count(self, what: str) -> None:
        """Count a page. Warn about the first one that is not stored for a reason that users can change."""
        with self._lock:
            self._counts[what] += 1
            is_first = self._counts[what] == 1
        if is_first and what in _WARNINGS:
            log.warning("%s: pages are not stored for now: %s", self._folder.path, _WARNINGS[what])

    def _write(self, key: PageKey, blobs: Mapping[str, Blob], names: Sequence[str]) -> None:
        """Write a page, in the store's own thread."""
        try:
            if not self._folder.is_writable:
                self._count("stopped")
                return
            self._count(add_page(self._folder, encode_page(key, blobs), names, self._governor.claim) or "stored")
        except OSError as error:
            self._folder.stop(error)
            self._count("stopped")
        except BaseException:
            log.exception("a page for %s was not stored", self._folder.path)
            raise


def add_page(folder: PageFolder, page: EncodedPage, names: Sequence[str], claim: Callable[[int], bool]) -> str:
    """Write a page, unless it is cached. After an error nothing is left of it.

    ``names`` are those of the pages up to this one. ``claim`` counts bytes that are about to be written, or returns
    False. Return why it is not cached now:
    ``"parent"``, ``"room"`` or ``"wear"``; an empty text if it is.
    """
    with folder.locked():
        if folder.has(page.key.page):
            return ""
        if not folder.has_parent(page.key):
            return "parent"
        if not make_room(folder, page.nbytes, names[:-1]):
            return "room"
        if not claim(page.nbytes):
            return "wear"
        partial = folder.path / f"{page.key.page}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        lock = _reserve(partial, page)
    fd = lock.fd
    try:
        page.write(fd)
        # macOS leaves it to the disk when to write what it was sent; after a loss of power checksums tell
        os.fsync(fd)
        drop_cached(fd, 0, page.nbytes)  # weights need the memory
        with folder.locked():
            if not folder.has_parent(page.key):
                return "parent"
            if not folder.has(page.key.page):
                partial.replace(path_of(folder.path, page.key.page))
                folder.touch(names)
        flush_folder(folder.path)
        return ""
    finally:
        _give_up(partial, lock)


def _reserve(partial: Path, page: EncodedPage) -> HeldLock:
    """Make a file of a page's size, which other writers count as soon as they have the lock. Return it open."""
    lock = HeldLock(partial, create=0o600, shared=True)  # as long as its writer lives
    try:
        os.ftruncate(lock.fd, page.nbytes)
    except BaseException:
        _give_up(partial, lock)
        raise
    return lock


def _give_up(partial: Path, lock: HeldLock) -> None:
    with suppress(OSError):  # the next opening removes it
        partial.unlink()
    lock.release()
