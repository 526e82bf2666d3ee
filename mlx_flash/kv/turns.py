"""The lock that a model holds during a pass, and whether several threads take it.

What MLX has not begun can only be computed in the thread that described it. So where threads take turns, each pass
begins all that its caches hold before another thread parks or copies them.
"""

from __future__ import annotations

import threading


class Turns:
    """The turns of threads that use one model.

    Attributes:
        lock: held during each pass and each copy.
        thread: the thread of the last one; None before.
        are_shared: several threads took turns.
        may_park: False for the first turn of a second thread: the first one may have to compute its caches.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: int | None = None
        self.are_shared = False
        self.may_park = True

    def pass_to(self, thread: int) -> None:
        """Note the thread whose turn it is."""
        if self.thread not in (None, thread) and not self.are_shared:
            self.are_shared, self.may_park = True, False
        self.thread = thread
