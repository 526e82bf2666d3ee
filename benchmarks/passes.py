"""Passes over the weights that a text takes, counted and not timed.

    python scripts/make_random_model.py DIR --layers 16 --hidden-size 256 --intermediate-size 704 --heads 4 \\
        --kv-heads 1 --vocab-size 2000 --dtype float32
    python benchmarks/passes.py --model DIR --budget 0.37 --context 24000 --prompt-tokens 1 23 2000 8000 --tokens 32

Each prompt is continued twice, greedily: without guesses, and with guesses from the text. Both give the same tokens, or
the program fails. How many tokens are guessed follows the measured times of the machine, unless ``--free-rows`` says
that a pass waits for the disk while rows are computed, as on a machine whose processor is much faster than its disk.

A random model soon repeats itself, which guesses follow: it shows what guesses can save, not what they save on text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mlx_flash import FlashConfig, FlashLLM, generate_step, load_model
from mlx_flash.config import GB, parse_budget
from mlx_flash.residency.plan import DEFAULT_PREFILL_STEP_SIZE
from mlx_flash.speculation.worth import Times


@dataclass(frozen=True)
class Counted:
    """The continuation of a prompt.

    Attributes:
        text: the tokens.
        to_first: passes to the first token.
        further: passes for the other tokens.
        guessed, right: tokens that were guessed and computed, and those that were right.
    """

    text: list[int]
    to_first: int
    further: int
    guessed: int
    right: int


class FreeRows(Times):
    """Times of a pass that reads for as long as sixteen rows compute."""

    def note(self, num_rows: int, seconds: float, waited_seconds: float, reading_seconds: float) -> None:
        """Leave the times as they are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Count passes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--budget", type=parse_budget, default="min")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1, 23, 2000, 8000])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--context", type=int, help="tokens of KV cache to reserve; what is not used holds parts of prompts"
    )
    parser.add_argument("--free-rows", action="store_true")
    args = parser.parse_args(arguments)
    plain = continue_all(args, speculation=False)
    guessing = continue_all(args, speculation=True)
    if [run.text for run in plain] != [run.text for run in guessing]:
        raise SystemExit("guesses changed the tokens")
    table = Table(
        "prompt tokens", "to the first token", "further tokens", "plain", "guessing", "right", box=SIMPLE_HEAD
    )
    for length, one, other in zip(args.prompt_tokens, plain, guessing, strict=True):
        numbers = (length, one.to_first, len(one.text) - 1, one.further, other.further)
        table.add_row(*map(str, numbers), f"{other.right} of {other.guessed}")
    Console(width=120).print(table)
    return 0


def continue_all(args: argparse.Namespace, *, speculation: bool) -> list[Counted]:
    """Continue prompts of all lengths."""
    context = args.context or max(args.prompt_tokens) + args.tokens
    config = FlashConfig(
        ram_budget_gb=args.budget, context_length=context, speculation=speculation, lend_reserves=False, telemetry=False
    )
    with load_model(args.model, config)[0] as model:
        model.start()
        if args.free_rows:
            model.times = FreeRows(1.0, 1 / 16)
        if not speculation:
            _describe(model)
        return [continue_one(model, length, args.tokens) for length in args.prompt_tokens]


def continue_one(model: FlashLLM, length: int, num_tokens: int) -> Counted:
    """Continue a prompt greedily, and count."""
    prompt = mx.array([1 + (i * i + 7 * i) % 997 for i in range(length)])
    before = replace(model.counters)
    steps = generate_step(prompt, model, max_tokens=num_tokens + 1, prefill_step_size=DEFAULT_PREFILL_STEP_SIZE)
    text = [next(steps)[0]]
    num_first = model.counters.num_passes
    text += [token for token, _ in steps]
    after = model.counters
    return Counted(
        text,
        to_first=num_first - before.num_passes,
        further=after.num_passes - num_first,
        guessed=after.num_guessed - before.num_guessed,
        right=after.num_right - before.num_right,
    )


def _describe(model: FlashLLM) -> None:
    plan = model.plan
    sizes = (
        f"{plan.model_bytes / GB:.2f} GB, budget {plan.budget_bytes / GB:.2f} GB, {plan.read_bytes / GB:.2f} GB read"
    )
    Console(width=120).print(f"{sizes} in a pass, {plan.prefill_step_size} prompt tokens in a call")


if __name__ == "__main__":
    sys.exit(main())
