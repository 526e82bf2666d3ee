"""Ctrl-C while a model answers: the first one stops the answer, the second one ends the program."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class AnswerStoppedError(Exception):
    """The user stopped an answer before its first token."""


class Interrupts:
    """A context in which the first Ctrl-C only sets a flag, so that no forward pass breaks off halfway.

    A process that ignores SIGINT, as background jobs do, goes on ignoring it.

    Attributes:
        stopped: the user pressed Ctrl-C.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._old: Any = None

    def __enter__(self) -> Interrupts:
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not is_ignored:
            self._old = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def check(self, done: int, total: int) -> None:
        """End the prompt's computation after Ctrl-C. A ``prompt_progress_callback`` of mlx-lm.

        Raises:
            AnswerStoppedError: the user pressed Ctrl-C.
        """
        if self.stopped:
            raise AnswerStoppedError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        print("\n(stopping; Ctrl-C again ends the program)", file=sys.stderr, flush=True)
