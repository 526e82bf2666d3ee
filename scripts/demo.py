"""Demonstration: a model in a third of its size, then in memory, with equal output.

Without ``--model``, the first run builds a model of about 1 GB, with the function of a small one that was trained on
Python's documentation. Then ``mlx-flash generate`` runs it with a budget of a third of that, and again with everything
in memory, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

MODEL = ROOT / "models" / "demo"
SMALL_LAYERS, LAYER_BYTES = 6, 23.6e6
"""Layers of the small model, and bytes of one when it is four times as wide."""


def build(directory: Path, size_gb: float) -> None:
    """Write the model unless it exists."""
    if (directory / "config.json").exists():
        return
    small = ROOT / "examples" / "pair" / "target"
    num_layers = max(SMALL_LAYERS, round(size_gb * 1e9 / LAYER_BYTES))
    command = [sys.executable, str(ROOT / "scripts" / "grow_model.py"), str(small), str(directory)]
    subprocess.run([*command, "--layers", str(num_layers), "--width", "4"], check=True)


def least_bytes(directory: Path) -> int:
    """Return the smallest budget that the model works in."""
    command = [sys.executable, "-m", "mlx_flash", "plan", "--model", str(directory), "--ram-budget-gb", "min", "--json"]
    plan: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return int(plan["budget_bytes"])


def generate(directory: Path, args: argparse.Namespace, *how: str) -> dict[str, Any]:
    """Run the command line once; print the command and return its report."""
    command = ["generate", "--model", str(directory), "--prompt", args.prompt, "--max-tokens", str(args.max_tokens)]
    shown = " ".join(f"'{word}'" if " " in word else word for word in [*command, *how])
    print(f"\n$ mlx-flash {shown}", flush=True)
    run = subprocess.run(
        [sys.executable, "-m", "mlx_flash", *command, *how, "--json"], stdout=subprocess.PIPE, check=True, text=True
    )
    report: dict[str, Any] = json.loads(run.stdout)
    peak, speed = report["peak_memory_bytes"] / 1e9, report["generation_tokens_per_second"]
    print(textwrap.indent(report["text"].strip(), "  "))
    print(f"  [peak {peak:.2f} GB, {speed:.2f} tokens/s]")
    return report


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
    budget = math.ceil(max(nbytes / 3, least_bytes(args.model)) / 1e6) / 1e3
    streamed = generate(args.model, args, "--ram-budget-gb", f"{budget:.3f}")
    resident = generate(args.model, args, "--resident")

    identical = streamed["tokens"] == resident["tokens"]
    held = streamed["peak_memory_bytes"] <= budget * 1e9
    print(f"\nmodel           {nbytes / 1e9:.2f} GB")
    print(f"peak, streamed  {streamed['peak_memory_bytes'] / 1e9:.2f} GB of {budget:.2f} GB budget")
    print(f"peak, resident  {resident['peak_memory_bytes'] / 1e9:.2f} GB")
    print(f"output          {'identical' if identical else 'DIFFERENT'} ({len(streamed['tokens'])} tokens)")
    return 0 if identical and held else 1


if __name__ == "__main__":
    sys.exit(main())
