"""``mlx-flash ps``, ``stop`` and ``monitor``: the running engines of this user, in whichever program. Needs no MLX."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.console import Console
from rich.text import Text

from mlx_flash.commands.common import emit, labelled
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import find_modelfile
from mlx_flash.monitor.frames import Canvas, frame, message
from mlx_flash.monitor.rates import History, Watcher
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


_CLEAR_BELOW, _CLEAR_RIGHT, _HOME = "\x1b[J", "\x1b[K", "\x1b[H"
_SHOW_CURSOR, _LEAVE_SCREEN = "\x1b[?25h", "\x1b[?1049l"


class Terminal:
    """A context that shows frames in place of each other and reads keys.

    A pipe, or a terminal with ``TERM=dumb``, gets the frames one after the other.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._in_place = console.is_terminal and not console.is_dumb_terminal
        self._keys = sys.stdin.fileno() if self._in_place and sys.stdin.isatty() else None
        self._saved: list[Any] | None = None

    def __enter__(self) -> Terminal:
        if self._keys is not None:
            self._saved = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        if self._in_place:
            self._console.set_alt_screen(True)
            self._console.show_cursor(False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._keys is not None and self._saved is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._saved)
        if self._in_place:
            # An exception may have come while the console collected a frame: it would collect this, too.
            self._console.file.write(_SHOW_CURSOR + _LEAVE_SCREEN)
            self._console.file.flush()

    @property
    def height(self) -> int | None:
        """Lines of the terminal now; None when frames follow one another."""
        return self._console.height if self._in_place else None

    def show(self, lines: Sequence[Text]) -> None:
        """Draw a frame that fits the terminal."""
        if not self._in_place:
            print_lines(self._console, [*lines, Text()])
            return
        with self._console.capture() as captured:
            print_lines(self._console, lines)
        text = captured.get().removesuffix("\n").replace("\n", f"{_CLEAR_RIGHT}\n")
        # One write over the old frame does not flicker.
        self._console.file.write(f"{_HOME}{text}{_CLEAR_RIGHT}{_CLEAR_BELOW}")
        self._console.file.flush()

    def wait(self, seconds: float) -> str:
        """Return the next key; an empty string when none comes in time."""
        if self._keys is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._keys], [], [], seconds)[0]:
            return ""
        key = os.read(self._keys, 1)
        return key.decode("ascii", "replace") if key else "q"  # the terminal is gone


def print_lines(console: Console, lines: Sequence[Text]) -> None:
    """Print lines as they are, however narrow the terminal."""
    console.print(Text("\n").join(lines), no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


EXIT_NONE = 1
ONCE_SECONDS = 1.0
"""Time between the two looks that give the speeds of a single frame."""

HINT = "Hint: start one with: mlx-flash generate --model DIR_OR_REPO"


def monitor(args: argparse.Namespace, out: TextIO) -> int:
    """Show the running engines, until the user quits; Ctrl-C is no failure."""
    console = Console(file=out, highlight=False, markup=False, emoji=False)
    watcher = Watcher()
    try:
        return print_looks(watcher, args, console, out) if args.once or args.json else live(watcher, args, console)
    except KeyboardInterrupt as error:
        if type(error) is not KeyboardInterrupt:  # SIGTERM and SIGHUP
            raise
        return 0


def print_looks(watcher: Watcher, args: argparse.Namespace, console: Console, out: TextIO) -> int:
    """Print one JSON object for each engine and look; with ``--once``, these or a frame of the second look."""
    has_none = False
    for number in count():
        watcher.look()
        if not watcher.histories and not has_none:
            print(f"flash-monitor: no engine is running. {HINT}", file=sys.stderr)
            has_none = True
        if args.once and has_none:
            return EXIT_NONE
        if args.json and (number or not args.once):
            print_json(watcher, out)
        elif number:
            print_lines(console, draw(watcher, console, None))
        if args.once and number:
            break
        time.sleep(ONCE_SECONDS if args.once else args.interval)
    return 0


def live(watcher: Watcher, args: argparse.Namespace, console: Console) -> int:
    """Draw frames until the user quits. Without an engine, wait for one."""
    with Terminal(console) as terminal:
        while True:
            watcher.look()
            terminal.show(draw(watcher, console, terminal.height))
            key = terminal.wait(args.interval)
            if key in ("q", "Q"):
                return 0
            if key == "\t":
                watcher.choose_next()


def draw(watcher: Watcher, console: Console, height: int | None) -> list[Text]:
    """Return the frame of the last look."""
    canvas = Canvas(console.width, height)
    shown = [*watcher.histories, *([watcher.ended] if watcher.ended else [])]
    if not shown:
        return message("No engine is running; waiting.", HINT, canvas)
    return frame(shown, watcher.chosen, watcher.system, canvas)


def print_json(watcher: Watcher, out: TextIO) -> None:
    """Print one object on one line for each engine."""
    for state in watcher.to_json():
        print(json.dumps(state, allow_nan=False), file=out)
    out.flush()
