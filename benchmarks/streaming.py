"""Decoding speed of a streamed model, compared with its disk and with the same model in memory.

    python benchmarks/streaming.py --model DIR --budgets min 0.9 1.8 --tokens 8 --rounds 3 --json out.json

One round runs everything once, so that a slow period of the machine affects all kinds of runs:

    resident, probe, budget A, probe, budget B, probe …

* *resident* is stock mlx-lm with all weights in memory. It gives the compute time and the tokens to compare with.
* A *probe* reads 1.5 GB of the checkpoint with each of a few read sizes and depths, from where the last one ended.
* A *budget* is a streamed run. With ``--variants`` each budget is run with several settings, such as expert pool sizes.

With ``--limit`` each budget runs in a kernel memory limit, which counts the page cache too. Stock mlx-lm, and llama.cpp
with ``--llama-bench`` and ``--gguf``, run in the same limits; whether before or after mlx-flash alternates by round.
``plot_budget.py`` draws the result:

    python benchmarks/streaming.py --model DIR --budgets 0.3 0.6 1.2 2.4 3 --limit --llama-bench PATH --gguf FILE \\
        --json out.json
    python benchmarks/plot_budget.py out.json budget.png

Decoding is timed from the first token to the last, without loading and prefill. A streamed token takes at least as long
as reading its bytes and at least as long as computing it. Efficiency compares the larger with the measurement:

    efficiency = max(bytes read a token / probed bytes a second, resident seconds a token) / measured seconds a token

The bandwidth comes from the probes just before and just after the run: once their best, once their median. The JSON has
all numbers of all rounds; the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from disk import DiskProbe
from harness import (
    KilledError,
    Run,
    describe,
    describe_cold,
    describe_model,
    make_cold,
    may_drop_caches,
    slowed,
    take_memory,
    write_json,
)
from llama_cpp import LlamaBench
from rich.console import Console
from runs import PREFILL_STEP, Job, run_job
from tables import in_words, print_tables

from mlx_flash.config import GB, parse_budget, parse_setting
from mlx_flash.errors import FlashError
from mlx_flash.memory.footprint import available_memory
from mlx_flash.storage.probe import disk_profile
from mlx_flash.storage.safetensors import read_checkpoint

OTHER_PROBES = ((4 << 20, 4), (8 << 20, 8), (16 << 20, 4))
"""(read size, queue depth) that are probed beside those of the plan."""

RESIDENT_SLACK = 700_000_000
"""Bytes that a resident run needs beside its weights."""

LIMIT_SHARE = 1.05
"""Kernel memory limit, as a multiple of the budget."""


# --- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """The runs of a round, and the conditions that they share."""

    job: Job
    budgets: Sequence[float | str]
    variants: Sequence[dict[str, Any]]
    with_resident: bool
    probe: DiskProbe
    paths: Sequence[Path]
    drop_caches: bool
    limit_share: float | None
    llama: LlamaBench | None
    say: Callable[[str], None]
    with_stock: bool = True

    def run_round(self, number: int) -> dict[str, Any]:
        """Run everything once."""
        resident = self._run(None) if self.with_resident else None
        probes, streamed, in_limit = [self._probe()], [], []
        for budget in self.budgets:
            limit = self._limit(budget)
            if limit is not None and number % 2:
                in_limit.append(self._others(budget, limit))
            for settings in self.variants:
                streamed.append(self._run(budget, settings, limit))
                probes.append(self._probe())
            if limit is not None and not number % 2:
                in_limit.append(self._others(budget, limit))
        round_ = {"resident": resident, "probes": probes, "streamed": streamed}
        return round_ | ({"in_limit": in_limit} if self.limit_share is not None else {})

    def _limit(self, budget: float | str) -> int | None:
        return None if self.limit_share is None else int(float(budget) * GB * self.limit_share)

    def _run(self, budget: float | str | None, settings: dict[str, Any] | None = None, limit: int | None = None) -> Run:
        make_cold(self.paths, self.drop_caches)
        take_memory(sum(path.stat().st_size for path in self.paths))
        name = "resident" if budget is None else " ".join([f"budget {budget}", *in_words(settings)])
        try:
            run = run_job(replace(self.job, budget=budget, settings=settings or {}), limit)
        except KilledError as error:
            raise SystemExit(str(error)) from None
        self.say(f"  {name}: {run['tokens_per_second']:.3f} tokens/s, peak {run['peak_bytes'] / GB:.3f} GB")
        return run if limit is None else run | {"limit_bytes": limit}

    def _others(self, budget: float | str, limit: int) -> dict[str, Any]:
        """Run stock mlx-lm and llama.cpp in a limit; stock mlx-lm is killed where the model does not fit."""
        found = {
            "budget": budget,
            "limit_bytes": limit,
            "stock": self._stock(limit) if self.with_stock else None,
            "llama_cpp": self.llama.run(limit) if self.llama is not None else None,
        }
        for name in ("stock", "llama_cpp"):
            if run := found[name]:
                speed = "killed" if run["killed"] else f"{run['tokens_per_second']:.3f} tokens/s"
                self.say(f"  {name} in {limit / GB:.3f} GB: {speed}")
        return found

    def _stock(self, limit: int) -> Run:
        make_cold(self.paths, self.drop_caches)
        try:
            return {"killed": False, **run_job(self.job, limit)}
        except KilledError:
            return {"killed": True}

    def _probe(self) -> list[dict[str, Any]]:
        make_cold(self.paths, self.drop_caches)
        found = self.probe.measure()
        rates = " ".join(f"{entry['bytes_per_second'] / GB:.2f}" for entry in found)
        self.say(f"  probe: {rates} GB/s")
        return found


def judge(round_: dict[str, Any], reference: Sequence[int], compute_seconds: float | None) -> None:
    """Compare every streamed run of a round with the disk, the resident model and the reference tokens."""
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
    """Return medians over the rounds."""
    resident = [round_["resident"] for round_ in rounds if round_["resident"]]
    budgets = [list(runs) for runs in zip(*(round_["streamed"] for round_ in rounds), strict=True)]
    summary = {
        "resident": _medians(resident) if resident else None,
        "probe": _probe_summary([entry for r in rounds for probes in r["probes"] for entry in probes]),
        "streamed": [_medians(runs) | _streamed_summary(runs) for runs in budgets],
    }
    if "in_limit" in rounds[0]:
        limits = zip(*(round_["in_limit"] for round_ in rounds), strict=True)
        summary["in_limit"] = [_limit_summary(entries) for entries in limits]
    return summary


def _limit_summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of the runs in one limit; a contender that was killed once counts as killed."""
    first = entries[0]
    found = {"budget": first["budget"], "limit_bytes": first["limit_bytes"]}
    for name in ("stock", "llama_cpp"):
        runs = [entry[name] for entry in entries]
        if runs[0] is None:
            found[name] = None
        elif any(run["killed"] for run in runs):
            found[name] = {"killed": True}
        else:
            found[name] = {"killed": False, **_medians(runs)}
    return found


