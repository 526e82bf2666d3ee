"""Perplexity of a text, resident and streamed, with a digest of every logit.

    python benchmarks/perplexity.py MODEL [MODEL ...] --text docs/reliability.md --budget min --tokens 1024

The text is cut into samples, and each is one forward call, as ``mlx_lm.perplexity`` does it. Each run has a process of
its own. The program fails where the logits of a streamed model differ from those of mlx-lm's model in one bit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import Run, describe, describe_cold, describe_model, run_worker, write_json
from mlx_lm.utils import load_model as load_stock_model
from mlx_lm.utils import load_tokenizer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mlx_flash import FlashConfig, load_model
from mlx_flash.config import GB, parse_budget
from mlx_flash.memory.footprint import peak_footprint

CONTEXT = 2048
"""Tokens of KV cache to reserve, whose memory has room for the logits of a sample."""


def work(options: argparse.Namespace) -> Run:
    """Return the perplexity of one model, computed in this process: in memory without a budget."""
    [path] = options.models
    tokens = load_tokenizer(path).encode(options.text.read_text())[: options.tokens]
    samples = [tokens[at : at + options.sample] for at in range(0, len(tokens) - 1, options.sample)]
    if options.budget is None:
        return {"budget_bytes": None, "read_bytes": 0} | measured(load_stock_model(path)[0], samples)
    config = FlashConfig(
        ram_budget_gb=options.budget,
        context_length=CONTEXT,
        prefill_step_size=options.sample,
        telemetry=False,
    )
    with load_model(path, config)[0] as model:
        model.start()
        plan = model.plan
        sizes = {"budget_bytes": plan.budget_bytes, "read_bytes": plan.read_bytes}
        return sizes | measured(model, samples)


def measured(model: Any, samples: Sequence[Sequence[int]]) -> Run:
    """Return perplexity, a digest of all logits, and the time."""
    seen, losses, began = sha256(), list[float](), time.perf_counter()
    for sample in samples:
        losses += _losses(model, sample, seen)
    return {
        "tokens": len(losses),
        "perplexity": math.exp(math.fsum(losses) / len(losses)),
        "digest": seen.hexdigest(),
        "seconds": time.perf_counter() - began,
        "peak_bytes": peak_footprint(),
    }


def _losses(model: Any, sample: Sequence[int], seen: Any) -> list[float]:
    """Return the loss of each token, and add its logits to a digest. They are freed before the next call."""
    logits = model(mx.array([sample[:-1]])).astype(mx.float32)  # exact: the model computes in 16 or 32 bits
    losses: list[float] = nn.losses.cross_entropy(logits, mx.array([sample[1:]]))[0].tolist()
    for row in logits[0]:
        seen.update(np.array(row).tobytes())
    return losses


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--sample", type=int, default=256, help="tokens of a call (default: %(default)s)")
    parser.add_argument("--budget", type=parse_budget, help="of the streamed runs (default: min)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models, and print a table."""
    options = make_parser().parse_args(arguments)
    if options.worker:
        print(json.dumps(work(options)))
        return 0
    rows = []
    for path in options.models:
        words = [path, "--worker", "--text", options.text, "--tokens", options.tokens, "--sample", options.sample]
        resident = run_worker(__file__, words, label=f"{path.name} in memory")
        streamed = run_worker(__file__, [*words, "--budget", options.budget or "min"], label=f"{path.name}, streamed")
        if resident["digest"] != streamed["digest"]:
            raise SystemExit(f"{path.name}: the logits of the streamed model are not mlx-lm's")
        rows.append({"model": describe_model(path), "resident": resident, "streamed": streamed})
        print(f"{path.name}: {resident['perplexity']!r} and {streamed['perplexity']!r}", flush=True)
    result = describe(options.models[0], describe_cold(None)) | {"text": options.text.name, "identical": True}
    write_json(options.json, result | {"sample": options.sample, "runs": rows})
    print_table(rows)
    return 0


def print_table(rows: Sequence[Run]) -> None:
    """Print perplexities, and what the runs took."""
    names = ("model", "GB", "perplexity", "in memory, s", "streamed, s", "budget, GB", "read in a pass, GB")
    table = Table(*names, box=SIMPLE_HEAD)
    for row in rows:
        resident, streamed = row["resident"], row["streamed"]
        table.add_row(
            row["model"]["name"],
            f"{row['model']['nbytes'] / GB:.2f}",
            f"{resident['perplexity']:.4f}",
            f"{resident['seconds']:.1f}",
            f"{streamed['seconds']:.1f}",
            f"{streamed['budget_bytes'] / GB:.2f}",
            f"{streamed['read_bytes'] / GB:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
