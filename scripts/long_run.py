"""Long runs of tiny models: memory, descriptors, threads and speed over many tokens, or many loads.

Each kind runs in a process of its own. The growth of the resident set is the slope of a line through the samples of its
last three quarters.

Example:
    python scripts/long_run.py --tokens 20000 --cycles 200
    python scripts/long_run.py cycles resident-cycles --cycles 1000
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash import DiskKVCache, FlashConfig, load_model
from models import LLAMA, QWEN3_MOE, save, stock

SMALL = {**LLAMA, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
CONVERSATION = 500
"""Tokens until a new prompt cache is begun."""

SAMPLES = 20


class Sample(NamedTuple):
    """Memory of the process after so many steps."""

    steps: int
    resident: int
    descriptors: int
    threads: int
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Return 1 when descriptors or threads grew."""
    parser = argparse.ArgumentParser(description="Run tiny models for long.")
    parser.add_argument("kinds", nargs="*", help=f"all by default: {', '.join(KINDS)}")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--cycles", type=int, default=200, help="loads and closings (default: 200)")
    parser.add_argument("--here", action="store_true", help="run one kind in this process")
    args = parser.parse_args(arguments)
    if not args.here:
        numbers = ["--tokens", str(args.tokens), "--cycles", str(args.cycles), "--here"]
        return max(
            subprocess.run([sys.executable, __file__, kind, *numbers]).returncode for kind in args.kinds or KINDS
        )
    (kind,) = args.kinds
    count = args.cycles if kind.endswith("cycles") else args.tokens
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        samples = list(sampled(KINDS[kind](Path(folder)), count))
    print(summary(kind, samples), flush=True)
    first, last = samples[len(samples) // 4], samples[-1]
    return int(last.descriptors > first.descriptors or last.threads > first.threads)


def sampled(steps: Iterator[None], count: int) -> Iterator[Sample]:
    """Yield a sample after each twentieth of the steps."""
    process, began, fewest = psutil.Process(), time.perf_counter(), sys.maxsize
    for number in range(1, count + 1):
        next(steps)
        if number % max(1, count // SAMPLES) == 0:
            now = time.perf_counter()
            fewest = descriptors(process, fewest)
            yield Sample(number, process.memory_info().rss, fewest, process.num_threads(), now - began)
            began = now


def descriptors(process: psutil.Process, before: int) -> int:
    """Return the fewest of some counts: other threads open files for moments. Counts above ``before`` are repeated."""
    counts: list[int] = []
    while len(counts) < 5 or (min(counts) > before and len(counts) < 100):
        counts.append(process.num_fds())
        time.sleep(0.001)
    return min(counts)


def summary(kind: str, samples: list[Sample]) -> str:
    """Return one line about a run."""
    late = samples[len(samples) // 4 :]
    slope = statistics.linear_regression([s.steps for s in late], [s.resident for s in late]).slope
    speeds = [samples[0].steps / s.seconds for s in (late[0], late[-1])]
    return (
        f"{kind}: {samples[-1].steps} steps, resident {late[0].resident / 1e6:.1f} -> {late[-1].resident / 1e6:.1f} MB "
        f"({slope / 1e3:+.3f} kB a step), descriptors {late[0].descriptors} -> {late[-1].descriptors}, threads "
        f"{late[0].threads} -> {late[-1].threads}, {speeds[0]:.1f} -> {speeds[1]:.1f} steps/s"
    )


def tokens(folder: Path, config: dict[str, Any], on_disk: bool = False) -> Iterator[None]:
    """Decode token after token."""
    settings = FlashConfig(ram_budget_gb="min", context_length=2 * CONVERSATION, prefill_step_size=16)
    model, _ = load_model(save(folder / "model", config), settings)
    with model:
        while True:
            cache = [DiskKVCache(directory=folder) for _ in model.layers] if on_disk else make_prompt_cache(model)
            token = mx.array([[1]])
            for _ in range(CONVERSATION):
                token = model(token, cache=cache)[:, -1:].argmax(-1)
                mx.eval(token)
                yield


def cycles(folder: Path, load: Callable[[Path], Any]) -> Iterator[None]:
    """Load a model, call it, and close it."""
    directory = save(folder / "model", SMALL)
    while True:
        model = load(directory)
        mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))
        if hasattr(model, "close"):
            model.close()
        del model
        gc.collect()
        yield


def streamed(directory: Path) -> Any:
    """Load a streamed model."""
    return load_model(directory, FlashConfig(ram_budget_gb="min", context_length=64, prefill_step_size=16))[0]


KINDS: dict[str, Callable[[Path], Iterator[None]]] = {
    "dense": lambda folder: tokens(folder, SMALL),
    "mixture": lambda folder: tokens(folder, QWEN3_MOE),
    "disk-kv": lambda folder: tokens(folder, SMALL, on_disk=True),
    "cycles": lambda folder: cycles(folder, streamed),
    "resident-cycles": lambda folder: cycles(folder, stock),
}

if __name__ == "__main__":
    sys.exit(main())
