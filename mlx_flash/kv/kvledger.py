"""The ledger of keys and values: the memory that layers take now, and the most that a call needs. Pure.

:mod:`mlx_flash.residency.ledger` has the other parts of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mlx_flash.errors import BudgetError
from mlx_flash.kv.options import NUM_SLOTS, KVOptions


class Layer(NamedTuple):
    """One layer of one prompt cache."""

    token_bytes: int = 0  # 0 before the first token
    length: int = 0  # number of tokens
    capacity: int = 0  # tokens that its buffers have room for; 0 while it has none
    is_on_disk: bool = False  # all but its last tokens

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers."""
        return self.capacity * self.token_bytes

    def takes_more(self, num_new: int) -> bool:
        """Return whether so many new tokens take more memory."""
        return not self.capacity or self.length + num_new > self.capacity


class Coming(NamedTuple):
    """Tokens that a call adds to a layer."""

    token_bytes: int
    num_new: int
    length: int  # number of tokens afterwards


class Kind(NamedTuple):
    """Layers that are alike, and get the same tokens."""

    layer: Layer
    coming: Coming | None = None
    number: int = 1

    @property
    def longer(self) -> int:
        """Tokens by which each layer gets longer."""
        return 0 if self.coming is None else max(0, self.coming.length - self.layer.length)

    @property
    def after(self) -> tuple[int, int]:
        """The bytes of a token in each layer, and its number of tokens, after those that come."""
        layer, coming = self.layer, self.coming
        return (layer.token_bytes, layer.length) if coming is None else (coming.token_bytes, coming.length)


class Way(NamedTuple):
    """A way for a call to stay within a limit."""

    missing: int  # bytes that it lacks
    under_way_bytes: int = 0  # kept free during the call: for reads and writes, or to offload a layer
    num_slots: int = 0  # buffers for layers on disk; 0 where nothing goes there
    disk_bytes: int = 0  # what it adds to the files


