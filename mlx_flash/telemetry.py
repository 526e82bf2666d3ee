"""The state of running engines: one small file for each model, in a folder private to the user.

A thread of the engine's process replaces the file a few times a second. The file has a folder of its own, which the
process locks, and removes when the model is closed or the process ends. The next reader removes the folders of crashed
processes. No connection, no port: readers cost the engine nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import psutil

from mlx_flash.files import SESSIONS, PrivateFolder, is_held, read_json_object, remove_orphans, write_atomically
from mlx_flash.logs import log

SHORTEST = 1e-6
"""Shorter times give no rate."""


METRICS = {
    "model.bytes": ("model_bytes", "Weights of the model"),
    "budget.bytes": ("budget_bytes", "RAM budget of the process"),
    "plan.read_bytes_per_pass": ("read_bytes_per_pass", "Weights that a pass reads by the plan"),
    "passes.num_passes": ("passes_total", "Forward passes that ended well"),
    "passes.num_failed": ("failed_passes_total", "Forward passes that failed"),
    "passes.num_tokens_in": ("input_tokens_total", "Tokens given to the model"),
    "passes.num_tokens_out": ("generated_tokens_total", "Tokens generated"),
    "passes.num_guessed": ("guessed_tokens_total", "Tokens guessed"),
    "passes.num_right": ("right_guesses_total", "Guessed tokens that were right"),
    "passes.pass_seconds": ("pass_seconds_total", "Time in forward passes"),
    "read.nbytes": ("disk_read_bytes_total", "Weights read from the disk"),
    "stream.wait_seconds": ("disk_wait_seconds_total", "Time that passes waited for the disk"),
    "memory.footprint": ("memory_bytes", "Memory of the process, as the budget counts it"),
    "memory.peak_footprint": ("memory_peak_bytes", "Largest memory of the process so far"),
    "experts.num_routed": ("routed_experts_total", "Experts that routers chose"),
    "experts.num_hits": ("expert_hits_total", "Chosen experts that were in memory"),
    "kv.disk_bytes": ("kv_disk_bytes", "Keys and values on the disk"),
}
"""The published numbers that are metrics of the server, with their names and meanings there; counters end in _total."""


class Facts(dict[str, float]):
    """Numbers by name. ``facts[name]`` is 0 for a number that is missing, ``facts.get(name)`` is None."""

    def __missing__(self, name: str) -> float:
        return 0.0


def budget_of(facts: Facts) -> float:
    """Return the budget in force."""
    return facts["budget.bytes"] or facts["plan.budget_bytes"]


def read(state: Any) -> Facts:
    """Return the numbers of a published state."""
    sections = ((section, numbers) for section, numbers in state.items() if isinstance(numbers, dict))
    named = ((f"{section}.{name}", value) for section, numbers in sections for name, value in numbers.items())
    return Facts((name, value) for name, value in named if type(value) in (int, float))


class Sample(NamedTuple):
    """The numbers at one moment of the engine's clock."""

    clock: float
    facts: Facts

    @property
    def last_ended(self) -> float:
        """End of the last call, by the engine's clock; 0 before the first one."""
        return self.facts["passes.last_ended"]

    def since(self, before: Sample, name: str) -> float:
        """Return the growth of a counter; a counter that is missing counts as 0."""
        return self.facts[name] - before.facts[name]

    def waited(self, before: Sample) -> float:
        """Return the time that computing waited for weights, keys and values."""
        return sum(max(0.0, self.since(before, f"{section}.wait_seconds")) for section in ("stream", "experts", "kv"))

    def reading(self, before: Sample) -> float:
        """Return the time with a read in flight: of weights, or of what computing waited for."""
        return max(self.since(before, "read.busy_seconds"), self.waited(before))


def ratio(part: float, whole: float, most: float = math.inf) -> float | None:
    """Return a quotient between 0 and ``most``; None where the divisor is next to nothing.

    Counters of parts and of the whole, and clocks, are read one after another: a share may come out a little above 1.
    """
    return min(max(part, 0.0) / whole, most) if whole > SHORTEST else None


