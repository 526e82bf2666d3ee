"""Several sequences with everything in memory: tokens a second beside mlx-lm's own batches.

    python benchmarks/sequences.py --model MODEL --budget 8 [--sequences 1 4 8] [--tokens 100] [--rounds 7]

Each way decodes the same prompts of 16 tokens and more, greedily, by turns in one process that holds the model twice:

* ``mlx-lm``: its ``BatchGenerator``.
* ``server``: what ``mlx-flash serve`` computes answers with, with default settings.
* ``batch_generate``: of mlx-flash, with default settings; ``mlx-lm batch_generate`` beside it.

A round gives the time to the first token, and tokens a second after that; of ``batch_generate``, all tokens in all the
time. A ratio is the median of those of the rounds. The first round, which compiles kernels, does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
from harness import describe, describe_cold, describe_model, write_json
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model as load_stock_model
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import mlx_flash
from mlx_flash import FlashConfig, FlashLLM
from mlx_flash.loading import load_model
from mlx_flash.server.batch import BatchOptions, ServedBatch, greedy

Prompts = list[list[int]]

TOKENIZER = SimpleNamespace(eos_token_ids=[], decode=lambda tokens: "")


@dataclass(frozen=True)
class Round:
    """Seconds to the first token, tokens a second, and the tokens of each sequence."""

    first: float
    rate: float
    tokens: Prompts


def served(model: FlashLLM, prompts: Prompts, num_tokens: int) -> Round:
    """Decode as the server does."""
    batch: Any = ServedBatch(model, BatchOptions(), {})
    batch.admit(model.plan, [len(prompt) + num_tokens for prompt in prompts])
    return _run(batch, prompts, num_tokens)


def stock(model: Any, prompts: Prompts, num_tokens: int) -> Round:
    """Decode with mlx-lm's generator."""
    return _run(BatchGenerator(model, stream=mx.default_stream(mx.default_device())), prompts, num_tokens)


def _run(generator: Any, prompts: Prompts, num_tokens: int) -> Round:
    began = time.perf_counter()
    uids = generator.insert(prompts, [num_tokens] * len(prompts), samplers=[greedy] * len(prompts))
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    first, num_left = 0.0, len(prompts)
    while num_left:
        for answer in generator.next()[1]:
            first = first or time.perf_counter() - began
            found[answer.uid].append(answer.token)
            num_left -= answer.finish_reason is not None
    seconds = time.perf_counter() - began - first
    generator.close()
    return Round(first, len(prompts) * (num_tokens - 1) / seconds, [found[uid] for uid in uids])


def whole(generate: Callable[..., Any], model: Any, prompts: Prompts, num_tokens: int) -> Round:
    """Decode with a ``batch_generate``."""
    began = time.perf_counter()
    found = generate(model, TOKENIZER, prompts, max_tokens=num_tokens, return_token_ids=True)
    seconds = time.perf_counter() - began
    return Round(seconds, len(prompts) * num_tokens / seconds, found.token_ids)


def compare(model_dir: Path, options: argparse.Namespace, say: Callable[[Table], None]) -> list[dict[str, Any]]:
    """Measure each number of sequences. Return the numbers of all rounds."""

    plain, model = load_stock_model(model_dir)[0], load_model(model_dir, FlashConfig(ram_budget_gb=options.budget))[0]
    model.start()
    ways: dict[str, Callable[[Prompts], Round]] = {
        "mlx-lm": lambda prompts: stock(plain, prompts, options.tokens),
        "server": lambda prompts: served(model, prompts, options.tokens),
        "mlx-lm batch_generate": lambda prompts: whole(mlx_lm.batch_generate, plain, prompts, options.tokens),
        "batch_generate": lambda prompts: whole(mlx_flash.batch_generate, model, prompts, options.tokens),
    }
    results = []
    for number in options.sequences:
        prompts = [[7 + (13 * i + 5 * k) % 211 for i in range(16 + k)] for k in range(number)]
        rounds: dict[str, list[Round]] = {name: [] for name in ways}
        for i in range(-1, options.rounds):
            for name in sorted(ways, reverse=bool(i % 2)):
                made = ways[name](prompts)
                rounds[name] += [made] if i >= 0 else []
        results.append({"sequences": number, **{name: summary(name, rounds) for name in ways}})
        say(table_of(results[-1]))
    return results


def summary(name: str, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Return the medians of a way, and its ratios to mlx-lm's."""
    ours, theirs = rounds[name], rounds["mlx-lm batch_generate" if name.endswith("batch_generate") else "mlx-lm"]
    return {
        "first_token_seconds": median(each.first for each in ours),
        "tokens_per_second": median(each.rate for each in ours),
        "ratio": median(a.rate / b.rate for a, b in zip(ours, theirs, strict=True)),
        "same_tokens": all(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)),
        "rounds": [[each.first, each.rate] for each in ours],
    }


def table_of(result: dict[str, Any]) -> Table:
    """Return the table that people look at."""
    names = [f"{result['sequences']} sequences", "first token", "tokens/s", "of mlx-lm's", "same tokens"]
    table = Table(*names, box=SIMPLE_HEAD)
    for name, found in result.items():
        if name != "sequences":
            first = "" if name.endswith("batch_generate") else f"{found['first_token_seconds'] * 1e3:.0f} ms"
            cells = [first, f"{found['tokens_per_second']:.4g}", f"{found['ratio']:.2f}"]
            table.add_row(name, *cells, "yes" if found["same_tokens"] else "no")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--budget", type=float, required=True, metavar="GB", help="that holds the model twice")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8], help="numbers of sequences")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    options = parser.parse_args(arguments)
    results = compare(options.model, options, Console().print)
    described = describe(options.model, describe_cold(None, limited=False)) | {"model": describe_model(options.model)}
    settings = {"budget_gb": options.budget, "tokens": options.tokens}
    write_json(options.json, described | settings | {"results": results})


if __name__ == "__main__":
    main()