@dataclass(frozen=True)
class KVLedger:
    """The layers of all caches of a model, and the tokens that a call adds to some."""

    options: KVOptions
    kinds: Sequence[Kind]  # the layers of all caches, and what a call, or several in lockstep, add to them
    step: int = 1  # how many of them go through the model at a time
    slots_held: int = 0  # bytes of the slots of layers on disk
    num_slots: int = NUM_SLOTS
    commits_lazily: bool = True  # slots take memory as they are written to
    under_way_bytes: int = 0  # kept free for reads and writes of layers on disk

    @cached_property
    def now(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return self.arrays + (self._on_disk(more=False) if self.is_on_disk else self.slots_held)

    @cached_property
    def arrays(self) -> int:
        """Bytes of caches that MLX counts as active: without slots, and without layers on disk."""
        return sum([number * layer.capacity * layer.token_bytes for layer, _, number in self.kinds])

    @cached_property
    def peak(self) -> int:
        """The most bytes while the tokens come to one layer after another, with layers where they are."""
        nbytes, moved = 0, 0
        for kind in self.kinds:
            layer, coming, number = kind
            if coming is None or layer.is_on_disk:
                nbytes += number * layer.nbytes
            else:
                capacity = self.options.capacity_after(layer.length, layer.capacity, kind.longer)
                if self._grows_several_times(kind):  # by which it may get more room, and is copied when it is long
                    capacity = max(capacity, self.options.most_capacity(coming.length))
                    moved = max(moved, coming.token_bytes * coming.length)
                nbytes += number * coming.token_bytes * capacity
            if self._grows(kind):
                moved = max(moved, layer.nbytes)  # its old buffers are there besides
        nbytes += moved
        nbytes += self._on_disk(more=True) if self.is_on_disk else self.slots_held
        return max(nbytes, self.now)

    @property
    def growth(self) -> int:
        """Bytes that the call adds if no layer is offloaded."""
        return self.peak + self.under_way_bytes * self.is_on_disk - self.now

    @cached_property
    def is_on_disk(self) -> bool:
        """True if a layer is on disk."""
        return True in [layer.is_on_disk for layer, _, _ in self.kinds]

    @cached_property
    def replaced(self) -> int:
        """The most bytes of buffers of a layer in memory that have no room for its tokens."""
        growing = [kind.layer.nbytes for kind in self.kinds if self._grows(kind)]
        return max(growing, default=0)

    def _grows(self, kind: Kind) -> bool:
        return kind.coming is not None and not kind.layer.is_on_disk and kind.layer.takes_more(kind.longer)

    def _on_disk(self, *, more: bool) -> int:
        """Return the memory of layers on disk, with or without more tokens: slots for the largest, all last tokens."""
        kinds = [kind for kind in self.kinds if kind.layer.is_on_disk]
        tails = sum([kind.number * (kind.after[0] if more else kind.layer.token_bytes) for kind in kinds])
        copy = self._copy(self._sizes_on_disk(more=more))
        return max(self.slots_needed(more=more), self.slots_held) + copy + self.options.step * tails

    def slots_needed(self, *, more: bool) -> int:
        """Return the bytes of all slots, for the largest layer on disk, with or without the tokens that come."""
        return self._slots(self._sizes_on_disk(more=more), self.num_slots)

    def _sizes_on_disk(self, *, more: bool) -> set[tuple[int, int]]:
        """Return the bytes of a token, and the number of tokens, of layers on disk."""
        kinds = [kind for kind in self.kinds if kind.layer.is_on_disk]
        sizes = {kind.after if more else (kind.layer.token_bytes, kind.layer.length) for kind in kinds}
        return {size for size in sizes if size[0]}  # others have no slot before their first tokens

    def _slots(self, sizes: Iterable[tuple[int, int]], num_slots: int) -> int:
        """Return the bytes of all slots, for layers of such sizes: bytes of a token, and tokens."""
        is_tight = self.commits_lazily or num_slots == 1
        return num_slots * max([self.options.slot_bytes(*each, is_tight=is_tight) for each in sizes], default=0)

    def _copy(self, sizes: Iterable[tuple[int, int]]) -> int:
        """Return the bytes of the copy of a slot that attention gets, for layers of such sizes."""
        return max([self.options.copy_bytes(*each) for each in sizes], default=0)

    def way(self, limit: int) -> Way:
        """Return how the call stays within a limit: of all caches together, reads and writes in flight included."""
        options, peak = self.options, self.peak
        if options.budget_bytes is None:
            return Way(max(0, peak - limit))
        offload = options.offload_bytes(self._new_sizes)
        if not self.is_on_disk and peak + offload <= limit:
            return Way(0, offload)
        for num_slots in (NUM_SLOTS, 1):
            least = self.least_with(num_slots)
            under_way = least - self.least(num_slots)
            if least <= limit:
                on_disk = [kind for kind in self.kinds if kind.coming is not None and kind.layer.is_on_disk]
                fresh = sum([number * coming.num_new * coming.token_bytes for _, coming, number in on_disk if coming])
                return Way(0, under_way, num_slots, fresh + max(0, peak + under_way - limit))
        return Way(max(0, min(least, peak + under_way * self.is_on_disk) - limit))  # nothing can be offloaded

    def least_with(self, num_slots: int) -> int:
        """Return the memory with every layer on disk, after the tokens came, and what is under way then."""
        tokens = max([coming.length for _, coming, _ in self.kinds if coming is not None], default=0)
        return self.least(num_slots) + self.options.under_way_bytes(self._new_sizes, tokens, self.step, num_slots)

    @cached_property
    def _new_sizes(self) -> list[int]:
        """Bytes of a token in each layer that gets some."""
        return [
            size for _, coming, number in self.kinds if coming is not None for size in [coming.token_bytes] * number
        ]

    def _grows_several_times(self, kind: Kind) -> bool:
        """Return whether the tokens come in parts that do not all fit into the buffers of the first one."""
        layer, coming = kind.layer, kind.coming
        if coming is None or coming.num_new <= self.step:
            return False
        return self.options.capacity_after(layer.length, layer.capacity, self.step) < layer.length + coming.num_new

    def least(self, num_slots: int) -> int:
        """Return the memory with every layer on disk, after the tokens came."""
        kinds = [kind for kind in self.kinds if kind.after[0]]
        tails = sum([kind.number * kind.after[0] for kind in kinds])
        sizes = {(0, 0), *(kind.after for kind in kinds)}
        return self._slots(sizes, num_slots) + self._copy(sizes) + self.options.step * tails


def no_room(needed: int, tokens: int, limit: float) -> BudgetError:
    """Return the error for tokens that do not fit with every layer on disk.

    Args:
        needed: bytes that the caches need.
        tokens: tokens of the cache that needs them.
        limit: the most bytes of all caches, without reads and writes in flight.
    """
    return BudgetError(
        f"the KV caches need {needed / 1e6:.1f} MB of memory for {tokens} tokens with every layer on disk: "
        "slots of a layer each, and the last tokens of every layer; without reads and writes in "
        f"flight their budget has {limit / 1e6:.1f} MB. Hint: raise it, or set kv_max_tokens.",
        needed,
    )