SCHEMA = 1
"""Version of the state. New values may come without a new number."""

INTERVAL_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
"""Interval at which a state that does not change is written again."""

SILENT_SECONDS = 5.0
"""Age of the file of an engine that stands still."""

Json = dict[str, Any]

_FILE_NAME = "state.json"
_LARGEST_FILE = 16 << 20
_JOIN_SECONDS = 1.0

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
    def is_foreign(self) -> bool:
        """True when another version wrote the state, which is left out then."""
        return self.schema != SCHEMA


class Publisher:
    """Publisher of the state of one model, which ``collect`` returns in the publisher's thread.

    ``collect`` must not refer to the object whose finalizer closes the publisher. A failure ends publishing, not the
    process. Failures of the file system are logged.
    """

    def __init__(self, collect: Callable[[], Json], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.path: Path | None = None  # before the start, after the end, and without a folder to write to
        self._collect = collect
        self._interval = interval_seconds
        self._folder: PrivateFolder | None = None
        self._closed = False
        # The garbage collector may call close() in any thread at any point: this queue is made for that, an Event not.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlx-flash-telemetry", daemon=True)

    def start(self) -> None:
        """Begin to publish. Without a private folder, log a warning and do nothing."""
        base = folders()[0]
        try:
            with contextlib.suppress(FileExistsError):
                base.mkdir(mode=0o700)
            _check_private(base)
            self._folder = PrivateFolder(base, "the state of a model")
        except OSError as error:
            log.warning("flash-monitor will not see this model: %s", error)
            return
        self.path = self._folder.path / _FILE_NAME
        began = psutil.Process().create_time()
        self._envelope = {"schema": SCHEMA, "pid": os.getpid(), "number": next(_numbers), "started": began}
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """End publishing and remove the file. Any thread may call it, repeatedly; a forked child removes nothing."""
        self._closed = True
        self._wake.put(None)
        atexit.unregister(self.close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # A limit, since a finalizer may run while its thread holds a lock that collect() waits for.
            self._thread.join(_JOIN_SECONDS)
        self._remove()

    def _run(self) -> None:
        last: Json | None = None
        last_clock = 0.0
        try:
            while not self._closed:
                clock = time.perf_counter()
                state = self._collect()
                if state != last or clock - last_clock >= HEARTBEAT_SECONDS:
                    entry = {**self._envelope, "written": time.time(), "clock": clock, "state": state}
                    if (path := self.path) is not None:
                        write_atomically(path, json.dumps(entry, allow_nan=False, separators=(",", ":")))
                    last, last_clock = state, clock
                with contextlib.suppress(Empty):
                    self._wake.get(timeout=self._interval)
        except OSError as error:
            if not self._closed:
                log.warning("flash-monitor does not see this model any more: %s", error)
        finally:
            self._remove()

    def _remove(self) -> None:
        self.path = None
        if self._folder is not None:
            self._folder.close()


def find() -> list[Published]:
    """Return the last states of this user's engines, by process and number. Remove those of dead processes."""
    found: list[Published] = []
    for folder in folders():
        if os.path.lexists(folder):
            _check_private(folder)
            sessions = list(folder.glob(SESSIONS))
            if not all(map(is_held, sessions)):  # remove_orphans locks the folder, so that starting engines wait
                remove_orphans(folder)
            found += filter(None, (_read(session / _FILE_NAME) for session in sessions))
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


def _read(path: Path) -> Published | None:
    """Return the state in a file; None when the file is gone or another program's."""
    found = read_json_object(path, _LARGEST_FILE)
    names = [field.name for field in fields(Published) if field.name != "path"]
    if not found.keys() >= {*names}:
        return None
    given = {name: found[name] for name in names}
    return Published(path, **(given if found["schema"] == SCHEMA else {**given, "state": {}}))
