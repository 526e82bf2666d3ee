"""The self-test of how bytes reach a device: back ends that lose them are caught, and what loses them is not used."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from fakedriver import FakeDriver
from mlx_flash import FlashConfig, SelfTestError, load_model
from mlx_flash.memory.arena import Arena
from mlx_flash.storage import probe as selftest
from mlx_flash.storage.prefetcher import RangeReader
from mlx_flash.storage.probe import SELF_TESTS, reads_directly, run_selftest, way_of_reading
from models import LLAMA, PREFILL_AND_DECODE, QWEN3_MOE, run, same_bits, save, stock

CASES = tuple((64 << 10, 4, is_shared) for is_shared in (True, False))


@pytest.fixture(autouse=True)
def small_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(selftest, "CASES", CASES)
    monkeypatch.setattr(selftest, "ROUNDS", 6)
    monkeypatch.setattr(selftest, "NUM_FILE_BYTES", 1 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    selftest._remembered_or_run.cache_clear()
    yield
    selftest._remembered_or_run.cache_clear()


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "needs_test", lambda: True)


def lose(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[memoryview], None], every: int = 3) -> None:
    """Make every third read of a kind spoil what it was to fill, or every so manieth."""
    read, count = getattr(RangeReader, name), iter(range(1 << 30))

    def wrong(self: RangeReader, *args: Any) -> None:
        read(self, *args)
        target = next(argument for argument in reversed(args) if isinstance(argument, memoryview))
        is_bounce_buffer = name == "_read_direct" and isinstance(target.obj, mmap.mmap)  # no memory of MLX
        if not is_bounce_buffer and next(count) % every == 0:
            spoil(target)

    monkeypatch.setattr(RangeReader, name, wrong)


def tear(target: memoryview) -> None:
    """Lose the last page, as a block of managed memory that moves during a read does."""
    np.frombuffer(target, np.uint8)[-4096:] = 0


def flip(target: memoryview) -> None:
    np.frombuffer(target, np.uint8)[len(target) // 2] ^= 1


LOST = {"buffered": 0, "in place": 1}  # of two blocks in the first round


@pytest.mark.parametrize(
    ("spoil", "driver", "lost", "way"),
    [
        (lambda target: None, None, {"buffered": 0, "in place": 0}, "in place"),
        (tear, None, LOST | {"bounced": 0}, "bounced"),
        (flip, None, LOST | {"bounced": 0}, "bounced"),
        (tear, FakeDriver(), LOST | {"copied by the driver": 0}, "copied by the driver"),  # slower ways are not tested
        (tear, FakeDriver(lose_every=12), LOST | {"copied by the driver": 1, "bounced": 0}, "bounced"),
        (tear, FakeDriver(failing="cuPointerGetAttribute"), LOST | {"bounced": 0}, "bounced"),
    ],
    ids=["ordinary", "torn", "flipped", "driver copies", "driver loses", "driver fails"],
)
def test_the_fastest_way_that_loses_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[memoryview], None],
    driver: FakeDriver | None,
    lost: dict[str, int],
    way: str,
) -> None:
    lose(monkeypatch, "_read_direct", spoil)
    if driver is not None:
        monkeypatch.setattr("mlx_flash.memory.driver.load_driver", lambda: driver)
    found = run_selftest()
    assert (found.way, found.lost) == (way, lost)


def test_nothing_is_read_directly_when_bounced_reads_are_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "_read_direct", tear)
    lose(monkeypatch, "_read_bounced", lambda buffer: flip(buffer[: 64 << 10]))
    found = run_selftest()
    assert found.way == "buffered" and found.lost["bounced"]


@pytest.mark.parametrize("number", [0, 11, 12, 23])
def test_block_that_is_lost_in_any_round_is_caught(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The first and the last block of each case."""
    reads: list[memoryview] = []

    def spoil(target: memoryview) -> None:
        reads.append(target)
        if len(reads) == number + 1:
            flip(target)

    lose(monkeypatch, "_read_direct", spoil, every=1)
    assert run_selftest().way == "bounced"


