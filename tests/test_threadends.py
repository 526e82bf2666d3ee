"""The ends of threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

import pytest

from mlx_flash.threadends import joined_to_the_end


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_a_join_waits_for_what_a_library_does_at_the_end_of_a_thread() -> None:
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0
    thread = threading.Thread(target=libc.pthread_setspecific, args=(key, ctypes.c_void_p(200_000)))
    with joined_to_the_end():
        thread.start()
        thread.join()
        assert not Path(f"/proc/self/task/{thread.native_id}").exists()
    libc.pthread_key_delete(key)
