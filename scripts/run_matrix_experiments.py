"""Run models over a matrix of settings, and find the smallest budget that is nearly as fast as the best.

    python scripts/run_matrix_experiments.py --models models/a models/b --num-budgets 8 --slots 2 auto --out matrix

Every cell is a run of ``benchmarks/streaming.py`` in a process of its own, between two probes of the disk. Rounds run
the whole matrix once each, so that a slow period of the machine affects all cells. The folder of ``--out`` gets
``matrix.json``, ``matrix.csv``, and with matplotlib a picture for each model. Cells that are in ``matrix.json`` are not
run again, so an interrupted run is resumed.

The *cliff* is the smallest budget that reaches 90 % of the best speed; below it the speed falls off. The last lines are
the recommended setting of each model, to paste.

``--preset promise`` runs ``benchmarks/promise.py`` instead: models, prompts and budgets inside kernel memory limits,
with counts of kills and refusals. It takes the flags after ``--``.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from disk import DiskProbe  # noqa: E402
from harness import Run, describe, describe_cold, describe_model, may_drop_caches  # noqa: E402
from rich.box import SIMPLE_HEAD  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from runs import Job  # noqa: E402
from streaming import RESIDENT_SLACK, Bench, judge  # noqa: E402

from mlx_flash.config import GB, FlashConfig  # noqa: E402
from mlx_flash.engine.prepare import prepare  # noqa: E402
from mlx_flash.files import write_atomically  # noqa: E402
from mlx_flash.memory.footprint import available_memory  # noqa: E402
from mlx_flash.residency.plan import MB  # noqa: E402
from mlx_flash.storage.probe import disk_profile  # noqa: E402
from mlx_flash.storage.safetensors import read_checkpoint  # noqa: E402

CLIFF = 0.9
"""Share of the best speed that the recommended budget reaches at least."""

AXES = ("slots", "io", "queue_depth", "context", "batch")
NUMBERS = ("budget_gb", "peak_gb", "read_gb", "tokens_per_second", "predicted", "ratio", "of_resident", "efficiency")
"""Columns of the table that hold numbers."""

Cell = tuple[int, Job]
"""A round, and a run in it; without a budget it is mlx-lm with all weights in memory."""


def key_of(cell: Cell) -> str:
    """Return the name of a cell's result."""
    return json.dumps([cell[0], asdict(cell[1])])


