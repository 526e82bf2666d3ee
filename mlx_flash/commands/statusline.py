"""A line on a terminal that shows what the program is doing, and for how long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from mlx_flash.monitor.words import size

_SECONDS_BEFORE_CLOCK = 3


class Status:
    """A line on stderr that is removed at the end. Nothing is drawn where stderr is no terminal.

    Args:
        words: the present activity.
        is_shown: draw it.
    """

    def __init__(self, words: str, is_shown: bool = True) -> None:
        self._words = self._activity = words
        self._began = time.monotonic()
        self._is_stopping: Callable[[], bool] = lambda: False
        self._spinner = Spinner("line")
        console = Console(file=sys.stderr, highlight=False)
        options = {"refresh_per_second": 8, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
        is_shown = is_shown and console.is_terminal
        self._live = Live(get_renderable=self._render, console=console, **options) if is_shown else None  # type: ignore[arg-type]

    def __enter__(self) -> Status:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def watch(self, is_stopping: Callable[[], bool]) -> None:
        """Show that the activity is about to stop, once a function says so. A thread calls it."""
        self._is_stopping = is_stopping

    def show_bytes(self, done: int, total: int) -> None:
        """Show how many bytes are done. A ``progress`` of ``load()``."""
        self._show(size(done), size(total), done < total)

    def show(self, done: int, total: int) -> None:
        """Show how much is done. A ``prompt_progress_callback`` of mlx-lm. The line is removed when all is."""
        self._show(str(done), str(total), done < total)

    def _show(self, done: str, total: str, is_drawn: bool) -> None:
        self._words = f"{self._activity}: {done} of {total}"
        if self._live is not None and is_drawn:
            self._live.start()
        elif not is_drawn:
            self.stop()

    def stop(self) -> None:
        """Remove the line."""
        if self._live is not None:
            self._live.stop()

    def _render(self) -> RenderableType:
        seconds = time.monotonic() - self._began
        clock = f" ({seconds:.0f} s)" if seconds >= _SECONDS_BEFORE_CLOCK else ""
        clock += "; stopping" if self._is_stopping() else ""
        self._spinner.update(text=Text(self._words + clock, no_wrap=True, overflow="ellipsis"))
        return self._spinner
