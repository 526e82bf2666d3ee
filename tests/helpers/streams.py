from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_flash.errors import ReadError
from mlx_flash.memory.arena import Arena
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import Placement, place
from mlx_flash.storage.safetensors import TensorRecord
from mlx_flash.streaming.stream import WeightStream, take_turns


class FakeTicket:
    """Reads that land when they are waited for, as late as they can; checks that nobody uses the slot meanwhile."""

    def __init__(self, reader: FakeReader, unit: int, buffer: memoryview) -> None:
        self.reader, self.unit, self.buffer = reader, unit, buffer
        assert buffer.obj is not None
        self.cancelled = False
        reader.num_started += 1
        reader.in_flight.add(self)

    def done(self) -> bool:
        return self not in self.reader.in_flight

    @property
    def has_come(self) -> bool:
        return self.done()

    def done_by(self, moment: float) -> bool:
        if self.reader.is_quick and self.unit not in self.reader.failing:
            self.wait()
        return self.done()

    def wait(self) -> float:
        if self.unit in self.reader.failing:
            raise ReadError(f"unit {self.unit}")
        assert not self.cancelled
        self.reader.in_flight.discard(self)
        self.buffer[0] = self.unit
        return 0.0

    def cancel(self) -> None:
        self.cancelled = True
        self.reader.in_flight.discard(self)


class FakeReader:
    """Fills a buffer's first byte with the number of the unit. Quick reads end before the unit before theirs is
    computed.
    """

    def __init__(self) -> None:
        self.is_quick = False
        self.num_started = 0
        self.failing: set[int] = set()
        self.in_flight: set[FakeTicket] = set()

    def prepare(self, segments: Any) -> int:
        return int(segments[0].pieces[0].name)

    def start(self, unit: int, buffer: memoryview) -> FakeTicket:
        return FakeTicket(self, unit, buffer)


def placement_of(unit: int) -> Placement:
    place_in_file = Path("file"), unit * DIRECT_ALIGNMENT, DIRECT_ALIGNMENT
    return place([[TensorRecord(str(unit), "U8", (DIRECT_ALIGNMENT,), *place_in_file)]])


def make_stream(num_units: int, num_slots: int) -> tuple[WeightStream, FakeReader, list[Arena]]:
    reader = FakeReader()
    arenas = [Arena(DIRECT_ALIGNMENT) for _ in range(num_slots)]
    stream = WeightStream(arenas, reader, poison=True, num_units=num_units)  # type: ignore[arg-type]
    for unit in range(num_units):
        assert stream.add(str(unit), placement_of(unit)) == (unit, arenas[take_turns(num_units, num_slots)[unit]])
    stream.start()
    return stream, reader, arenas
