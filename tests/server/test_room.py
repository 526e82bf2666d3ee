"""The generation thread, where it cannot load its model."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_flash import FlashConfig
from mlx_flash.errors import CheckpointError, RefusedError
from mlx_flash.server.catalog import Catalog, Source
from mlx_flash.server.models import Models
from mlx_flash.server.ranks import Ranks
from mlx_flash.server.room import EngineRoom


def new_room() -> EngineRoom:
    config = FlashConfig()
    return EngineRoom(Catalog([Source(name="x", base="x", config=config)], Source(config=config)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("owner", "name"), [(Ranks, "of_process"), (Models, "__init__"), (Models, "load")])
def test_a_thread_that_dies_before_it_has_a_model_is_told(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: 1 / 0)
    room = new_room()
    with pytest.raises(RefusedError, match="the generation thread died"):
        room.start()
    assert not room.is_ready and not room.is_alive and not room.join()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_a_thread_that_loaded_nothing_is_waited_for_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX aborts the process if a thread ends while Python does, and Python joins a thread before it has ended."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0

    def load(*_: Any) -> None:
        libc.pthread_setspecific(key, ctypes.c_void_p(200_000))
        raise CheckpointError("no model")

    monkeypatch.setattr(Models, "load", load)
    room = new_room()
    monkeypatch.setattr(room, "_loaded", SimpleNamespace(put=lambda _: None, get=room._thread.join))
    with pytest.raises(CheckpointError, match="no model"):
        room.start()
    assert not Path(f"/proc/self/task/{room._native_id}").exists()
    libc.pthread_key_delete(key)
