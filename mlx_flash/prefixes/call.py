"""A forward call and its prompt cache, as the prefix cache sees them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_flash.kv.history import History
from mlx_flash.kv.options import PAGE_TOKENS
from mlx_flash.prefixes.folder import Blob
from mlx_flash.prefixes.leaves import Leaf, RowLeaf, StateLeaf, has_state


def state_end(
    bound: int,
    num_new: int,
    segment_left: int,
    every: int,
    *,
    are_windows: bool,
    page_tokens: int = PAGE_TOKENS,
) -> int | None:
    """Return the number of tokens after which windows and states of a call are kept; None if they are not.

    With ``every`` 1 that is the end of the call. Else it is the end of a page: a multiple of ``every``, or the last one
    in the segment, from where the next turn of a conversation goes on. Windows are known at the last end of a page in a
    call. Recurrent states are known at the end of the call only, so the last full part of a segment has to do.

    Args:
        bound: tokens up to the end of the call.
        num_new: tokens of the call.
        segment_left: tokens of its segment that come after it.
        every: tokens between two windows and states that are kept.
        are_windows: whether there are no recurrent states.
        page_tokens: tokens of a page.
    """
    if every == 1:
        return bound
    end = bound // page_tokens * page_tokens
    if not (are_windows or end == bound) or end <= bound - num_new:
        return None
    is_last = end == (bound + segment_left) // page_tokens * page_tokens or (not are_windows and segment_left < num_new)
    return end if is_last or end % every == 0 else None


@dataclass(slots=True)
class KnownCall:
    """A forward call on a cache whose content is known."""

    leaves: list[Leaf]  # the entries of the cache
    history: History  # their content when the call began
    after: History  # and when it has ended
    tokens: mx.array  # the new ones
    is_prompt: bool  # the logits are dropped
    bounds: list[int]  # ends of the calls in which the tokens are computed: one, or some that share a pass
    state_ends: dict[int, int]  # where windows and states are kept in one of these calls, by its end
    num_after: int = 0  # tokens that the same pass adds behind it
    num_restored: int = 0  # tokens that are cached
    kept: dict[int, dict[int, StateLeaf]] = field(default_factory=dict)  # between its calls: by end, and id of entry

    def add(self, index: int, entry: Any, found: Any) -> None:
        """Keep a state as it was found by the call of a number, of those that share a pass, if it is wanted."""
        bound = self.bounds[index - 1] if 0 < index <= len(self.bounds) else 0
        if self.is_prompt and has_state(entry) and bound in self.state_ends:
            kept = copy.copy(found)
            kept.__dict__ = {name: _unshared(value) for name, value in vars(found).items()}
            self.kept.setdefault(bound, {})[id(entry)] = StateLeaf(kept)

    def take_states(self, bound: int) -> dict[int, dict[str, Blob]]:
        """Return windows and states of one of the calls, by its end; none if they are gone. They are not kept longer.

        Those between calls that share a pass were kept. Windows are known where the last page of a call has ended.
        """
        kept, found, later = self.kept.pop(bound, {}), dict[int, dict[str, Blob]](), bound - self.state_ends[bound]
        for i, leaf in enumerate(self.states):
            state: dict[str, Blob] | None = None
            if id(leaf.entry) in kept:
                state = kept[id(leaf.entry)].read_before(later)
            elif bound == self.after.length and not self.num_after:
                state = leaf.read_before(later)
            if state is None:
                return {}
            found[i] = state
        return found

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
