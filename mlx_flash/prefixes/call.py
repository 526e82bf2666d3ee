"""A forward call and its prompt cache, as the prefix cache sees them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_flash.kv.history import History
from mlx_flash.prefixes.folder import Blob
from mlx_flash.prefixes.leaves import Leaf, RowLeaf, StateLeaf, has_state


@dataclass(slots=True)
class KnownCall:
    """A forward call on a cache whose content is known, or some that share a pass. Its logits are dropped."""

    leaves: list[Leaf]  # the entries of the cache
    history: History  # their content when the call began
    after: History  # and when it has ended
    tokens: mx.array  # the new ones
    bounds: list[int]  # ends of the calls in which the tokens are computed: one, or some that share a pass
    num_after: int = 0  # tokens that the same pass adds behind it
    num_restored: int = 0  # tokens that are cached
    kept: dict[int, dict[int, StateLeaf]] = field(default_factory=dict)  # between its calls: by end, and id of entry

    def add(self, index: int, entry: Any, found: Any) -> None:
        """Keep a state as it was found by the call of a number, of those that share a pass, if it is wanted."""
        bound = self.bounds[index - 1] if 0 < index <= len(self.bounds) else 0
        if has_state(entry) and bound in self.after.ends:
            kept = copy.copy(found)
            kept.__dict__ = {name: _unshared(value) for name, value in vars(found).items()}
            self.kept.setdefault(bound, {})[id(entry)] = StateLeaf(kept)

    def take_states(self, bound: int) -> dict[int, dict[str, Blob]]:
        """Return windows and states at the end of one of the calls; none inside a call. They are not kept longer.

        Those between calls that share a pass were kept.
        """
        kept = self.kept.pop(bound, {})
        if bound == self.after.length and not self.num_after:
            kept = {id(leaf.entry): leaf for leaf in self.states} | kept
        if any(id(leaf.entry) not in kept for leaf in self.states):
            return {}
        return {i: kept[id(leaf.entry)].read_state() for i, leaf in enumerate(self.states)}

    @property
    def rows(self) -> list[RowLeaf]:
        """Leaves with a row for each token."""
        return [leaf for leaf in self.leaves if isinstance(leaf, RowLeaf)]

    @property
    def states(self) -> list[StateLeaf]:
        """Leaves with a state."""
        return [leaf for leaf in self.leaves if isinstance(leaf, StateLeaf)]


def _unshared(value: Any) -> Any:
    """Return what an entry holds as it is now: an array that is written to later is another one then."""
    if isinstance(value, list):
        return [*map(_unshared, value)]
    return copy.copy(value) if isinstance(value, mx.array) else value
