"""Which tokens a cache holds, and what besides them decided the bits of their keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Labels = np.ndarray[Any, np.dtype[np.int64]]
"""``(tokens, 4)``: the token; begin and end of the call it was computed in, or 0 where they do not matter; and the form
of the cache at that call."""

NO_LABELS: Labels = np.empty((0, 4), np.int64)

ATTRIBUTE = "prefix_history"
"""Of an entry of a cache, where its history is noted."""

Unread = Callable[[], Sequence[int]]
"""Tokens that were computed, but not looked at: that would wait for the computation."""


def make_labels(tokens: Sequence[int], begin: int, end: int, form: int) -> Labels:
    """Labels of tokens that were computed in one call."""
    labels = np.empty((len(tokens), 4), np.int64)
    labels[:, 0], labels[:, 1:] = tokens, (begin, end, form)
    return labels


class History:
    """What is in a cache, all full pages of which are stored. It does not change, so copies of a cache may share it.

    Args:
        labels: of the tokens.
        ends: with how many tokens each page ends.
        unread: functions that return tokens which come after those, each with the form of the cache.
        num_unread: how many tokens these are.

    Attributes:
        length: number of tokens.
        ends: with how many tokens each page ends.
    """

    def __init__(
        self,
        labels: Labels = NO_LABELS,
        ends: tuple[int, ...] = (),
        unread: tuple[tuple[Unread, int], ...] = (),
        num_unread: int = 0,
    ) -> None:
        self._labels = labels
        self._unread = unread
        self.ends = ends
        self.length = len(labels) + num_unread

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        return self

    @property
    def labels(self) -> Labels:
        """Of all tokens; reads those that were not looked at."""
        if self._unread:
            read = [make_labels(tokens(), 0, 0, form) for tokens, form in self._unread]
            self._labels, self._unread = np.concatenate([self._labels, *read]), ()
        return self._labels

    def with_unread(self, tokens: Unread, count: int, form: int) -> History:
        """This, and some more tokens that are looked at when that is needed."""
        unread = (*self._unread, (tokens, form))
        return History(self._labels, self.ends, unread, self.length - len(self._labels) + count)

    def with_labels(self, labels: Labels, ends: Sequence[int]) -> History:
        """This, and some more tokens and pages."""
        return History(np.concatenate([self.labels, labels]), (*self.ends, *ends))

    def cut(self, length: int) -> History:
        """The beginning of this, and of the pages in it."""
        return History(self.labels[:length], tuple(end for end in self.ends if end <= length))


def pass_on(entry: object, successor: object, anchor: object = None) -> None:
    """Notes the history of an entry of a cache on one that holds the same tokens.

    Args:
        entry: whose history still holds.
        successor: the other one.
        anchor: an object that it replaces when sequences are added to it or taken out; None when that cannot be.
    """
    if ATTRIBUTE in vars(entry):
        vars(successor)[ATTRIBUTE] = (vars(entry)[ATTRIBUTE][0], anchor)


def is_anchored(entry: object, anchor: object) -> bool:
    """Whether the history that is noted on an entry still holds."""
    return ATTRIBUTE in vars(entry) and vars(entry)[ATTRIBUTE][1] is anchor
