"""Parts that all benchmarks share: worker processes, cold caches, and the description of a measurement.

Every measurement runs in a process of its own, because a peak of memory is that of a whole process. The process prints
its result as one line of JSON, the last on its standard output. With a limit, ``scripts/small_machine`` starts it in a
memory cgroup of that size.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import psutil

import mlx_flash
from mlx_flash.memory.footprint import available_memory, total_memory
from mlx_flash.memory.pagecache import drop_file
from mlx_flash.storage.probe import disk_of
from mlx_flash.storage.safetensors import weight_files

ROOT = Path(__file__).resolve().parent.parent
SMALL_MACHINE = ROOT / "scripts" / "small_machine"

V1, V2 = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")
"""Paths of the block-I/O controller in both versions of cgroups."""

NOT_AVAILABLE = 77
"""Exit status of ``small_machine`` where no memory cgroup can be made."""

KILLED = 128 + signal.SIGKILL
"""Exit status of ``small_machine`` for a killed command; old kernels do not count kills."""

Run = dict[str, Any]


# --- worker processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A worker process that ended.

    Attributes:
        stdout: its standard output.
        machine: the numbers that ``small_machine`` reported; empty without a limit.
    """

    stdout: str
    machine: dict[str, float]


class KilledError(Exception):
    """A worker process that the kernel killed, because it needed more memory than its limit."""


def run_worker(
    script: str | Path,
    arguments: Sequence[object],
    *,
    label: str,
    environment: Mapping[str, str] | None = None,
    limit_bytes: int | None = None,
) -> Run:
    """Run a Python script in a process of its own, and return the JSON value that it printed last.

    Args:
        script: the script.
        arguments: of the script.
        label: name of the run in error messages.
        environment: variables set besides those of this process.
        limit_bytes: size of the memory cgroup that it runs in; None for none.

    Raises:
        KilledError: the kernel killed it for the limit.
        SystemExit: it failed; with the last line that it wrote.
    """
    command = [sys.executable, script, *arguments]
    done = run_command(command, label=label, environment=environment, limit_bytes=limit_bytes)
    run: Run = json.loads(done.stdout.splitlines()[-1])
    return run


def run_command(
    command: Sequence[object],
    *,
    label: str,
    environment: Mapping[str, str] | None = None,
    limit_bytes: int | None = None,
) -> Finished:
    """Run a command, in a memory cgroup if a limit is given.

    Args:
        command: program and arguments.
        label: name of the run in error messages.
        environment: variables set besides those of this process.
        limit_bytes: size of the cgroup, page cache included.

    Raises:
        KilledError: the kernel killed it for the limit.
        SystemExit: it failed for another reason; with the last line that it wrote.
    """
    words = [str(word) for word in command]
    if limit_bytes is not None:
        words = [str(SMALL_MACHINE), str(limit_bytes), *words]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    said = done.stderr.strip().splitlines()
    machine = _machine_report(said.pop()) if limit_bytes is not None and done.returncode != NOT_AVAILABLE else {}
    if machine.get("kills") or (machine and done.returncode == KILLED):
        raise KilledError(f"{label} was killed: it needs more than the limit of {limit_bytes} bytes")
    if done.returncode:
        last = said[-1] if said else "no message"
        raise SystemExit(f"{label} failed: {last} (exit status {done.returncode})")
    return Finished(done.stdout, machine)


def _machine_report(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)\b", line)}


# --- slow disks ------------------------------------------------------------------------------------------------------


@contextmanager
def slow_disk(model: Path, bytes_per_second: int) -> Iterator[Path]:
    """Make a group whose processes read at most so many bytes a second. Yield the file that takes them in."""
    is_v1 = (V1 / "blkio.throttle.read_bps_device").exists()
    group = (V1 if is_v1 else V2) / f"mlx-flash-{os.getpid()}-{len(list(V1.glob('mlx-flash-*')))}"
    number = model.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    group.mkdir()
    try:
        if is_v1:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {bytes_per_second}")
        else:
            (group / "io.max").write_text(f"{device} rbps={bytes_per_second}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


@contextmanager
def slowed(model: Path, mb_per_second: float | None) -> Iterator[None]:
    """Limit what this process and those that it starts read a second, if a limit is wanted.

    They have a cache directory of their own, so that no other process uses the speeds that they measure.
    """
    if mb_per_second is None:
        yield
        return
    with (
        slow_disk(model, int(mb_per_second * 1e6)) as entry,
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, XDG_CACHE_HOME=folder),
    ):
        entry.write_text(str(os.getpid()))
        try:
            yield
        finally:
            (entry.parents[1] / entry.name).write_text(str(os.getpid()))


