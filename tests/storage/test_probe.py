"""The short look at a disk, and what is remembered of it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import children
from mlx_flash.errors import ReadError
from mlx_flash.files import cache_directory
from mlx_flash.storage import probe
from mlx_flash.storage.prefetcher import DEFAULT_QUEUE_DEPTH, DEFAULT_READ_SIZE, BackgroundPrefetcher, Ticket
from mlx_flash.storage.probe import MAX_AGE_SECONDS, DiskProfile, disk_profile, doubt_profile, probe_disk
from models import save
from noting import noted
from reading import descriptors, num_cached_pages, reader_threads, write_file
from zoo import configuration

SAMPLE = 1 << 20
CANDIDATES = ((64 << 10, 2), (128 << 10, 4), (300_000, 2))
FAKE = DiskProfile(bytes_per_second=123.5, read_size=4096, queue_depth=3, direct=True)


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "SAMPLE_BYTES", SAMPLE)
    monkeypatch.setattr(probe, "CANDIDATES", CANDIDATES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def big(tmp_path: Path) -> Path:
    return write_file(tmp_path / "big", 2 * SAMPLE + 4097)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The ``direct`` of every look that is taken from now on; each finds FAKE."""
    calls: list[bool] = []

    def look(path: Path, direct: bool, may_buffer: bool) -> DiskProfile:
        calls.append(direct)
        return FAKE

    monkeypatch.setattr(probe, "probe_disk", look)
    return calls


def disks() -> Path:
    return cache_directory() / "disks.json"


def entry(**changes: object) -> dict[str, object]:
    known = {"bytes_per_second": 5e8, "read_size": 1 << 20, "queue_depth": 4, "direct": True}
    return {**known, "time": time.time() - 100, **changes}


# --- looking ---------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_probe_of_a_big_file(big: Path, direct: bool) -> None:
    before = descriptors()
    found = probe_disk(big, direct)
    assert found.bytes_per_second > 1e6
    assert (found.read_size, found.queue_depth) in CANDIDATES
    reader = BackgroundPrefetcher([big], direct=direct)
    assert found.direct == (direct and reader.is_direct)
    reader.close()
    assert descriptors() == before
    assert not reader_threads()


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 2 * SAMPLE - 1])
def test_small_file_is_read_with_the_defaults(tmp_path: Path, nbytes: int) -> None:
    found = probe_disk(write_file(tmp_path / "small", nbytes), True)
    assert found.bytes_per_second > 0
    assert (found.read_size, found.queue_depth) == (DEFAULT_READ_SIZE, DEFAULT_QUEUE_DEPTH)


