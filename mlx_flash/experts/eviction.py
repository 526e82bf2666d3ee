"""The eviction policy of the expert pool: the least used expert gives way, and recent uses count more.

Compared on recorded routing by ``benchmarks/eviction.py``: least recently used keeps nothing when a pass needs more
experts than there are slots, and is behind frequency at any size; frequency that forgets is as good as frequency where
routing stays as it is, and better where it changes (docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

Expert = tuple[int, int]
"""Number of the layer, number of the expert in it."""

HALF_LIFE = 32
"""A use counts half after so many passes."""

_MOST_USES = 1 / (1 - 2 ** (-1 / HALF_LIFE))
"""The sum of the uses of an expert that every pass needs."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Uses:
    """The uses of each expert, and the least used expert among those in slots.

    Sums are kept as logarithms of their value at the start, so that time passing does not change them.
    """

    def __init__(self, sizes: Sequence[int], num_slots: int) -> None:
        self._sums = [np.full(size, -np.inf) for size in sizes]
        self._in_slots = np.full(num_slots, np.inf)
        self._holders: list[Expert | None] = [None] * num_slots
        self._order: list[int] = []
        self._ordered_by = self._in_slots
        self._now = 0.0
        self._last = -1

    def add(self, layer: int, experts: Numbers, counts: Numbers, num_tokens: int, slots: Numbers) -> None:
        """Count a call of a layer: distinct experts, and how many tokens each computes.

        Tokens of one call count as if they were spread evenly over as many passes. Slots are negative for experts
        without one.
        """
        if layer <= self._last:
            self._now += 1 / HALF_LIFE
            self.reorder()
        self._last = layer
        weight = (1 - 2 ** (-num_tokens / HALF_LIFE)) * _MOST_USES / num_tokens
        sums = self._sums[layer]
        found = sums[experts] = np.logaddexp2(sums[experts], self._now + np.log2(counts * weight))
        self._in_slots[slots[slots >= 0]] = found[slots >= 0]

    def enter(self, slot: int, key: Expert) -> None:
        """Note that an expert has a slot."""
        self._holders[slot] = key
        self._in_slots[slot] = self._sums[key[0]][key[1]]

    def leave(self, slot: int) -> None:
        """Note that a slot is empty."""
        self._holders[slot] = None
        self._in_slots[slot] = np.inf

    def least(self, spared: Collection[int], number: int) -> list[Expert]:
        """Return some of the experts in slots that were used least, or fewer where slots are spared.

        Slots are put in order once a pass: numpy lets go of Python's lock for so many, and threads that read would take
        it each time. What has been used or has entered since stays.
        """
        found, seen, is_new = list[int](), list[int](), False
        while len(found) < number:
            if not self._order:
                if is_new:
                    break
                self._put_in_order()
                found, seen, is_new = [], [], True
                continue
            slot = self._order.pop()
            if slot in spared:
                seen.append(slot)
            elif self._in_slots[slot] == self._ordered_by[slot]:
                found.append(slot)
                seen.append(slot)  # it may stay
        self._order += reversed(seen)
        return [key for slot in found if (key := self._holders[slot]) is not None]

    def reorder(self) -> None:
        """Have slots put in order again, by what was used and has entered up to now."""
        self._order.clear()

    def _put_in_order(self) -> None:
        """List the slots with experts, those that were used least last."""
        self._ordered_by = self._in_slots.copy()
        number = int(np.count_nonzero(self._in_slots < np.inf))
        self._order = self._in_slots.argsort()[:number][::-1].tolist()

    def is_more(self, key: Expert, than: Expert) -> bool:
        """Return whether an expert was used more than another."""
        return bool(self._sums[key[0]][key[1]] > self._sums[than[0]][than[1]])
