"""A server on several ranks: rank 0 sees requests, and all ranks decide and compute alike."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from mlx_flash.errors import RefusedError
from mlx_flash.ranks import Peers, launched_group
from mlx_flash.residency.plan import Decision
from mlx_flash.server.request import GenerationRequest

_DECISIONS: tuple[Decision, ...] = get_args(Decision)
"""From the one that needs most memory to the one that needs least."""


@dataclass(frozen=True, slots=True)
class News:
    """Events that rank 0 has seen since the last pass."""

    requests: Sequence[GenerationRequest] = ()  # those that came
    left: Sequence[int] = ()  # numbers of requests whose clients left
    expired: Sequence[str] = ()  # names of models whose time in memory is over
    stops: bool = False  # whether the server ends


class Ranks:
    """The ranks that answer requests together. All of them call every method, in the same order."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    @classmethod
    def of_process(cls) -> Ranks | None:
        """Return the ranks that ``mlx.launch`` started; None if this process was started alone."""
        group = launched_group()
        return None if group is None else cls(Peers(group))

    @property
    def is_first(self) -> bool:
        """True on the rank that has the clients."""
        return self._peers.rank == 0

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Check that requests can be sent to the other ranks, with some levels to spare: an error there ends all."""
        wrapped: object = requests
        for _ in range(100):
            wrapped = [wrapped]
        try:
            pickle.dumps(wrapped)
        except RecursionError:
            raise RefusedError("arguments of a call have too many objects or arrays inside each other.", 400) from None

    def share(self, news: News) -> News:
        """Return the news of rank 0."""
        found: News = pickle.loads(self._peers.data(pickle.dumps(news), 0))
        return found

    def agree(self, decide: Callable[[], Decision]) -> Decision:
        """Return the decision on a request that suits every rank."""
        refused, refusal = len(_DECISIONS), None
        try:
            own = _DECISIONS.index(decide())
        except RefusedError as error:
            own, refusal = refused, error
        found = [int(numbers[0]) for numbers in self._peers.gather([own])]
        if refusal is not None:
            raise refusal
        if max(found) == refused:
            rank = found.index(refused)
            raise RefusedError(
                f"rank {rank} has no room for the request. Hint: send a shorter prompt or a smaller max_tokens, or "
                "serve with a larger budget there.",
                413,
            )
        return _DECISIONS[max(found)]

    def have_same(self, number: int) -> bool:
        """Return whether a number is the same on all ranks."""
        return len({numbers[0] for numbers in self._peers.gather([number])}) == 1
