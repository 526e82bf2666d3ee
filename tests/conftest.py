"""Fixtures that every test file may use."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import settings

from mlx_flash import enginethread
from mlx_flash.forks import wait_for_finalizers
from mlx_flash.residency import machine
from mlx_flash.storage import probe

# The same examples in every run; `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None)  # machines are slow at times
settings.load_profile("repeatable")

QUICK = {
    "test_compat",
    "test_dropped",
    "test_files",
    "test_kv_growth",
    "test_layering",
    "test_layers",
    "test_layout",
    "test_memory",
    "test_modelfile",
    "test_placement",
    "test_pool",
    "test_residency_kv",
    "test_run",
    "test_slots",
    "test_stream",
    "test_writer",
}
"""Files of which every test gets the marker ``quick``; in other files, single tests have it."""

REST = {
    "test_benchmark",
}
"""Files that test the programs of `benchmarks/`. Their tests get the marker ``rest``, and so do all cases of a test but
the first and the last one."""

TESTS = Path(__file__).resolve().parent
DURATIONS = TESTS / "durations.json"
"""How many seconds each file took in the last run with ``--write-durations``."""
sys.path.insert(0, str(TESTS / "helpers"))

# Child processes import this checkout, and write as those of users do. They and pytest, which rewrites the tests, keep
# compiled modules.
os.environ["PYTHONPATH"] = str(TESTS.parent)
os.environ.pop("PYTHONUNBUFFERED", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name}, the order of the files")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first, so that no worker is left with one of them at the end. Mark the tests."""
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.path.stem, 0))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
        if item.path.stem in QUICK:
            item.add_marker(pytest.mark.quick)
        if item.path.stem in REST:
            item.add_marker(pytest.mark.rest)
    for same in cases.values():
        for item in same[1:-1]:
            item.add_marker(pytest.mark.rest)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write how long each file took, if asked to."""
    if not config.getoption("--write-durations"):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.location[0]).stem] += report.duration
    slow = {name: round(total) for name, total in seconds.most_common() if total >= 1}
    DURATIONS.write_text(json.dumps(slow, indent=1) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collections, which tests and pytest ask for often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Let signals reach the tests and the processes that they start: jobs in the background may ignore them."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


SPEEDS = {"read_products": 4e9, "prompt_speedup": 4.0}
"""Speeds of this processor, by the functions that measure them."""

DISK_BYTES_PER_SECOND = 1e9


@pytest.fixture(autouse=True, scope="session")
def _same_speeds() -> Iterator[None]:
    """Plan models with the same speeds in every run, whatever else this machine does.

    The disk is read, as it is without tests. Tests of the measurements call the functions; child processes measure.
    """

    def probe_disk(path: Path, direct: bool, may_buffer: bool) -> probe.DiskProfile:
        return replace(real(path, direct, may_buffer), bytes_per_second=DISK_BYTES_PER_SECOND)

    real = probe.probe_disk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "probe_disk", probe_disk)
        for name, speed in SPEEDS.items():
            patch.setattr(machine, name, lambda given, speed=speed: speed)
        patch.setattr(machine, "barrier_seconds", lambda: 5e-5)
        yield


@pytest.fixture(autouse=True, scope="session")
def _roomy_disk() -> Iterator[None]:
    """Let this machine's disk decide nothing by how full it is. Children of ``children.py`` have the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", import_module("roomy").disk_usage)
        yield


@pytest.fixture(autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """Let no test leave a signal handler behind: a later test that interrupts itself would end the whole process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    left = [number.name for number, handler in before.items() if signal.getsignal(number) is not handler]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not left, f"this test changed the handler of {', '.join(left)}"


@pytest.fixture(autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the user's settings and from files that the user's runs wrote."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.getbasetemp()))
    for name in [name for name in os.environ if name.startswith("MLX_FLASH_")]:
        monkeypatch.delenv(name)


def _end_what_is_left() -> None:
    """Wait until what tests have left has ended: finalizers leave the ends of models to the engine thread."""
    gc.collect()
    wait_for_finalizers()
    enginethread.run(gc.collect)


@pytest.fixture
def _no_freed_buffers() -> Iterator[None]:
    """Let MLX keep no buffers of freed arrays. On the CPU the limit of an earlier test's model stays, however large."""
    _end_what_is_left()
    limit = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(limit)


@pytest.fixture(autouse=True, scope="module")
def _gives_memory_back() -> Iterator[None]:
    """Return free memory to the system after each module, because a budget counts the memory of the whole process.

    What is left, such as modules that tests imported, is excluded from later collections: many tests ask for one.
    """
    yield
    _end_what_is_left()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
