"""The short table: what a user gets from mlx-flash and from mlx-lm. ``make bench``, about seven minutes on two cores.

    python benchmarks/bench.py [--rounds 3] [--folder models/bench] [--json bench.json]

Two random models are made in the folder, unless they are there. Runs of both programs alternate, each in a process of
its own, with default settings and mlx-flash's own loop without guesses. mlx-lm has all weights in memory. Files are
cold before each run. The disk is probed in each round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from disk import DiskProbe
from harness import Run, describe, describe_cold, describe_model, make_cold, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runs import Job, run_job

from mlx_flash.config import GB
from mlx_flash.storage.safetensors import weight_files

ROOT = Path(__file__).resolve().parents[1]

SHAPES = {
    "dense": "--layers 12 --hidden-size 1536 --intermediate-size 4096 --heads 12 --kv-heads 4 --vocab-size 8000",
    "mixture": "--architecture qwen3_moe --layers 8 --hidden-size 1024 --intermediate-size 512 --heads 8 --kv-heads 4"
    " --vocab-size 8000 --experts 24 --experts-per-token 4 --routing-skew 1.0 --dtype float32",
}
"""0.7 GB in bfloat16, and 1.3 GB in float32: MLX's CPU back end computes experts in nothing else."""

PROBES = ((2 << 20, 8), (4 << 20, 4))
"""(read size, queue depth)."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: as the table says it.
        model: a key of ``SHAPES``.
        budget_gb: of mlx-flash.
        figure: what is compared: a field of a run.
        tokens, prompt_tokens, batch: of a run.
    """

    name: str
    model: str
    budget_gb: float
    figure: str = "tokens_per_second"
    tokens: int = 24
    prompt_tokens: int = 16
    batch: int = 1

    def job(self, folder: Path) -> Job:
        """Return mlx-flash's run."""
        return Job(
            str(folder / self.model), self.tokens, self.prompt_tokens, self.budget_gb, batch=self.batch, own=True
        )


ROWS = [
    Row("dense, half of its size", "dense", 0.35),
    Row("dense, everything fits", "dense", 4.0),
    Row("mixture, a third", "mixture", 0.45),
    Row("8 sequences at once", "dense", 0.35, batch=8, tokens=8),
    Row("first token of 256, half", "dense", 0.35, "first_token_seconds", 2, 256),
]


def make_models(folder: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """Return the models. Those that are missing are made."""
    for name, shape in SHAPES.items():
        if not (folder / name / "config.json").is_file():
            say(f"making {folder / name}")
            command = [sys.executable, ROOT / "scripts" / "make_random_model.py", folder / name, *shape.split()]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {name: folder / name for name in SHAPES}


def compare(row: Row, folder: Path, number: int) -> dict[str, Run]:
    """Run both programs, in an order that changes from round to round."""
    streamed = row.job(folder)
    jobs = {"mlx-flash": streamed, "mlx-lm": replace(streamed, budget=None, batch=1, own=False)}
    found = {}
    for program in sorted(jobs, reverse=bool(number % 2)):
        make_cold(weight_files(folder / row.model))
        found[program] = run_job(jobs[program])
    if row.batch == 1 and found["mlx-flash"]["token_ids"] != found["mlx-lm"]["token_ids"]:
        raise SystemExit(f"{row.name}: the tokens differ")
    return found


def summarize(row: Row, rounds: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """Return the medians of a row, and how many times as good mlx-flash is."""
    ours, theirs = ([found[program][row.figure] for found in rounds] for program in ("mlx-flash", "mlx-lm"))
    is_time = row.figure.endswith("seconds")
    ratios = [b / a if is_time else a / b for a, b in zip(ours, theirs, strict=True)]
    peaks = {program: max(found[program]["peak_bytes"] for found in rounds) for program in rounds[0]}
    medians = {"mlx-flash": median(ours), "mlx-lm": median(theirs)}
    return {"row": vars(row), "medians": medians, "ratio": median(ratios), "peaks": peaks, "rounds": list(rounds)}


def table_of(summaries: Sequence[dict[str, Any]]) -> Table:
    """Return the table that people look at."""
    table = Table("", "mlx-flash", "its peak", "mlx-lm", "its peak", "ratio", box=SIMPLE_HEAD)
    for found in summaries:
        unit = "s" if found["row"]["figure"].endswith("seconds") else "tokens/s"
        cells = [found["row"]["name"]]
        for program in ("mlx-flash", "mlx-lm"):
            cells += [f"{found['medians'][program]:.3g} {unit}", f"{found['peaks'][program] / GB:.2f} GB"]
        table.add_row(*cells, f"{found['ratio']:.2f}")
    return table


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of all rows (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "models" / "bench", help="for the models")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    options = parser.parse_args()
    console = Console()
    models = make_models(options.folder, console.print)
    files = weight_files(models["dense"])
    probe, probes = DiskProbe(files, PROBES, GB // 4), []
    rounds: list[list[dict[str, Run]]] = [[] for _ in ROWS]
    for number in range(options.rounds):
        for row, found in zip(ROWS, rounds, strict=True):
            console.print(f"round {number + 1} of {options.rounds}: {row.name}")
            found.append(compare(row, options.folder, number))
        make_cold(files)
        probes += probe.measure()
    summaries = [summarize(row, found) for row, found in zip(ROWS, rounds, strict=True)]
    console.print(table_of(summaries))
    rates = sorted(found["bytes_per_second"] / GB for found in probes)
    console.print(f"The disk read {rates[0]:.2f} to {rates[-1]:.2f} GB/s. A ratio above 1 is in favour of mlx-flash.")
    described = describe(options.folder, describe_cold())
    described["models"] = {name: describe_model(path) for name, path in models.items()}
    write_json(options.json, described | {"rows": summaries, "probes": probes})


if __name__ == "__main__":
    main()
