"""The state of running engines: one small file for each model, in a folder private to the user.

A thread of the engine's process replaces the file a few times a second, and removes it when the model is closed or the
process ends. The next look removes the file of a crashed process. No connection, no port: readers cost the engine
nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import math
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import psutil

from mlx_flash.files import write_atomically

SCHEMA = 1
"""Version of the state. New values may come without a new number."""

INTERVAL_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
"""Interval at which a state that does not change is written again."""

SILENT_SECONDS = 5.0
"""Age of the file of an engine that stands still. A process that began at another time than its file says is another
one, unless the file is newer than this: setting the clock changes the time at which processes seem to have begun."""

Json = dict[str, Any]

_FILE_NAME = re.compile(r"([1-9][0-9]{0,9})-([0-9]{1,9})\.json(\.partial)?")
_LARGEST_FILE = 16 << 20
_TIMES = ("started", "written", "clock")
_KINDS = {"pid": int, "number": int, "schema": int, **dict.fromkeys(_TIMES, float), "state": dict}
_SAME_START_SECONDS = 2.0
_JOIN_SECONDS = 1.0

_logger = logging.getLogger(__name__)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Published:
    """The last published state of one engine."""

    path: Path
    pid: int
    number: int  # of the model in that process
    started: float  # start of the process, in seconds since the epoch
    schema: int  # version of the state
    written: float  # time of the state, in seconds since the epoch
    clock: float  # the same time by the process's time.perf_counter(), as all times in the state
    state: Json  # result of collect

    @property
    def is_newer(self) -> bool:
        """True when a newer version wrote the state."""
        return self.schema > SCHEMA


class Publisher:
    """Publisher of the state of one model.

    The thread refers to ``collect``, which must not refer to the object whose finalizer closes the publisher. A failure
    ends publishing, not the process. Failures of the file system are logged.

    Args:
        collect: returns the state, in JSON's types. Called in the publisher's thread.
        interval_seconds: time between two calls.

    Attributes:
        path: the file; None before the start, after the end, and without a folder to write to.
    """

    def __init__(self, collect: Callable[[], Json], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.path: Path | None = None
        self._collect = collect
        self._interval = interval_seconds
        self._pid = os.getpid()
        self._number = next(_numbers)
        self._lock = threading.RLock()
        self._closed = False
        # The garbage collector may call close() in any thread at any point: this queue is made for that, an Event not.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlx-flash-telemetry", daemon=True)

    def start(self) -> None:
        """Begin to publish. Without a private folder, log a warning and do nothing."""
        try:
            folder = _make_folder(folders()[0])
            list(_look(folder))  # removes the files of dead processes
        except OSError as error:
            _logger.warning("flash-monitor will not see this model: %s", error)
            return
        self._pid = os.getpid()
        self.path = folder / f"{self._pid}-{self._number}.json"
        began = psutil.Process().create_time()
        self._envelope = {"schema": SCHEMA, "pid": self._pid, "number": self._number, "started": began}
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """End publishing and remove the file. Any thread may call it, repeatedly; a forked child does nothing."""
        if os.getpid() != self._pid or (self._closed and self.path is None):
            return
        self._closed = True
        self._wake.put(None)
        atexit.unregister(self.close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # A limit, since a finalizer may run while its thread holds a lock that collect() waits for.
            self._thread.join(_JOIN_SECONDS)
        self._remove()

    def _run(self) -> None:
        try:
            self._publish()
        except OSError as error:
            _logger.warning("flash-monitor does not see this model any more: %s", error)
        finally:
            self._remove()

    def _publish(self) -> None:
        last: Json | None = None
        last_clock = 0.0
        while not self._closed:
            clock = time.perf_counter()
            state = self._collect()
            if state != last or clock - last_clock >= HEARTBEAT_SECONDS:
                self._write(clock, state)
                last, last_clock = state, clock
            with contextlib.suppress(Empty):
                self._wake.get(timeout=self._interval)

    def _write(self, clock: float, state: Json) -> None:
        entry = {**self._envelope, "written": time.time(), "clock": clock, "state": state}
        text = json.dumps(entry, allow_nan=False, separators=(",", ":"))
        path = self.path
        if path is None:
            return
        write_atomically(path, text)
        if self.path is None:  # closing may have looked for the file before it was there
            path.unlink(missing_ok=True)

    def _remove(self) -> None:
        with self._lock:
            path, self.path = self.path, None
            if path is not None:
                with contextlib.suppress(OSError):  # the next look removes the file of a process that ended
                    path.unlink()


def find() -> list[Published]:
    """Return the last states of this user's engines, by process and number. Remove the files of dead processes.

    Raises:
        PermissionError: a folder is not private to the user.
    """
    found: list[Published] = []
    for folder in folders():
        if os.path.lexists(folder):
            _check_private(folder)
            found += _look(folder)
    return sorted(found, key=lambda published: (published.pid, published.number))


def folders() -> list[Path]:
    """Return the folders where this user's engines may publish, which need not exist. Ours publish in the first one.

    That is the user's runtime folder on Linux, which a session over ``su`` or ``cron`` may lack, or a temporary folder.
    """
    uid = os.getuid()
    temporary = Path(tempfile.gettempdir()) / f"mlx-flash-{uid}"
    if sys.platform != "linux":
        return [temporary]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    return [Path(runtime) / "mlx-flash", temporary] if _is_own(runtime) else [temporary]


def _is_own(directory: str) -> bool:
    try:
        return os.stat(directory).st_uid == os.getuid() and os.access(directory, os.R_OK | os.W_OK | os.X_OK)  # noqa: PTH116
    except OSError:
        return False


def _make_folder(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _check_private(folder)
    return folder


def _check_private(folder: Path) -> None:
    """Refuse a folder that another user may have made."""
    status = folder.lstat()
    problem = None
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory"
    elif status.st_uid != os.getuid():
        problem = f"belongs to user {status.st_uid}, not {os.getuid()}"
    elif status.st_mode & 0o077:
        problem = f"can be used by others (mode {stat.S_IMODE(status.st_mode):o}, not 700)"
    if problem is not None:
        raise PermissionError(f"{folder} {problem}. Hint: remove it.")


def _look(folder: Path) -> Iterator[Published]:
    """Yield the states in a folder, and remove the files of dead processes. Other files are left alone."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    for name in names:
        path, match = folder / name, _FILE_NAME.fullmatch(name)
        if match is None:
            continue
        published = None if match[3] else _read(path, int(match[1]), int(match[2]))
        if not _is_wanted(int(match[1]), published):
            path.unlink(missing_ok=True)
        elif published is not None:
            yield published


def _read(path: Path, pid: int, number: int) -> Published | None:
    """Return the state in a file; None when the file is gone or has another form."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file) if os.fstat(file.fileno()).st_size <= _LARGEST_FILE else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or any(type(found.get(key)) is not kind for key, kind in _KINDS.items()):
        return None
    if (found["pid"], found["number"]) != (pid, number) or not all(math.isfinite(found[key]) for key in _TIMES):
        return None
    return Published(path, **{key: found[key] for key in _KINDS})


def _is_wanted(pid: int, published: Published | None) -> bool:
    """Return False for a file of a dead process."""
    is_fresh = published is not None and abs(time.time() - published.written) < SILENT_SECONDS
    try:
        process = psutil.Process(pid)
        is_running, began = process.status() != psutil.STATUS_ZOMBIE, process.create_time()
    except psutil.NoSuchProcess:
        return False
    is_same = published is None or abs(began - published.started) < _SAME_START_SECONDS
    return is_running and (is_same or is_fresh)
