"""The codec of compressed weights: the bytes of items are sorted by significance, then entropy-coded by Zstandard.

The high bytes of floating-point weights hold sign and exponent, which have few likely values. The low bytes are noise,
which Zstandard stores as it is. Repeated strings do not occur, so the encoder looks for next to none: that makes the
decoder faster. Each block is one frame of Zstandard, with a checksum of its contents.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from mlx_flash.errors import ConfigError
from mlx_flash.storage.blocks import BLOCK_BYTES

CODED_DTYPES = frozenset({"BF16", "F16", "F32"})
"""Dtypes of tensors that may be compressed."""

WORTH_IT = 1.05
"""A compressed copy pays where a pass is this much faster."""

_PROBE_BLOCKS = 4
_PROBE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Compression:
    """A compressed checkpoint in numbers.

    Attributes:
        ratio: bytes that are read for each byte of weights.
        decode_bytes_per_second: bytes of weights that one core decodes.
        disk_bytes_per_second: bytes that the disk delivers.
        compute_bytes_per_second: bytes of weights that MLX computes with.
        shares_cores: whether MLX computes on the cores that decode.
    """

    ratio: float
    decode_bytes_per_second: float
    disk_bytes_per_second: float
    compute_bytes_per_second: float
    shares_cores: bool

    @property
    def weight_bytes_per_second(self) -> float:
        """Bytes of weights that reading and decoding side by side deliver. MLX may take one core."""
        free = max(1, num_cores() - self.shares_cores)
        return min(self.disk_bytes_per_second / self.ratio, self.decode_bytes_per_second * free)

    @property
    def num_decoding(self) -> int:
        """Threads that decode while as many others as ever wait for the disk. One more helps where speeds vary."""
        free = max(1, num_cores() - self.shares_cores)
        return min(free, math.ceil(self.disk_bytes_per_second / self.ratio / self.decode_bytes_per_second) + 1)

    @property
    def gain(self) -> float:
        """The time of a pass with an uncompressed copy over that with this one."""
        computing = 1 / self.compute_bytes_per_second
        busy = (1 / self.decode_bytes_per_second + computing * self.shares_cores) / num_cores()
        plain = max(1 / self.disk_bytes_per_second, computing)
        return plain / max(1 / self.weight_bytes_per_second, computing, busy)

    @property
    def pays(self) -> bool:
        """True if the gain is worth a copy that only this program reads."""
        return self.gain >= WORTH_IT


class CodecError(Exception):
    """A block is not what the encoder made."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _zstandard() -> Any:
    """Return the library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError("compressed weights need the package zstandard. Hint: pip install zstandard.") from error
    return zstandard


def check_installed() -> None:
    """Raise a ConfigError if the library is not installed."""
    _zstandard()


class Encoder:
    """Encodes blocks. Not for several threads at once."""

    def __init__(self) -> None:
        library = _zstandard()
        parameters = library.ZstdCompressionParameters(
            strategy=library.STRATEGY_FAST, min_match=7, window_log=17, hash_log=6, write_checksum=True
        )
        self._compressor = library.ZstdCompressor(compression_params=parameters)
        self._flush = library.COMPRESSOBJ_FLUSH_BLOCK

    def encode(self, block: bytes | memoryview, itemsize: int) -> bytes:
        """Return a block in coded form. Each significance ends a block of Zstandard, which has its own code."""
        planes = np.ascontiguousarray(np.frombuffer(block, np.uint8).reshape(-1, itemsize).T)
        frame = self._compressor.compressobj(size=planes.size)
        parts = [part for plane in planes for part in (frame.compress(plane.data), frame.flush(self._flush))]
        return b"".join([*parts, frame.flush()])


class Decoder:
    """Decodes blocks. Not for several threads at once."""

    def __init__(self) -> None:
        self._library = _zstandard()
        self._decompressor = self._library.ZstdDecompressor()
        self._planes = np.empty(BLOCK_BYTES, np.uint8)

    def decode(self, stored: memoryview, target: memoryview, itemsize: int, sizes: Sequence[int] = ()) -> None:
        """Write the contents of blocks to memory of their size. Releases the GIL most of the time.

        Threads that decode hand the GIL to each other, which takes longer than what they do with it. So several blocks
        are decoded at once.

        Args:
            stored: the coded blocks, one after another.
            target: the memory.
            itemsize: of the tensor.
            sizes: bytes of the contents of each block; none for a single one.

        Raises:
            CodecError: a block is damaged, or the contents have another size.
        """
        if len(target) > len(self._planes):
            self._planes = np.empty(len(target), np.uint8)
        planes, sizes = self._planes[: len(target)], sizes or [len(target)]
        try:
            size = self._library.get_frame_parameters(stored).content_size
            if size != sizes[0]:
                raise CodecError(f"it has {size} bytes, expected {sizes[0]}")
            # each block is decoded in one step, as it is there as a whole and has room
            with self._decompressor.stream_reader(stored, read_across_frames=True) as reader:
                got = reader.readinto(planes.data)
                is_longer = got == len(target) and bool(reader.read(1))
        except self._library.ZstdError as error:
            raise CodecError(str(error)) from error
        if got != len(target) or is_longer:
            raise CodecError(f"it has {'more' if is_longer else got} bytes, expected {len(target)}")
        items, begin = np.frombuffer(target, f"<u{itemsize}"), 0
        for size, group in groupby(sizes):
            end = begin + size * len(list(group))
            _join(planes[begin:end].reshape(-1, itemsize, size // itemsize), items[begin // itemsize : end // itemsize])
            begin = end


def _join(planes: np.ndarray[Any, Any], items: np.ndarray[Any, Any]) -> None:
    """Put items together from their bytes: ``planes`` has those of each block, the least significant first."""
    items = items.reshape(len(planes), -1)
    np.copyto(items, planes[:, -1])
    for number in range(planes.shape[1] - 2, -1, -1):
        np.left_shift(items, 8, out=items)
        np.bitwise_or(items, planes[:, number], out=items)


def decode_speed() -> float:
    """Return the bytes of bfloat16 weights a second that one core decodes. Takes some milliseconds."""
    normal = np.random.default_rng(0).standard_normal(_PROBE_BLOCKS * BLOCK_BYTES // 2, np.float32)
    blocks = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(_PROBE_BLOCKS, -1)
    encoder, decoder = Encoder(), Decoder()
    stored = [memoryview(encoder.encode(block.data, 2)) for block in blocks]
    target = memoryview(bytearray(BLOCK_BYTES))
    seconds = []
    for _ in range(_PROBE_ROUNDS):
        began = time.perf_counter()
        for block in stored:
            decoder.decode(block, target, 2)
        seconds.append(time.perf_counter() - began)
    return blocks.size / min(seconds)
