"""The ledger of keys and values: the memory that layers take now, and the most that a call needs. Pure.

:mod:`mlx_flash.residency.ledger` has the other parts of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from mlx_flash.errors import BudgetError
from mlx_flash.kv.options import NUM_SLOTS, KVOptions, slot_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up


class Layer(NamedTuple):
    """One layer of one prompt cache."""

    widths: tuple[int, ...] = ()  # bytes of a token in each array; none before the first token
    length: int = 0  # number of tokens
    capacity: int = 0  # tokens that its buffers have room for; 0 while it has none
    pages: tuple[tuple[int, int], ...] = ()  # (identity, bytes) of the rows that it is parked in
    is_on_disk: bool = False  # all but its last tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of a token; 0 before the first one."""
        return sum(self.widths)

    @property
    def held(self) -> int:
        """Bytes of its buffers."""
        return self.capacity * sum(self.widths)

    def takes_more(self, num_new: int) -> bool:
        """Return whether so many new tokens take more memory."""
        return not self.capacity or self.length + num_new > self.capacity


class Coming(NamedTuple):
    """Tokens that a call adds to a layer."""

    nbytes: int  # of a token
    num_new: int
    held: int  # the most tokens that the layer holds meanwhile; fewer than all where old ones are dropped


class Way(NamedTuple):
    """A way for a call to stay within a limit."""

    missing: int  # bytes that it lacks
    under_way_bytes: int = 0  # kept free during the call: for reads and writes, or to offload a layer
    num_slots: int = 0  # buffers for layers on disk; 0 where nothing goes there
    disk_bytes: int = 0  # what it adds to the files


