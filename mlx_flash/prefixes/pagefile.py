"""Page files of the prefix cache: their names, their format, and reads that check every byte.

A page file holds what all layers keep of some 256 tokens: some MB. Its name is a hash of the model, the settings of its
cache, the tenant and all tokens up to its last one, so equal names mean equal content::

    8 bytes   magic, with the version of the format
    8 bytes   length of the file, little-endian
    4 bytes   length of the description
    4 bytes   CRC-32 of the two lengths and the description
    ...       the description, two lines of JSON: the fields of PageKey; for each blob its name, dtype, shape, length
              and CRC-32
    ...       the blobs, each at a multiple of 4096

CRC-32 is the fastest checksum of Python's library (1.9 GB/s; BLAKE2b 1.2, SHA-256 0.7).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_flash.errors import ReadError
from mlx_flash.files import write_at
from mlx_flash.kv.writing import FILE_ALIGNMENT, BlobInfo, Draft
from mlx_flash.memory.pagecache import aligned_offsets, drop_cached, round_up

MAGIC = b"MLXFKV\x00\x04"
SUFFIX = ".page"

_HEAD = struct.Struct("<8sQII")
_LENGTHS = struct.Struct("<QI")
_FIRST_READ = 8 << 10
"""Bytes that hold nearly every description; a longer one takes a second read."""

_MOST_KEY_BYTES, _MOST_BLOB_BYTES = 1024, 128
"""Bytes that suffice for a key without its title, and for a blob, in nearly every description."""

Tokens = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Tokens of a sequence, ``(length,)``; or ``(length, n)`` where more than the token decides what is cached."""


class Blob(NamedTuple):
    """Bytes of an array in C order, and their type: the caller's name for it, such as ``bfloat16``."""

    data: bytes | bytearray | memoryview
    dtype: str
    shape: tuple[int, ...]


class Place(NamedTuple):
    """A page file, and the blobs in it."""

    path: Path
    inode: int
    blobs: Mapping[str, BlobInfo]


@dataclass(frozen=True, slots=True)
class PageKey:
    """The identity of a page."""

    page: str  # its name, 64 hexadecimal digits
    parent: str  # the page before it, or that at whose end the snapshot was taken; empty for a first one
    kind: str  # of a snapshot; empty for a page
    number: int  # how many pages come before it
    tokens: int  # how many it holds
    model: str  # fingerprint of the model
    title: str  # name of the model, for people

    @property
    def depth(self) -> int:
        """Number of pages it depends on."""
        return self.number + bool(self.kind)


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


def snapshot_name(page: str, kind: str) -> str:
    """Return the name of a snapshot at the end of a page."""
    return hashlib.blake2b(bytes.fromhex(page) + kind.encode(), digest_size=32).hexdigest()


def path_of(folder: Path, page: str) -> Path:
    """Return the path of a page."""
    return folder / f"{page}{SUFFIX}"


class EncodedPage(NamedTuple):
    """The content of a page file."""

    key: PageKey
    nbytes: int  # the length of the file
    head: bytes  # everything before the blobs
    blobs: Sequence[tuple[int, memoryview]]  # those to write, with their offsets
    draft: Draft | None  # the file, in which the other blobs are already; None for a new one

    @property
    def new_bytes(self) -> int:
        """Bytes that the disk has not got yet."""
        return self.nbytes - (self.draft.nbytes if self.draft is not None else 0)

    def write(self, fd: int) -> None:
        """Write what the file lacks."""
        for offset, data in ((0, memoryview(self.head)), *self.blobs):
            write_at(fd, data.cast("B") if data.nbytes else memoryview(b""), offset)


def encode_page(key: PageKey, blobs: Mapping[str, Blob], draft: Draft | None = None) -> EncodedPage | None:
    """Return the file of a page: its description, the blobs of its draft, if it has one, and the blobs behind them.

    The blobs' bytes must not change until it is written. Return None if the draft was not written as a whole.
    """
    written = [] if draft is None else draft.finished()
    if written is None:
        return None
    data = {name: memoryview(blob.data) for name, blob in blobs.items()}
    rest = [(n, b.dtype, b.shape, data[n].nbytes, zlib.crc32(data[n])) for n, b in blobs.items()]
    text = f"{json.dumps(asdict(key))}\n{json.dumps([*(blob[:-1] for blob in written), *rest])}".encode()
    room = round_up(_HEAD.size + len(text), FILE_ALIGNMENT) if draft is None else draft.room
    if _HEAD.size + len(text) > room:
        return None
    begin = room + (0 if draft is None else draft.nbytes)
    *offsets, end = aligned_offsets([view.nbytes for view in data.values()], FILE_ALIGNMENT, begin)
    text = text.ljust(room - _HEAD.size)
    head = _HEAD.pack(MAGIC, end, len(text), zlib.crc32(_LENGTHS.pack(end, len(text)) + text))
    return EncodedPage(key, end, head + text, [*zip(offsets, data.values(), strict=True)], draft)


def room_for_head(title: str, num_blobs: int) -> int:
    """Return the bytes to leave free at the beginning of a draft."""
    return round_up(_MOST_KEY_BYTES + len(json.dumps(title)) + num_blobs * _MOST_BLOB_BYTES, FILE_ALIGNMENT)


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
        """Read a blob into writable memory of its length, and check it.

        Raises: KeyError: there is no such blob; ValueError: the memory has another length; ReadError: it is damaged.
        """
        blob = self.blobs[name]
        view = into.cast("B") if into.nbytes else memoryview(b"")
        if view.nbytes != blob.nbytes:
            raise ValueError(f"blob {name!r} of page {self.key.page} takes {blob.nbytes} bytes, not {view.nbytes}")
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
        key = PageKey(**json.loads(line))
        for field in fields(key):
            if type(getattr(key, field.name)).__name__ != field.type:
                raise ValueError(f"{field.name} is not of the type {field.type}")
        if key.page != self._page:
            raise ValueError(f"it describes page {key.page}")
        return key, table, round_up(start, FILE_ALIGNMENT), size

    def _damaged(self, reason: str) -> ReadError:
        return ReadError(f"{self._path} is damaged: {reason}")
