"""Guesses from the text itself: what followed the last tokens when they came before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import pack

from mlx_flash.speculation.guesses import Source

MAX_MATCH = 4
"""Longest match that is compared: longer ones count as equal."""

_WIDTH = 4
"""Bytes of a token."""

_EXPECTED = {1: 0.1, 2: 0.3, 3: 0.5, 4: 0.8}
"""The share of right guesses after matches of each length, found on answers of a trained model (docs/benchmarks.md)."""


class Lookup(Source):
    """Prompt lookup. Tokens are stored as bytes, so that a search is one call of ``rfind``.

    Args:
        tokens: the prompt.
    """

    guess_seconds = 0.0
    expected: Mapping[int, float] = _EXPECTED

    def __init__(self, tokens: Iterable[int]) -> None:
        self._added = list(tokens)  # the last ones, which join the text when it is searched: often it never is
        self._text = bytearray()
        self._at: int | None = None

    def add(self, token: int) -> None:
        """Add the next token."""
        self._added.append(token)

    def look(self) -> int:
        """Return how many of the last tokens came before, in this order; at most ``MAX_MATCH``."""
        self._text += pack(f"<{len(self._added)}i", *self._added)
        self._added = []
        longest = min(MAX_MATCH, len(self._text) // _WIDTH - 1)
        for length in range(longest, 0, -1):
            self._at = self._find(length)
            if self._at is not None:
                return length
        return 0

    def guess(self, limit: int) -> Sequence[int]:
        """Return what followed the match that :meth:`look` found. It goes on in itself where the text ends."""
        text = self._text[self._at : self._at and self._at + limit * _WIDTH]
        found = [int.from_bytes(text[i : i + _WIDTH], "little", signed=True) for i in range(0, len(text), _WIDTH)]
        return [found[i % len(found)] for i in range(limit)]

    def _find(self, length: int) -> int | None:
        """Return the byte after the latest earlier occurrence of the last ``length`` tokens."""
        ending = self._text[-_WIDTH * length :]
        stop = len(self._text) - _WIDTH
        while (at := self._text.rfind(ending, 0, stop)) >= 0:
            if at % _WIDTH == 0:
                return at + len(ending)
            stop = at + len(ending) - 1
        return None