def test_the_fastest_wins_unless_an_earlier_one_is_nearly_as_fast(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = dict.fromkeys(CANDIDATES, 0.5) | {CANDIDATES[0]: 1.0, CANDIDATES[1]: 1.04, CANDIDATES[2]: 1.2}
    starts = []

    def measure(path: Path, direct: bool, read_size: int, queue_depth: int, start: int, nbytes: int) -> DiskProfile:
        starts.append(start)
        assert nbytes == SAMPLE
        return DiskProfile(speeds[read_size, queue_depth], read_size, queue_depth, direct)

    monkeypatch.setattr(probe, "_measure", measure)
    assert probe_disk(big, True).bytes_per_second == 1.2
    speeds[CANDIDATES[2]] = 1.05
    assert probe_disk(big, True).bytes_per_second == 1.0
    assert len(set(starts)) == probe.ROUNDS * len(CANDIDATES)
    assert all(start % 4096 == 0 and start + SAMPLE <= big.stat().st_size for start in starts)


@pytest.mark.parametrize(("buffered", "chosen"), [(1.1, False), (1.2, True)])
def test_reads_through_the_page_cache_are_chosen_where_they_are_clearly_faster(
    big: Path, monkeypatch: pytest.MonkeyPatch, buffered: float, chosen: bool
) -> None:
    def measure(path: Path, direct: bool, *args: int) -> DiskProfile:
        return DiskProfile(1.0 if direct else buffered, args[0], args[1], direct)

    monkeypatch.setattr(probe, "_measure", measure)
    assert probe_disk(big, True, may_buffer=True).direct != chosen
    assert probe_disk(big, True).direct


def test_page_cache_is_not_measured(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux drops pages when asked")
    with big.open("rb") as file:
        os.fsync(file.fileno())
    assert num_cached_pages(big) > 500
    left = noted(monkeypatch, BackgroundPrefetcher, "start", lambda *_: num_cached_pages(big))
    probe._measure(big, False, 4 << 20, 1, 0, 2 * SAMPLE)
    assert left[0] < 50
    assert num_cached_pages(big) < 50, "the pages of the probe were dropped, too"


@pytest.mark.parametrize("error", [ReadError("the disk is gone"), KeyboardInterrupt()])
def test_error_reaches_the_caller(big: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    before = descriptors()
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(Ticket, "wait", Mock(side_effect=error))
        disk_profile(big, True)
    assert descriptors() == before
    assert not reader_threads()
    assert not disks().exists()


# --- remembering -----------------------------------------------------------------------


def test_stored_profile_is_used_and_that_of_a_small_file_is_not_stored(
    big: Path, probed: list[bool], tmp_path: Path
) -> None:
    small = write_file(tmp_path / "small", 2 * SAMPLE - 1)
    assert disk_profile(small, True) == disk_profile(small, True) == FAKE
    assert probed == [True, True] and not cache_directory().exists()
    for direct in (True, False, True, False):
        assert disk_profile(big, direct) == FAKE
    assert disk_profile(small, True) == FAKE  # of the same disk
    assert probed == [True, True, True, False]
    assert len(json.loads(disks().read_text())) == 2
    assert [path.name for path in cache_directory().iterdir()] == ["disks.json"]


LOAD_AT_LEAST = """
import sys
from mlx_flash import FlashConfig, load_model
from mlx_flash.memory.footprint import peak_footprint
model = load_model(sys.argv[1], FlashConfig(ram_budget_gb="min"))[0]
print(peak_footprint(), model.plan.budget_bytes)
"""


def test_probe_of_a_small_file_stays_within_the_least_budget(tmp_path: Path) -> None:
    model = save(tmp_path / "mamba", configuration("mamba") | {"vocab_size": 64_000})
    done = children.run("-c", LOAD_AT_LEAST, model, forks=False)
    assert done.returncode == 0, done.stderr.decode()
    peak, budget = map(int, done.stdout.split())
    assert peak <= budget


def test_doubted_profile_is_measured_once_more(big: Path, probed: list[bool]) -> None:
    for _ in range(3):
        assert disk_profile(big, True) == FAKE
        doubt_profile(big)
    assert probed == [True, True]


@pytest.mark.parametrize(
    ("age", "is_used"), [(MAX_AGE_SECONDS - 60, True), (MAX_AGE_SECONDS + 1, False), (-3600, False)]
)
def test_old_profile_is_measured_again(big: Path, probed: list[bool], age: float, is_used: bool) -> None:
    """And that of a clock that was wrong. Others, and entries of a later version, are kept."""
    disk_profile(big, True)
    (key,) = json.loads(disks().read_text())
    entries = {"elsewhere:1:direct": entry(), key: entry(time=time.time() - age, latency=3)}
    disks().write_text(json.dumps(entries))
    probed.clear()
    assert disk_profile(big, True).bytes_per_second == (5e8 if is_used else FAKE.bytes_per_second)
    assert probed == ([] if is_used else [True])
    assert "elsewhere:1:direct" in json.loads(disks().read_text())


def test_foreign_contents_are_ignored_and_replaced(big: Path, probed: list[bool]) -> None:
    changes: list[dict[str, object]] = [
        *({"read_size": value} for value in (0, "large", 1.5)),
        *({"queue_depth": value} for value in (0, None)),
        *({"bytes_per_second": value} for value in (0.0, float("inf"), float("nan"))),
        *({"time": value} for value in ("yesterday", float("nan"))),
        {"direct": "yes"},
    ]
    entries = [None, "text", {}, {"time": time.time()}, *(entry(**change) for change in changes)]
    disk_profile(big, True)
    (key,) = json.loads(disks().read_text())
    for text in ("", "{", "\0", "null", "[]", "[" * 5000, *(json.dumps({key: value}) for value in entries)):
        disks().write_text(text)
        probed.clear()
        assert disk_profile(big, True) == disk_profile(big, True) == FAKE
        assert probed == [True], text