def test_device_that_sees_old_bytes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor sees every byte here, the device computes from what was there before."""

    class StaleArena(Arena):
        def view(self, *args: Any) -> mx.array:
            return mx.array(np.array(super().view(*args)))

    monkeypatch.setattr(selftest, "Arena", StaleArena)
    with pytest.raises(SelfTestError, match=r"2 blocks through the page cache.* Hint: update MLX"):
        run_selftest()


def test_result_is_remembered_for_a_version_of_mlx(monkeypatch: pytest.MonkeyPatch, as_on_gpu: None) -> None:
    runs = []
    monkeypatch.setattr(selftest, "run_selftest", lambda: runs.append(1) or selftest.SelfTest("bounced", {}))
    assert way_of_reading() == "bounced"
    assert len(runs) == len(SELF_TESTS.load()) == 1
    selftest._remembered_or_run.cache_clear()  # as in another process
    assert way_of_reading() == "bounced" and len(runs) == 1
    real = selftest.version
    monkeypatch.setattr(selftest, "version", lambda name: "9.9" if name == "mlx" else real(name))
    assert way_of_reading() == "bounced" and len(runs) == 2


@pytest.mark.parametrize("damage", ["no JSON", "[]", '{"way": "in place"}'])
def test_damaged_results_are_replaced_and_the_processor_is_not_tested(
    damage: str, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    SELF_TESTS.file.parent.mkdir(parents=True)
    SELF_TESTS.file.write_text(damage)
    assert way_of_reading() == "in place"
    assert [result["way"] for result in SELF_TESTS.load().values() if isinstance(result, dict)] == ["in place"]
    monkeypatch.setattr(selftest, "needs_test", lambda: False)
    monkeypatch.setattr(selftest, "run_selftest", lambda: pytest.fail("tested"))
    assert way_of_reading() == "in place" and reads_directly("auto") and not reads_directly("buffered")


def test_model_is_exact_when_the_driver_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_on_gpu: None
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("mlx_flash.memory.driver.load_driver", lambda: driver)
    lose(monkeypatch, "_read_direct", tear)
    for number, (shape, io) in enumerate(((LLAMA, "auto"), (LLAMA, "buffered"), (QWEN3_MOE, "auto"))):
        directory = save(tmp_path / str(number), shape | {"vocab_size": LLAMA["vocab_size"]})
        expected = run(stock(directory), PREFILL_AND_DECODE)
        before = driver.num_copies
        model, _ = load_model(directory, FlashConfig(ram_budget_gb="min", io=io))
        with model:
            assert same_bits(run(model, PREFILL_AND_DECODE), expected)
            assert driver.num_copies > before
        assert not (driver.registered or driver.num_streams or driver.num_contexts)


@pytest.mark.parametrize("is_bounce_broken", [False, True])
def test_model_is_exact_on_a_device_that_loses_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_on_gpu: None, is_bounce_broken: bool
) -> None:
    directory = save(tmp_path / "model", LLAMA)
    expected = run(stock(directory), PREFILL_AND_DECODE)
    lose(monkeypatch, "_read_direct", tear)
    if is_bounce_broken:
        lose(monkeypatch, "_read_bounced", lambda buffer: flip(buffer[: 64 << 10]))
    model, _ = load_model(directory, FlashConfig(ram_budget_gb="min"))
    with model:
        assert model.engine is not None
        assert same_bits(run(model, PREFILL_AND_DECODE), expected)
        assert model.engine.reader.stats.nbytes and model.engine.reader.is_direct != is_bounce_broken
    monkeypatch.setattr(selftest, "needs_test", lambda: False)
    if not is_bounce_broken:  # without the self-test the weights are wrong
        model, _ = load_model(directory, FlashConfig(ram_budget_gb="min", num_slots=2, io="direct"))
        with model:
            assert not all(mx.array_equal(*pair) for pair in zip(run(model, PREFILL_AND_DECODE), expected, strict=True))
