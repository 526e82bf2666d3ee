"""``mlx-flash monitor``: the running engines of this user, in whichever program. Needs no MLX."""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Sequence
from itertools import count
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from mlx_flash.commands.common import print_json
from mlx_flash.monitor.frames import PLAIN, Canvas, frame, message
from mlx_flash.monitor.rates import Watcher

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
