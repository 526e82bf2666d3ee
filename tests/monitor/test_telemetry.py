"""What an engine publishes is found while it runs, private, whole, and gone when it is gone."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from children import ROOT
from mlx_flash.files import PrivateFolder
from mlx_flash.telemetry import HEARTBEAT_SECONDS, SCHEMA, Publisher, find, folders
from waiting import eventually

HELD: list[PrivateFolder] = []
"""Folders of files that :func:`write` made."""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of its own, and another folder for temporary files."""
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield tmp_path / "run"
    while HELD:
        HELD.pop().close()


@pytest.fixture
def publish() -> Iterator[Callable[..., Publisher]]:
    """Starts publishers, and closes them after the test."""
    started = []

    def start(collect: Callable[[], dict[str, Any]], interval: float = 0.01) -> Publisher:
        publisher = Publisher(collect, interval)
        started.append(publisher)
        publisher.start()
        return publisher

    yield start
    for publisher in started:
        publisher.close()


def write(text: str) -> Path:
    """Write a state as a running engine does."""
    HELD.append(PrivateFolder(folders()[0]))
    path = HELD[-1].path / "state.json"
    path.write_text(text)
    return path


def envelope(**changes: Any) -> str:
    now = {"started": psutil.Process().create_time(), "written": time.time(), "clock": 1.0}
    return json.dumps({"schema": SCHEMA, "pid": os.getpid(), "number": 0, **now, "state": {}, **changes})


def test_what_is_published_is_found_and_private(publish: Any) -> None:
    previous = os.umask(0)
    try:
        publisher = publish(lambda: {"a": [1, {"b": None}]})
        (found,) = eventually(find)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(found.path.parent.stat().st_mode) == 0o700
    assert found.path == publisher.path
    assert (found.pid, found.schema, found.state) == (os.getpid(), SCHEMA, {"a": [1, {"b": None}]})
    assert not found.is_foreign
    assert abs(found.started - psutil.Process().create_time()) < 0.1
    assert abs(found.written - time.time()) < 5
    assert abs(found.clock - time.perf_counter()) < 5


def test_closing_removes_the_file_and_ends_the_thread(publish: Any) -> None:
    publisher = publish(dict)
    (found,) = eventually(find)
    publisher.close()
    assert publisher.path is None and not found.path.exists()
    assert not any(thread.name == "mlx-flash-telemetry" for thread in threading.enumerate())
    publisher.close()
    assert not found.path.parent.exists()


def test_closing_in_its_own_thread_does_not_wait_for_itself() -> None:
    """The garbage collector runs finalizers in whatever thread it happens to be."""
    publisher = Publisher(lambda: publisher.close() or {}, 0.01)  # type: ignore[func-returns-value]
    publisher.start()
    eventually(lambda: not publisher._thread.is_alive())
    assert find() == []


def test_a_changing_state_is_written_often_and_an_idle_one_rarely(publish: Any) -> None:
    ticks = iter(range(10**9))
    idle, busy = publish(lambda: {"same": 1}), publish(lambda: {"tick": next(ticks)})
    eventually(lambda: len(find()) == 2)
    seen: dict[str, set[float]] = {"idle": set(), "busy": set()}
    began = time.monotonic()
    while time.monotonic() - began < 1.5 * HEARTBEAT_SECONDS:
        for published in find():
            seen["idle" if published.path == idle.path else "busy"].add(published.clock)
        time.sleep(0.01)
    assert 2 <= len(seen["idle"]) <= 3
    assert len(seen["busy"]) > 10
    assert busy.path is not None


def test_a_failing_file_system_ends_publishing_with_one_warning(publish: Any, caplog: pytest.LogCaptureFixture) -> None:
    ticks = iter(range(10**9))
    publisher = publish(lambda: {"tick": next(ticks)})
    (found,) = eventually(find)
    found.path.parent.rename(found.path.parent.with_name("gone"))  # the publisher writes while a tree is removed
    eventually(lambda: not publisher._thread.is_alive())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "flash-monitor does not see this model any more" in caplog.text
    assert str(found.path) in caplog.text
    publisher.close()


