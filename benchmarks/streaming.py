"""How fast a streamed model decodes, next to the disk it is read from and to the same model in memory.

    python benchmarks/streaming.py --model DIR --budgets min 0.9 1.8 --tokens 8 --rounds 3 --json out.json

One round runs everything once, so that a machine that becomes slower for a while does so for all of it:

    resident, probe, budget A, probe, budget B, probe …

* *resident* is stock mlx-lm with all weights in memory: the time that computing takes, and the tokens to compare with.
* a *probe* reads 1.5 GB of the checkpoint for each of a few read sizes and depths, always further on in the files.
* a *budget* is a streamed run. Its own process, as for the resident one: a peak of memory is that of a whole process.
  With ``--variants`` each budget is run with several settings, such as sizes of the pool of experts.

Decoding is timed from the first token to the last, so loading and prefill are left out. A streamed token takes at least
as long as reading its bytes and at least as long as computing it; what can be hoped for is the larger of the two:

    efficiency = max(bytes read a token / probed bytes a second, resident seconds a token) / measured seconds a token

The bandwidth is that of the probes just before and just after the run: once the best of them, once their median. All
numbers of all rounds are in the JSON; the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.generate import generate_step
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import mlx_flash
from mlx_flash.config import GB, FlashConfig, parse_budget
from mlx_flash.errors import FlashError
from mlx_flash.memory.footprint import available_memory, peak_footprint, total_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, drop_cached, open_buffered
from mlx_flash.model import FlashLLM, load_model
from mlx_flash.residency.plan import PREFILL_STEPS, ResidencyPlan
from mlx_flash.storage.placement import Piece, Segment
from mlx_flash.storage.probe import disk_profile
from mlx_flash.storage.reader import Reader, Ticket
from mlx_flash.storage.safetensors import read_checkpoint

PREFILL_STEP = PREFILL_STEPS[-1]
"""The one that fits every budget; the same for all runs, since another one may give other bits."""

OTHER_PROBES = ((4 << 20, 4), (8 << 20, 8), (16 << 20, 4))
"""(read size, queue depth) that are probed beside those of the plan."""

PROBE_BUFFERS = 2
"""Each as large as what is in flight at once."""

RESIDENT_SLACK = 700_000_000
"""What a resident run needs beside its weights."""

Run = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What one worker process does; a budget of None is the resident model."""

    model: str
    tokens: int
    prompt_tokens: int
    budget: float | str | None = None
    read_size_mb: float | None = None
    queue_depth: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Counters:
    """What a streamed model counted up to now; of experts, what needed which bytes."""

    nbytes: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_routed: int = 0
    num_hits: int = 0
    num_predicted: int = 0
    num_predicted_right: int = 0
    missed_bytes: int = 0


# --- one run, in its own process -------------------------------------------------------------------------------------


def work(job: Job) -> Run:
    return _resident_run(job) if job.budget is None else _streamed_run(job)


def _resident_run(job: Job) -> Run:
    began = time.perf_counter()
    model, _ = mlx_lm_utils.load_model(Path(job.model))
    loaded = time.perf_counter() - began
    return {**_decode(model, job, Counters), "load_seconds": loaded, "peak_bytes": peak_footprint()}


def _streamed_run(job: Job) -> Run:
    config = FlashConfig(
        ram_budget_gb=parse_budget(job.budget),
        context_length=job.prompt_tokens + job.tokens,  # as the command line sets it
        read_size_mb=job.read_size_mb,
        queue_depth=job.queue_depth,
        **{"expert_warm_start": False, **job.settings},  # every run begins with nothing known
    )
    began = time.perf_counter()
    model, _ = load_model(job.model, config)
    loaded = time.perf_counter() - began
    with model:
        run = _decode(model, job, lambda: _counters(model))
        run |= {"load_seconds": loaded, "peak_bytes": peak_footprint(), "budget": job.budget, "settings": job.settings}
        return run | {"budget_bytes": model.plan.budget_bytes, "plan": _plan_summary(model.plan)}


