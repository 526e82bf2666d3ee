"""The folder of page files, which is the index of the prefix cache, as one process sees it.

A page is cached when its file exists, so every process sees at once what others store and remove. Files are added and
removed under one lock. Where there is no room for another page, those used longest ago go first. The time of a file is
its last use, and a little later for each page that follows: so the end of a prefix goes before its beginning. A page
without those before it is not found, and goes when its time has come. Layers on disk lock the files that they read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_flash.errors import ReadError, WriteError
from mlx_flash.files import PARTIAL_SUFFIX, HeldLock, free_bytes, free_floor, make_private, remove_unheld, write_at
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


class Place(NamedTuple):
    """A page file, and the blobs in it."""

    path: Path
    inode: int
    blobs: Mapping[str, BlobInfo]


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

    @property
    def place(self) -> Place:
        """The place of the blobs."""
        return Place(Path(self._path), os.fstat(self._fd).st_ino, self.blobs)

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

    def place(self, page: str) -> Place | None:
        """Return the place of a page; None if it is gone."""
        try:
            with PageFile(self.path, page) as file:
                return file.place
        except (OSError, ReadError):
            return None

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
        if excess > 0 and remove_unheld(path):
            excess -= size
    return excess <= 0 and nbytes <= _spare_bytes(folder)


def clear_prefixes(directory: Path) -> list[StoredModel]:
    """Remove the pages of all models that nobody uses. Return what is left. Raises: WriteError."""
    folder = PageFolder(directory)
    if not folder.path.is_dir():
        return []
    try:
        folder.open()
        with folder.locked():
            for _, _, path in folder.files():
                if path.suffix == SUFFIX:
                    remove_unheld(path)
        return list_prefixes(directory)
    except OSError as error:
        raise WriteError(f"cannot clear {directory}: {error}. Hint: check who may write there.") from error


def _spare_bytes(folder: PageFolder) -> int:
    return free_bytes(folder.path) - (folder.free_floor or 0)
