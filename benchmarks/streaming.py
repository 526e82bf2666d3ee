"""Speed of a streamed model in many settings, compared with its disk and with the same model in memory.

    python benchmarks/streaming.py --model DIR --budgets min 0.9 1.8 --tokens 8 --rounds 3 --json out.json

A *run* is a process of its own. There is one for each copy of the model (as it is, packed or compressed), prompt
length, budget, variant of settings, loop and number of sequences. A round does each run once, between two probes of the
disk, so that a slow period of the machine affects all of them:

* *resident* is stock mlx-lm with all weights in memory, once for each prompt length. It gives the compute time and the
  tokens to compare with.
* A *probe* reads 1.5 GB of the checkpoint with each of a few read sizes and depths, from where the last one ended.

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
from dataclasses import dataclass
from itertools import groupby, pairwise, product
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
    slowed,
    take_memory,
    write_json,
)
from llama_cpp import LlamaBench
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runs import PREFILL_STEP, Job, run_job

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

LOOPS = {"mlx-lm": False, "mlx-flash": True}
"""Loops that decode one sequence, and ``Job.own``."""


# --- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """The runs of a round, and the conditions that they share. Jobs of one budget and prompt follow each other."""

    jobs: Sequence[Job]
    residents: Sequence[Job]
    probe: DiskProbe
    paths: Sequence[Path]
    limit_share: float | None
    llama: LlamaBench | None
    say: Callable[[str], None]

    def run_round(self, number: int) -> dict[str, Any]:
        """Run everything once."""
        resident = [self._run(job) for job in self.residents]
        probes, streamed, in_limit = [self._probe()], [], []
        for (_, prompt_tokens, budget), jobs in groupby(
            self.jobs, lambda job: (job.model, job.prompt_tokens, job.budget)
        ):
            limit = None if self.limit_share is None else int(float(budget or 0) * GB * self.limit_share)
            stock = Job(self.jobs[0].model, self.jobs[0].tokens, prompt_tokens)
            if limit is not None and number % 2:
                in_limit.append(self._others(stock, budget, limit))
            for job in jobs:
                streamed.append(self._run(job, limit))
                probes.append(self._probe())
            if limit is not None and not number % 2:
                in_limit.append(self._others(stock, budget, limit))
        round_ = {"resident": resident, "probes": probes, "streamed": streamed}
        return round_ | ({"in_limit": in_limit} if self.limit_share is not None else {})

    def _run(self, job: Job, limit: int | None = None) -> Run:
        make_cold(self.paths)
        take_memory(sum(path.stat().st_size for path in self.paths))
        try:
            run = run_job(job, limit)
        except KilledError as error:
            raise SystemExit(str(error)) from None
        name = "resident" if job.budget is None else f"budget {job.budget}"
        self.say(f"  {name}: {run['tokens_per_second']:.3f} tokens/s, peak {run['peak_bytes'] / GB:.3f} GB")
        return run if limit is None else run | {"limit_bytes": limit}

    def _others(self, stock: Job, budget: float | str | None, limit: int) -> dict[str, Any]:
        """Run stock mlx-lm and llama.cpp in a limit; stock mlx-lm is killed where the model does not fit."""
        make_cold(self.paths)
        found: dict[str, Any] = {"budget": budget, "limit_bytes": limit}
        try:
            found["stock"] = {"killed": False, **run_job(stock, limit)}
        except KilledError:
            found["stock"] = {"killed": True}
        found["llama_cpp"] = self.llama.run(limit) if self.llama is not None else None
        for name in ("stock", "llama_cpp"):
            if run := found[name]:
                speed = "killed" if run["killed"] else f"{run['tokens_per_second']:.3f} tokens/s"
                self.say(f"  {name} in {limit / GB:.3f} GB: {speed}")
        return found

    def _probe(self) -> list[dict[str, Any]]:
        make_cold(self.paths)
        found = self.probe.measure()
        rates = " ".join(f"{entry['bytes_per_second'] / GB:.2f}" for entry in found)
        self.say(f"  probe: {rates} GB/s")
        return found


def judge(round_: dict[str, Any], first: dict[str, Any]) -> None:
    """Compare every streamed run of a round with the disk, the resident run, and the tokens of the first round."""
    for run, around in zip(round_["streamed"], pairwise(round_["probes"]), strict=True):
        resident = next((r for r in round_["resident"] if r["prompt_tokens"] == run["prompt_tokens"]), None)
        runs = [*first["resident"], *first["streamed"]]
        expected = next(each for each in runs if each["prompt_tokens"] == run["prompt_tokens"])
        rates = [entry["bytes_per_second"] for probes in around for entry in probes]
        run["identical"] = run["token_ids"] == expected["token_ids"]
        run["probe_best"], run["probe_median"] = max(rates), median(rates)
        compute = resident["seconds_per_token"] if resident else None
        for name in ("best", "median"):
            ideal = max(run["bytes_per_token"] / run[f"probe_{name}"], compute or 0.0)
            run[f"efficiency_{name}"] = ideal / run["seconds_per_token"]
        run["of_resident"] = run["tokens_per_second"] * compute if compute else None


def summarize(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds."""
    resident, streamed = (
        list(zip(*(round_[name] for round_ in rounds), strict=True)) for name in ("resident", "streamed")
    )
    summary: dict[str, Any] = {
        "resident": [_medians(runs) for runs in resident],
        "probe": _probe_summary([entry for r in rounds for probes in r["probes"] for entry in probes]),
        "streamed": [_medians(runs) | _streamed_summary(runs) for runs in streamed],
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
    return {name: runs[0][name] for name in ("model", "budget", "settings", "own", "batch")} | {
        "peak_bytes_max": max(run["peak_bytes"] for run in runs),
        "within_budget": all(run["peak_bytes"] <= run["budget_bytes"] for run in runs),
        "identical": all(run["identical"] for run in runs),
    }


def _probe_summary(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rates: dict[tuple[int, int], list[float]] = {}
    for entry in entries:
        rates.setdefault((entry["read_size"], entry["queue_depth"]), []).append(entry["bytes_per_second"])
    return [
        {"read_size": size, "queue_depth": depth, "best": max(found), "median": median(found)}
        for (size, depth), found in rates.items()
    ]


# --- tables ----------------------------------------------------------------------------------------------------------


def print_tables(console: Console, result: dict[str, Any]) -> None:
    """Print machine, model, probes, runs and notes."""
    machine, model, summary = result["machine"], result["model"], result["summary"]
    disk = machine["disk"]
    console.print(f"{model['name']}, {model['nbytes'] / GB:.2f} GB, on {machine['device']}")
    console.print(f"{machine['cpu']}, {machine['threads']} threads, {machine['memory_bytes'] / GB:.1f} GB")
    console.print(f"{machine['os']}; disk {disk['device']} {disk['file_system']} {disk['model'] or ''}")
    for entry in summary["probe"]:
        name = f"{entry['read_size'] / (1 << 20):g} MiB, {entry['queue_depth']} at once"
        console.print(f"disk, cold, {name}: best {_gb(entry['best'])} GB/s, median {_gb(entry['median'])} GB/s")
    console.print(_run_table(summary))
    if experts := [run for run in summary["streamed"] if "hit_rate" in run]:
        console.print(_expert_table(experts))
    if "in_limit" in summary:
        console.print(_limit_table(summary))
    for note in result["notes"]:
        console.print(f"note: {note}")


COLUMNS = ("prompt", "first", "passes", "peak", "token/s", "predicted", "of res.", "a token", "/s read")


def _run_table(summary: dict[str, Any]) -> Table:
    title = "decoding, medians over the rounds; sizes in GB; seconds and passes to the first token"
    table = Table("budget", title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in (*COLUMNS, "waiting", "efficiency", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in [*summary["resident"], *summary["streamed"]]:
        cells = [f"{run['prompt_tokens']:.0f}", f"{run['first_token_seconds']:.2f}"]
        if "budget" not in run:
            table.add_row("resident", *cells, "", _gb(run["peak_bytes"]), f"{run['tokens_per_second']:.3f}")
            continue
        table.add_row(
            _name(run, summary),
            *cells,
            f"{run['first_token_passes']:.0f}",
            _gb(run["peak_bytes_max"]) + ("" if run["within_budget"] else " (!)"),
            f"{run['tokens_per_second']:.3f}",
            "" if run["predicted_tokens_per_second"] is None else f"{run['predicted_tokens_per_second']:.3f}",
            f"{run['of_resident']:.2f}" if "of_resident" in run else "",
            _gb(run["bytes_per_token"] / run["batch"]),
            _gb(run["read_bytes_per_second"]) if "read_bytes_per_second" in run else "",
            f"{run['wait_share']:.0%}",
            f"{run['efficiency_best']:.0%} ({run['efficiency_median']:.0%})",
            "yes" if run["identical"] else "NO",
        )
    return table


def _name(run: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return what a run differs in."""
    words = [f"{'min = ' if run['budget'] == 'min' else ''}{_gb(run['budget_bytes'])}"]
    words += [Path(run["model"]).name] if len({each["model"] for each in summary["streamed"]}) > 1 else []
    words += [f"{run['batch']} sequences"] if run["batch"] > 1 else []
    return " ".join([*words, *(["own loop"] if run["own"] else []), *(f"{k}={v}" for k, v in run["settings"].items())])


def _expert_table(runs: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the runs that read experts one by one."""
    names = ("budget", "hits without look-ahead", "look-ahead right", "missed a token, GB", "read / missed")
    table = Table(*names, title="experts", box=SIMPLE_HEAD)
    for run in runs:
        right, ratio = run.get("predicted_right"), run.get("read_per_missed")
        words = [_gb(run["budget_bytes"]), *(f"{k}={v}" for k, v in run["settings"].items())]
        cells = [" ".join(words), f"{run['hit_rate']:.0%}", "" if right is None else f"{right:.0%}"]
        table.add_row(*cells, _gb(run["missed_bytes_per_token"]), "" if ratio is None else f"{ratio:.2f}")
    return table


def _limit_table(summary: dict[str, Any]) -> Table:
    """Return a table of tokens/s in each kernel memory limit: mlx-flash, stock mlx-lm, llama.cpp."""
    names = ("limit, GB", "budget, GB", "mlx-flash", "stock mlx-lm", "llama.cpp, mmap")
    table = Table(*names, title="tokens/s in a kernel memory limit, medians", box=SIMPLE_HEAD)
    for entry in summary["in_limit"]:
        best = max(run["tokens_per_second"] for run in summary["streamed"] if run["budget"] == entry["budget"])
        others = [_speed(entry[name]) for name in ("stock", "llama_cpp")]
        table.add_row(_gb(entry["limit_bytes"]), f"{entry['budget']:g}", f"{best:.3f}", *others)
    return table


def _speed(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    return "killed" if run["killed"] else f"{run['tokens_per_second']:.3f}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.3f}"


# --- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", type=Path, nargs="+", required=True, help="model directory, and copies of it by mlx-flash pack")
    add("--budgets", nargs="+", default=["min"], help="numbers of GB, or 'min'")
    add(
        "--variants",
        nargs="+",
        type=_settings,
        default=[{}],
        metavar="NAME=VALUE,...",
        help="settings of FlashConfig to run every budget with, such as expert_pool=false or - for none",
    )
    add("--loops", nargs="+", choices=LOOPS, default=["mlx-lm"], help="that decode one sequence (default: mlx-lm)")
    add("--batches", type=int, nargs="+", default=[1], metavar="N", help="sequences that share passes (default: 1)")
    add("--prompt-tokens", type=int, nargs="+", default=[PREFILL_STEP], metavar="N", help=f"default: {PREFILL_STEP}")
    add("--context", type=int, help="tokens of KV cache to reserve; what is not used holds parts of prompts")
    add("--warm", action="store_true", help="decode a token first, which compiles the kernels of a GPU")
    add("--tokens", type=int, default=8, help="to decode in every run; at least 2 (default: 8)")
    add("--rounds", type=int, default=3, help="default: 3")
    add("--probe-gb", type=float, default=1.5, help="read with every probe setting (default: 1.5)")
    add("--no-resident", action="store_true", help="leave the resident runs out")
    add(
        "--limit",
        type=float,
        nargs="?",
        const=LIMIT_SHARE,
        metavar="SHARE",
        help=f"run budgets and stock mlx-lm in a kernel memory limit of SHARE times the budget (SHARE: {LIMIT_SHARE})",
    )
    add("--llama-bench", metavar="PATH", help="llama.cpp's llama-bench, run in each limit")
    add("--gguf", type=Path, metavar="FILE", help="the model for llama-bench")
    add("--disk-mb-per-second", type=float, help="limit all reads, probes included; needs root")
    add("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.rounds < 1 or min(options.prompt_tokens) < 1:
        parser.error("--tokens must be at least 2, --rounds and --prompt-tokens at least 1")
    if options.limit is not None and not all(budget.replace(".", "", 1).isdigit() for budget in options.budgets):
        parser.error("--limit needs --budgets in GB")
    if (options.llama_bench is None) != (options.gguf is None) or (options.gguf and options.limit is None):
        parser.error("--llama-bench, --gguf and --limit go together")
    return options


def _settings(text: str) -> dict[str, Any]:
    """Return ``a=1,b=false`` as a dictionary, and ``-`` as an empty one."""
    pairs = [pair.partition("=") for pair in text.split(",") if text != "-"]
    return {name: parse_setting(name, value) for name, _, value in pairs}


def make_bench(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[Bench, list[str]]:
    """Return the bench, and notes on the runs that it leaves out."""
    shards = [shard for model in options.model for shard in read_checkpoint(model).shards]
    first = read_checkpoint(options.model[0])
    nbytes = sum(shard.nbytes for shard in first.shards)
    profile = disk_profile(max(shards, key=lambda shard: shard.nbytes).path, direct=True)
    settings = dict.fromkeys([(profile.read_size, profile.queue_depth), *OTHER_PROBES])
    notes = []
    with_resident = not options.no_resident
    if first.is_compressed and (with_resident or options.limit is not None):
        sys.exit(
            f"mlx-lm cannot load {options.model[0]}, which is compressed. "
            "Hint: name the plain model first, or give --no-resident without --limit."
        )
    if with_resident and nbytes + RESIDENT_SLACK > available_memory():
        with_resident = False
        notes.append(f"no resident run: the model has {nbytes / GB:.2f} GB, {available_memory() / GB:.2f} GB are free")
    if not with_resident:
        notes.append("'same' compares with the first streamed run; efficiency counts only the disk")
    axes = (options.model, options.prompt_tokens, map(parse_budget, options.budgets))
    jobs = [
        Job(str(model), options.tokens, length, budget, options.context, variant, batch, LOOPS[loop], options.warm)
        for model, length, budget, variant, loop, batch in product(
            *axes, options.variants, options.loops, options.batches
        )
    ]
    residents = [Job(str(options.model[0]), options.tokens, n, warm=options.warm) for n in options.prompt_tokens]
    paths = [shard.path for shard in shards]
    probe = DiskProbe(paths, list(settings), int(options.probe_gb * GB))
    llama = LlamaBench(options.llama_bench, options.gguf, options.tokens - 1) if options.gguf else None
    if llama is not None and (missing := llama.missing()) is not None:
        notes.append(missing)
        llama = None
    runs = (jobs, residents if with_resident else [])
    return Bench(*runs, probe, paths, options.limit, llama, say), notes


def run_bench(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all rounds and describe them."""
    bench, notes = make_bench(options, say)
    rounds = []
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        rounds.append(bench.run_round(number))
    for round_ in rounds:
        judge(round_, rounds[0])
    cold = describe_cold(is_direct=bench.probe.is_direct, limited=options.limit is not None)
    return {
        **describe(options.model[0], cold),
        "model": describe_model(options.model[0]),
        "tokens": options.tokens,
        "disk_mb_per_second": options.disk_mb_per_second,
        "notes": notes,
        "summary": summarize(rounds),
        "rounds": rounds,
    }


def main() -> None:
    """Run the command line."""
    options = parse_arguments(sys.argv[1:])
    console = Console(width=max(140, Console().width))  # the table's width
    try:
        with slowed(options.model[0], options.disk_mb_per_second):
            result = run_bench(options, lambda line: console.print(line, highlight=False))
    except FlashError as error:
        raise SystemExit(str(error)) from None
    write_json(options.json, result)
    print_tables(console, result)


if __name__ == "__main__":
    main()
