"""The ledger: the memory that tokens need in each part of the process, now and at the peak. Pure.

A plan asks for one sequence of the planned length, admission for sequences as long as requests may become, and the
check before a pass for new tokens of caches as they are. The ledger of keys and values is below it, in
:mod:`mlx_flash.kv.kvledger`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.kv.options import NUM_SLOTS, SLOT_PADDING, KVOptions, slot_memory
from mlx_flash.layout.cachesizes import CacheSizes
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.activations import ActivationSizes
from mlx_flash.storage.blocks import decoding_bytes
from mlx_flash.storage.probe import DiskProfile


class NewTokens(NamedTuple):
    """New tokens of one prompt cache in a pass.

    Attributes:
        num_tokens: how many, over all sequences.
        num_at_once: how many of them go through the model at a time.
        context: tokens that the newest one attends to, itself included.
        batch_size: sequences.
        all_logits: whether the logits of every new token are wanted.
        in_parts: whether they go through the model in parts, so that the logits of all parts wait.
        is_fused: whether keys and values are not quantized.
        num_kept: tokens whose logits are kept while others compute, in arrays that are not made yet. 0 keeps those
            of all parts, in 32 bits.
        quantized_row: bytes of a token of all sequences in the widest layer with quantized keys and values. MLX's
            kernels for these copy what has room behind it: those of a whole layer, for each call.
    """

    num_tokens: int
    num_at_once: int
    context: int
    batch_size: int = 1
    all_logits: bool = True
    in_parts: bool = False
    is_fused: bool = True
    num_kept: int = 0
    quantized_row: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """The prices of tokens with one model and its settings.

    Attributes:
        cache: sizes of the caches of a sequence.
        activations: what a forward call allocates.
        options: how keys and values are kept; None leaves caches to mlx-lm.
        step: new tokens of a call at most, as planned.
        cut: the way the layers are cut, as in ``Streaming.cut``.
        is_tiled: whether linear layers pass through the slots in tiles of rows, or experts one by one.
        process: the process itself without arrays, and buffers; in bytes.
        keeps_states: whether the prefix cache keeps windows and states after each call of a prompt.
    """

    cache: CacheSizes
    activations: ActivationSizes
    options: KVOptions | None = None
    step: int = 1
    cut: int = 0
    is_tiled: bool = False
    process: int = 0
    keeps_states: bool = False

    # Keys and values

    def held(self, length: int, num_new: int | None = None) -> int:
        """Return the most tokens that a cache holds up to a length, if so many come in a call."""
        return length if self.options is None else self.options.held_tokens(length, num_new or self.step)

    def in_memory(self, capacities: Sequence[int]) -> int:
        """Return the memory of caches with room for so many tokens each, and of a copy of the largest layer."""
        return sum([self.cache.nbytes(room) for room in capacities]) + self.cache.largest_row * max(capacities)

    @property
    def may_offload(self) -> bool:
        """True if keys and values may go to disk."""
        return self.options is not None and self.options.budget_bytes is not None

    def on_disk(self, tokens: int, num_new: int, num_slots: int = NUM_SLOTS) -> int:
        """Return the memory of keys and values with every layer on disk, of the longest sequence."""
        assert self.options is not None
        rows = self.cache.rows
        under_way = self.options.under_way_bytes(rows, tokens, num_new, num_slots)
        return self.options.least_bytes(rows, tokens, num_slots) + under_way

    @property
    def others(self) -> CacheSizes:
        """The caches that never go to disk."""
        rows = sum(self.cache.rows)
        return replace(self.cache, rows=(), token_bytes=self.cache.token_bytes - rows)

    # Calls

    def states(self, num_new: int) -> int:
        """Return the memory that recurrent states keep of a call."""
        return self.cache.call_bytes * num_new

    def computing(self, num_prompt: int, num_answer: int, context: int) -> int:
        """Return the memory of the larger of a part of a prompt without logits, and a call with those of all tokens."""
        prompt = self.activations.nbytes(num_prompt, context, all_logits=False)
        return max(prompt, self.activations.nbytes(num_answer, context, all_logits=True))

    def one_by_one(self, context: int, held: int) -> int:
        """Return the memory of a sequence that is computed token by token, without keys and values that may go to disk.

        Its last token attends to ``context`` tokens, its caches hold ``held``.
        """
        return self.cache.others_bytes(held) + self.activations.nbytes(1, context, all_logits=True)

    def active(self, new: NewTokens) -> int:
        """Return the memory of intermediate results while new tokens compute."""
        if new.num_kept:
            logits = new.num_kept * self.activations.returned_per_token
        else:
            logits = new.num_tokens * self.activations.logits_per_token if new.in_parts and new.all_logits else 0
        nbytes = self.activations.nbytes(new.num_at_once, new.context, all_logits=new.all_logits, fused=new.is_fused)
        return logits + nbytes + new.quantized_row * new.context

    def waiting(self, new: NewTokens) -> int:
        """Return the memory of intermediate results while others compute, and of the logits until they are used."""
        num_rows = new.num_tokens if new.all_logits else 1
        return self.activations.waiting_bytes(new.num_at_once) + 2 * num_rows * self.activations.logits_per_token

    def computed(self, together: Sequence[NewTokens]) -> int:
        """Return the memory of intermediate results of a pass: of those that compute, and of those that wait."""
        if len(together) == 1:
            return self.active(together[0])
        waiting = [self.waiting(new) for new in together]
        return sum(waiting) + max([self.active(new) - bytes_ for new, bytes_ in zip(together, waiting, strict=True)])

    def slots_held(self, together: Sequence[NewTokens]) -> int:
        """Return the bytes of slots that sequences with layers on disk hold while another one computes.

        Where units are smaller than layers, a sequence waits inside its attention. It holds the slot, which the pool
        replaces.
        """
        sizes = [self.slot_held(new.context, new.batch_size) for new in together]
        return sum(sizes) - min(sizes)

    def slot_held(self, context: int, batch_size: int) -> int:
        """Return the bytes of such a slot; 0 where units are whole layers."""
        if not self.cut or self.options is None:
            return 0
        tokens = batch_size * round_up(context, self.options.step)
        return slot_memory(self.cache.largest_row * tokens + SLOT_PADDING)

    def part_waiting(
        self,
        num_tokens: int,
        batch_size: int,
        context: int,
        *,
        is_first: bool = False,
        on_disk: bool = False,
        kept: int | None = None,
    ) -> int:
        """Return the memory of a part of a prompt that waits while another one computes.

        Where units are smaller than layers, the part before waits inside its attention, with its keys and values. So
        MLX copies them when a part adds to them, instead of writing in place. Where a call holds those of all layers,
        they are copied in each. In the slot of a layer on disk they are not copied.

        Args:
            num_tokens: new tokens, over all sequences.
            batch_size: sequences.
            context: tokens that the newest one attends to, of this part and those before it.
            is_first: whether it is the only one that waits, or one of several. It counts as much as its widest layer:
                attention that makes keys of latent ones takes more than :meth:`active` knows.
            on_disk: whether layers are on disk.
            kept: bytes of the windows and states that the prefix cache keeps for it; None if they are not known.
        """
        sizes, cut = self.activations, None if self.is_tiled or is_first else self.cut
        row = self.cache.token_bytes if sizes.held.has_keys else self.cache.largest_row if self.cut else 0
        keys = 0 if on_disk else row * (context + CACHE_STEP) * batch_size
        if kept is None:
            kept = self.cache.states_bytes(num_tokens, context) if self.keeps_states else 0
        return sizes.held_bytes(num_tokens, context, cut) + keys + kept

    def of_a_layer(self, new: NewTokens) -> int:
        """Return the memory of the intermediate results of one layer."""
        sizes, per_pair = self.activations, 0  # the kernels for a single token store no scores
        if not new.is_fused:
            per_pair = sizes.unfused_per_pair
        elif new.num_tokens > new.batch_size or sizes.scores_per_pair >= sizes.unfused_per_pair:
            per_pair = sizes.scores_per_pair
        kept = new.num_kept * sizes.returned_per_token + new.quantized_row * new.context
        return kept + sizes.layer_bytes(new.num_at_once, new.context, per_pair)


def shares_on_disk(ledger: Ledger) -> bool:
    """Return whether parts of a prompt may share a pass with layers on disk: none holds the slots of all layers."""
    return ledger.may_offload and not ledger.activations.held.has_keys


def parts_waiting(ledger: Ledger, number: int, step: int, context: int, *, on_disk: bool = False) -> int:
    """Return the memory of some equal parts of one prompt that wait, with its keys and values on disk or not."""
    if number <= 0:
        return 0
    first = ledger.part_waiting(step, 1, context, is_first=True, on_disk=on_disk)
    return first + (number - 1) * ledger.part_waiting(step, 1, context, on_disk=on_disk)


def parts_together(ledger: Ledger, room: int, step: int, context: int, *, on_disk: bool = False) -> int:
    """Return how many equal parts of one prompt share a pass, if so many bytes are left for those that wait."""
    first, two = (parts_waiting(ledger, number, step, context, on_disk=on_disk) for number in (1, 2))
    return 1 if room < first else 2 + (room - first) // max(1, two - first)


def reader_bytes(disk: DiskProfile, *, bounces: bool, decodes: bool) -> int:
    """Return the memory of the threads that read, through buffers of their own or of compressed tensors."""
    each = disk.read_size * bounces + decoding_bytes(disk.read_size) * decodes
    return each * disk.queue_depth
