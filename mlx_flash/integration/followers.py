"""A server on several ranks: what rank 0 sees, and what memory allows, is decided alike on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import get_args

from mlx_flash.errors import RefusedError
from mlx_flash.ranks.peers import Peers, launched_group
from mlx_flash.residency.admission import Decision

_DECISIONS: tuple[Decision, ...] = get_args(Decision)
"""From the one that needs most memory to the one that needs least."""


class ServerRanks:
    """The ranks that answer requests together. All of them call every method, in the same order.

    Args:
        peers: the ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    @classmethod
    def of_process(cls) -> ServerRanks | None:
        """Return the ranks that ``mlx.launch`` started; None if this process was started alone."""
        group = launched_group()
        return None if group is None else cls(Peers(group))

    def share_events(self, is_stopping: bool, left: Sequence[int]) -> tuple[bool, set[int]]:
        """Return what rank 0 knows: whether the server stops, and the requests whose clients left, by number."""
        stops, num_left = self._peers.gather([float(is_stopping), float(len(left))])[0]
        return bool(stops), set(json.loads(self._peers.text(json.dumps(list(left))))) if num_left else set()

    def waiting(self) -> AbstractContextManager[None]:
        """Return what ends the process if rank 0 is gone while this one waits for the next request."""
        return self._peers.asking("rank 0", "the next request")

    def agree(self, decide: Callable[[], Decision]) -> Decision:
        """Return the decision on a request that suits every rank.

        Args:
            decide: returns what suits this one.

        Raises:
            RefusedError: a rank has no room for the request.
        """
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
