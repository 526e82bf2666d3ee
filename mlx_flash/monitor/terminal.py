"""The terminal: it takes whole frames, gives single keys, and is restored afterwards."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

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
        self._old_handler: Any = None

    def __enter__(self) -> Terminal:
        self._old_handler = signal.signal(signal.SIGTERM, _end)
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
        signal.signal(signal.SIGTERM, self._old_handler)

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


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
