"""Fixtures that every test file may use."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run; `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None)  # machines are slow at times
settings.load_profile("repeatable")

SLOWEST = (
    "test_zoo",
    "test_kv_batches",
    "test_experts",
    "test_model",
    "test_readme",
    "test_scripts",
    "test_kv_streaming",
    "test_least_budget",
    "test_plan",
    "test_cli",
    "test_monitor",
    "test_faults",
    "test_ranks",
    "test_prefixes",
    "test_kv_cache",
    "test_serving",
    "test_experts_budget",
    "test_pack",
    "test_benchmark",
    "test_rows",
    "test_speculation",
    "test_lockstep",
    "test_huggingface",
    "test_generation",
    "test_stacks",
    "test_budget",
    "test_kept",
    "test_reader",
    "test_kv_store",
    "test_lending",
    "test_derived",
    "test_attention",
    "test_run",
    "test_loans",
    "test_batching",
    "test_exact_serving",
    "test_examples",
    "test_monitor_experts",
    "test_grow_model",
    "test_kv_pages",
    "test_patch",
    "test_rank_rows",
    "test_speed",
    "test_lookahead",
    "test_guessed_batches",
    "test_promise",
    "test_rank_serving",
    "test_rank_watch",
    "test_forks",
    "test_kv_shared",
    "test_residency_kv",
    "test_tuning",
    "test_placement",
    "test_rank_files",
    "test_disk_kv_cache",
    "test_config",
    "test_gotemplate",
    "test_stage",
    "test_counted",
    "test_telemetry",
)
"""Files that take longest, from the slowest. They run first, so that no worker is left with one of them at the end."""

QUICK = {
    "test_compat",
    "test_dropped",
    "test_files",
    "test_kv_sizes",
    "test_layering",
    "test_layers",
    "test_layout",
    "test_memory",
    "test_modelfile",
    "test_monitor_experts",
    "test_placement",
    "test_pool",
    "test_residency_kv",
    "test_run",
    "test_slots",
    "test_stream",
    "test_trace",
    "test_writer",
}
"""Files of which every test gets the marker ``quick``; in other files, single tests have it."""

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

# Child processes import this checkout. They and pytest, which rewrites the tests, keep compiled modules.
os.environ["PYTHONPATH"] = str(TESTS.parent)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first, and mark the tests of the quick ones."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
    for item in items:
        if item.path.stem in QUICK:
            item.add_marker(pytest.mark.quick)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collections, which tests and pytest ask for often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Let SIGINT reach the tests and the processes that they start: a shell has its background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(autouse=True, scope="module")
def _gives_memory_back() -> Iterator[None]:
    """Return free memory to the system after each module, because a budget counts the memory of the whole process."""
    yield
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
