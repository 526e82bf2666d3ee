"""Speed of a mixture beside streamlx and mlx-lm, and whether they choose the same tokens.

    python scripts/make_random_model.py models/mixture --architecture qwen3_moe --layers 24 --hidden-size 2048 \\
        --intermediate-size 768 --heads 32 --kv-heads 4 --experts 128 --experts-per-token 8 --quantize-bits 4 \\
        --routing-skew 1.0
    PYTHONPATH=STREAMLX python benchmarks/mixtures.py --model models/mixture --budgets 4 6 --pools 2 4

streamlx (https://github.com/srcterm/streamlx) has a size for its experts alone; each budget is paired with one. With
``--pools`` and no number it is left out.
Processes run one after another, in turn, each with a model that is not cached. Tokens are chosen greedily. mlx-lm runs
in the first round only: it is there for its tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import harness
import mlx.core as mx
import mlx_lm.utils
from mlx_lm.generate import generate_step

import mlx_flash
from mlx_flash.config import parse_budget

PROMPT = [1, 11, 43, 85]


def load(engine: str, model: Path, size: Any) -> Any:
    """Return a model as mlx-lm's loop takes it.

    Args:
        engine: ``mlx-flash``, ``streamlx`` or ``mlx-lm``.
        model: its folder.
        size: the budget in GB or a word for it, or streamlx's experts in GiB.
    """
    if engine == "mlx-flash":
        return mlx_flash.load_model(model, mlx_flash.FlashConfig(ram_budget_gb=size))[0]
    if engine == "streamlx":
        from streamlx.integrate import load_streaming_model  # type: ignore[import-not-found]

        return load_streaming_model(str(model), budget_bytes=int(size * 2**30))[0]
    return mlx_lm.utils.load_model(model)[0]


def run(engine: str, path: Path, size: Any, num_tokens: int) -> harness.Run:
    """Generate, and return tokens, times, and the peaks of MLX's memory and of the process in the host's."""
    began = time.perf_counter()
    model = load(engine, path, size)
    loaded = time.perf_counter()
    tokens, stamps = [], []
    for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=num_tokens):
        tokens.append(int(token))
        stamps.append(time.perf_counter())
    half = num_tokens // 2
    return {
        "tokens": tokens,
        "load_seconds": loaded - began,
        "first_token_seconds": stamps[0] - loaded,
        "tokens_per_second": (num_tokens - 1) / (stamps[-1] - stamps[0]),
        "second_half": (num_tokens - half - 1) / (stamps[-1] - stamps[half]),
        "mlx_peak_bytes": mx.get_peak_memory(),
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--budgets", type=parse_budget, nargs="+", default=[4, 6], metavar="GB")
    parser.add_argument("--pools", type=float, nargs="*", default=[2, 4], metavar="GIB", help="streamlx's experts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "SIZE"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all engines in turn and print medians."""
    args = parse(arguments)
    if args.worker:
        engine, size = args.worker
        budget = parse_budget(size) if engine == "mlx-flash" else float(size)
        print(json.dumps(run(engine, args.model, budget, args.tokens)))
        return
    cases: list[tuple[str, Any]] = [("mlx-lm", 0)]
    for budget, pool in zip_longest(args.budgets, args.pools):
        cases += [(engine, size) for engine, size in (("mlx-flash", budget), ("streamlx", pool)) if size is not None]
    runs: dict[tuple[str, Any], list[harness.Run]] = {case: [] for case in cases}
    for number in range(args.rounds):
        for engine, size in cases[1:] if number else cases:
            harness.make_cold(args.model.glob("*.safetensors"))
            words = ["--model", args.model, "--tokens", args.tokens, "--worker", engine, size]
            found = harness.run_worker(__file__, words, label=f"{engine} {size}")
            runs[engine, size].append(found)
            print(f"{engine:9} {size:>4}: {found['tokens_per_second']:6.2f} tokens/s", flush=True)
            listed = [{"engine": of, "size": at, "runs": some} for (of, at), some in runs.items()]
            harness.write_json(args.json, {**harness.describe(args.model, harness.describe_cold()), "results": listed})
    print_medians(runs)


def print_medians(runs: dict[tuple[str, Any], list[harness.Run]]) -> None:
    """Print the medians of each engine, and whether its tokens are those of mlx-lm."""
    expected = runs["mlx-lm", 0][0]["tokens"]
    for (engine, size), found in runs.items():
        equal = sum(one["tokens"] == expected for one in found)
        middle = {key: median(one[key] for one in found) for key in found[0] if key != "tokens"}
        print(
            f"{engine:9} {size:>4}: {middle['tokens_per_second']:6.2f} tokens/s, second half "
            f"{middle['second_half']:6.2f}, MLX {middle['mlx_peak_bytes'] / 1e9:5.2f} GB, "
            f"process {middle['resident_peak_bytes'] / 1e9:5.2f} GB, "
            f"tokens as mlx-lm's in {equal} of {len(found)}"
        )


if __name__ == "__main__":
    main()
