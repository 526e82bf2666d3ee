"""Trials of other ways of reading while a model runs, since a disk changes and a probe sees only a moment of it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from mlx_flash.storage.ranges import Way

_TRIAL_PASSES = 4
"""Passes that another way has to win."""

_WORTH_IT = 0.95
"""A pass is won in at most this share of the usual time."""

_FIRST_TRIALS = 2
"""Other ways that are tried in the first passes, since a probe sees only a moment of the disk. There are few passes to
compare with, so a way has to win two of them clearly."""

_FIRST_PASSES = 2

_CLEAR = 0.9

_PASSES_BETWEEN = 32
"""Passes before the first trial, and between two."""

_LEAST_COMPUTING = 0.8
"""Share of the usual time without waiting that a pass takes at least, once reads leave the processor alone."""

_MOST_PASSES = 4096

_log = logging.getLogger("mlx_flash")


class ReadTuner:
    """Finds the way of reading with which decoding passes are fastest.

    It compares times of whole passes, so that a way that takes the processor from the computation does not win. A trial
    takes every other pass and ends with the first that it does not win. Two ways are tried in the third and the fourth
    pass. A pass that has waited too long to win reads in the usual way from then on. When no other way was faster, the
    time until the next trials doubles.

    Args:
        ways: returns them. The first is used until another one is faster.
        choose: called with the way to read in: before a pass, and within it when a trial is given up.

    Attributes:
        way: the fastest so far.
    """

    def __init__(self, ways: Callable[[], Sequence[Way]], choose: Callable[[Way], None]) -> None:
        self.way = ways()[0]
        self._choose = choose
        self._ways = ways
        self._untried: list[Way] = []
        self._num_first = _FIRST_TRIALS
        self._num_between, self._num_left = _PASSES_BETWEEN, 1
        self._usual: deque[float] = deque(maxlen=_TRIAL_PASSES)
        self._least_computing = math.inf
        self._num_won = 0
        self._is_trying = self._is_given_up = False
        self._kind = 0

    @property
    def _is_trial(self) -> bool:
        return not self._num_left and len(self._usual) >= (1 if self._num_first else _TRIAL_PASSES)

    def _next(self) -> Way:
        """Return the way to try."""
        if not self._untried:
            self._untried = [way for way in self._ways() if way != self.way]
        return self._untried[0]

    def begin(self, *, may_try: bool) -> None:
        """Choose the way for a pass. Unless :meth:`end` will get its time, it is read in the usual way."""
        self._is_trying, self._is_given_up = self._is_trial and may_try, False
        self._choose(self._next() if self._is_trying else self.way)

    def waited(self, seconds: float) -> None:
        """Give a trial up that has waited too long for reads, in seconds up to now, to win."""
        if self._is_trying and not self._is_given_up and seconds > self._limit() - self._least_computing:
            self._is_given_up = True
            self._choose(self.way)

    def end(self, seconds: float, waited: float, kind: int) -> None:
        """Note a decoding pass, and the part of its time in which it waited. Only passes of one kind are compared."""
        if kind != self._kind:
            self._kind, self._num_won = kind, 0
            self._usual.clear()
            self._least_computing = math.inf
        elif not self._is_trying:
            self._usual.append(seconds)
            self._least_computing = min(self._least_computing, _LEAST_COMPUTING * (seconds - waited))
            self._num_left = max(0, self._num_left - 1)
        elif self._is_given_up or seconds > self._limit():
            self._lose()
        elif self._num_won + 1 < (_FIRST_PASSES if self._num_first else _TRIAL_PASSES):
            self._num_won += 1
            self._num_left = 1
        else:
            self._win(seconds)

    def _limit(self) -> float:
        """Return the time in which a pass is won."""
        return _CLEAR * min(self._usual) if self._num_first else _WORTH_IT * median(self._usual)

    def _lose(self) -> None:
        self._untried.pop(0)
        self._num_won = 0
        if self._num_first:
            self._num_first -= 1
        elif not self._untried:
            self._num_between = min(2 * self._num_between, _MOST_PASSES)
        self._num_left = 0 if self._num_first else self._num_between

    def _win(self, seconds: float) -> None:
        other = self._untried.pop(0)
        _log.info("passes take %.3f s, not %.3f, with %s", seconds, median(self._usual), other)
        self.way, self._num_won, self._num_first = other, 0, 0
        self._num_between = self._num_left = _PASSES_BETWEEN
        self._usual.clear()
        self._untried.clear()
