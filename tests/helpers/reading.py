from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import Placement, place
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Caching, Ticket
from mlx_flash.storage.safetensors import TensorRecord

PAGE = DIRECT_ALIGNMENT

CACHING: dict[str, Caching] = {"kept": "kept", "found": "found"}


def write_file(path: Path, nbytes: int, seed: int = 0) -> Path:
    path.write_bytes(np.random.default_rng(seed).bytes(nbytes))
    return path


def packed(path: Path, start: int, sizes: Sequence[int], gap: int = 0) -> list[TensorRecord]:
    records = []
    for i, nbytes in enumerate(sizes):
        records.append(TensorRecord(f"{path.stem}.{i}", "U8", (nbytes,), path, start, nbytes))
        start += nbytes + gap
    return records


class Load:
    """Tensors, where they go, and what should be there."""

    def __init__(self, records: Sequence[TensorRecord], alignment: int = 16) -> None:
        self.records = records
        self.placement: Placement = place([[record] for record in records], alignment)
        self.buffer = memoryview(mmap.mmap(-1, max(1, self.placement.nbytes)))
        self.expected = [made.path.read_bytes()[made.offset : made.end] if made.nbytes else b"" for made in records]
        self.nbytes = sum(made.nbytes for made in records)

    def submit(self, reader: BackgroundPrefetcher, mode: str = "direct", urgent: bool = False) -> Ticket:
        caching = CACHING.get(mode, "shared")
        return reader.submit(self.placement.segments, self.buffer, caching=caching, urgent=urgent)

    def found(self) -> list[bytes]:
        return [
            bytes(self.buffer[at : at + made.nbytes])
            for made, at in zip(self.records, self.placement.offsets, strict=True)
        ]

    def check(self, reader: BackgroundPrefetcher, mode: str = "direct", urgent: bool = False) -> None:
        """Reads into a soiled buffer."""
        self.soil()
        self.submit(reader, mode, urgent).wait()
        assert self.found() == self.expected

    def soil(self) -> None:
        np.frombuffer(self.buffer, np.uint8)[:] = 0xA5

    def check_soiled(self) -> None:
        assert (np.frombuffer(self.buffer, np.uint8) == 0xA5).all()


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mlx-flash-reader")]


def num_cached_pages(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        bytes_ = np.frombuffer(pages, np.uint8)
        present = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(bytes_.ctypes.data), ctypes.c_size_t(len(pages)), present) == 0
        del bytes_
    return sum(flag & 1 for flag in present)
