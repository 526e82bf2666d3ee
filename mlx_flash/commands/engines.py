"""``mlx-flash ps`` and ``stop``: the running engines of this user, in whichever program. Needs no MLX."""

from __future__ import annotations

import argparse
import os
import pwd
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import psutil

from mlx_flash.commands.common import emit, labelled
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import find_modelfile
from mlx_flash.monitor.rates import History
from mlx_flash.monitor.words import counted, duration, filled, model_name, printable
from mlx_flash.telemetry import Json, Published, budget_of, find

OWN_PROGRAM = "mlx-flash"

_LOOK_SECONDS = 0.1
ENGINE = """
Engine: {program}, {model}, {state}, {footprint_bytes:size} of {budget_bytes:size}, {tokens:token}, \
{tokens_per_second:speed}, for {seconds:duration}
"""
"""A running engine in words."""


def ps(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash ps``. Engines of mlx-flash's own commands come first."""
    entries = sorted(map(_to_json, find()), key=lambda entry: not _is_own(entry["program"]))
    number = counted(len(entries), "engine") if entries else "no engine"
    lines = [(f"{entry['pid']}", text) for entry in entries for _, text in filled(ENGINE, entry)]
    emit(args, {"engines": entries}, labelled([*lines, (f"user {_user()}", f"{number} running")]), out)
    return 0


def stop(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash stop``: send SIGTERM to a process, and wait until it has ended."""
    engine = choose(published_name(args.model), find())
    name = _describe(engine)
    os.kill(engine.pid, signal.SIGTERM)
    deadline = time.monotonic() + args.timeout
    while engine.pid in (left.pid for left in find()):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"process {name} has not ended {duration(args.timeout)} after SIGTERM. Hint: it ends after the pass "
                f"under way; `kill -9 {engine.pid}` ends it at once."
            )
        time.sleep(_LOOK_SECONDS)
    if not args.quiet:
        print(f"stopped process {name}", file=out)
    return 0


def published_name(model: str) -> str:
    """Return the name that engines publish for a model of the command line; the number of a process as it is."""
    if model.isdecimal():
        return model
    base = find_modelfile(model).base
    return Path(base).name if Path(base).is_dir() else base


def choose(wanted: str, engines: Sequence[Published]) -> Published:
    """Return the engine of a process or model. The name of a model chooses no other program than mlx-flash."""
    found = [engine for engine in engines if wanted in (str(engine.pid), model_name(engine.state))]
    if len({engine.pid for engine in found}) != 1:
        names = ", ".join(map(_describe, engines)) or "none"
        raise ConfigError(
            f"stop {wanted}: {len(found)} running engines match. Running for user {_user()}: {names}. "
            "Hint: name one process."
        )
    (engine, *_) = found
    program = program_of(engine.pid)
    if wanted != str(engine.pid) and not _is_own(program):
        raise ConfigError(
            f"stop {wanted}: the model runs in process {engine.pid} of user {_user()}, whose program is {program}. "
            f"Hint: `mlx-flash stop {engine.pid}` ends the whole program."
        )
    return engine


def program_of(pid: int) -> str:
    """Return the name of a process's program, for people: of mlx-flash with its command; of Python, the script's."""
    try:
        process = psutil.Process(pid)
        words, name = process.cmdline(), process.name()
    except psutil.Error:
        return "?"
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
            words = words[2 if words[0] in ("-X", "-W") else 1 :]
        words = words[1:] if words[:1] == ["-m"] else words
    if not words or words[0] == "-c":
        return printable(name)
    script = Path(words[0]).name
    if script in ("mlx-flash", "mlx_flash", "__main__.py"):
        return printable(" ".join([OWN_PROGRAM, *words[1:2]]))
    return printable(script)


def _is_own(program: str) -> bool:
    return program.split(" ")[0] == OWN_PROGRAM


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.getuid())


def _describe(engine: Published) -> str:
    return f"{engine.pid} ({model_name(engine.state)}, {program_of(engine.pid)})"


def _to_json(engine: Published) -> Json:
    history = History(engine)
    facts = history.facts
    return {
        "pid": engine.pid,
        "program": program_of(engine.pid),
        "user": _user(),
        "model": model_name(engine.state),
        "state": "idle" if history.is_idle() else "running",
        "footprint_bytes": int(facts["memory.footprint"]),
        "budget_bytes": int(budget_of(facts)),
        "tokens": int(facts["passes.num_tokens_out"]),
        "tokens_per_second": history.rates.mean_tokens_per_second,
        "seconds": max(0.0, time.time() - engine.started),
    }
