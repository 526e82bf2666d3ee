"""The log. No thread that computes takes its locks, and no thread of a caller leaves one held.

In Python 3.11 an interrupt between ``acquire()`` and ``try`` in :mod:`logging` leaves its lock with the main thread for
ever. Another thread that logs, or collects a handler, would never return, and nor would its callers.
"""

from __future__ import annotations

import logging
import sys
import threading
from _thread import start_new_thread
from contextvars import Context, copy_context
from typing import Any

_SECONDS = 1.0
"""The longest wait for a record to be written."""


class _Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records are written by new threads, in the order of their making."""

    def log(self, level: int, msg: object, *args: Any, exc_info: Any = None, **_: Any) -> None:
        logger = self.logger
        if level < logger.getEffectiveLevel() or level <= logger.manager.disable:  # neither takes a lock
            return
        error = sys.exc_info() if exc_info is True else exc_info
        error = (type(error), error, error.__traceback__) if isinstance(error, BaseException) else error
        path, line, function, _stack = logger.findCaller(stacklevel=2)
        record = logger.makeRecord(logger.name, level, path, line, msg, args, error, function)
        context, writing = copy_context(), threading.Lock()
        writing.acquire()
        try:
            start_new_thread(_write, (context, logger, record, writing))
        except RuntimeError:  # from 3.12 on Python starts no thread when it ends
            logger.handle(record)
        else:
            writing.acquire(timeout=_SECONDS)


def _write(context: Context, logger: logging.Logger, record: logging.LogRecord, writing: threading.Lock) -> None:
    try:
        context.run(logger.handle, record)
    finally:
        writing.release()


log = _Log(logging.getLogger("mlx_flash"))