def test_a_mistake_in_collecting_is_shown_and_ends_publishing(publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    answers: list[dict[str, Any]] = [{"tick": 2}, {"tick": 1}]
    publisher = publish(lambda: answers.pop())
    eventually(lambda: not publisher._thread.is_alive())
    assert [arguments.exc_type for arguments in shown] == [IndexError]
    assert find() == []


@pytest.mark.parametrize(
    ("problem", "words"),
    [("mode", "can be used by others .mode 750"), ("link", "is not a directory"), ("file", "is not a directory")],
)
def test_a_folder_that_is_not_private_is_refused(
    problem: str, words: str, publish: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = folders()[0]
    if problem == "mode":
        folder.mkdir()
        folder.chmod(0o750)
    elif problem == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(PermissionError, match=words):
        find()
    publisher = publish(dict)
    assert publisher.path is None
    assert "flash-monitor will not see this model" in caplog.text and str(folder) in caplog.text
    publisher.close()


def test_another_users_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    folder = folders()[-1]
    assert folder == tmp_path / "tmp" / f"mlx-flash-{other}"
    folder.mkdir(mode=0o700)
    with pytest.raises(PermissionError, match=f"belongs to user {other - 1}, not {other}"):
        find()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has runtime folders")
def test_an_engine_started_without_a_runtime_folder_is_found(
    publish: Any, monkeypatch: pytest.MonkeyPatch, runtime: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    publisher = publish(dict)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert [published.path for published in eventually(find)] == [publisher.path]


def test_another_schema_is_told() -> None:
    write(envelope(schema=SCHEMA + 1, more="things"))
    (found,) = find()
    assert found.is_foreign and found.schema == SCHEMA + 1 and not found.state


FOREIGN = ["", "{", "[]", "null", "[" * 100_000, '{"pid": 1}', "\ud800"]


def test_what_is_not_ours_is_left_alone() -> None:
    path = write("")
    for text in FOREIGN:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert find() == [] and path.exists(), text[:80]
    path.write_text(envelope())
    path.parent.rename(path.parents[1] / "other")
    assert find() == [] and (path.parents[1] / "other").exists()


PROGRAM = """
import os, sys, time
from mlx_flash.telemetry import Publisher, find
publisher = Publisher(lambda: {"model": "it"}, 0.01)
publisher.start()
while not any(published.pid == os.getpid() for published in find()):
    time.sleep(0.01)
print(publisher.path, flush=True)
"""


def start(program: str) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", PROGRAM + program]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, text=True, cwd=ROOT)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError", "os.kill(os.getpid(), 2)"])
def test_a_process_that_ends_removes_its_file(ending: str) -> None:
    process, path = start(ending)
    process.communicate(timeout=60)
    assert not path.parent.exists()


def test_a_killed_process_leaves_a_file_that_the_next_look_removes() -> None:
    process, path = start("time.sleep(60)")
    assert [published.pid for published in find()] == [process.pid]
    (path.parent / f"{path.name}.partial").write_text("half")
    process.send_signal(signal.SIGKILL)
    killed = psutil.Process(process.pid)
    eventually(
        lambda: killed.status() == psutil.STATUS_ZOMBIE and killed.num_threads() == 1
    )  # files close with the last
    assert path.exists()
    assert find() == []  # a zombie: nobody has asked for its exit status yet
    assert list(path.parent.parent.iterdir()) == []
    process.communicate()


def test_a_forked_process_leaves_its_parents_file() -> None:
    program = """
import warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    publisher.close()
    sys.exit(0)
os.waitpid(child, 0)
print(os.path.exists(publisher.path), len(find()), flush=True)
"""
    process, path = start(program)
    out, error = process.communicate(timeout=60)
    assert out.split() == ["True", "1"], error
    assert not path.exists()
