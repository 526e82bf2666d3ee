"""Speed of a scattered checkpoint and of the same one packed by ``mlx-flash pack``, read and run by turns.

    python scripts/make_random_model.py models/llama --size-gb 8
    python -m mlx_lm convert --hf-path models/llama --mlx-path models/llama-4bit -q
    python benchmarks/packing.py --model models/llama-4bit --rounds 5 --json out.json

mlx's writer scatters tensors: it writes them in the order of a hash table, after a header of any length. The gain
depends on both. It is nearly nothing where the header's length happens to suit and tensors are larger than a read.

One round does everything once on both checkpoints. Which one is first alternates by round:

* *Reads*: all units that a pass reads whole, cold, past the page cache, into a ring of slots like the engine's, without
  computing.
* *Passes*: decoding with the smallest budget that works, each run in a process of its own. The tokens must be equal.

The JSON has all numbers of all rounds; the tables show medians over the rounds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness import Run, describe, describe_cold, describe_model, make_cold, may_drop_caches, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runs import PREFILL_STEP, Job, run_job

from mlx_flash.config import GB, parse_budget
from mlx_flash.convert.pack import PackReport, pack, streaming_order
from mlx_flash.errors import FlashError
from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.arena import Arena, kernel_alignment
from mlx_flash.storage.placement import Placement, place
from mlx_flash.storage.prefetcher import BackgroundPrefetcher, Ticket
from mlx_flash.storage.probe import disk_profile
from mlx_flash.storage.safetensors import read_checkpoint

NUM_SLOTS = 3

NAMES = ("scattered", "packed")


@dataclass(frozen=True)
class Contestant:
    """One of the two checkpoints.

    Attributes:
        directory: its folder.
        paths: its safetensors files.
        placements: one for each unit that is read whole, in the order of a pass.
    """

    directory: Path
    paths: list[Path]
    placements: list[Placement]


def open_contestant(directory: Path, alignment: int) -> Contestant:
    checkpoint = read_checkpoint(directory)
    units = streaming_order(make_layout(load_lazily(directory, checkpoint)), checkpoint)
    records = [[checkpoint.tensors[name] for name in unit.streamed] for unit in units if unit.is_read_whole]
    return Contestant(directory, [shard.path for shard in checkpoint.shards], [place(r, alignment) for r in records])


@dataclass(frozen=True)
class Bench:
    """The runs of a round, and the conditions that they share."""

    contestants: dict[str, Contestant]
    slots: list[Arena]
    read_size: int
    queue_depth: int
    job: Job
    with_passes: bool
    drop_caches: bool
    say: Callable[[str], None]

    def run_round(self, number: int) -> dict[str, dict[str, Run]]:
        """Run everything once on both checkpoints."""
        order = NAMES if number % 2 == 0 else NAMES[::-1]
        reads = {name: self._read(name) for name in order}
        passes = {name: self._decode(name) for name in order} if self.with_passes else {}
        return {"reads": reads, "passes": passes}

    def _read(self, name: str) -> Run:
        contestant = self.contestants[name]
        make_cold(contestant.paths, self.drop_caches)
        reader = BackgroundPrefetcher(
            contestant.paths, direct=True, read_size=self.read_size, queue_depth=self.queue_depth
        )
        try:
            began = time.perf_counter()
            read_units(reader, contestant.placements, self.slots)
            seconds, stats, is_direct = time.perf_counter() - began, reader.stats, reader.is_direct
        finally:
            reader.close()
        rate = stats.nbytes / seconds
        self.say(f"  {name}: {rate / GB:.2f} GB/s in {stats.num_reads} reads")
        return {
            "seconds": seconds,
            "nbytes": stats.nbytes,
            "bytes_per_second": rate,
            "num_reads": stats.num_reads,
            "is_direct": is_direct,
        }

    def _decode(self, name: str) -> Run:
        contestant = self.contestants[name]
        make_cold(contestant.paths, self.drop_caches)
        run = run_job(replace(self.job, model=str(contestant.directory)))
        self.say(f"  {name}: {run['tokens_per_second']:.3f} tokens/s")
        return run


def read_units(reader: BackgroundPrefetcher, placements: Sequence[Placement], slots: Sequence[Arena]) -> None:
    """Read every unit once. Each slot is read into again as soon as its read has ended."""
    in_flight: deque[Ticket] = deque()
    for i, placement in enumerate(placements):
        if len(in_flight) == len(slots):
            in_flight.popleft().wait()
        in_flight.append(reader.submit(placement.segments, slots[i % len(slots)].memory))
    for ticket in in_flight:
        ticket.wait()


def summarize(rounds: Sequence[dict[str, dict[str, Run]]]) -> dict[str, Any]:
    """Return medians over the rounds, and the ratio of packed to scattered: above 1 is a gain."""
    summary: dict[str, Any] = {"reads": _compare(rounds, "reads", "bytes_per_second")}
    if rounds[0]["passes"]:
        summary["passes"] = _compare(rounds, "passes", "tokens_per_second")
        tokens = [round_["passes"][name]["token_ids"] for round_ in rounds for name in NAMES]
        summary["passes"]["identical"] = all(ids == tokens[0] for ids in tokens)
    return summary


def _compare(rounds: Sequence[dict[str, dict[str, Run]]], kind: str, rate: str) -> dict[str, Any]:
    rates = {name: [round_[kind][name][rate] for round_ in rounds] for name in NAMES}
    ratios = [packed / scattered for scattered, packed in zip(*(rates[name] for name in NAMES), strict=True)]
    return {
        **{name: median(rates[name]) for name in NAMES},
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "unit": rate,
    }


# --- what people see -------------------------------------------------------------------------------------------------


def print_tables(console: Console, result: dict[str, Any]) -> None:
    machine, model, disk = result["machine"], result["model"], result["machine"]["disk"]
    console.print(f"{model['name']}, {model['nbytes'] / GB:.2f} GB, on {machine['device']}, {machine['cpu']}")
    console.print(f"{machine['os']}; disk {disk['device']} {disk['file_system']} {disk['model'] or ''}")
    console.print(_pattern_table(result["pack"]))
    console.print(_rate_table(result["summary"]))


def _pattern_table(report: dict[str, Any]) -> Table:
    table = Table("", *NAMES, title="one pass over all units", box=SIMPLE_HEAD)
    patterns = [report["before"], report["after"]]
    for name in ("num_units", "num_reads", "num_copied"):
        table.add_row(name.removeprefix("num_").replace("reads", "runs of bytes"), *(str(p[name]) for p in patterns))
    for name in ("median", "mean"):
        table.add_row(f"{name} run, MB", *(f"{p[f'{name}_bytes'] / 1e6:.2f}" for p in patterns))
    return table


def _rate_table(summary: dict[str, Any]) -> Table:
    table = Table("", *NAMES, "ratio", "min", "max", title="medians over the rounds", box=SIMPLE_HEAD)
    labels = {"reads": ("cold reads, GB/s", GB), "passes": ("decoding, tokens/s", 1)}
    for kind, (label, unit) in labels.items():
        if kind in summary:
            found = summary[kind]
            rates = (f"{found[name] / unit:.3f}" for name in NAMES)
            table.add_row(label, *rates, *(f"{found[key]:.2f}" for key in ("ratio", "ratio_min", "ratio_max")))
    if "passes" in summary:
        table.caption = f"tokens {'identical' if summary['passes']['identical'] else 'NOT IDENTICAL'}"
    return table


# --- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory whose tensors are scattered")
    parser.add_argument(
        "--packed", type=Path, help="where the packed one is kept (default: beside the model, removed at the end)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--budget", default="min", help="of the passes: a number of GB, or 'min' (default)")
    parser.add_argument("--tokens", type=int, default=5, help="to decode in every run; at least 2 (default: 5)")
    parser.add_argument("--no-passes", action="store_true", help="only read")
    parser.add_argument("--read-size-mb", type=float, help="as in FlashConfig (default: as probed)")
    parser.add_argument("--queue-depth", type=int, help="as in FlashConfig (default: as probed)")
    parser.add_argument(
        "--drop-caches", action="store_true", help="drop all caches of the system before every run, where permitted"
    )
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.rounds < 1:
        parser.error("--tokens must be at least 2, --rounds at least 1")
    return options


def make_bench(options: argparse.Namespace, packed: Path, say: Callable[[str], None]) -> Bench:
    folders = dict(zip(NAMES, (options.model, packed), strict=True))
    contestants = {name: open_contestant(folder, kernel_alignment()) for name, folder in folders.items()}
    largest = max(placement.nbytes for c in contestants.values() for placement in c.placements)
    profile = disk_profile(max(contestants["scattered"].paths, key=lambda path: path.stat().st_size), direct=True)
    return Bench(
        contestants,
        [Arena(largest) for _ in range(NUM_SLOTS)],
        int(options.read_size_mb * 1e6) if options.read_size_mb else profile.read_size,
        options.queue_depth or profile.queue_depth,
        Job("", options.tokens, PREFILL_STEP, parse_budget(options.budget), options.read_size_mb, options.queue_depth),
        not options.no_passes,
        options.drop_caches and may_drop_caches(),
        say,
    )


def run_bench(options: argparse.Namespace, packed: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Pack, run all rounds and describe them."""
    report: PackReport = pack(options.model, packed)
    say(f"packed {report.nbytes / GB:.2f} GB in {report.seconds:.1f} s")
    bench = make_bench(options, packed, say)
    rounds = []
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        rounds.append(bench.run_round(number))
    is_direct = all(run["is_direct"] for round_ in rounds for run in round_["reads"].values())
    return {
        **describe(options.model, describe_cold(drop_caches=bench.drop_caches, is_direct=is_direct)),
        "model": describe_model(options.model, report.nbytes),
        "pack": {**asdict(report), "target": packed.name},
        "read_size": bench.read_size,
        "queue_depth": bench.queue_depth,
        "num_slots": NUM_SLOTS,
        "summary": summarize(rounds),
        "rounds": rounds,
    }


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    console = Console()
    with ExitStack() as stack:
        packed = options.packed
        if packed is None:
            beside = Path(tempfile.mkdtemp(prefix="packing-", dir=options.model.resolve().parent))
            stack.callback(shutil.rmtree, beside)
            packed = beside / f"{options.model.resolve().name}-packed"
        try:
            result = run_bench(options, packed, lambda line: console.print(line, highlight=False))
        except FlashError as error:
            raise SystemExit(str(error)) from None
    write_json(options.json, result)
    print_tables(console, result)


if __name__ == "__main__":
    main()
