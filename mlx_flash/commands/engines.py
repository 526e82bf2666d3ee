"""``mlx-flash monitor``: the running engines of this user, in whichever program. Needs no MLX."""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TextIO

from rich.console import Console
from rich.text import Text

from mlx_flash.commands.common import print_json
from mlx_flash.monitor.frames import PLAIN, Canvas, frame, message
from mlx_flash.monitor.rates import Watcher

_CLEAR_BELOW, _CLEAR_RIGHT, _HOME = "\x1b[J", "\x1b[K", "\x1b[H"
_SHOW_CURSOR, _LEAVE_SCREEN = "\x1b[?25h", "\x1b[?1049l"


def is_screen(console: Console) -> bool:
    """Return whether frames replace each other. A pipe, or ``TERM=dumb``, gets them one after the other."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def screen(console: Console) -> Iterator[int | None]:
    """Show frames in place of each other during a block. Yield the descriptor that keys are read from, if any."""
    if not is_screen(console):
        yield None
        return
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    saved = None if keys is None else termios.tcgetattr(keys)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        console.set_alt_screen(True)
        console.show_cursor(False)
        yield keys
    finally:
        if keys is not None and saved is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, saved)
        # An exception may have come while the console collected a frame: it would collect this, too.
        console.file.write(_SHOW_CURSOR + _LEAVE_SCREEN)
        console.file.flush()


def show(console: Console, lines: Sequence[Text]) -> None:
    """Draw a frame that fits the terminal."""
    if not is_screen(console):
        print_lines(console, [*lines, Text()])
        return
    with console.capture() as captured:
        print_lines(console, lines)
    text = captured.get().removesuffix("\n").replace("\n", f"{_CLEAR_RIGHT}\n")
    # One write over the old frame does not flicker.
    console.file.write(f"{_HOME}{text}{_CLEAR_RIGHT}{_CLEAR_BELOW}")
    console.file.flush()


def wait(keys: int | None, seconds: float) -> str:
    """Return the next key; an empty string when none comes in time."""
    if keys is None:
        time.sleep(seconds)
        return ""
    if not select.select([keys], [], [], seconds)[0]:
        return ""
    key = os.read(keys, 1)
    return key.decode("ascii", "replace") if key else "q"  # the terminal is gone


def print_lines(console: Console, lines: Sequence[Text]) -> None:
    """Print lines as they are, however narrow the terminal."""
    text = Text("\n").join(lines)
    if not console.encoding.startswith("utf"):
        text.plain = text.plain.translate(PLAIN)
    console.print(text, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


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
            for state in watcher.to_json():
                print_json(state, out)
        elif number:
            print_lines(console, draw(watcher, console, None))
        if args.once and number:
            break
        time.sleep(ONCE_SECONDS if args.once else args.interval)
    return 0


def live(watcher: Watcher, args: argparse.Namespace, console: Console) -> int:
    """Draw frames until the user quits. Without an engine, wait for one."""
    with screen(console) as keys:
        while True:
            watcher.look()
            show(console, draw(watcher, console, console.height if is_screen(console) else None))
            key = wait(keys, args.interval)
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
