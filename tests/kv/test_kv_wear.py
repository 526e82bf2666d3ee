"""How much may be written: counted across threads, processes and days, and not at all in zero-write mode."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from mlx_flash.kv.wear import FILE_NAME, WriteGovernor

GB = 10**9
DAY = 24 * 3600


def governor(folder: Path, gb_per_day: float | None = 1.0, now: float = 1e9) -> WriteGovernor:
    return WriteGovernor(folder, gb_per_day=gb_per_day, clock=lambda: now)


def counted(governor: WriteGovernor) -> tuple[object, ...]:
    told = governor.telemetry()
    return told["session_bytes"], told["day_bytes"], told["total_bytes"]


def test_bytes_are_counted_for_the_session_the_day_and_ever(tmp_path: Path) -> None:
    first = governor(tmp_path)
    assert first.claim(100)
    first.count(20)
    assert counted(first) == (120, 120, 120)
    second = governor(tmp_path)
    assert counted(second) == (0, 120, 120)
    assert second.claim(5)
    assert counted(first) == (120, 125, 125), "it learns what others counted"
    tomorrow = governor(tmp_path, now=1e9 + DAY)
    assert counted(tomorrow) == (0, 0, 125)
    tomorrow.count(1)
    assert counted(tomorrow) == (1, 1, 126)


def test_the_cap_is_kept_to_the_byte(tmp_path: Path) -> None:
    capped = governor(tmp_path)
    assert capped.claim(GB - 1) and not capped.claim(2) and capped.claim(1)
    assert capped.claim(0)
    assert capped.telemetry()["refused_bytes"] == 2
    capped.count(7)
    assert counted(capped) == (GB + 7,) * 3, "what has to be written is counted past the cap"
    assert governor(tmp_path, None).claim(10**15), "None is no cap"
    assert not governor(tmp_path / "other", 0).claim(1)


def test_zero_write_mode_writes_nothing_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    frugal = governor(folder, 0)
    assert not frugal.claim(5)
    frugal.count(3)
    assert counted(frugal) == (3, 0, 0) and frugal.telemetry()["refused_bytes"] == 5
    assert not folder.exists()
    governor(folder).count(11)
    before = (folder / FILE_NAME).read_bytes(), (folder / FILE_NAME).stat().st_mtime_ns
    frugal.count(3)
    assert counted(frugal) == (6, 11, 11), "what was counted earlier is shown"
    assert ((folder / FILE_NAME).read_bytes(), (folder / FILE_NAME).stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    "data", [b"", b"x", b"{}", b"[1]", b"\xff" * 256, b'{"day": 3, "day_bytes": 1, "total_bytes": 1}']
)
def test_a_damaged_file_counts_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(data)
    running = governor(tmp_path)
    assert running.claim(10) and running.claim(5)
    assert counted(running) == (15, 15, 15) == (*counted(governor(tmp_path))[1:], 15), "it is written anew"


def test_a_file_that_cannot_be_opened_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).mkdir()
    running = governor(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert running.claim(GB) and not running.claim(1)
    assert len(caplog.records) == 1 and FILE_NAME in caplog.text
    assert counted(running) == (GB, GB, GB), "the process counts for itself"


def test_threads_share_a_day(tmp_path: Path) -> None:
    shared, other = governor(tmp_path), governor(tmp_path)
    claimed = [0] * 4

    def work(number: int, mine: WriteGovernor) -> None:
        for _ in range(100):
            claimed[number] += mine.claim(GB // 300)

    threads = [threading.Thread(target=work, args=(i, (shared, other)[i % 2])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(claimed) == 300
    assert counted(shared)[1:] == counted(other)[1:] == (300 * (GB // 300),) * 2