def _medians(runs: Sequence[Run]) -> dict[str, float | None]:
    """Return the median of every number that all runs have."""
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


# --- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory")
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
    parser.add_argument(
        "--limit",
        type=float,
        nargs="?",
        const=LIMIT_SHARE,
        metavar="SHARE",
        help=f"run budgets and stock mlx-lm in a kernel memory limit of SHARE times the budget (SHARE: {LIMIT_SHARE})",
    )
    parser.add_argument("--llama-bench", metavar="PATH", help="llama.cpp's llama-bench, run in each limit")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama-bench")
    parser.add_argument("--disk-mb-per-second", type=float, help="limit all reads, probes included; needs root")
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.rounds < 1 or options.prompt_tokens < 1:
        parser.error("--tokens must be at least 2, --rounds and --prompt-tokens at least 1")
    if options.limit is not None and not all(_is_number(budget) for budget in options.budgets):
        parser.error("--limit needs --budgets in GB")
    if (options.llama_bench is None) != (options.gguf is None) or (options.gguf and options.limit is None):
        parser.error("--llama-bench, --gguf and --limit go together")
    return options


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _settings(text: str) -> dict[str, Any]:
    """Return ``a=1,b=false`` as a dictionary, and ``-`` as an empty one."""
    pairs = [pair.partition("=") for pair in text.split(",") if text != "-"]
    return {name: parse_setting(name, value) for name, _, value in pairs}


def make_bench(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[Bench, list[str]]:
    """Return the bench, and notes on the runs that it leaves out."""
    checkpoint = read_checkpoint(options.model)
    shards, is_compressed = checkpoint.shards, bool(checkpoint.tables)
    paths = [shard.path for shard in shards]
    nbytes = sum(shard.nbytes for shard in shards)
    profile = disk_profile(max(shards, key=lambda shard: shard.nbytes).path, direct=True)
    read_size = int(options.read_size_mb * 1e6) if options.read_size_mb else profile.read_size
    settings = dict.fromkeys([(read_size, options.queue_depth or profile.queue_depth), *OTHER_PROBES])
    notes = []
    with_resident = not options.no_resident and not is_compressed
    if with_resident and nbytes + RESIDENT_SLACK > available_memory():
        with_resident = False
        notes.append(f"no resident run: the model has {nbytes / GB:.2f} GB, {available_memory() / GB:.2f} GB are free")
    if not with_resident:
        notes.append("'same' compares with the first streamed run")
        if options.compute_seconds is None:
            notes.append("efficiency counts only the disk: the compute time is unknown")
    drop_caches = options.drop_caches and may_drop_caches()
    if options.drop_caches and not drop_caches:
        notes.append("caches could not be dropped: not permitted here")
    job = Job(
        str(options.model), options.tokens, options.prompt_tokens, None, options.read_size_mb, options.queue_depth
    )
    probe = DiskProbe(paths, list(settings), int(options.probe_gb * GB))
    budgets = [budget for text in options.budgets if (budget := parse_budget(text)) is not None]
    llama = LlamaBench(options.llama_bench, options.gguf, options.tokens - 1) if options.gguf else None
    if llama is not None and (missing := llama.missing()) is not None:
        notes.append(missing)
        llama = None
    conditions = (probe, paths, drop_caches, options.limit, llama, say, not is_compressed)
    bench = Bench(job, budgets, options.variants, with_resident, *conditions)
    return bench, notes


def run_bench(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all rounds and describe them."""
    bench, notes = make_bench(options, say)
    rounds = []
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        rounds.append(bench.run_round(number))
    first = rounds[0]["resident"] or rounds[0]["streamed"][0]
    for round_ in rounds:
        judge(round_, first["token_ids"], options.compute_seconds)
    cold = describe_cold(
        drop_caches=bench.drop_caches, is_direct=bench.probe.is_direct, limited=options.limit is not None
    )
    return {
        **describe(options.model, cold),
        "model": describe_model(options.model),
        "tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
        "disk_mb_per_second": options.disk_mb_per_second,
        "compute_seconds": options.compute_seconds,
        "notes": notes,
        "summary": summarize(rounds),
        "rounds": rounds,
    }


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    console = Console(width=max(100, Console().width))  # the table's width
    try:
        with slowed(options.model, options.disk_mb_per_second):
            result = run_bench(options, lambda line: console.print(line, highlight=False))
    except FlashError as error:
        raise SystemExit(str(error)) from None
    write_json(options.json, result)
    print_tables(console, result)


if __name__ == "__main__":
    main()