def in_group(entry: Path, command: Sequence[object]) -> list[object]:
    """Return a command that runs in the group that a file takes processes in for."""
    return ["bash", "-c", f'echo $$ > {entry} && exec "$@"', "bash", *command]


# --- cold caches -----------------------------------------------------------------------------------------------------


def make_cold(paths: Iterable[Path]) -> None:
    """Drop the cached pages of files. With a limit, ``small_machine`` drops all caches of the system."""
    for path in paths:
        drop_file(path)


def take_memory(nbytes: int | None = None) -> None:
    """Write to so many bytes of memory in another process, at most and by default half of the free ones.

    They are free again when this returns. A virtual machine gets memory from its host when it is written to, and keeps
    it for a while. Without this, runs differ by whether they are the first to use some memory, and one that takes more
    of it is slower.
    """
    most = available_memory() // 2
    code = f"import numpy; numpy.ones({most if nbytes is None else min(nbytes, most)}, numpy.uint8)"
    subprocess.run([sys.executable, "-c", code], check=True)


def describe_cold(
    files: str | None = "checkpoint", *, is_direct: bool | None = None, limited: bool = False
) -> list[str]:
    """Return how a benchmark made sure that it read the disk, not a cache; for its JSON.

    Args:
        files: the files whose cached pages were dropped before every run; None if there were none.
        is_direct: reads went past the page cache; None if this is not known.
        limited: runs were started by ``small_machine``.
    """
    ways = []
    if is_direct is not None:
        ways.append("reads past the page cache" if is_direct else "buffered reads: the file system has no direct ones")
    if files is not None:
        ways.append(f"the cached pages of the {files} dropped before every run (a hint to the system)")
    if limited:
        ways.append("runs in a limit: all caches dropped before each (small_machine)")
    return ways or ["nothing is read from the disk"]


# --- the description of a measurement --------------------------------------------------------------------------------


def describe(disk: Path, cold: Sequence[str]) -> dict[str, Any]:
    """Return what the JSON of every benchmark says: date, command, machine, versions and how the cache was made cold.

    Args:
        disk: a file or folder on the disk that is measured.
        cold: from `describe_cold`.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": describe_machine(disk),
        "versions": describe_versions(),
        "cold": list(cold),
    }


def describe_machine(disk: Path) -> dict[str, Any]:
    """Return processor, memory, system, MLX device and the disk that holds a path."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "usable_memory_bytes": total_memory(),
        "os": platform.platform(),
        "device": str(mx.default_device()),
        "device_info": mx.device_info(),
        "disk": _disk(disk),
    }


def _cpu_model() -> str:
    if sys.platform == "darwin":
        found = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return found.stdout.strip()
    with suppress(FileNotFoundError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _disk(path: Path) -> dict[str, str | None]:
    """Return device and file system that hold a path, and the disk's model where the system names it."""
    found = disk_of(path)
    return {"device": found.device, "file_system": found.file_system, "model": _disk_model(found.device)}


def _disk_model(device: str) -> str | None:
    block = Path("/sys/class/block", Path(device).name)
    for folder in (block, block.resolve().parent):  # a partition's disk is the folder around it
        with suppress(OSError):
            return (folder / "device" / "model").read_text().strip()
    return None


def describe_model(path: Path, nbytes: int | None = None) -> dict[str, Any]:
    """Return the name, size and shape of a model; the size is that of its weights in files, unless given."""
    if nbytes is None:
        nbytes = sum(file.stat().st_size for file in weight_files(path))
    config = json.loads((path / "config.json").read_text())
    names = ("model_type", "num_hidden_layers", "hidden_size", "torch_dtype", "quantization")
    return {"name": path.resolve().name, "nbytes": nbytes} | {name: config.get(name) for name in names}


def describe_versions() -> dict[str, str | None]:
    """Return the versions of Python, MLX, mlx-lm, numpy and mlx-flash, with its commit."""
    names = ("mlx", "mlx-lm", "numpy")
    return {"python": platform.python_version(), "mlx-flash": mlx_flash.__version__, "commit": _commit()} | {
        name: version(name) for name in names
    }


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with suppress(FileNotFoundError):
        found = subprocess.run(command, capture_output=True, text=True)
        return found.stdout.strip() or None
    return None


def write_json(path: Path | None, result: Any) -> None:
    """Write all numbers of a benchmark, if a file was named."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
