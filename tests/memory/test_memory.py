"""How much memory there is and how much of it is used."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
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


def test_footprint_equals_the_systems_number() -> None:
    if sys.platform == "darwin" or driver.has_own_memory():
        pytest.skip("the footprint is not the resident set there")
    assert footprint() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05, abs=8 * MB)


def test_total_and_available() -> None:
    assert 0 < total_memory() <= psutil.virtual_memory().total
    assert 0 <= available_memory() <= total_memory()


# --- control groups --------------------------------------------------------------------


class Tree:
    """A made-up ``/proc/self`` and ``/sys/fs/cgroup``."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        self.proc.mkdir()
        self.groups.mkdir()

    def be_in(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("".join(line + "\n" for line in lines))

    def add(self, path: str, limit_file: str, limit: object, stat: str) -> None:
        group = self.groups / path
        group.mkdir(parents=True, exist_ok=True)
        (group / limit_file).write_text(f"{limit}\n")
        (group / "memory.stat").write_text(stat)

    def add_v2(self, path: str, limit: object, anon: int = 0) -> None:
        self.add(path, "memory.max", limit, f"anon {anon}\nfile 123456\nkernel 77\n")

    def add_v1(self, path: str, limit: object, rss: int = 0) -> None:
        self.add(
            path, "memory.limit_in_bytes", limit, f"cache 99\nrss 1\nhierarchical_memory_limit 5\ntotal_rss {rss}\n"
        )


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path)
    monkeypatch.setattr(memory, "_PROC", made.proc)
    monkeypatch.setattr(memory, "_CGROUPS", made.groups)

    class Machine:
        total = 64_000 * MB
        available = 40_000 * MB

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    return made


def check(total: int, available: int) -> None:
    assert (total_memory(), available_memory()) == (total * MB, available * MB)


def test_shared_memory_of_a_group_is_in_use(tree: Tree) -> None:
    """It is counted as cache, but without swap the kernel would rather kill than take it back."""
    for line, limit_file, names in (
        ("0::/a", "memory.max", ("anon", "shmem")),
        ("5:memory:/a", "memory.limit_in_bytes", ("total_rss", "total_shmem")),
    ):
        tree.be_in(line)
        path = "a" if limit_file == "memory.max" else "memory/a"
        tree.add(path, limit_file, 1000 * MB, f"{names[0]} {300 * MB}\n{names[1]} {200 * MB}\n")
        check(1000, 500)


def test_no_control_groups(tree: Tree) -> None:
    check(64_000, 40_000)  # no /proc/self/cgroup at all
    tree.be_in()
    check(64_000, 40_000)
    tree.be_in("0::/")
    check(64_000, 40_000)


def test_cgroup_v2(tree: Tree) -> None:
    tree.be_in("0::/user.slice/run.scope")
    tree.add_v2("user.slice/run.scope", 8_000 * MB, 3_000 * MB)
    check(8_000, 5_000)


def test_cgroup_v2_without_limit(tree: Tree) -> None:
    tree.be_in("0::/user.slice/run.scope")
    tree.add_v2("user.slice/run.scope", "max", 3_000 * MB)
    check(64_000, 40_000)


def test_cgroup_v2_limits_of_parents_hold(tree: Tree) -> None:
    tree.be_in("0::/pod/container/leaf")
    tree.add_v2("pod", 6_000 * MB, 5_500 * MB)
    tree.add_v2("pod/container", 9_000 * MB, 100 * MB)
    tree.add_v2("pod/container/leaf", "max", 50 * MB)
    check(6_000, 500)


def test_cgroup_v2_in_a_container_with_its_group_as_root(tree: Tree) -> None:
    tree.be_in("0::/")
    tree.add_v2("", 4_000 * MB, 1_000 * MB)
    check(4_000, 3_000)


def test_cgroup_v1(tree: Tree) -> None:
    tree.be_in("5:devices:/", "4:cpu,memory:/job", "2:cpuset:/other", "1:name=systemd:/job", "0::/")
    tree.add_v1("memory/job", 8_000 * MB, 1_000 * MB)
    tree.add_v1("memory", UNLIMITED_V1, 30_000 * MB)
    check(8_000, 7_000)


def test_cgroup_v1_in_a_container_with_another_group_name(tree: Tree) -> None:
    tree.be_in("4:memory:/docker/0123456789")
    tree.add_v1("memory", 8_000 * MB, 1_000 * MB)
    check(8_000, 7_000)


def test_other_controllers_and_odd_names(tree: Tree) -> None:
    tree.be_in("4:memoryless:/a", "3:cpu:/a", "0::/with:colon/é")
    tree.add_v1("memory/a", 1 * MB)
    tree.add_v2("with:colon/é", 7_000 * MB)
    check(7_000, 7_000)


def test_group_outside_of_the_visible_tree(tree: Tree) -> None:
    tree.be_in("0::/../sibling")
    tree.add_v2("", 5_000 * MB)
    check(5_000, 5_000)


def test_more_used_than_allowed(tree: Tree) -> None:
    tree.be_in("0::/a")
    tree.add_v2("a", 1_000 * MB, 1_001 * MB)
    check(1_000, 0)


def test_limit_above_what_the_machine_has(tree: Tree) -> None:
    tree.be_in("0::/a")
    tree.add_v2("a", 100_000 * MB, 1_000 * MB)
    check(64_000, 40_000)


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

V4_FIELDS = [
    "ri_user_time",
    "ri_system_time",
    "ri_pkg_idle_wkups",
    "ri_interrupt_wkups",
    "ri_pageins",
    "ri_wired_size",
    "ri_resident_size",
    "ri_phys_footprint",
    "ri_proc_start_abstime",
    "ri_proc_exit_abstime",
    "ri_child_user_time",
    "ri_child_system_time",
    "ri_child_pkg_idle_wkups",
    "ri_child_interrupt_wkups",
    "ri_child_pageins",
    "ri_child_elapsed_abstime",
    "ri_diskio_bytesread",
    "ri_diskio_byteswritten",
    "ri_cpu_time_qos_default",
    "ri_cpu_time_qos_maintenance",
    "ri_cpu_time_qos_background",
    "ri_cpu_time_qos_utility",
    "ri_cpu_time_qos_legacy",
    "ri_cpu_time_qos_user_initiated",
    "ri_cpu_time_qos_user_interactive",
    "ri_billed_system_time",
    "ri_serviced_system_time",
    "ri_logical_writes",
    "ri_lifetime_max_phys_footprint",
    "ri_instructions",
    "ri_cycles",
    "ri_billed_energy",
    "ri_serviced_energy",
    "ri_interval_max_phys_footprint",
    "ri_runnable_time",
]
"""The 64-bit fields of ``struct rusage_info_v4``, after the 16 bytes of ``ri_uuid``."""


@pytest.mark.parametrize("name", ["ri_phys_footprint", "ri_lifetime_max_phys_footprint"])
def test_offsets_of_the_macos_struct(name: str) -> None:
    assert getattr(memory._RUsageInfo, name).offset == 16 + 8 * V4_FIELDS.index(name)
    assert getattr(memory._RUsageInfo, name).size == 8


def test_size_of_the_macos_struct() -> None:
    """The system writes the whole of the version asked for."""
    assert ctypes.sizeof(memory._RUsageInfo) >= 16 + 8 * len(V4_FIELDS)


def test_known_offsets_of_the_macos_struct() -> None:
    assert V4_FIELDS.index("ri_phys_footprint") == 7
    assert V4_FIELDS.index("ri_lifetime_max_phys_footprint") == 28


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
