"""Interrupt passes and changes of tiny models at random moments, and count what is left.

    python scripts/interrupts.py [--seconds 20] [--kinds dense,mixture] [--changes decode,prompt] [--seed 1]
    python scripts/interrupts.py --kinds "" --caches "offloaded,prefixes disk exact"

For each kind of model and of change it prints the number of interrupts, and how often the model and the prompt cache
were `right` afterwards (mlx-lm's logits, bit for bit) or `refused` to go on. A third of the interrupts comes from a
trace, before a random instruction; the others from a timer, half of them twice. KV caches and the prefix cache alone
are interrupted by the timer, in the scenarios of their tests. The exit status is 1 if anything was wrong. Where a
scenario takes more than two minutes, the stacks of all threads are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import mlx.core as mx

import interrupted_kv
import interrupted_prefixes
from expert_pools import with_pool
from interrupt_points import Program, durations, interrupted_at_random
from interrupting import CHANGES, Strike, Victim, outcomes
from mlx_flash import FlashError, FlashLLM, load_model
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, save, stock
from streamed import LARGE_GB, config, streamed_on_disk, streamed_whole

KINDS: dict[str, tuple[dict[str, Any], Callable[[Path], FlashLLM]]] = {
    "dense": (LLAMA | {"num_hidden_layers": 2}, lambda folder: streamed_whole(folder, tile_rows=10**9)),
    "finer cut": (LLAMA | {"num_hidden_layers": 2}, lambda folder: streamed_whole(folder, cut=1)),
    "on disk": (LLAMA | {"num_hidden_layers": 2}, streamed_on_disk),
    "finer cut on disk": (LLAMA | {"num_hidden_layers": 2}, lambda folder: streamed_on_disk(folder, cut=2)),
    "sliding window": (GEMMA3 | {"num_hidden_layers": 3}, streamed_whole),
    "recurrent": (MAMBA2 | {"num_hidden_layers": 2}, streamed_whole),
    "mixture": (QWEN3_MOE | {"num_hidden_layers": 2}, lambda folder: with_pool(folder, 6)),
    "streamed mixture": (QWEN3_MOE | {"num_hidden_layers": 2}, lambda folder: with_pool(folder, 6, "streamed")),
    "in memory": (
        LLAMA | {"num_hidden_layers": 2},
        lambda folder: load_model(folder, config(ram_budget_gb=LARGE_GB))[0],
    ),
    "window in memory": (
        GEMMA3 | {"num_hidden_layers": 3},
        lambda folder: load_model(folder, config(ram_budget_gb=LARGE_GB))[0],
    ),
    "full shape": (QWEN3_MOE | {"num_hidden_layers": 2}, lambda folder: with_pool(folder, 12, exact_rows=False)),
}


CACHES: dict[str, Callable[[Path], Program]] = {
    **{name.replace(",", ""): partial(interrupted_kv.program, name) for name in interrupted_kv.SCENARIOS},
    **{
        f"prefixes {kind} {mode}": partial(interrupted_prefixes.program, kind, mode)
        for kind in interrupted_prefixes.KINDS
        for mode in interrupted_prefixes.MODES
    },
}


def alarm(*delays: float) -> Callable[[Callable[[], Any]], bool]:
    """Return what runs a change and interrupts it after some time, and what handles that after some more."""

    def strike(change: Callable[[], Any]) -> bool:
        left, is_struck = list(delays), False

        def interrupt(*_: object) -> None:
            nonlocal is_struck
            is_struck = True
            set_timer()
            raise KeyboardInterrupt

        def set_timer() -> None:
            if left:
                signal.setitimer(signal.ITIMER_REAL, left.pop(0))

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            try:
                set_timer()
                change()
            finally:
                left.clear()
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGALRM, before)
        return is_struck

    return strike


def attack(victim: Victim, change: str, seconds: float, dice: random.Random) -> Counter[str]:
    """Interrupt a change again and again."""
    strike = Strike(None, None)
    outcomes(victim, change, strike.run)
    began = time.perf_counter()
    outcomes(victim, change, lambda run_it: run_it() is None)
    duration = time.perf_counter() - began
    counts = Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        by_trace = Strike(None, dice.randrange(strike.count))
        found = outcomes(victim, change, by_trace.run)
        found += outcomes(victim, change, alarm(dice.uniform(1e-5, duration)))
        found += outcomes(victim, change, alarm(dice.uniform(1e-5, duration), dice.uniform(1e-6, 3e-4)))
        counts.update(found)
        counts["interrupts"] += by_trace.where is not None
        if not set(found) <= {"right", "refused"}:
            print(f"{change}: {found} after an interrupt in {by_trace.where}", flush=True)
    return counts


def attack_caches(name: str, seconds: float, dice: random.Random) -> Counter[str]:
    """Interrupt a scenario of caches again and again."""
    counts, end = Counter[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        program = CACHES[name](Path(folder))
        expected = durations(program)
        while time.monotonic() < end:
            faulthandler.dump_traceback_later(120)
            try:
                counts["interrupts"] += interrupted_at_random(program, expected, dice)
            except (AssertionError, FlashError, OSError, RuntimeError, ValueError):
                traceback.print_exc()
                counts["wrong"] += 1
            else:
                counts["right"] += 1
            faulthandler.cancel_dump_traceback_later()
    return counts


def main() -> int:
    """Return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="time for each kind of change (20)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of models")
    parser.add_argument("--caches", default=",".join(CACHES), help="scenarios of caches")
    parser.add_argument("--changes", default=",".join(CHANGES), help="kinds of changes")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice, total = random.Random(options.seed), Counter[str]()
    for kind in filter(None, options.kinds.split(",")):
        architecture, make = KINDS[kind]
        with tempfile.TemporaryDirectory() as name:
            folder = save(Path(name) / "model", architecture, mx.float32)
            with make(folder) as model:
                model.start()
                model.plan = replace(model.plan, budget_bytes=10**11, prefill_step_size=2048)
                victim = Victim(model, stock(folder))
                for change in options.changes.split(","):
                    counts = attack(victim, change, options.seconds, dice)
                    print(f"{kind}, {change}: {dict(counts)}", flush=True)
                    total += counts
            del model, victim
            gc.collect()
    for name in filter(None, options.caches.split(",")):
        counts = attack_caches(name, options.seconds, dice)
        print(f"{name}: {dict(counts)}", flush=True)
        total += counts
    print(f"all: {dict(total)}")
    return int(not total.keys() <= {"interrupts", "right", "refused"})


if __name__ == "__main__":
    sys.exit(main())
