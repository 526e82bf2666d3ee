"""Demonstration: a model in a third of its size, then in memory, with equal output.

Without ``--model``, the first run builds a model of about 1 GB, with the function of a small one that was trained on
Python's documentation. Then ``mlx-flash generate`` runs it with a budget of a third of that, and ``mlx_lm.generate``
in memory, each in a process of its own. On a terminal, ``flash-monitor`` shows below the text what the engine does.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mlx_flash.monitor.frames import Canvas, frame
from mlx_flash.monitor.rates import Watcher

ROOT = Path(__file__).resolve().parent.parent

MODEL = ROOT / "models" / "demo"
SMALL_LAYERS, LAYER_BYTES = 6, 23.6e6
"""Layers of the small model, and bytes of one when it is four times as wide."""

LOOK_SECONDS = 0.15


def build(directory: Path, size_gb: float) -> None:
    """Write the model unless it exists."""
    if (directory / "config.json").exists():
        return
    small = ROOT / "examples" / "pair" / "target"
    num_layers = max(SMALL_LAYERS, round(size_gb * 1e9 / LAYER_BYTES))
    command = [sys.executable, str(ROOT / "scripts" / "grow_model.py"), str(small), str(directory)]
    subprocess.run([*command, "--layers", str(num_layers), "--width", "4"], check=True)


def plan(directory: Path, budget: str) -> dict[str, Any]:
    """Return the plan for a budget."""
    command = [
        sys.executable,
        "-m",
        "mlx_flash",
        "plan",
        "--model",
        str(directory),
        "--ram-budget-gb",
        budget,
        "--json",
    ]
    planned: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return planned


def generate(program: str, directory: Path, args: argparse.Namespace, *how: str) -> tuple[str, str]:
    """Run a program once, and show it. Return the text, and the summary that comes after it."""
    command = ["generate", "--model", str(directory), "--prompt", args.prompt, "--max-tokens", str(args.max_tokens)]
    print(f"\n$ python -m {program} {shlex.join([*command, *how])}", flush=True)
    text: list[str] = []
    with tempfile.TemporaryFile("w+") as summary:
        run = subprocess.Popen(
            [sys.executable, "-m", program, *command, *how], stdout=subprocess.PIPE, stderr=summary, text=True
        )
        assert run.stdout is not None
        reader = threading.Thread(target=text.extend, args=[iter(partial(run.stdout.read, 1), "")])
        reader.start()
        watch(run, args.prompt, text, Console())
        status = run.wait()
        reader.join()
        summary.seek(0)
        words = summary.read()
    if status:
        sys.exit(words)
    print(textwrap.indent(f"{args.prompt} {''.join(text).strip()}", "  "), words.rstrip(), sep="\n", flush=True)
    return "".join(text), words


def watch(run: subprocess.Popen[str], prompt: str, text: list[str], console: Console) -> None:
    """Show the text so far and the monitor of the run's engine until the run ends. Do nothing without a terminal."""
    if not console.is_terminal:
        return
    watcher = Watcher()
    canvas = Canvas(console.width, None)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while run.poll() is None:
            watcher.look()
            own = [history for history in watcher.histories if history.latest.pid == run.pid]
            lines = frame(own, 0, watcher.system, canvas) if own else []
            words = Text.assemble(prompt, " ", ("".join(text).strip(), "bold"))
            live.update(Group(words, "", *lines), refresh=True)
            time.sleep(LOOK_SECONDS)


def main() -> int:
    """Build, run, compare. Return 0 when the outputs are identical and the budget held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a model; without it, one is built")
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--prompt", default="The default value is")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()

    if args.model == MODEL:
        build(args.model, args.size_gb)
    nbytes = sum(shard.stat().st_size for shard in args.model.glob("model*.safetensors"))
    least = plan(args.model, "min")["budget_bytes"]
    budget = f"{math.ceil(max(nbytes / 3, least) / 1e6) / 1e3:.3f}"
    planned = plan(args.model, budget)
    print(
        f"{nbytes / 1e9:.2f} GB of weights, a budget of {budget} GB: {planned['pinned_bytes'] / 1e9:.2f} GB of them "
        f"stay in memory, {planned['streaming']['read_bytes'] / 1e9:.2f} GB are read for each token"
    )
    streamed, summary = generate("mlx_flash", args.model, args, "--ram-budget-gb", budget)
    resident, _ = generate("mlx_lm", args.model, args, "--verbose", "False")

    identical, held = streamed == resident, "within the budget" in summary
    print(f"\noutput {'identical' if identical else 'DIFFERENT'}, budget {'kept' if held else 'NOT KEPT'}")
    return 0 if identical and held else 1


if __name__ == "__main__":
    sys.exit(main())
