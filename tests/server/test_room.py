"""The generation thread, where it cannot load its model."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_flash import FlashConfig
from mlx_flash.errors import CheckpointError
from mlx_flash.server.catalog import Catalog, Source
from mlx_flash.server.models import Models
from mlx_flash.server.room import EngineRoom


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_a_thread_that_loaded_nothing_is_waited_for_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX aborts the process if a thread ends while Python does, and Python joins a thread before it has ended."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0

    def load(*_: Any) -> None:
        libc.pthread_setspecific(key, ctypes.c_void_p(200_000))
        raise CheckpointError("no model")

    monkeypatch.setattr(Models, "load", load)
    config = FlashConfig()
    room = EngineRoom(Catalog([Source(name="x", base="x", config=config)], Source(config=config)))
    result = room._plan.result
    monkeypatch.setattr(room._plan, "result", lambda: (room._thread.join(), result()))
    with pytest.raises(CheckpointError, match="no model"):
        room.start()
    assert not Path(f"/proc/self/task/{room._native_id}").exists()
    libc.pthread_key_delete(key)
