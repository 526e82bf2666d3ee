"""Settings of KV caches: the form of their memory, and their budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlx_flash.memory.arena import HUGE_PAGE
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT, round_up

DEFAULT_STEP = 256  # tokens by which a cache grows, as in mlx-lm, and tokens of one page on disk
CONTEXT_ALIGNMENT = 256

NUM_SLOTS = 2  # buffers for layers on disk
SLOT_PADDING = 6 * DIRECT_ALIGNMENT  # at most; arrays begin at a page, and there are six if rows are quantized
LARGE_SLOT_BYTES = 16 << 20  # a slot of at least this size uses large pages, if memory is committed lazily
ROOM_PART = 8  # a slot has additional room for this part of its tokens, if the context length is unset
ROOM_TOKENS = 1024  # and it has at least room for so many
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
    max_context_length: int | None = None  # tokens that slots have room for; longer contexts still grow
    budget_bytes: int | None = None  # the most memory of all caches together; beyond it layers are offloaded to disk
    always_on_disk: bool = False  # whether layers go to disk with their first tokens, whatever the budget
    directory: Path | None = None  # in which a folder for files is created; None for the cache folder
    direct: bool = True  # whether reads bypass the page cache
    # Whether attention reads a copy of a slot in a buffer of mlx-lm's size: CUDA's choice of a kernel depends on that.
    copies_slots: bool = field(default_factory=has_own_memory)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that slots have room for; 0 when that is unset."""
        return round_up(self.max_context_length or 0, CONTEXT_ALIGNMENT)

    def most_capacity(self, tokens: int) -> int:
        """Return the most tokens that the buffers of a cache in memory have room for while it holds so many at most."""
        return self.step if tokens <= self.step else tokens + self.step - 1

    def capacity_after(self, length: int, capacity: int, num_new: int) -> int:
        """Return the capacity of buffers in memory, 0 if there are none, after new tokens came to ``length``."""
        end = length + num_new
        if capacity and end <= capacity:
            return capacity
        return length + round_up(num_new, self.step)

    def slot_tokens(self, tokens: int) -> int:
        """Return the capacity of a slot for so many tokens."""
        if 0 < tokens <= self.reserved_tokens:
            return round_up(self.reserved_tokens, self.step)
        return round_up(max(tokens, 1) + tokens // ROOM_PART, round_up(ROOM_TOKENS, self.step))

    def slot_bytes(self, token_bytes: int, tokens: int, *, is_tight: bool) -> int:
        """Return the most memory of a slot for a layer; if ``is_tight``, it takes none for tokens to come."""
        capacity = round_up(tokens, self.step) if is_tight else self.slot_tokens(tokens)
        return slot_memory(capacity * token_bytes + SLOT_PADDING)

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


def slot_memory(nbytes: int) -> int:
    """Return the most memory of a slot with so many bytes."""
    return nbytes if nbytes < LARGE_SLOT_BYTES else nbytes + HUGE_PAGE