def _decode(model: Any, job: Job, count: Callable[[], Counters]) -> Run:
    """Greedy decoding of a fixed prompt. The clock runs from the first token to the last."""
    prompt = mx.array([7 + 13 * i % 89 for i in range(job.prompt_tokens)])
    ids: list[int] = []
    start = first = last = time.perf_counter()
    before = after = Counters()
    for token, _ in generate_step(prompt, model, max_tokens=job.tokens, prefill_step_size=PREFILL_STEP):
        last, after = time.perf_counter(), count()
        if not ids:
            first, before = last, after
        ids.append(int(token))
    passes, seconds = len(ids) - 1, last - first
    busy = after.busy_seconds - before.busy_seconds
    return {
        "token_ids": ids,
        "first_token_seconds": first - start,
        "seconds_per_token": seconds / passes,
        "tokens_per_second": passes / seconds,
        "bytes_per_token": (after.nbytes - before.nbytes) / passes,
        "read_bytes_per_second": (after.nbytes - before.nbytes) / busy if busy > 0 else None,
        "wait_share": (after.wait_seconds - before.wait_seconds) / seconds,
        **_experts(before, after, passes),
    }


def _experts(before: Counters, after: Counters, passes: int) -> Run:
    """What experts did, if they were read one by one. What had to be read is what was not there when it was needed,
    or was there because it had been read ahead."""
    routed = after.num_routed - before.num_routed
    if not routed:
        return {}
    missed = after.missed_bytes - before.missed_bytes
    predicted = after.num_predicted - before.num_predicted
    right = after.num_predicted_right - before.num_predicted_right
    return {
        "hit_rate": (after.num_hits - before.num_hits - right) / routed,
        "predicted_right": right / predicted if predicted else None,
        "missed_bytes_per_token": missed / passes,
        "read_per_missed": (after.nbytes - before.nbytes) / missed if missed else None,
    }


def _counters(model: FlashLLM) -> Counters:
    engine = model.engine
    assert engine is not None
    read, wait_seconds = engine.reader.stats, engine.stream.stats.wait_seconds
    if engine.experts is None:
        return Counters(read.nbytes, read.busy_seconds, wait_seconds)
    pool = engine.experts.pool
    stats = pool.stats
    missed = stats.num_routed - stats.num_hits + stats.num_predicted_right
    return Counters(
        read.nbytes,
        read.busy_seconds,
        wait_seconds + stats.wait_seconds,
        stats.num_routed,
        stats.num_hits,
        stats.num_predicted,
        stats.num_predicted_right,
        missed * max(layer.expert_bytes for layer in pool.layers),
    )


def _plan_summary(plan: ResidencyPlan) -> dict[str, Any]:
    streaming = plan.streaming
    return {
        "minimum_bytes": plan.minimum_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_seconds_per_token": plan.seconds,
        "read_bytes": plan.read_bytes,
        "streamed_layers": len(streaming.layers),
        "tiled_heads": dict(streaming.heads),
        "num_slots": streaming.num_slots,
        "slot_bytes": streaming.slot_bytes,
        "read_size": plan.read_size,
        "queue_depth": plan.queue_depth,
        "disk_bytes_per_second": plan.disk_bytes_per_second,
        "context_length": plan.context_length,
        "prefill_step_size": plan.prefill_step_size,
        "parts": dict(plan.parts()),
        "pool": plan.pool and asdict(plan.pool),
    }


def run_worker(job: Job) -> Run:
    """Runs a job in a process of its own.

    Raises:
        SystemExit: it failed; with the last thing it said.
    """
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SystemExit(f"the run with budget {job.budget} failed: {said[-1]}")
    run: Run = json.loads(done.stdout.splitlines()[-1])
    return run


# --- the disk --------------------------------------------------------------------------------------------------------


