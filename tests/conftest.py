"""Fixtures that every test file may use."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run; `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps tests from reading or writing what the user's runs remember, and from the user's settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.getbasetemp()))
    for name in [name for name in os.environ if name.startswith("MLX_FLASH_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="module")
def _gives_memory_back() -> Iterator[None]:
    """Budgets count the whole process: what the tests of one file let go of is not left to those of the next."""
    yield
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
