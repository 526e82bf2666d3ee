"""Which expert's place is taken next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

Expert = tuple[int, int]
"""Number of the layer, number of the expert in it."""


class Recency:
    """Experts by when they were last used."""

    def __init__(self) -> None:
        self._order: OrderedDict[Expert, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: Expert) -> None:
        """A new one, just used."""
        self._order[key] = None

    def touch(self, key: Expert) -> None:
        """It was used."""
        self._order.move_to_end(key)

    def cool(self, key: Expert) -> None:
        """It may go first."""
        self._order.move_to_end(key, last=False)

    def remove(self, key: Expert) -> None:
        """It is gone."""
        del self._order[key]

    def coldest(self) -> Iterator[Expert]:
        """All of them, the first to go first."""
        return iter(self._order)
