"""A forward call and its prompt cache, as the prefix cache sees them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_flash.kv.history import History, Labels, make_labels
from mlx_flash.prefixes.leaves import Leaf, RowLeaf, StateLeaf, has_state
from mlx_flash.prefixes.pagefile import Blob


@dataclass(slots=True)
class Call:
    """A forward call on a cache whose content is known."""

    leaves: list[Leaf]  # the entries of the cache
    history: History  # their content when the call began
    tokens: mx.array  # the new ones
    form: int  # a number for the form of the cache
    is_prompt: bool  # the logits are dropped
    ends: list[int]  # ends of the pages that the call completes
    is_exact: bool  # whether bounds of calls decide bits
    bounds: list[int]  # ends of the calls in which the tokens are computed: one, or some that share a pass
    num_after: int = 0  # tokens that the same pass adds behind it
    num_restored: int = 0  # tokens that were not computed
    kept: dict[int, dict[int, StateLeaf]] = field(default_factory=dict)  # states inside it: by length, and id of entry

    def add(self, index: int, entry: Any, found: Any) -> None:
        """Keep a state as it was found by the call of a number, of those that share a pass, if a page ends there."""
        end = self.bounds[index - 1] if 0 < index <= len(self.bounds) else 0
        if self.is_prompt and end in self.ends and has_state(entry):
            kept = copy.copy(found)
            kept.__dict__ = {name: _unshared(value) for name, value in vars(found).items()}
            self.kept.setdefault(end, {})[id(entry)] = StateLeaf(kept)

    def take_states(self, history: History, end: int) -> dict[int, dict[str, Blob]]:
        """Return windows and states as they were where a page ended; none if they are gone. They are not kept longer.

        Between calls that share a pass they were kept. Of one call, windows are known at the end of its last page.

        Args:
            history: the content of the cache after the call.
            end: the number of tokens.
        """
        kept, found = self.kept.pop(end, {}), dict[int, dict[str, Blob]]()
        for i, leaf in enumerate(self.states):
            state: dict[str, Blob] | None = None
            if id(leaf.entry) in kept:
                state = kept[id(leaf.entry)].read_state()
            elif not self.num_after and end == history.ends[-1]:
                state = leaf.read_before(history.length - end)
            if state is None:
                return {}
            found[i] = state
        return found

    def first(self, number: int) -> Call:
        """Return the call as one with so many of its tokens, that were restored."""
        most = self.history.length + number
        ends = [end for end in self.ends if end <= most]
        return replace(self, tokens=self.tokens[:, :number], ends=ends, bounds=[most], num_restored=number)

    @property
    def end(self) -> int:
        """Tokens in the cache after the call."""
        return self.history.length + int(self.tokens.shape[1])

    @property
    def labels(self) -> Labels:
        """Labels of the new tokens."""
        tokens, first = np.array(self.tokens)[0], self.history.length
        if not self.is_exact:
            return make_labels(tokens, 0, 0, self.form)
        starts = [first, *self.bounds]
        calls = zip(starts, self.bounds, strict=False)
        return np.concatenate([make_labels(tokens[a - first : b - first], a, b, self.form) for a, b in calls])

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


def _unshared(value: Any) -> Any:
    """Return what an entry holds as it is now: an array that is written to later is another one then."""
    if isinstance(value, list):
        return [*map(_unshared, value)]
    return copy.copy(value) if isinstance(value, mx.array) else value