class DiskProbe:
    """Reads the checkpoint in order, round and round, into the same two buffers.

    Args:
        paths: files of the checkpoint.
        settings: (read size, queue depth) to try.
        nbytes: to read with each of them; the whole checkpoint if that is smaller.
    """

    def __init__(self, paths: Sequence[Path], settings: Sequence[tuple[int, int]], nbytes: int) -> None:
        self._paths = paths
        self._settings = settings
        self._nbytes = min(nbytes, sum(path.stat().st_size for path in paths))
        self._path, self._offset = 0, 0
        self.is_direct = True

    def measure(self) -> list[dict[str, Any]]:
        """One measurement of every setting."""
        return [self._measure(read_size, queue_depth) for read_size, queue_depth in self._settings]

    def _measure(self, read_size: int, queue_depth: int) -> dict[str, Any]:
        reader = Reader(self._paths, direct=True, read_size=read_size, queue_depth=queue_depth)
        try:
            self.is_direct = reader.is_direct
            buffers = [_buffer(reader.read_size * queue_depth) for _ in range(PROBE_BUFFERS)]
            began = time.perf_counter()
            nbytes = self._read(reader, buffers)
            rate = nbytes / (time.perf_counter() - began)
        finally:
            reader.close()
        return {"read_size": read_size, "queue_depth": queue_depth, "nbytes": nbytes, "bytes_per_second": rate}

    def _read(self, reader: Reader, buffers: Sequence[memoryview]) -> int:
        """While one buffer is waited for, the reads of the next are under way already: the queue never runs empty."""
        done, under_way = 0, deque[Ticket]()
        for buffer in cycle(buffers):
            if done >= self._nbytes:
                break
            if len(under_way) == len(buffers):
                under_way.popleft().wait()
            segment = self._next(len(buffer))
            under_way.append(reader.submit([segment], buffer))
            done += segment.pieces[0].nbytes
        for ticket in under_way:
            ticket.wait()
        return done

    def _next(self, most: int) -> Segment:
        """The next stretch of the files; after the last comes the first."""
        path, start = self._paths[self._path], self._offset
        size = path.stat().st_size
        nbytes = min(most, size - start)
        self._offset += nbytes
        if self._offset == size:
            self._path, self._offset = (self._path + 1) % len(self._paths), 0
        whole = -(-nbytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        return Segment(path, start, whole, 0, (Piece(path.name, start, nbytes, 0),))


def _buffer(nbytes: int) -> memoryview:
    """Memory that a disk reads into as fast as it can: in large pages where the system has them, and touched before."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))
    return view


def make_cold(paths: Sequence[Path], drop_caches: bool) -> None:
    """Makes the system forget what it has cached of the files."""
    for path in paths:
        fd = open_buffered(path)
        try:
            drop_cached(fd, 0, path.stat().st_size)
        finally:
            os.close(fd)
    if drop_caches:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def may_drop_caches() -> bool:
    return sys.platform == "linux" and os.access("/proc/sys/vm/drop_caches", os.W_OK)


# --- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """Everything that a round needs."""

    job: Job
    budgets: Sequence[float | str]
    variants: Sequence[dict[str, Any]]
    with_resident: bool
    probe: DiskProbe
    paths: Sequence[Path]
    drop_caches: bool
    say: Callable[[str], None]

    def run_round(self) -> dict[str, Any]:
        """Runs everything once."""
        resident = self._run(None) if self.with_resident else None
        probes, streamed = [self._probe()], []
        for budget in self.budgets:
            for settings in self.variants:
                streamed.append(self._run(budget, settings))
                probes.append(self._probe())
        return {"resident": resident, "probes": probes, "streamed": streamed}

    def _run(self, budget: float | str | None, settings: dict[str, Any] | None = None) -> Run:
        make_cold(self.paths, self.drop_caches)
        run = run_worker(Job(**{**asdict(self.job), "budget": budget, "settings": settings or {}}))
        name = "resident" if budget is None else " ".join([f"budget {budget}", *_in_words(settings)])
        self.say(f"  {name}: {run['tokens_per_second']:.3f} tokens/s, peak {run['peak_bytes'] / GB:.3f} GB")
        return run

    def _probe(self) -> list[dict[str, Any]]:
        make_cold(self.paths, self.drop_caches)
        found = self.probe.measure()
        rates = " ".join(f"{entry['bytes_per_second'] / GB:.2f}" for entry in found)
        self.say(f"  probe: {rates} GB/s")
        return found


def _in_words(settings: dict[str, Any] | None) -> list[str]:
    return [f"{name}={value}" for name, value in (settings or {}).items()]


def judge(round_: dict[str, Any], reference: Sequence[int], compute_seconds: float | None) -> None:
    """Adds to every streamed run of a round how it compares with the disk, the resident model and its tokens."""
    resident = round_["resident"]
    compute = resident["seconds_per_token"] if resident else compute_seconds
    for run, around in zip(round_["streamed"], pairwise(round_["probes"]), strict=True):
        rates = [entry["bytes_per_second"] for probes in around for entry in probes]
        run["identical"] = run["token_ids"] == list(reference)
        run["probe_best"], run["probe_median"] = max(rates), median(rates)
        for name in ("best", "median"):
            ideal = max(run["bytes_per_token"] / run[f"probe_{name}"], compute or 0.0)
            run[f"efficiency_{name}"] = ideal / run["seconds_per_token"]
        run["of_resident"] = compute / run["seconds_per_token"] if compute else None


def summarize(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""
    resident = [round_["resident"] for round_ in rounds if round_["resident"]]
    budgets = [list(runs) for runs in zip(*(round_["streamed"] for round_ in rounds), strict=True)]
    return {
        "resident": _medians(resident) if resident else None,
        "probe": _probe_summary([entry for r in rounds for probes in r["probes"] for entry in probes]),
        "streamed": [_medians(runs) | _streamed_summary(runs) for runs in budgets],
    }


def _medians(runs: Sequence[Run]) -> dict[str, float | None]:
    """The median of every number that all runs have."""
    names = [name for name, value in runs[0].items() if isinstance(value, int | float) and type(value) is not bool]
    return {name: median(run[name] for run in runs) for name in names if all(run[name] is not None for run in runs)}


def _streamed_summary(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "budget": runs[0]["budget"],
        "settings": runs[0]["settings"],
        "peak_bytes_max": max(run["peak_bytes"] for run in runs),
        "within_budget": all(run["peak_bytes"] <= run["budget_bytes"] for run in runs),
        "identical": all(run["identical"] for run in runs),
    }


def _probe_summary(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for read_size, queue_depth in dict.fromkeys((entry["read_size"], entry["queue_depth"]) for entry in entries):
        rates = [
            e["bytes_per_second"] for e in entries if (e["read_size"], e["queue_depth"]) == (read_size, queue_depth)
        ]
        found.append({"read_size": read_size, "queue_depth": queue_depth, "best": max(rates), "median": median(rates)})
    return found


# --- the machine and the model ---------------------------------------------------------------------------------------


def describe_machine(model: Path) -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "usable_memory_bytes": total_memory(),
        "os": platform.platform(),
        "device": str(mx.default_device()),
        "device_info": mx.device_info(),
        "disk": _disk(model),
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
    """Device and file system that hold a path, as far as the system says."""
    mounts = [m for m in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(m.mountpoint)]
    if not mounts:
        return {"device": None, "file_system": None, "model": None}
    mount = max(mounts, key=lambda m: len(m.mountpoint))
    return {"device": mount.device, "file_system": mount.fstype, "model": _disk_model(mount.device)}


def _disk_model(device: str) -> str | None:
    block = Path("/sys/class/block", Path(device).name)
    for folder in (block, block.resolve().parent):  # a partition's disk is the folder around it
        with suppress(OSError):
            return (folder / "device" / "model").read_text().strip()
    return None


def describe_model(path: Path, nbytes: int) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    names = ("model_type", "num_hidden_layers", "hidden_size", "torch_dtype", "quantization")
    return {"name": path.resolve().name, "nbytes": nbytes} | {name: config.get(name) for name in names}


def describe_versions() -> dict[str, str | None]:
    names = ("mlx", "mlx-lm", "numpy")
    return {"python": platform.python_version(), "mlx-flash": mlx_flash.__version__, "commit": _commit()} | {
        name: version(name) for name in names
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with suppress(FileNotFoundError):
        found = subprocess.run(command, capture_output=True, text=True)
        return found.stdout.strip() or None
    return None


def describe_cold(probe: DiskProbe, drop_caches: bool) -> list[str]:
    """How it was made sure that the disk was read, not a cache."""
    ways = ["reads past the page cache" if probe.is_direct else "buffered reads: the file system has no direct ones"]
    ways.append("the cached pages of the checkpoint dropped before every run and probe (a hint to the system)")
    return [*ways, "all caches dropped (drop_caches)"] if drop_caches else ways


# --- what people see -------------------------------------------------------------------------------------------------


def print_tables(console: Console, result: dict[str, Any]) -> None:
    machine, model, summary = result["machine"], result["model"], result["summary"]
    disk = machine["disk"]
    console.print(f"{model['name']}, {model['nbytes'] / GB:.2f} GB, on {machine['device']}")
    console.print(f"{machine['cpu']}, {machine['threads']} threads, {machine['memory_bytes'] / GB:.1f} GB")
    console.print(f"{machine['os']}; disk {disk['device']} {disk['file_system']} {disk['model'] or ''}")
    console.print(_probe_table(summary["probe"]))
    console.print(_run_table(summary))
    if (experts := _expert_table(summary)) is not None:
        console.print(experts)
    for note in result["notes"]:
        console.print(f"note: {note}")


def _probe_table(probe: Sequence[dict[str, Any]]) -> Table:
    table = Table("read size", "depth", "best GB/s", "median GB/s", title="disk, cold", box=SIMPLE_HEAD)
    for entry in probe:
        size = f"{entry['read_size'] / (1 << 20):g} MiB"
        rates = (f"{entry[name] / GB:.2f}" for name in ("best", "median"))
        table.add_row(size, str(entry["queue_depth"]), *rates)
    return table


def _run_table(summary: dict[str, Any]) -> Table:
    table = Table(
        title="decoding, medians over the rounds; sizes in GB", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "budget" else "right", no_wrap=True)
    if summary["resident"]:
        run = summary["resident"]
        cells = ("resident", _gb(run["peak_bytes"]), f"{run['tokens_per_second']:.3f}", "1.00")
        table.add_row(*cells, "", "", "", "", f"{run['load_seconds']:.1f}", "")
    for run in summary["streamed"]:
        table.add_row(*_cells(run))
    return table


def _expert_table(summary: dict[str, Any]) -> Table | None:
    """What experts did in the runs that read them one by one."""
    runs = [run for run in summary["streamed"] if "hit_rate" in run]
    names = ("budget", "hits without look-ahead", "look-ahead right", "missed a token, GB", "read / missed")
    table = Table(*names, title="experts", box=SIMPLE_HEAD)
    for run in runs:
        right, ratio = run.get("predicted_right"), run.get("read_per_missed")
        table.add_row(
            " ".join([_gb(run["budget_bytes"]), *_in_words(run["settings"])]),
            f"{run['hit_rate']:.0%}",
            f"{right:.0%}" if right is not None else "",
            _gb(run["missed_bytes_per_token"]),
            f"{ratio:.2f}" if ratio is not None else "",
        )
    return table if runs else None


_COLUMNS = ("budget", "peak", "token/s", "of res.", "a token", "/s read", "waiting", "efficiency", "load", "same")


def _cells(run: dict[str, Any]) -> list[str]:
    word = "min = " if run["budget"] == "min" else ""
    return [
        " ".join([f"{word}{_gb(run['budget_bytes'])}", *_in_words(run["settings"])]),
        _gb(run["peak_bytes_max"]) + ("" if run["within_budget"] else " (!)"),
        f"{run['tokens_per_second']:.3f}",
        f"{run['of_resident']:.2f}" if "of_resident" in run else "",
        _gb(run["bytes_per_token"]),
        _gb(run["read_bytes_per_second"]) if "read_bytes_per_second" in run else "",
        f"{run['wait_share']:.0%}",
        f"{run['efficiency_best']:.0%} ({run['efficiency_median']:.0%})",
        f"{run['load_seconds']:.1f}",
        "yes" if run["identical"] else "NO",
    ]


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.3f}"


# --- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="model directory")
    parser.add_argument("--budgets", nargs="+", default=["min"], help="numbers of GB, or 'min'")
    parser.add_argument(
        "--variants",
        nargs="+",
        type=_settings,
        default=[{}],
        metavar="NAME=VALUE,...",
        help="settings of FlashConfig to run every budget with, such as expert_pool_gb=0 or - for none",
    )
    parser.add_argument("--tokens", type=int, default=8, help="to decode in every run; at least 2 (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--prompt-tokens", type=int, default=PREFILL_STEP, help=f"default: {PREFILL_STEP}")
    parser.add_argument("--probe-gb", type=float, default=1.5, help="read with every probe setting (default: 1.5)")
    parser.add_argument("--read-size-mb", type=float, help="as in FlashConfig")
    parser.add_argument("--queue-depth", type=int, help="as in FlashConfig")
    parser.add_argument("--no-resident", action="store_true", help="leave the resident run out")
    parser.add_argument(
        "--compute-seconds", type=float, help="seconds a resident token takes on a like machine with more memory"
    )
    parser.add_argument(
        "--drop-caches", action="store_true", help="drop all caches of the system before every run, where permitted"
    )
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)
    if options.worker is None and options.model is None:
        parser.error("--model is required")
    if options.tokens < 2 or options.rounds < 1 or options.prompt_tokens < 1:
        parser.error("--tokens must be at least 2, --rounds and --prompt-tokens at least 1")
    return options


def _settings(text: str) -> dict[str, Any]:
    """``a=1,b=false`` as a dictionary; ``-`` as an empty one."""
    pairs = [pair.partition("=") for pair in text.split(",") if text != "-"]
    return {name: json.loads(value) for name, _, value in pairs}


def make_bench(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[Bench, list[str]]:
    """The bench, and notes on what it leaves out."""
    shards = read_checkpoint(options.model).shards
    paths = [shard.path for shard in shards]
    nbytes = sum(shard.nbytes for shard in shards)
    profile = disk_profile(max(shards, key=lambda shard: shard.nbytes).path, direct=True)
    read_size = int(options.read_size_mb * 1e6) if options.read_size_mb else profile.read_size
    settings = dict.fromkeys([(read_size, options.queue_depth or profile.queue_depth), *OTHER_PROBES])
    notes = []
    with_resident = not options.no_resident
    if with_resident and nbytes + RESIDENT_SLACK > available_memory():
        with_resident = False
        notes.append(f"no resident run: the model has {nbytes / GB:.2f} GB, {available_memory() / GB:.2f} GB are free")
    if not with_resident:
        notes.append("'same' compares with the first streamed run")
        if options.compute_seconds is None:
            notes.append("efficiency knows only the disk: how long computing takes is unknown")
    drop_caches = options.drop_caches and may_drop_caches()
    if options.drop_caches and not drop_caches:
        notes.append("caches could not be dropped: not permitted here")
    job = Job(
        str(options.model), options.tokens, options.prompt_tokens, None, options.read_size_mb, options.queue_depth
    )
    probe = DiskProbe(paths, list(settings), int(options.probe_gb * GB))
    budgets = [budget for text in options.budgets if (budget := parse_budget(text)) is not None]
    return Bench(job, budgets, options.variants, with_resident, probe, paths, drop_caches, say), notes


def run_bench(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs all rounds and gathers what there is to know about them."""
    bench, notes = make_bench(options, say)
    rounds = []
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        rounds.append(bench.run_round())
    first = rounds[0]["resident"] or rounds[0]["streamed"][0]
    for round_ in rounds:
        judge(round_, first["token_ids"], options.compute_seconds)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": describe_machine(options.model),
        "versions": describe_versions(),
        "model": describe_model(options.model, sum(path.stat().st_size for path in bench.paths)),
        "tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
        "compute_seconds": options.compute_seconds,
        "cold": describe_cold(bench.probe, bench.drop_caches),
        "notes": notes,
        "summary": summarize(rounds),
        "rounds": rounds,
    }


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    if options.worker is not None:
        print(json.dumps(work(Job(**json.loads(options.worker)))))
        return
    console = Console(width=max(100, Console().width))  # so wide is the table
    try:
        result = run_bench(options, lambda line: console.print(line, highlight=False))
    except FlashError as error:
        raise SystemExit(str(error)) from None
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print_tables(console, result)


if __name__ == "__main__":
    main()