@dataclass(frozen=True)
class KVLedger:
    """The layers of all caches of a model, and the tokens that a call adds to some. Shared rows count once."""

    options: KVOptions
    layers: Mapping[Any, Layer]  # every layer of every cache
    coming: Mapping[Any, Coming] = field(default_factory=dict)  # tokens of a call, or of several in lockstep
    step: int = 1  # how many of them go through the model at a time
    slots_held: int = 0  # bytes of the slots of layers on disk
    num_slots: int = NUM_SLOTS
    commits_lazily: bool = True  # slots take memory as they are written to
    under_way_bytes: int = 0  # kept free for reads and writes of layers on disk

    @cached_property
    def now(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        held = sum([layer.held for layer in self.layers.values()])
        return held + _shared(self.layers.values()) + self._on_disk({})

    @cached_property
    def peak(self) -> int:
        """The most bytes while the tokens come to one layer after another, with layers where they are."""
        needed = self._grown
        for key, each in self.coming.items():
            layer = self.layers[key]
            if each.held < layer.length + each.num_new:  # a layer that drops tokens is copied
                needed = max(needed, self.now + layer.held)
        return needed

    @property
    def growth(self) -> int:
        """Bytes that the call adds if no layer is offloaded."""
        return max(0, self.peak + self.under_way_bytes * self._is_on_disk - self.now)

    @cached_property
    def _is_on_disk(self) -> bool:
        return any(layer.is_on_disk for layer in self.layers.values())

    @cached_property
    def _grown(self) -> int:
        growing, grown, moved = set[Any](), 0, 0
        holders = Counter([page for layer in self.layers.values() for page, _ in layer.pages])
        for key, each in self.coming.items():
            layer = self.layers[key]
            if layer.is_on_disk:
                continue
            num_new = self._num_new[key]
            grown += each.nbytes * self.options.capacity_after(layer.length, layer.capacity, num_new)
            if layer.takes_more(num_new):  # its old buffers, or the pages that nobody else holds, are there besides
                growing.add(key)
                own = sum([nbytes for page, nbytes in layer.pages if holders[page] == 1])
                moved = max(moved, layer.held + own)
        others = sum([layer.held for key, layer in self.layers.items() if key not in self.coming])
        shared = _shared([layer for key, layer in self.layers.items() if key not in growing])
        return others + grown + moved + shared + self._on_disk(self._num_new)

    @cached_property
    def _num_new(self) -> dict[Any, int]:
        """The tokens by which each layer gets longer."""
        return {key: max(0, each.held - self.layers[key].length) for key, each in self.coming.items()}

    def _on_disk(self, num_new: Mapping[Any, int]) -> int:
        """Return the memory of layers on disk: slots for the largest, and the last tokens of each."""
        tails = self.options.step * sum([layer.token_bytes for layer in self.layers.values() if layer.is_on_disk])
        return max(self.slots_needed(num_new), self.slots_held) + tails

    def slots_needed(self, num_new: Mapping[Any, int]) -> int:
        """Return the bytes of all slots, for the largest layer on disk after new tokens came to some."""
        layers = [(layer, num_new.get(key, 0)) for key, layer in self.layers.items() if layer.is_on_disk]
        return self.num_slots * max([self._slot_bytes(layer, layer.length + more) for layer, more in layers], default=0)

    def _slot_bytes(self, layer: Layer, tokens: int) -> int:
        """Return the memory of a slot that holds so many tokens."""
        is_tight = self.commits_lazily or self.num_slots == 1
        capacity = round_up(tokens, self.options.step) if is_tight else self.options.slot_tokens(tokens)
        nbytes = sum([round_up(capacity * width, DIRECT_ALIGNMENT) for width in layer.widths])
        return slot_memory(nbytes) if is_tight else nbytes

    def way(self, limit: int) -> Way:
        """Return how the call stays within a limit: of all caches together, reads and writes in flight included."""
        options, sizes = self.options, [each.nbytes for each in self.coming.values()]
        needed = self.peak + (options.step * sum(sizes) if self._grows_several_times else 0)
        if options.budget_bytes is None:
            return Way(max(0, needed - limit))
        offload = options.offload_bytes(sizes)
        if not self._is_on_disk and needed + offload <= limit:
            return Way(0, offload)
        for num_slots in (NUM_SLOTS, 1):
            least = self.least_with(num_slots)
            under_way = least - self.least(num_slots)
            if least <= limit:
                fresh = [each.num_new * each.nbytes for key, each in self.coming.items() if self.layers[key].is_on_disk]
                return Way(0, under_way, num_slots, sum(fresh) + max(0, needed + under_way - limit))
        return Way(max(0, min(least, needed + under_way * self._is_on_disk) - limit))  # nothing can be offloaded

    def least_with(self, num_slots: int) -> int:
        """Return the memory with every layer on disk, after the tokens came, and what is under way then."""
        sizes = [each.nbytes for each in self.coming.values()]
        tokens = max([each.held for each in self.coming.values()], default=0)
        return self.least(num_slots) + self.options.under_way_bytes(sizes, tokens, self.step, num_slots)

    @property
    def _grows_several_times(self) -> bool:
        """True if a cache grows more than once, by which it gets more room."""
        for key, each in self.coming.items():
            layer = self.layers[key]
            in_memory = 0 if layer.is_on_disk else layer.length
            first = self.options.capacity_after(in_memory, layer.capacity, min(self.step, each.num_new))
            if first < layer.length + each.num_new:
                return True
        return False

    def least(self, num_slots: int) -> int:
        """Return the memory with every layer on disk, after the tokens came."""
        sizes = {key: layer.token_bytes for key, layer in self.layers.items()}
        sizes |= {key: each.nbytes for key, each in self.coming.items()}
        lengths = {key: layer.length for key, layer in self.layers.items()}
        lengths |= {key: each.held for key, each in self.coming.items()}
        some = [key for key, nbytes in sizes.items() if nbytes]
        return self.options.least_bytes(
            [sizes[key] for key in some], [lengths[key] for key in some], num_slots, is_tight=self.commits_lazily
        )


def _shared(layers: Iterable[Layer]) -> int:
    """Return the bytes of the shared rows that layers are parked in."""
    return sum({page: nbytes for layer in layers for page, nbytes in layer.pages}.values())


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
