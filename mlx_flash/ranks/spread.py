"""A model that several ranks share: all of them call it with the same tokens."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_flash.errors import BudgetError, FlashError, PeerError
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.ranks.peers import Peers

NUM_SPEEDS = 3
"""Numbers that each rank tells the others with each pass."""

HAND_ON, HAND_OVER, HANDED = "hand on", "hand over", "handed"
"""Points at which calls that share a pass wait: before this rank sends a layer's output; before it receives one, or
other ranks exchange one; and when it has received one. No call of a group passes the first two before all are there."""

_NUM_DIGESTS = 4

_LARGEST = 1 << 20
"""Numbers are sent as float32, which holds integers up to here."""


class Spread(ABC):
    """A model on several ranks.

    Args:
        peers: the ranks.

    Attributes:
        peers: the ranks.
        measure: returns the speeds of this rank, for the others; as many numbers on all of them.
        measured: the speeds of each rank before the last pass; empty before the first one.
        can_share: several calls may share a pass.
    """

    can_share = False

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.measure: Callable[[], list[float]] = lambda: [0.0] * NUM_SPEEDS
        self.measured: list[list[float]] = []
        self._num_passes = 0

    @abstractmethod
    def runs_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the runs of layers that a rank computes: the first of each, and the one after its last."""

    @abstractmethod
    def own_part(self, layout: ModelLayout) -> ModelLayout:
        """Return the layout of what this rank computes."""

    @abstractmethod
    def calls(
        self,
        tokens: Sequence[mx.array | None],
        caches: Sequence[Sequence[Any] | None],
        wait_turn: Callable[[tuple[str, int]], None] | None = None,
    ) -> AbstractContextManager[None]:
        """Compute calls of the model on all ranks, one alone or several that share a pass.

        Args:
            tokens: of each call.
            caches: the prompt caches that they add to.
            wait_turn: called with ``HAND_ON``, ``HAND_OVER`` or ``HANDED`` and the number of a layer, whose output is
                evaluated then. Returns when it is the turn of this call. None for one call alone.

        Raises:
            PeerError: the ranks were called differently, or a connection was lost.
        """

    def computing(self, cache: Sequence[Any] | None) -> AbstractContextManager[None]:
        """Compute one of these calls.

        Args:
            cache: what the call takes for its prompt cache.

        Raises:
            StreamedWeightsError: the model cannot be shared in this way.
        """
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Leave the model's layers as they were loaded."""

    def least(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks."""
        return int(min(numbers[0] for numbers in self.peers.gather([number])))

    def worst(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the largest of each number over all ranks, and the first rank that has it."""
        found = list(zip(*self.peers.gather(numbers), strict=True))
        return [(int(max(each)), each.index(max(each))) for each in found]

    @contextmanager
    def all_have_room(self) -> Iterator[None]:
        """Let the errors of a check of memory be those of all ranks, so that all cut or refuse a call, or none.

        Raises:
            FlashError: the one that was raised here, or another rank has raised one.
        """
        try:
            yield
        except FlashError as error:
            self._agree(error)
            raise
        self._agree(None)

    def _agree(self, error: FlashError | None) -> None:
        own = 0.0 if error is None else 1.0 if isinstance(error, BudgetError) else 2.0
        found = [numbers[0] for numbers in self.peers.gather([own])]
        rank = found.index(max(found))
        if own < found[rank]:
            told = (
                f"rank {rank} has no room for the call, or cannot compute it. Hint: see its budget, and what it prints."
            )
            raise (BudgetError(told, 0) if found[rank] == 1.0 else PeerError(told)) from error

    def _check_equal(self, tokens: Sequence[mx.array | None]) -> None:
        """Check that all ranks compute the same tokens in a pass, and exchange speeds.

        Raises:
            PeerError: they do not.
        """
        self._num_passes += 1
        told = self.peers.gather([self._num_passes % _LARGEST, *_digest(tokens), *self.measure()])
        found = [numbers[:_NUM_DIGESTS] for numbers in told]
        self.measured = [numbers[_NUM_DIGESTS:] for numbers in told]
        for rank, numbers in enumerate(found):
            if numbers != found[self.peers.rank]:
                raise PeerError(
                    f"pass {self._num_passes} of rank {self.peers.rank} is {found[self.peers.rank]} (number, calls, "
                    f"tokens, digest of tokens), that of rank {rank} is {numbers}. Hint: start the same program with "
                    "the same arguments and seed on all ranks."
                )


def _digest(calls: Sequence[mx.array | None]) -> list[float]:
    """Return how many calls and tokens there are, and a number that other tokens are unlikely to have."""
    known = [tokens for tokens in calls if tokens is not None]
    crc = 0
    for tokens in known:
        crc = zlib.crc32(repr(tokens.shape).encode(), crc)
        crc = zlib.crc32(np.array(tokens).astype(np.int64).tobytes(), crc)
    return [float(len(calls)), float(sum(tokens.size for tokens in known) % _LARGEST), float(crc % _LARGEST)]
