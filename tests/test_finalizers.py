"""Finalizers and the ends of threads: no signal that arrives while an object ends loses what is left to do."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from children import ROOT
from mlx_flash.files import HeldLock, PrivateFolder
from mlx_flash.forks import finalize, joined_to_the_end, wait_for_finalizers


class Owner:
    """An object with a finalizer."""


class Struck(Exception):
    """What the handler of a signal raises."""


def dropped(owners: list[Any]) -> None:
    """Drop the only reference to an object. A signal arrives in each function of Python that this calls."""

    def strike(frame: FrameType, event: str, argument: object) -> None:
        raise Struck

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    sys.settrace(strike)
    try:
        owners.clear()
    finally:
        sys.settrace(None)
        sys.unraisablehook = hook
    wait_for_finalizers()


def test_a_signal_while_an_object_ends_loses_no_work() -> None:
    done = list[str]()
    owners = [Owner()]
    finalize(owners[0], lambda: done.append(threading.current_thread().name))
    dropped(owners)
    assert len(done) == 1 and done[0] != threading.current_thread().name


def hold(folder: Path) -> HeldLock:
    return HeldLock(folder / "lock", create=0o600)


def make(folder: Path) -> PrivateFolder:
    return PrivateFolder(folder / "private")


@pytest.mark.parametrize("opened", [hold, make])
def test_a_signal_while_a_file_ends_leaves_nothing(tmp_path: Path, opened: Callable[[Path], object]) -> None:
    before = len([*Path("/dev/fd").iterdir()])
    dropped([opened(tmp_path)])
    assert len([*Path("/dev/fd").iterdir()]) == before
    for path in tmp_path.rglob("*"):
        assert path.name in ("lock", "private")
        HeldLock(path, wait=False).release()


def test_an_error_in_a_finalizer_is_reported_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reported, done = list[threading.ExceptHookArgs](), list[int]()
    monkeypatch.setattr(threading, "excepthook", reported.append)
    owners = [Owner()]
    finalize(owners[0], int, "x")
    dropped(owners)
    owners = [Owner()]
    finalize(owners[0], done.append, 1)
    dropped(owners)
    assert [each.exc_type for each in reported] == [ValueError] and done == [1]


PROGRAM = """
import os, sys
from mlx_flash.forks import finalize, wait_for_finalizers
class Owner:
    pass
owners = [Owner(), Owner()]
for number, owner in enumerate(owners):
    finalize(owner, os.write, 1, b"%d" % number)
"""


@pytest.mark.parametrize(
    ("rest", "printed"),
    [
        ("", "10"),
        ("del owner, owners[0]; wait_for_finalizers(); os.write(1, b'x')", "0x1"),
        ("if not os.fork(): owners.clear(); wait_for_finalizers(); sys.exit()\nos.wait(); os.write(1, b'x')", "x10"),
        ("if not os.fork(): finalize(owner, os.write, 1, b'c'); sys.exit()\nos.wait(); os.write(1, b'x')", "cx10"),
        ("owners.append(owners); del owner, owners", "10"),
    ],
)
def test_what_is_left_at_the_end_of_a_process_runs_in_it(rest: str, printed: str) -> None:
    command = [sys.executable, "-W", "ignore:This process", "-c", PROGRAM + rest]  # Python 3.12 warns of forks
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


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
