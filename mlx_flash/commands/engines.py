"""``mlx-flash ps`` and ``stop``: the running engines of this user. Needs no MLX."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.table import Table

from mlx_flash.commands.common import print_json, print_rich
from mlx_flash.errors import ConfigError
from mlx_flash.monitor.history import History
from mlx_flash.monitor.state import model_name, number
from mlx_flash.monitor.words import duration, rate, size
from mlx_flash.telemetry import Json, Published, find

_LOOK_SECONDS = 0.1


def ps(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash ps``."""
    engines = running()
    if args.json:
        print_json({"engines": [_to_json(engine) for engine in engines]}, out)
        return 0
    if not engines:
        print("no engine is running", file=out)
        return 0
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("process", "model", "state", "memory", "budget", "tokens", "tokens/s", "running for"):
        table.add_column(heading, justify="left" if heading in ("model", "state") else "right")
    for engine in engines:
        table.add_row(*_cells(_to_json(engine)))
    print_rich(table, out)
    return 0


def stop(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash stop``: send SIGTERM to a process, and wait until it has ended.

    Raises:
        ConfigError: not exactly one running process is meant, or it does not end in time.
    """
    engine = choose(args.engine, running())
    name = f"process {engine.pid} ({model_name(engine.state)})"
    os.kill(engine.pid, signal.SIGTERM)
    deadline = time.monotonic() + args.timeout
    while engine.pid in (left.pid for left in running()):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{name} has not ended {duration(args.timeout)} after SIGTERM. Hint: it ends after the pass under way; "
                f"`kill -9 {engine.pid}` ends it at once."
            )
        time.sleep(_LOOK_SECONDS)
    if not args.quiet:
        print(f"stopped {name}", file=out)
    return 0


def running() -> list[Published]:
    """Return the engines that run now."""
    return [engine for engine in find() if not engine.ended]


def choose(wanted: str, engines: Sequence[Published]) -> Published:
    """Return the engine of a process or model. Nothing is chosen for the user, who may have other engines running.

    Raises:
        ConfigError: no process, or more than one, has it.
    """
    found = [engine for engine in engines if wanted in (str(engine.pid), model_name(engine.state))]
    if len({engine.pid for engine in found}) == 1:
        return found[0]
    names = ", ".join(f"{engine.pid} ({model_name(engine.state)})" for engine in engines) or "none"
    raise ConfigError(f"stop {wanted}: {len(found)} running engines match. Running: {names}. Hint: name one process.")


def _to_json(engine: Published) -> Json:
    history, state = History(engine), engine.state
    return {
        "pid": engine.pid,
        "model": model_name(state),
        "state": "idle" if history.is_idle() else "running",
        "footprint_bytes": int(number(state, "memory", "footprint")),
        "budget_bytes": int(number(state, "budget", "bytes")),
        "tokens": int(number(state, "passes", "num_tokens_out")),
        "tokens_per_second": history.rates.mean_tokens_per_second,
        "seconds": max(0.0, time.time() - engine.started),
    }


def _cells(entry: Json) -> list[str]:
    sizes = [size(entry[name]) for name in ("footprint_bytes", "budget_bytes")]
    speed, seconds = rate(entry["tokens_per_second"]), duration(entry["seconds"])
    return [str(entry["pid"]), entry["model"], entry["state"], *sizes, str(entry["tokens"]), speed, seconds]
