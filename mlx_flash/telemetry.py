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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import psutil

from mlx_flash.files import SESSIONS, PrivateFolder, is_held, read_json_object, remove_orphans, write_atomically
from mlx_flash.logs import log

SHORTEST = 1e-6
"""Shorter times give no rate."""


class Fact(NamedTuple):
    """A published number: its unit, whether it only grows, its meaning, and its name as a metric."""

    unit: str
    kind: str
    help: str
    metric: str = ""


_GAUGE, _COUNTER = "gauge", "counter"

FACTS = {
    "model.bytes": Fact("bytes", _GAUGE, "Weights of the model", "model_bytes"),
    "budget.bytes": Fact("bytes", _GAUGE, "RAM budget of the process", "budget_bytes"),
    # By the plan
    "plan.budget_bytes": Fact("bytes", _GAUGE, "Budget that the plan was made for"),
    "plan.base_bytes": Fact("bytes", _GAUGE, "The process's own memory, before any weight"),
    "plan.resident_bytes": Fact("bytes", _GAUGE, "Small and derived parameters, always in memory"),
    "plan.pinned_bytes": Fact("bytes", _GAUGE, "Other weights that stay in memory"),
    "plan.slots_bytes": Fact("bytes", _GAUGE, "Slots of streamed weights"),
    "plan.num_slots": Fact("slots", _GAUGE, "Slots of streamed weights"),
    "plan.pool_bytes": Fact("bytes", _GAUGE, "Experts that stay in memory"),
    "plan.kv_bytes": Fact("bytes", _GAUGE, "Memory reserved for keys and values"),
    "plan.kv_disk_bytes": Fact("bytes", _GAUGE, "Keys and values that a pass reads from the disk in a full context"),
    "plan.activation_bytes": Fact("bytes", _GAUGE, "Memory reserved for activations"),
    "plan.spare_bytes": Fact("bytes", _GAUGE, "Memory reserved for longer prompts"),
    "plan.bounce_bytes": Fact("bytes", _GAUGE, "Bounce buffers of reads"),
    "plan.cache_limit": Fact("bytes", _GAUGE, "Limit of freed arrays that MLX keeps"),
    "plan.context_length": Fact("tokens", _GAUGE, "Context that memory is reserved for"),
    "plan.prefill_step_size": Fact("tokens", _GAUGE, "Most tokens of a prompt in one call"),
    "plan.disk_bytes_per_second": Fact("bytes/second", _GAUGE, "Speed of the disk in its probe"),
    "plan.read_bytes_per_pass": Fact("bytes", _GAUGE, "Weights that a pass reads by the plan", "read_bytes_per_pass"),
    "plan.predicted_seconds_per_pass": Fact("seconds", _GAUGE, "Predicted time of a pass in a short context"),
    # Forward passes
    "passes.num_passes": Fact("passes", _COUNTER, "Forward passes that ended well", "passes_total"),
    "passes.num_failed": Fact("passes", _COUNTER, "Forward passes that failed", "failed_passes_total"),
    "passes.num_sequences": Fact("sequences", _COUNTER, "Sequences over all passes"),
    "passes.num_tokens_in": Fact("tokens", _COUNTER, "Tokens given to the model", "input_tokens_total"),
    "passes.num_tokens_out": Fact("tokens", _COUNTER, "Tokens generated", "generated_tokens_total"),
    "passes.num_prompt_tokens": Fact("tokens", _COUNTER, "Tokens of prompts whose evaluation has ended"),
    "passes.num_guessed": Fact("tokens", _COUNTER, "Tokens guessed", "guessed_tokens_total"),
    "passes.num_right": Fact("tokens", _COUNTER, "Guessed tokens that were right", "right_guesses_total"),
    "passes.pass_seconds": Fact("seconds", _COUNTER, "Time in forward passes", "pass_seconds_total"),
    "passes.decode_seconds": Fact("seconds", _COUNTER, "Time in passes that generate tokens"),
    "passes.decode_gap_seconds": Fact("seconds", _COUNTER, "Time between passes that generate tokens"),
    "passes.prompt_gap_seconds": Fact("seconds", _COUNTER, "Time from passes for prompts to the next passes"),
    "passes.last_seconds": Fact("seconds", _GAUGE, "Time of the last pass"),
    "passes.last_ended": Fact("clock seconds", _GAUGE, "End of the last pass"),
    "passes.last_began": Fact(
        "clock seconds", _GAUGE, "Start of the pass under way or, between passes, of the last one"
    ),
    "passes.began": Fact("clock seconds", _GAUGE, "Start of the pass under way"),
    "passes.num_tokens": Fact("tokens", _GAUGE, "New tokens of that or the last pass"),
    "passes.batch_size": Fact("sequences", _GAUGE, "Sequences of that or the last pass"),
    "passes.num_decoding": Fact("sequences", _GAUGE, "Those of them with one new token"),
    # Reads
    "read.nbytes": Fact("bytes", _COUNTER, "Weights read from the disk", "disk_read_bytes_total"),
    "read.busy_seconds": Fact("seconds", _COUNTER, "Time with at least one read in flight"),
    "read.cached_bytes": Fact("bytes", _COUNTER, "Weights read through the page cache"),
    "read.cached_file_bytes": Fact("bytes", _GAUGE, "Part of the files that is read through the page cache"),
    "read.num_reads": Fact("reads", _COUNTER, "Reads that ended, retries not counted"),
    "read.num_retries": Fact("reads", _COUNTER, "Reads that were repeated after an I/O error"),
    "stream.wait_seconds": Fact("seconds", _COUNTER, "Time that passes waited for the disk", "disk_wait_seconds_total"),
    "stream.held_seconds": Fact("seconds", _COUNTER, "Time from the arrival of weights to their release"),
    "stream.num_acquired": Fact("units", _COUNTER, "Streamed units that were waited for"),
    "stream.num_unpredicted": Fact("units", _COUNTER, "Those of them whose read had not been started ahead"),
    # Memory
    "memory.footprint": Fact("bytes", _GAUGE, "Memory of the process, as the budget counts it", "memory_bytes"),
    "memory.peak_footprint": Fact("bytes", _GAUGE, "Largest memory of the process so far", "memory_peak_bytes"),
    "memory.active": Fact("bytes", _GAUGE, "Arrays of MLX"),
    "memory.cache": Fact("bytes", _GAUGE, "Freed arrays that MLX keeps"),
    "memory.peak": Fact("bytes", _GAUGE, "Largest arrays of MLX so far"),
    "memory.lent": Fact("bytes", _GAUGE, "Streamed weights in reserved memory"),
    "memory.pool": Fact("bytes", _GAUGE, "Experts in memory"),
    "memory.kv_and_activations": Fact("bytes", _GAUGE, "Keys, values and activations"),
    "memory.others": Fact("bytes", _GAUGE, "Weights, keys and values of other models of the process"),
    # Experts
    "experts.num_routed": Fact("experts", _COUNTER, "Experts that routers chose", "routed_experts_total"),
    "experts.num_hits": Fact("experts", _COUNTER, "Chosen experts that were in memory", "expert_hits_total"),
    "experts.num_predicted": Fact("experts", _COUNTER, "Experts read because a router was expected to choose them"),
    "experts.num_predicted_right": Fact("experts", _COUNTER, "Those of them that were chosen next"),
    "experts.num_evicted": Fact("experts", _COUNTER, "Experts that lost their slots to others"),
    "experts.num_calls": Fact("calls", _COUNTER, "Calls of layers of experts"),
    "experts.num_full": Fact("calls", _COUNTER, "Those of them that ran at the full number of experts"),
    "experts.read_bytes": Fact("bytes", _COUNTER, "Bytes of experts that were read"),
    "experts.wait_seconds": Fact("seconds", _COUNTER, "Time that calls waited for experts"),
    "experts.num_slots": Fact("slots", _GAUGE, "Slots of the pool, one expert each"),
    "experts.slot_bytes": Fact("bytes", _GAUGE, "Size of a slot"),
    "experts.expert_bytes": Fact("bytes", _GAUGE, "Bytes of the largest expert"),
    "experts.num_resident": Fact("experts", _GAUGE, "Experts in the pool"),
    "experts.num_experts": Fact("experts", _GAUGE, "Experts of all layers"),
    # Keys and values, prompts, writes
    "kv.memory_bytes": Fact("bytes", _GAUGE, "Keys and values in memory"),
    "kv.disk_bytes": Fact("bytes", _GAUGE, "Keys and values on the disk", "kv_disk_bytes"),
    "kv.read_bytes": Fact("bytes", _COUNTER, "Keys and values read from the disk"),
    "kv.written_bytes": Fact("bytes", _COUNTER, "Keys and values written to the disk"),
    "kv.reserved_bytes": Fact("bytes", _GAUGE, "Arrays of MLX for keys and values"),
    "kv.num_offloaded": Fact("layers", _COUNTER, "Layers offloaded to the disk"),
    "kv.wait_seconds": Fact("seconds", _COUNTER, "Time that calls waited for keys and values"),
    "prefixes.num_restored": Fact("tokens", _COUNTER, "Prompt tokens restored from the prefix cache"),
    "prefixes.num_computed": Fact("tokens", _COUNTER, "Prompt tokens computed"),
    "prefixes.restored_bytes": Fact("bytes", _COUNTER, "Keys and values restored from the prefix cache"),
    "prefixes.num_calls_restored": Fact("calls", _COUNTER, "Calls that were restored whole"),
    "prefixes.stored": Fact("pages", _COUNTER, "Pages stored in the prefix cache"),
    "prefixes.refused_wear": Fact("pages", _COUNTER, "Pages not stored: the limit of writes is reached"),
    "prefixes.refused_room": Fact("pages", _COUNTER, "Pages not stored: the disk, or the share of it, is full"),
    "prefixes.refused_stopped": Fact("pages", _COUNTER, "Pages not stored: storing has stopped"),
    "prefixes.queued_bytes": Fact("bytes", _GAUGE, "Pages that wait to be written"),
    "prefixes.damaged": Fact("pages", _COUNTER, "Pages that were found damaged"),
    "writes.session_bytes": Fact("bytes", _COUNTER, "Written for this model"),
    "writes.day_bytes": Fact("bytes", _GAUGE, "Written today by this process"),
    "writes.day_limit_bytes": Fact("bytes", _GAUGE, "Most that may be written in a day"),
    "writes.refused_bytes": Fact("bytes", _COUNTER, "Not written because of that limit"),
}


class Facts(dict[str, float]):
    """Numbers by name. ``facts[name]`` is 0 for a number that is missing, ``facts.get(name)`` is None."""

    def __missing__(self, name: str) -> float:
        return 0.0


def budget_of(facts: Facts) -> float:
    """Return the budget in force."""
    return facts["budget.bytes"] or facts["plan.budget_bytes"]


def read(state: Any) -> Facts:
    """Return the numbers of a published state."""
    found = Facts()
    for name in FACTS:
        section, key = name.split(".")
        if (value := (state.get(section) or {}).get(key)) is not None:
            found[name] = value
    return found


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


def metrics(state: Any) -> Iterator[tuple[Fact, float]]:
    """Yield the metrics of one engine and their values. Those that it lacks, such as those of experts, are left out."""
    found = read(state)
    yield from ((fact, found[name]) for name, fact in FACTS.items() if fact.metric and name in found)


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
