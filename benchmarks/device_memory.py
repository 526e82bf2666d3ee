"""Memory of a GPU and of the host, as the driver and the kernel show it, while a model decodes at some budgets.

    python benchmarks/device_memory.py --model models/llama --budgets 4 6 10 --json out.json

Needs an NVIDIA GPU that nothing else uses. Each run is a process of its own. Meanwhile this process asks ``nvidia-smi``
for the memory in use (NVML), and ``/proc`` for what the run has in the host's: its resident pages, and those of them
that are managed memory (``/dev/nvidia-uvm``), which NVML counts too, so they are left out of the host's. The context is
what an MLX process takes that has computed next to nothing. *Device* is the rise of NVML's count above that; *both*
adds the host's pages of the same moment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness import Run, describe, describe_cold, describe_model, make_cold, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runs import Job, run_job

from mlx_flash.config import GB, parse_budget
from mlx_flash.storage.safetensors import weight_files

_EMPTY = "import mlx.core as mx; mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64))); input()"
_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
_MANAGED = "/dev/nvidia-uvm"
_SECONDS = 0.2


class Sample(NamedTuple):
    """Bytes at one moment: of the device, resident in the host, and of these in managed memory."""

    device: int
    resident: int
    managed: int


def used_on_device() -> int:
    """Return the bytes of the GPU that are in use."""
    return int(subprocess.run(_QUERY, check=True, capture_output=True, text=True).stdout) << 20


def in_host(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process, and those of managed memory; 0 once it has ended."""
    resident = managed = 0
    is_managed = False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    for line in lines:
        if line.startswith("Rss:"):
            nbytes = int(line.split()[1]) << 10
            resident += nbytes
            managed += nbytes * is_managed
        elif "-" in line.split(" ", 1)[0]:
            is_managed = line.endswith(_MANAGED)
    return resident, managed


class Watcher:
    """Samples of the memory of the process that this one has started, until it ends."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
            hosts = [in_host(int(pid)) for pid in children]
            resident, managed = (sum(values) for values in zip(*hosts, strict=True)) if hosts else (0, 0)
            self.samples.append(Sample(used_on_device(), resident, managed))


def context_bytes(before: int) -> int:
    """Return the bytes of the GPU that a process takes in which MLX has computed next to nothing."""
    with subprocess.Popen([sys.executable, "-c", _EMPTY], stdin=subprocess.PIPE) as process:
        time.sleep(6)
        found = used_on_device() - before
        process.communicate(b"\n")
    return found


def measure(options: argparse.Namespace, budget: str, before: int, context: int) -> Run:
    """Decode at a budget, and watch."""
    make_cold(weight_files(options.model))
    settings = {"io": options.io, "telemetry": False}
    job = Job(str(options.model), options.tokens, 16, parse_budget(budget), settings=settings, own=True)
    with Watcher() as watcher:
        run = run_job(job)
    device = [sample.device - before - context for sample in watcher.samples]
    both = [on + sample.resident - sample.managed for on, sample in zip(device, watcher.samples, strict=True)]
    highest = both.index(max(both))
    return {
        **run,
        "device_bytes": max(device),
        "both_bytes": max(both),
        "at_highest": watcher.samples[highest]._asdict(),
        "managed_in_host_bytes": max(sample.managed for sample in watcher.samples),
        "num_samples": len(both),
    }


def print_table(console: Console, result: Run) -> None:
    table = Table("budget", "device", "both", "both, of the budget", "managed in host", "tokens/s", box=SIMPLE_HEAD)
    for run in result["runs"]:
        gigabytes = (f"{run[name] / GB:.2f} GB" for name in ("budget_bytes", "device_bytes", "both_bytes"))
        share = f"{run['both_bytes'] / run['budget_bytes']:.2f}"
        table.add_row(
            *gigabytes, share, f"{run['managed_in_host_bytes'] / GB:.2f} GB", f"{run['tokens_per_second']:.2f}"
        )
    console.print(table)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--budgets", nargs="+", default=["4", "6", "10"], help="in GB, or 'min' (default: 4 6 10)")
    parser.add_argument("--tokens", type=int, default=24, help="to decode in every run (default: 24)")
    parser.add_argument("--io", default="auto", help="how to read (default: auto)")
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    return parser.parse_args(arguments)


def main() -> None:
    options, console = parse_arguments(sys.argv[1:]), Console()
    before = used_on_device()
    context = context_bytes(before)
    console.print(f"in use before: {before / GB:.2f} GB; context: {context / GB:.2f} GB", highlight=False)
    found = [measure(options, budget, before, context) for budget in options.budgets]
    result = {
        **describe(options.model, describe_cold()),
        "model": describe_model(options.model),
        "context_bytes": context,
        "runs": found,
    }
    write_json(options.json, result)
    print_table(console, result)


if __name__ == "__main__":
    main()
