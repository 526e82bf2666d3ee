"""Trials of other ways of reading while a model runs, since a disk changes and a probe sees only a moment of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median

from mlx_flash.storage.ranges import Way

_ORDER = "ABBAABBA"
"""Passes of a trial: the present way and another one, in an order that cancels a trend."""

_WORTH_IT = 0.95
"""A way replaces the present one if its passes take at most this share of the time."""

_FIRST_PASSES = 4
"""Passes before the first trial: kernels and caches warm up."""

_PASSES_BETWEEN = 64
_MOST_PASSES = 4096

_log = logging.getLogger("mlx_flash")


class ReadTuner:
    """Finds the way of reading with which decoding passes are fastest.

    It compares times of whole passes, so that a way that takes the processor from the computation does not win. When no
    other way was faster, the time until the next trials doubles.

    Args:
        ways: the first is used until another one is faster.
        choose: called before a pass with the way to read it.

    Attributes:
        way: the fastest so far.
    """

    def __init__(self, ways: Sequence[Way], choose: Callable[[Way], None]) -> None:
        self.way = ways[0]
        self._choose = choose
        self._ways = list(ways)
        self._untried = self._others()
        self._num_left = _FIRST_PASSES
        self._num_between = _PASSES_BETWEEN
        self._seconds: list[float] = []
        self._kind = 0

    def _others(self) -> list[Way]:
        return [way for way in self._ways if way != self.way]

    def begin(self) -> None:
        """Choose the way for a pass."""
        is_trial = self._num_left == 0 and _ORDER[len(self._seconds)] == "B"
        self._choose(self._untried[0] if is_trial else self.way)

    def end(self, seconds: float, kind: int) -> None:
        """Note a decoding pass.

        Args:
            seconds: its time.
            kind: passes of other kinds are not compared with it, such as its number of sequences.
        """
        if kind != self._kind:
            self._kind, self._seconds = kind, []
        elif self._num_left:
            self._num_left -= 1
        else:
            self._seconds.append(seconds)
            if len(self._seconds) == len(_ORDER):
                self._decide()

    def _decide(self) -> None:
        times = {name: median(s for s, of in zip(self._seconds, _ORDER, strict=True) if of == name) for name in "AB"}
        other = self._untried.pop(0)
        self._seconds = []
        if times["B"] <= _WORTH_IT * times["A"]:
            _log.info("passes take %.3f s, not %.3f, with %s", times["B"], times["A"], other)
            self.way, self._num_between = other, _PASSES_BETWEEN
            self._untried = self._others()
        elif not self._untried:
            self._untried, self._num_left = self._others(), self._num_between
            self._num_between = min(2 * self._num_between, _MOST_PASSES)
