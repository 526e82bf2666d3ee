"""A self-test of how bytes reach a GPU. It runs once for each device and each version of MLX.

Threads write to memory that MLX computes from. Some devices lose a part of what a disk writes there past the processor,
and wrong weights follow without an error. The test reads known bytes while the device computes from their neighbours,
and compares them on both processors. A way of reading that loses bytes is not used.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from mlx_flash import enginethread
from mlx_flash.errors import SelfTestError, WriteError
from mlx_flash.files import cache_directory
from mlx_flash.memory.arena import Arena, SlotArena
from mlx_flash.memory.driver import DriverError
from mlx_flash.memory.footprint import free_unused
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.prefetcher import Arrival, BackgroundPrefetcher
from mlx_flash.storage.probe import DiskProfile, Measurements, disk_profile, folder_profile, temporary_file
from mlx_flash.version import VERSION

ROUNDS = 20
NUM_FILE_BYTES = 24 << 20
RESULTS = Measurements("selftest.json")

_FASTEST_FIRST: tuple[Arrival, ...] = ("in place", "copied by the driver", "bounced")

_CHUNK_BYTES = 1 << 20
_FACTOR = 2654435761
"""Word ``i`` of the test file is ``i`` times this odd number, so no two words of it are equal."""

_Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"


_Case = tuple[int, int, bool]
"""Bytes of a read, places for them, and whether these are slots of one array; otherwise each is one of its own."""

CASES: tuple[_Case, ...] = ((3 << 20, 8, True), (64 << 10, 16, True), (64 << 10, 16, False))
"""Large and small slots of one array, and small arrays: MLX puts those side by side."""


def _places(nbytes: int, number: int, is_shared: bool) -> tuple[list[memoryview], mx.array | list[mx.array], object]:
    """Return the memory of each place, MLX's views of them, and their owner: with it the memory would go."""
    if not is_shared:
        arenas = [Arena(nbytes) for _ in range(number)]
        return (
            [arena.memory for arena in arenas],
            [arena.view(0, (nbytes // 4,), mx.uint32) for arena in arenas],
            arenas,
        )
    slots = SlotArena(number, nbytes + DIRECT_ALIGNMENT)
    return [slots.memory(i) for i in range(number)], slots.view(0, (nbytes // 4,), mx.uint32), slots


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of a test."""

    way: Arrival  # how bytes are to reach MLX's memory
    # blocks that did not arrive, by way. A way ends with the first round that loses some. Slower ways than the chosen
    # one, and those that cannot be tested, are missing.
    lost: dict[str, int]


def needs_test() -> bool:
    """Return True for a GPU. The CPU back end computes from ordinary memory."""
    return bool(mx.default_device() == mx.gpu)


def way_of_reading() -> Arrival:
    """Return how bytes are to reach the memory of MLX's default device. The first call for a GPU may test it."""
    return _remembered_or_run(_key()).way if needs_test() else "in place"


def reads_directly(io: str) -> bool:
    """Return whether direct reads are to be tried, with ``FlashConfig(io=...)`` as given."""
    return io != "buffered" and way_of_reading() != "buffered"


def profile_for(path: Path, io: str) -> DiskProfile:
    """Return the profile of the disk that holds a file or folder, for reads with ``FlashConfig(io=...)`` as given."""
    profile = disk_profile if path.is_file() else folder_profile
    return profile(path, reads_directly(io), may_buffer=io == "auto")


def test_now() -> SelfTest:
    """Test the default device, whatever is remembered, and remember the result. Raises: SelfTestError."""
    result = enginethread.run(run_selftest)
    RESULTS.save(_key(), asdict(result))
    return result


@cache
def _remembered_or_run(key: str) -> SelfTest:
    match RESULTS.load().get(key):
        case {"way": "in place" | "copied by the driver" | "bounced" | "buffered" as way, "lost": dict(lost)}:
            return SelfTest(way, lost)
    return test_now()


def run_selftest() -> SelfTest:
    """Test the default device, and choose the fastest way that loses nothing. Raises: SelfTestError, WriteError."""
    with _file_of_words() as file:
        lost: dict[str, int] = {"buffered": _count_lost(file, "buffered") or 0}
        if lost["buffered"]:
            raise SelfTestError(
                f"the self-test of {_device()} with MLX {version('mlx')} lost bytes that threads wrote to MLX's "
                f"memory: {lost['buffered']} blocks through the page cache. A model would compute with wrong weights. "
                "Hint: update MLX, or compute on the processor with mx.set_default_device(mx.cpu)."
            )
        chosen: Arrival | None = None
        for way in _FASTEST_FIRST:
            found = _count_lost(file, way)
            if not found and way == "copied by the driver":
                found = _count_lost(file, way, direct=False)
            lost |= {} if found is None else {way: found}
            if found == 0:
                chosen = way
                break
    free_unused()
    # Bounced reads that were not tested, since the disk has no direct ones, are taken for good.
    return SelfTest(chosen or ("buffered" if lost.get("bounced") else "bounced"), lost)


def _count_lost(file: Path, way: Arrival, *, direct: bool | None = None) -> int | None:
    """Return the number of blocks that did not arrive; None where the disk or the driver has no such reads."""
    direct = way != "buffered" if direct is None else direct
    with suppress(DriverError), closing(BackgroundPrefetcher([file], direct=direct, arrival=way)) as reader:
        if not direct or reader.is_direct:
            return next((lost for case in CASES if (lost := _lost_in_case(case, reader, file))), 0)
    return None


def _lost_in_case(case: _Case, reader: BackgroundPrefetcher, file: Path) -> int:
    """Fill half of the places while the device computes from the other half, then the other way round, and so on.

    Return the number of places that are wrong after a round, and end with the first round that has some.
    """
    block_bytes, num_blocks, _ = case
    memories, views, _owner = _places(*case)
    starts = range(0, NUM_FILE_BYTES - block_bytes, block_bytes)
    first_words = _words(0, block_bytes)
    held: dict[int, int] = {}
    for number in range(ROUNDS):
        tickets = {}
        for place in range(number % 2, num_blocks, 2):
            held[place] = starts[(number * num_blocks + place) % len(starts)]
            piece = Piece("(self-test)", held[place], block_bytes, 0)
            segment = Segment(file, piece.offset, piece.nbytes, 0, (piece,))
            tickets[place] = reader.submit([segment], memories[place])
            mx.async_eval(_work(views[place ^ 1]))
        for place, ticket in tickets.items():
            while not ticket.done():
                mx.eval(_work(views[place ^ 1]))
            ticket.wait()
        if wrong := _wrong(memories, views, held, first_words):
            return len(wrong)
    return 0


def _work(neighbour: mx.array) -> mx.array:
    return (neighbour ^ 1).max()


def _wrong(
    memories: list[memoryview], views: mx.array | list[mx.array], held: dict[int, int], first_words: _Words
) -> set[int]:
    """Return the places that do not hold what was read to them, as the device or as the processor sees them."""
    # The device looks at all of them before the processor's look may move memory that they share.
    looks = {
        place: (views[place] != _words_on_device(start, first_words.nbytes)).any() for place, start in held.items()
    }
    mx.eval(list(looks.values()))
    wrong = {place for place, look in looks.items() if look.item()}
    for place, start in held.items():
        found = np.frombuffer(memories[place][: first_words.nbytes], np.uint32)
        if not np.array_equal(found, first_words + np.uint32(start // 4 * _FACTOR % 2**32)):
            wrong.add(place)
    return wrong


def _words(start: int, nbytes: int) -> _Words:
    return np.arange(start // 4, (start + nbytes) // 4, dtype=np.uint32) * np.uint32(_FACTOR)


def _words_on_device(start: int, nbytes: int) -> mx.array:
    return mx.arange(start // 4, (start + nbytes) // 4, dtype=mx.uint32) * mx.array(_FACTOR, mx.uint32)


def _device() -> str:
    known = mx.device_info()
    return ", ".join(str(known[name]) for name in ("device_name", "architecture") if name in known)


def _key() -> str:
    versions = f"mlx {version('mlx')}, mlx-flash {VERSION}"
    return f"{platform.node()}: {_device()}, {mx.default_device()}, {platform.platform()}, {versions}"


@contextmanager
def _file_of_words() -> Iterator[Path]:
    """Yield a file to read, on a disk like that of models if there is room, else in the system's folder."""

    def in_folder(folder: Path) -> AbstractContextManager[Path]:
        pieces = (_words(start, _CHUNK_BYTES).data for start in range(0, NUM_FILE_BYTES, _CHUNK_BYTES))
        return temporary_file(folder, "the self-test", pieces)

    with ExitStack() as stack:
        try:
            file = stack.enter_context(in_folder(cache_directory()))
        except WriteError:
            file = stack.enter_context(in_folder(Path(tempfile.gettempdir())))
        yield file
