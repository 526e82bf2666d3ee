"""A forward call as the prefix cache sees it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_flash.kv.history import History
from mlx_flash.prefixes.leaves import Leaf, RowLeaf, StateLeaf


@dataclass(slots=True)
class Call:
    """A forward call on a cache whose content is known.

    Attributes:
        leaves: the entries of the cache.
        history: their content when the call began.
        tokens: the new ones.
        form: a number for the form of the cache.
        is_prompt: whether the logits are dropped.
        ends: ends of the pages that the call completes.
        num_restored: tokens that were not computed.
    """

    leaves: list[Leaf]
    history: History
    tokens: mx.array
    form: int
    is_prompt: bool
    ends: list[int]
    num_restored: int = 0

    @property
    def end(self) -> int:
        """Tokens in the cache after the call."""
        return self.history.length + int(self.tokens.shape[1])

    @property
    def is_answered(self) -> bool:
        """True when nothing is left to be computed."""
        return self.num_restored == self.tokens.shape[1]

    @property
    def rows(self) -> list[RowLeaf]:
        """Leaves with a row for each token."""
        return [leaf for leaf in self.leaves if isinstance(leaf, RowLeaf)]

    @property
    def states(self) -> list[StateLeaf]:
        """Leaves with a state."""
        return [leaf for leaf in self.leaves if isinstance(leaf, StateLeaf)]