def budgets_of(model: str, number: int) -> list[float]:
    """Return budgets in GB at equal distances, from the smallest one to one that holds the model."""
    plan = prepare(model, FlashConfig(ram_budget_gb="min"), writes=False).plan
    least, most = plan.minimum_bytes, plan.base_bytes + 1.15 * plan.model_bytes
    step = max(0.0, most - least) / max(1, number - 1)
    return sorted({-(-int(least + i * step) // MB) * MB / GB for i in range(number)})


def cells_of(options: argparse.Namespace, budgets: dict[str, list[float]]) -> Iterator[Cell]:
    """Yield the cells in the order in which they run. The budgets of each model are those of an interrupted run."""
    for model in options.models:
        if options.budgets or len(budgets.get(model, ())) != options.num_budgets:
            budgets[model] = options.budgets or budgets_of(model, options.num_budgets)
    for number, model in product(range(options.rounds), options.models):
        nbytes = sum(shard.nbytes for shard in read_checkpoint(Path(model)).shards)
        if nbytes + RESIDENT_SLACK < available_memory():
            yield from ((number, Job(model, options.tokens, context)) for context in options.contexts)
        axes = (options.slots, options.io, options.queue_depths, options.contexts, options.batches)
        for budget, slots, io, depth, context, batch in product(budgets[model], *axes):
            settings = {"io": io} | ({"num_slots": slots} if slots else {})
            yield number, Job(model, options.tokens, context, budget, None, depth, settings, batch)


class Matrix:
    """The results so far, in a file that is replaced after every cell.

    Args:
        folder: of the results.
        drop_caches: drop all caches of the system before every run.
    """

    def __init__(self, folder: Path, drop_caches: bool) -> None:
        self.file = folder / "matrix.json"
        self.drop_caches = drop_caches and may_drop_caches()
        self._probes: dict[str, DiskProbe] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.found = {"models": {}, "budgets": {}} | self.found
        self.cells: dict[str, Run] = self.found.setdefault("cells", {})

    def run(self, cell: Cell) -> Run:
        """Run a cell, and keep its result."""
        number, job = cell
        result = self.cells[key_of(cell)] = {"round": number, "job": asdict(job), **self._measure(number, job)}
        self.found["models"].setdefault(job.model, describe_model(Path(job.model)))
        self.found |= describe(Path(job.model), describe_cold(drop_caches=self.drop_caches))
        write_atomically(self.file, json.dumps(self.found, indent=1) + "\n")
        return result

    def _measure(self, number: int, job: Job) -> Run:
        try:
            round_ = self._bench(job).run_round(0)
        except SystemExit as error:
            if "BudgetError" not in str(error):
                raise
            return {"status": "refused", "why": str(error)}
        if job.budget is None:
            return {"status": "ok", **round_["resident"]}
        resident = self.cells.get(key_of((number, Job(job.model, job.tokens, job.prompt_tokens))), {})
        seconds = resident.get("seconds_per_token")
        judge(round_, resident.get("token_ids", round_["streamed"][0]["token_ids"]), seconds and seconds * job.batch)
        return {"status": "ok", **round_["streamed"][0]}

    def _bench(self, job: Job) -> Bench:
        """Return the bench of a run. Those of a model share the probe, which goes on where it was in its files."""
        paths = [shard.path for shard in read_checkpoint(Path(job.model)).shards]
        if job.model not in self._probes:
            profile = disk_profile(max(paths, key=lambda path: path.stat().st_size), direct=True)
            self._probes[job.model] = DiskProbe(paths, [(profile.read_size, profile.queue_depth)], int(GB))
        budgets = () if job.budget is None else (job.budget,)
        shared = (self._probes[job.model], paths, self.drop_caches, None, None, lambda line: None)
        return Bench(job, budgets, (job.settings,), job.budget is None, *shared)


def table_of(runs: Iterable[Run]) -> list[Run]:
    """Return a row for each setting, with medians over the rounds; settings that were refused are left out."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        job, settings = run["job"], run["job"]["settings"]
        axes = (settings.get("num_slots"), settings.get("io"), job["queue_depth"], job["prompt_tokens"], job["batch"])
        if job["budget"] is not None and run["status"] == "ok":
            groups.setdefault((job["model"], job["budget"], *axes), []).append(run)
    return [_row(key, group) for key, group in groups.items()]


def _row(key: tuple[Any, ...], group: Sequence[Run]) -> Run:
    def middle(name: str) -> float:
        return median(run[name] or 0.0 for run in group)

    speed = middle("tokens_per_second")
    predicted = middle("predicted_tokens_per_second")
    return dict(zip(("model", "budget_gb", *AXES), key, strict=True)) | {
        "tokens_per_second": speed,
        "predicted": predicted,
        "ratio": predicted / speed,
        "of_resident": middle("of_resident"),
        "peak_gb": max(run["peak_bytes"] for run in group) / GB,
        "efficiency": middle("efficiency_median"),
        "wait_share": middle("wait_share"),
        "read_gb": middle("bytes_per_token") / GB,
        "within_budget": all(run["peak_bytes"] <= run["budget_bytes"] for run in group),
        "identical": all(run["identical"] for run in group),
        "rounds": len(group),
    }


def cliff_of(rows: Sequence[Run]) -> Run:
    """Return the row of the smallest budget that is nearly as fast as the fastest row; of equals, the fastest."""
    enough = CLIFF * max(row["tokens_per_second"] for row in rows)
    near = [row for row in rows if row["tokens_per_second"] >= enough]
    return min(near, key=lambda row: (row["budget_gb"], -row["tokens_per_second"]))


def lines_of(rows: Iterable[Run]) -> dict[tuple[Any, ...], list[Run]]:
    """Return the rows of each setting but the budget, by rising budget."""
    lines: dict[tuple[Any, ...], list[Run]] = {}
    for row in sorted(rows, key=lambda row: row["budget_gb"]):
        lines.setdefault(tuple(row[axis] for axis in AXES), []).append(row)
    return lines


def recommended(rows: Sequence[Run]) -> str:
    """Return the recommended setting of a model, as a command: from the shortest prompts, one sequence at a time."""
    plain = [row for row in rows if row["batch"] == min(r["batch"] for r in rows)]
    row = cliff_of([row for row in plain if row["context"] == min(r["context"] for r in plain)])
    flags = {"num-slots": row["slots"], "queue-depth": row["queue_depth"]}
    flags |= {"io": row["io"] if row["io"] != "auto" else None, "ram-budget-gb": f"{row['budget_gb']:.3f}"}
    words = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return shlex.join(["mlx-flash", "generate", "--model", row["model"], *words])


def draw(rows: Sequence[Run], title: str, picture: Path) -> None:
    """Draw tokens/s with the cliff, memory and efficiency over the budget, a line for each setting."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for number, (setting, line) in enumerate(lines_of(rows).items()):
        words = ", ".join(f"{axis} {value}" for axis, value in zip(AXES, setting, strict=True) if value is not None)
        budgets, cliff, color = [row["budget_gb"] for row in line], cliff_of(line), f"C{number}"
        for panel, name in zip(panels, ("tokens_per_second", "peak_gb", "efficiency"), strict=True):
            panel.plot(budgets, [row[name] for row in line], "o-", color=color, label=words)
        panels[0].plot(budgets, [row["predicted"] for row in line], ":", color=color, label="predicted")
        panels[0].axvline(cliff["budget_gb"], color=color, linewidth=0.8, alpha=0.6)
        words, at = f"cliff: {cliff['budget_gb']:.2f} GB", (cliff["budget_gb"], 0.02)
        panels[0].annotate(words, at, xycoords=("data", "axes fraction"), rotation=90, color=color)
    limits = [min(row["budget_gb"] for row in rows), max(row["budget_gb"] for row in rows)]
    panels[1].plot(limits, limits, "--", color="0.6", label="the budget")
    for panel, label in zip(panels, ("tokens/s, decoding", "peak memory, GB", "efficiency"), strict=True):
        panel.set(xlabel="RAM budget, GB", ylabel=label, ylim=(0, None))
        panel.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def report(matrix: Matrix, runs: Iterable[Run], console: Console) -> None:
    """Print the table and the recommended settings; write CSV and pictures."""
    rows, folder = table_of(runs), matrix.file.parent
    with (folder / "matrix.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
    table = Table(box=SIMPLE_HEAD)
    for name in ("model", *AXES, *NUMBERS, "same"):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in NUMBERS]
        settings = ["-" if row[axis] is None else str(row[axis]) for axis in AXES]
        table.add_row(Path(row["model"]).name, *settings, *numbers, "yes" if row["identical"] else "NO")
    console.print(table)
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model, about = [row for row in rows if row["model"] == model], matrix.found["models"][model]
        name, machine = Path(model).resolve().name, matrix.found["machine"]
        title = f"{name}, {about['nbytes'] / GB:.2f} GB; {machine['cpu']}, {machine['threads']} threads"
        try:
            draw(of_model, f"{title}; {matrix.found['date'][:10]}", folder / f"{name}.png")
        except ModuleNotFoundError:
            console.print("no picture: matplotlib is missing. Hint: pip install matplotlib")
        print(recommended(of_model))


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the flags."""
    or_auto = lambda text: None if text == "auto" else int(text)  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=[], metavar="DIR")
    add("--budgets", nargs="+", type=float, metavar="GB", help="the same for all models; unset: --num-budgets")
    add("--num-budgets", type=int, default=8, metavar="N", help="from the smallest to the whole model (default: 8)")
    add("--slots", nargs="+", type=or_auto, default=[None], metavar="N", help="buffers of layers; auto: the plan's")
    add("--io", nargs="+", choices=("auto", "direct", "buffered"), default=["direct"])
    add("--queue-depths", nargs="+", type=or_auto, default=[None], metavar="N", help="reading threads; auto: probed")
    add("--contexts", nargs="+", type=int, default=[16], metavar="N", help="tokens of the prompt (default: 16)")
    add("--batches", nargs="+", type=int, default=[1], metavar="N", help="sequences at once (default: 1)")
    add("--tokens", type=int, default=10, help="to decode in every run (default: 10)")
    add("--rounds", type=int, default=1)
    add("--drop-caches", action="store_true", help="drop the system's caches before every run, where permitted")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the results, and of an interrupted run")
    add("--preset", choices=("promise",))
    add("flags", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.tokens < 2 or not (options.models or options.preset):
        parser.error("--models names at least one model, and --tokens is at least 2")
    return options


def main() -> None:
    """Run what is missing of the matrix, and report."""
    options = parse_arguments(sys.argv[1:])
    if options.preset == "promise":
        options.out.mkdir(parents=True, exist_ok=True)
        program, models = ROOT / "benchmarks" / "promise.py", options.out / "models"
        command = [sys.executable, program, models, "--json", options.out / "promise.json", *options.flags]
        raise SystemExit(subprocess.run(command).returncode)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    matrix = Matrix(options.out, options.drop_caches)
    cells = list(cells_of(options, matrix.found["budgets"]))
    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("Runs", total=len(cells))
        for cell in cells:
            if key_of(cell) not in matrix.cells:
                run = matrix.run(cell)
                speed = f"{run['tokens_per_second']:.3f} tokens/s" if run["status"] == "ok" else run["status"]
                progress.console.print(f"{Path(cell[1].model).name}, {cell[1].budget} GB: {speed}", highlight=False)
            progress.advance(task)
    report(matrix, [matrix.cells[key_of(cell)] for cell in cells], console)


if __name__ == "__main__":
    main()
