"""The memory of keys and values: settings that give buffers their sizes, and the ledger that adds them up. Pure.

The ledger has what layers take now, and the most that a call needs. :mod:`mlx_flash.residency.plan` has the other
parts of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mlx_flash.errors import BudgetError
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up

DEFAULT_STEP = 256  # tokens by which a cache grows, as in mlx-lm, and tokens of one page on disk

NUM_SLOTS = 2  # buffers for layers on disk
SLOT_PADDING = 6 * DIRECT_ALIGNMENT  # at most; arrays begin at a page, and there are six if rows are quantized
COPY_ROOM_STEPS = 2  # steps of room in the copy of a slot at most: after a long trim, mlx-lm's cache has more

WRITE_BEHIND_BYTES = 32 << 20  # the most bytes queued for writing; a call that adds more waits
LEAST_WRITE_BEHIND_BYTES = 4 << 20  # the same where memory is short
NUM_COPIES = 3  # copies of rows on their way to disk: contiguous, joined with the rest of a page, and cut by head

READ_SIZE = 2 << 20  # bytes of one read
QUEUE_DEPTH = 4  # reads in flight at once
NUM_READERS = 2  # sets of read buffers: urgent reads have their own. With one slot all reads are urgent

PAGE_TOKENS = 256  # tokens of a page of the prefix cache
QUEUED_PAGES = 2  # pages of the prefix cache that may wait to be written; a call that adds more waits


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOptions:
    """Settings of the KV caches of one model."""

    step: int = DEFAULT_STEP  # tokens of a page, and by which caches in memory grow
    budget_bytes: int | None = None  # the most memory of all caches together; beyond it layers are offloaded to disk
    always_on_disk: bool = False  # whether layers go to disk with their first tokens, whatever the budget
    directory: Path | None = None  # in which a folder for files is created; None for the cache folder
    direct: bool = True  # whether reads bypass the page cache
    # Whether attention reads a copy of a slot in a buffer of mlx-lm's size: CUDA's choice of a kernel depends on that.
    copies_slots: bool = field(default_factory=has_own_memory)

    def most_capacity(self, tokens: int) -> int:
        """Return the most tokens that the buffers of a cache in memory have room for while it holds so many at most."""
        return self.step if tokens <= self.step else tokens + self.step - 1

    def capacity_after(self, length: int, capacity: int, num_new: int) -> int:
        """Return the capacity of buffers in memory, 0 if there are none, after new tokens came to ``length``."""
        end = length + num_new
        if capacity and end <= capacity:
            return capacity
        return length + round_up(num_new, self.step)

    def slot_bytes(self, token_bytes: int, tokens: int) -> int:
        """Return the most memory of a slot for a layer."""
        return round_up(tokens, self.step) * token_bytes + SLOT_PADDING

    def copy_bytes(self, token_bytes: int, tokens: int) -> int:
        """Return the most memory of the copy of a slot that attention gets, for so many tokens of a layer."""
        return (tokens + COPY_ROOM_STEPS * self.step) * token_bytes if self.copies_slots else 0

    def under_way_bytes(self, token_bytes: Sequence[int], tokens: int, num_new: int, num_slots: int = NUM_SLOTS) -> int:
        """Return the additional memory while layers are written and read: rows queued for writing, read buffers.

        ``num_new`` are the most new tokens of one call. With one slot for layers on disk, the queue is short.
        """
        waiting = min(queued_bytes(num_slots), sum(token_bytes) * tokens)
        buffers = min(NUM_READERS, num_slots) * QUEUE_DEPTH * READ_SIZE if self.direct else 0
        return waiting + NUM_COPIES * max(token_bytes, default=0) * max(num_new, min(tokens, self.step)) + buffers

    def offload_bytes(self, token_bytes: Iterable[int]) -> int:
        """Return the additional memory while a layer is offloaded to disk: copies of a page, and its last tokens."""
        return (NUM_COPIES + 1) * self.step * max(token_bytes, default=0)


def queued_bytes(num_slots: int) -> int:
    """Return the most bytes queued for writing, given the buffers for layers on disk."""
    return WRITE_BEHIND_BYTES if num_slots > 1 else LEAST_WRITE_BEHIND_BYTES


class Layers(NamedTuple):
    """Layers of prompt caches that are alike, and the tokens that a call adds to each."""

    token_bytes: int
    length: int = 0  # number of tokens
    capacity: int = 0  # tokens that buffers in memory have room for: on disk of the last ones; 0 while there are none
    is_on_disk: bool = False  # all but the last tokens
    num_new: int = 0  # tokens that come
    number: int = 1  # of layers

    @property
    def nbytes(self) -> int:
        return self.capacity * self.token_bytes

    @property
    def end(self) -> int:
        """Number of tokens after those that come."""
        return self.length + self.num_new

    @property
    def grows(self) -> bool:
        """True if its buffers have no room for the tokens that come."""
        return bool(self.num_new) and not self.is_on_disk and self.end > self.capacity


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
    layers: Sequence[Layers]  # of all caches, and what a call, or several in lockstep, add to them
    step: int = 1  # how many of them go through the model at a time
    slots_held: int = 0  # bytes of the slots of layers on disk
    num_slots: int = NUM_SLOTS
    under_way_bytes: int = 0  # kept free for reads and writes of layers on disk

    @cached_property
    def now(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return self.arrays + (self._on_disk(more=False) if self.is_on_disk else self.slots_held)

    @property
    def active(self) -> int:
        """Bytes that MLX counts as active: of caches in memory, and of slots."""
        return self.arrays + self.slots_held

    @cached_property
    def arrays(self) -> int:
        """Bytes of caches in memory."""
        return sum([each.number * each.nbytes for each in self.layers if not each.is_on_disk])

    @cached_property
    def peak(self) -> int:
        """The most bytes while the tokens come to one layer after another, with layers where they are."""
        nbytes, moved, options = 0, 0, self.options
        for each in self.layers:
            if each.is_on_disk:
                continue
            capacity = each.capacity
            if each.grows:
                moved = max(moved, each.nbytes)  # the old buffers are there besides
                capacity = options.capacity_after(each.length, capacity, each.num_new)
                first = options.capacity_after(each.length, each.capacity, self.step)
                if each.num_new > self.step and first < each.end:
                    # it grows several times, by which it may get more room, and is copied when it is long
                    capacity = max(capacity, options.most_capacity(each.end))
                    moved = max(moved, each.token_bytes * each.end)
            nbytes += each.number * each.token_bytes * capacity
        nbytes += moved + (self._on_disk(more=True) if self.is_on_disk else self.slots_held)
        return max(nbytes, self.now)

    @property
    def growth(self) -> int:
        """Bytes that the call adds if no layer is offloaded."""
        return self.peak + self.under_way_bytes * self.is_on_disk - self.now

    @cached_property
    def is_on_disk(self) -> bool:
        return True in [each.is_on_disk for each in self.layers]

    @cached_property
    def replaced(self) -> int:
        """The most bytes of buffers of a layer in memory that have no room for its tokens."""
        return max([each.nbytes for each in self.layers if each.grows], default=0)

    def _on_disk(self, *, more: bool) -> int:
        """Return the memory of layers on disk, with or without more tokens: slots for the largest, all last tokens."""
        layers = [each for each in self.layers if each.is_on_disk and (each.capacity or (more and each.num_new))]
        sizes = {(each.token_bytes, each.end if more else each.length) for each in layers}
        slots = max(self._slots(sizes, self.num_slots), self.slots_held)
        return slots + self._copy(sizes) + self.options.step * sum([each.number * each.token_bytes for each in layers])

    def _slots(self, sizes: Iterable[tuple[int, int]], num_slots: int) -> int:
        """Return the bytes of all slots, for layers of such sizes: bytes of a token, and tokens."""
        return num_slots * max([self.options.slot_bytes(*each) for each in sizes], default=0)

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
                fresh = sum([each.number * each.num_new * each.token_bytes for each in self.layers if each.is_on_disk])
                return Way(0, under_way, num_slots, fresh + max(0, peak + under_way - limit))
        return Way(max(0, min(least, peak + under_way * self.is_on_disk) - limit))  # nothing can be offloaded

    def least_with(self, num_slots: int) -> int:
        """Return the memory with every layer on disk, after the tokens came, and what is under way then."""
        tokens = max([each.end for each in self.layers if each.num_new], default=0)
        return self.least(num_slots) + self.options.under_way_bytes(self._new_sizes, tokens, self.step, num_slots)

    @cached_property
    def _new_sizes(self) -> list[int]:
        """Bytes of a token in each layer that gets some."""
        return [size for each in self.layers if each.num_new for size in [each.token_bytes] * each.number]

    def least(self, num_slots: int) -> int:
        """Return the memory with every layer on disk, after the tokens came."""
        tails = sum([each.number * each.token_bytes for each in self.layers])
        sizes = {(0, 0), *((each.token_bytes, each.end) for each in self.layers if each.token_bytes)}
        return self._slots(sizes, num_slots) + self._copy(sizes) + self.options.step * tails


def no_room(needed: int, tokens: int, limit: float) -> BudgetError:
    """Return the error for tokens that do not fit a limit of all caches with every layer on disk."""
    return BudgetError(
        f"the KV caches need {needed / 1e6:.1f} MB of memory for {tokens} tokens with every layer on disk: "
        "slots of a layer each, and the last tokens of every layer; without reads and writes in "
        f"flight their budget has {limit / 1e6:.1f} MB. Hint: raise it, or set kv_max_tokens.",
        needed,
    )
