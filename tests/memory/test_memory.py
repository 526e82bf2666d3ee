"""How much memory there is and how much of it is used."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

import children
from mlx_flash.memory import driver
from mlx_flash.memory import footprint as memory
from mlx_flash.memory.footprint import available_memory, footprint, peak_footprint, total_memory
from models import LLAMA, save

MB = 1_000_000
UNLIMITED_V1 = 9223372036854771712
linux = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")


@pytest.mark.usefixtures("_no_freed_buffers")
def test_footprint_follows_touched_memory() -> None:
    before = footprint()
    now = footprint()  # taken before the peak, which might grow in between
    assert 0 < now <= peak_footprint()
    pages = mmap.mmap(-1, 100 * MB)
    reserved = footprint()
    np.frombuffer(pages, np.uint8)[:: mmap.PAGESIZE] = 1
    touched = footprint()
    pages.close()
    after = footprint()
    assert reserved - before < 20 * MB
    assert 80 * MB < touched - reserved < 130 * MB
    assert after < touched - 80 * MB
    assert peak_footprint() >= touched - 4 * MB


# --- control groups --------------------------------------------------------------------


class Tree:
    """A made-up ``/proc/self`` and ``/sys/fs/cgroup``."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        self.proc.mkdir()
        self.groups.mkdir()

    def add(self, path: str, limit: object, used: int = 0, shared: int = 0) -> None:
        """Add a group; one below ``memory/`` is of version 1."""
        is_v1 = path.split("/")[0] == "memory"
        group = self.groups / path
        group.mkdir(parents=True, exist_ok=True)
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(f"{limit}\n")
        stat = "cache 99\nrss 1\ntotal_rss {}\ntotal_shmem {}\n" if is_v1 else "file 12\nanon {}\nshmem {}\nkernel 7\n"
        (group / "memory.stat").write_text(stat.format(used, shared))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path)
    monkeypatch.setattr(memory, "_PROC", made.proc)
    monkeypatch.setattr(memory, "_CGROUPS", made.groups)
    machine = SimpleNamespace(total=64_000 * MB, available=40_000 * MB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    return made


SCOPE = "user.slice/run.scope"
GROUPS: dict[str, tuple[list[str] | None, list[tuple[Any, ...]], tuple[int, int]]] = {
    "no file": (None, [], (64_000, 40_000)),
    "none": ([], [], (64_000, 40_000)),
    "only the root": (["0::/"], [], (64_000, 40_000)),
    "v2": ([f"0::/{SCOPE}"], [(SCOPE, 8_000, 3_000)], (8_000, 5_000)),
    "v2 without limit": ([f"0::/{SCOPE}"], [(SCOPE, "max", 3_000)], (64_000, 40_000)),
    "limits of parents hold": (
        ["0::/pod/container/leaf"],
        [("pod", 6_000, 5_500), ("pod/container", 9_000, 100), ("pod/container/leaf", "max", 50)],
        (6_000, 500),
    ),
    "v2 in a container with its group as root": (["0::/"], [("", 4_000, 1_000)], (4_000, 3_000)),
    "v1": (
        ["5:devices:/", "4:cpu,memory:/job", "2:cpuset:/other", "1:name=systemd:/job", "0::/"],
        [("memory/job", 8_000, 1_000), ("memory", UNLIMITED_V1, 30_000)],
        (8_000, 7_000),
    ),
    "v1 in a container with another group name": (
        ["4:memory:/docker/0123456789"],
        [("memory", 8_000, 1_000)],
        (8_000, 7_000),
    ),
    "other controllers and odd names": (
        ["4:memoryless:/a", "3:cpu:/a", "0::/with:colon/é"],
        [("memory/a", 1, 0), ("with:colon/é", 7_000, 0)],
        (7_000, 7_000),
    ),
    "outside of the visible tree": (["0::/../sibling"], [("", 5_000, 0)], (5_000, 5_000)),
    "more used than allowed": (["0::/a"], [("a", 1_000, 1_001)], (1_000, 0)),
    "limit above what the machine has": (["0::/a"], [("a", 100_000, 1_000)], (64_000, 40_000)),
    # It is counted as cache, but without swap the kernel would rather kill than take it back.
    "shared memory": (["0::/a"], [("a", 1_000, 300, 200)], (1_000, 500)),
    "shared memory, v1": (["5:memory:/a"], [("memory/a", 1_000, 300, 200)], (1_000, 500)),
}
"""Lines of ``/proc/self/cgroup``; groups with limit and use in MB, and shared memory; total and available memory."""


def test_limits_of_control_groups_hold(tree: Tree) -> None:
    for name, (lines, groups, expected) in GROUPS.items():
        shutil.rmtree(tree.groups, ignore_errors=True)
        if lines is not None:
            (tree.proc / "cgroup").write_text("".join(line + "\n" for line in lines))
        for path, limit, *used in groups:
            in_bytes = limit if limit in ("max", UNLIMITED_V1) else limit * MB
            tree.add(path, in_bytes, *(nbytes * MB for nbytes in used))
        assert (total_memory(), available_memory()) == (expected[0] * MB, expected[1] * MB), name


@linux
def test_status_without_the_field(tree: Tree) -> None:
    (tree.proc / "status").write_text("Name:\tpython\nVmPeak:\t  12 kB\nVmRSS:\t  34 kB\n")
    (tree.proc / "statm").write_text("99 34 5 1 0 40 0\n")
    assert footprint() == 34 * mmap.PAGESIZE
    with pytest.raises(OSError, match="VmHWM"):
        peak_footprint()


# --- a GPU with memory of its own --------------------------------------------------------------

CONTEXT = 500 * MB
SMAPS = """\
7f00-7f10 rw-s 00000000 00:05 9 /dev/nvidia-uvm
Size: 999999 kB
Rss: {managed} kB
7f10-7f20 r--p 00000000 08:01 3 /usr/lib/libc.so.6
Rss: 7 kB
"""


@pytest.fixture
def gpu(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what sets the memory in the host, in kB: the resident set, its shared pages, and managed memory in it."""
    monkeypatch.setattr(memory, "has_own_memory", lambda: True)
    monkeypatch.setattr(memory, "context_bytes", lambda: CONTEXT)
    monkeypatch.setattr(memory, "_managed_seen", (0, 0))

    def be(resident: int, shared: int, managed: int, peak: int = 0) -> None:
        pages = [kilobytes * 1024 // mmap.PAGESIZE for kilobytes in (resident, shared)]
        (tree.proc / "statm").write_text(f"99 {pages[0]} {pages[1]} 1 0 40 0\n")
        (tree.proc / "smaps").write_text(SMAPS.format(managed=managed))
        (tree.proc / "status").write_text(f"Name:\tpython\nVmHWM:\t{peak} kB\n")

    return be


def arrays() -> int:
    return mx.get_active_memory() + mx.get_cache_memory()


@linux
def test_footprint_has_the_arrays_of_a_gpu_and_the_context_of_cuda(gpu: Callable[..., None]) -> None:
    gpu(resident=800_000, shared=100_000, managed=0)
    before = footprint()
    assert before == 800_000 * 1024 + CONTEXT + arrays()
    array = mx.ones((50 * MB,), mx.uint8)
    mx.eval(array)
    assert 50 * MB <= footprint() - before < 60 * MB


@linux
def test_managed_memory_in_the_host_counts_once(gpu: Callable[..., None]) -> None:
    gpu(resident=800_000, shared=100_000, managed=0)
    before = footprint()
    gpu(resident=840_000, shared=140_000, managed=40_000)  # pages of arrays moved to the host
    assert footprint() == before
    gpu(resident=841_000, shared=140_001, managed=-1)  # not counted again: nothing shared has moved
    assert footprint() == before + 1_000 * 1024


@linux
def test_peak_of_host_and_gpu(gpu: Callable[..., None]) -> None:
    """The kernel's peak may have managed memory in it that MLX's peak has, too."""
    gpu(resident=800_000, shared=100_000, managed=0, peak=900_000)
    mx.reset_peak_memory()
    array = mx.ones((200 * MB,), mx.uint8)
    mx.eval(array)
    del array
    assert 0 <= peak_footprint() - 800_000 * 1024 - CONTEXT - mx.get_peak_memory() < MB
    gpu(resident=800_000, shared=100_000, managed=0, peak=2_000_000)
    assert peak_footprint() == 2_000_000 * 1024 + CONTEXT


class Management:
    """NVML of a machine with some processes on its GPU: process numbers and bytes."""

    def __init__(self, processes: Sequence[tuple[int, int]], error: int = 0) -> None:
        self.processes, self.error = processes, error

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: object, number: Any, found: Any) -> int:  # noqa: N802
        room, number._obj.value = number._obj.value, len(self.processes)
        if room < len(self.processes):
            return 7
        for entry, (pid, nbytes) in zip(found, self.processes, strict=False):
            entry.pid, entry.used = pid, nbytes
        return self.error


@pytest.mark.parametrize(
    ("management", "of_pool", "expected"),
    [
        (Management([(1, 900 * MB), (os.getpid(), 600 * MB)]), 100 * MB, 500 * MB),
        (Management([*((i + 1 << 30, MB) for i in range(40)), (os.getpid(), 600 * MB)]), 100 * MB, 500 * MB),
        (Management([(1, 900 * MB)]), 100 * MB, driver._CONTEXT_BYTES),  # another namespace of process numbers
        (Management([(os.getpid(), (1 << 64) - 1)]), 100 * MB, driver._CONTEXT_BYTES),  # not told
        (Management([(os.getpid(), 600 * MB)], error=3), 100 * MB, driver._CONTEXT_BYTES),
        (Management([(os.getpid(), 600 * MB)]), None, driver._CONTEXT_BYTES),  # no pool
        (None, 100 * MB, driver._CONTEXT_BYTES),
    ],
)
def test_context_is_what_nvml_counts_beside_arrays(
    management: Management | None, of_pool: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "has_own_memory", lambda: True)
    monkeypatch.setattr(driver, "_management", lambda: management and (management, None))
    monkeypatch.setattr(driver, "_used_of_pool", lambda: of_pool)
    assert driver.context_bytes() == expected


# --- macOS -----------------------------------------------------------------------------

NUM_V4_FIELDS = 35
"""64-bit fields of ``struct rusage_info_v4``, after the 16 bytes of ``ri_uuid``."""


@pytest.mark.parametrize(("name", "number"), [("phys_footprint", 7), ("lifetime_max_phys_footprint", 28)])
def test_the_macos_struct(name: str, number: int) -> None:
    assert getattr(memory._RUsageInfo, f"ri_{name}").offset == 16 + 8 * number
    assert getattr(memory._RUsageInfo, f"ri_{name}").size == 8
    # The system writes the whole of the version asked for.
    assert ctypes.sizeof(memory._RUsageInfo) >= 16 + 8 * NUM_V4_FIELDS


HOLES = """
import sys
import mlx.core as mx
from mlx_flash import FlashConfig, load_model
from mlx_flash.memory.footprint import footprint

mx.set_cache_limit(0)
if len(sys.argv) > 1:
    load_model(sys.argv[1], FlashConfig(ram_budget_gb=1, telemetry=False))
large = mx.ones(8 << 20, mx.uint8)
mx.eval(large)
del large  # from now on glibc takes blocks of up to 8 MiB from the heap, if it may
before = footprint()
blocks = []
for _ in range(64):
    blocks.append(mx.ones(1 << 20, mx.uint8))
    mx.eval(blocks)
del blocks[:-1]
print(footprint() - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's allocator")
@pytest.mark.parametrize("loads", [True, False])
def test_freed_arrays_leave_no_holes_once_a_model_was_loaded(tmp_path: Path, loads: bool) -> None:
    arguments = [save(tmp_path, LLAMA)] if loads else []
    done = children.run("-c", HOLES, *arguments)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 32 << 20) is not loads
