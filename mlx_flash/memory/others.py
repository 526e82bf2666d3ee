"""The load of other processes. Speeds that were measured beside it are not kept as this machine's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

BUSY = 0.25
"""Share of all processors that others take, from which on a measured speed says little of this machine."""

CLEAN_TRIALS, MOST_TRIALS = 4, 16

CLEAN = 0.8
"""A trial on the processor is clean if this process used it for so much of the time at least."""


class OtherLoad:
    """A meter of the processor time that other processes take from now on."""

    def __init__(self) -> None:
        self._began, self._others = time.monotonic(), _seconds_of_others()

    @property
    def share(self) -> float:
        """Share of all processors that others have taken since then."""
        seconds = time.monotonic() - self._began
        taken = _seconds_of_others() - self._others
        return max(0.0, taken) / (seconds * (os.cpu_count() or 1)) if seconds > 0 else 0.0

    @property
    def is_high(self) -> bool:
        """True if a speed that was measured meanwhile says little."""
        return self.share > BUSY


def _seconds_of_others() -> float:
    """Return the processor time of all other processes, and that which a host gave to other machines, in seconds."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    counted_twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    own = os.times()
    return float(sum(times) - idle - counted_twice - sum(own[:4]))


def least(trial: Callable[[], float], *, on_cores: bool) -> float:
    """Return the least of several times. Trials go on while other processes take the processor in between."""
    times: list[float] = []
    num_clean = 0
    while num_clean < CLEAN_TRIALS and len(times) < MOST_TRIALS:
        began, used = time.perf_counter(), time.process_time()
        times.append(trial())
        num_clean += not on_cores or time.process_time() - used >= CLEAN * (time.perf_counter() - began)
    return min(times)
