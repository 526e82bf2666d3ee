"""Ctrl-C while a model answers: the first one stops the answer, the second one ends the program."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_WORDS = "\n(stopping after the pass under way; Ctrl-C again ends the program)\n"
_STDERR = 2


@contextmanager
def alarm(seconds: float | None, action: Callable[[], None]) -> Iterator[None]:
    """Call a function in the main thread once a block has waited so long; None and less wait for ever."""
    is_set = seconds is not None and seconds >= 0
    before = signal.signal(signal.SIGALRM, lambda *_: action()) if is_set else None
    signal.setitimer(signal.ITIMER_REAL, max(seconds or 0, 1e-6) if is_set else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if is_set:
            signal.signal(signal.SIGALRM, before)


class AnswerStoppedError(Exception):
    """The user stopped an answer before its first token."""


class Interrupts:
    """A context in which the first Ctrl-C only sets a flag, so that no forward pass breaks off halfway.

    Python calls a handler once for all signals that come during one operation of MLX. So signals are counted in a pipe
    that they are written to as they come. A process that ignores SIGINT, as background jobs do, goes on ignoring it.

    Attributes:
        stopped: the user pressed Ctrl-C.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._count = 0
        self._old: Any = None
        self._old_fd = -1
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Interrupts:
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not is_ignored:
            self._pipe = os.pipe()
            for fd in self._pipe:
                os.set_blocking(fd, False)
            self._old_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._old = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            signal.signal(signal.SIGINT, self._old)
            signal.set_wakeup_fd(self._old_fd)
            for fd in self._pipe:
                os.close(fd)
            self._pipe = None

    @property
    def is_pressed(self) -> bool:
        """True once the user pressed Ctrl-C, even while an operation of MLX keeps Python from calling the handler."""
        return self.stopped or (self._pipe is not None and bool(select.select([self._pipe[0]], [], [], 0)[0]))

    def check(self, done: int, total: int) -> None:
        """End the prompt's computation after Ctrl-C. A ``prompt_progress_callback`` of mlx-lm.

        Raises:
            AnswerStoppedError: the user pressed Ctrl-C.
        """
        if self.stopped:
            raise AnswerStoppedError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += self._num_written()
        if self.stopped or self._count > 1:
            raise KeyboardInterrupt
        self.stopped = True
        os.write(_STDERR, _WORDS.encode())  # not print(), which fails in a handler that interrupts a print()

    def _num_written(self) -> int:
        """Return how often SIGINT came since the last look."""
        if self._pipe is None:
            return 0
        try:
            return os.read(self._pipe[0], 4096).count(signal.SIGINT)
        except BlockingIOError:
            return 0
