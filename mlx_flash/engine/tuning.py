"""Trials of other ways of reading while a model runs, since a disk changes and a probe sees only a moment of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from mlx_flash.storage.ranges import Way

_TRIAL_PASSES = 4
"""Passes that another way has to win."""

_WORTH_IT = 0.95
"""A pass is won in at most this share of the usual time."""

_PASSES_BETWEEN = 32
"""Passes before the first trial, and between two. A lost trial takes one pass, which may be twice as slow."""

_MOST_PASSES = 4096

_log = logging.getLogger("mlx_flash")


class ReadTuner:
    """Finds the way of reading with which decoding passes are fastest.

    It compares times of whole passes, so that a way that takes the processor from the computation does not win. A trial
    takes every other pass and ends with the first that it does not win. When no other way was faster, the time until
    the next trials doubles.

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
        self._num_between = self._num_left = _PASSES_BETWEEN
        self._usual: deque[float] = deque(maxlen=_TRIAL_PASSES)
        self._num_won = 0
        self._kind = 0

    def _others(self) -> list[Way]:
        return [way for way in self._ways if way != self.way]

    @property
    def _is_trial(self) -> bool:
        return not self._num_left and len(self._usual) == _TRIAL_PASSES

    def begin(self, *, may_try: bool) -> None:
        """Choose the way for a pass.

        Args:
            may_try: :meth:`end` will get the time of the pass. If False, the pass is read in the usual way.
        """
        self._choose(self._untried[0] if self._is_trial and may_try else self.way)

    def end(self, seconds: float, kind: int) -> None:
        """Note a decoding pass.

        Args:
            seconds: its time.
            kind: passes of other kinds are not compared with it, such as its number of sequences.
        """
        if kind != self._kind:
            self._kind, self._num_won = kind, 0
            self._usual.clear()
        elif not self._is_trial:
            self._usual.append(seconds)
            self._num_left = max(0, self._num_left - 1)
        elif seconds > _WORTH_IT * median(self._usual):
            self._lose()
        elif self._num_won + 1 < _TRIAL_PASSES:
            self._num_won += 1
            self._num_left = 1
        else:
            self._win(seconds)

    def _lose(self) -> None:
        self._untried.pop(0)
        if not self._untried:
            self._untried = self._others()
            self._num_between = min(2 * self._num_between, _MOST_PASSES)
        self._num_won, self._num_left = 0, self._num_between

    def _win(self, seconds: float) -> None:
        other = self._untried[0]
        _log.info("passes take %.3f s, not %.3f, with %s", seconds, median(self._usual), other)
        self.way, self._num_won = other, 0
        self._num_between = self._num_left = _PASSES_BETWEEN
        self._usual.clear()
        self._untried = self._others()
