"""The ledger: the memory that tokens need in each part of the process, now and at the peak. Pure.

A plan asks for one sequence of the planned length, admission for sequences as long as requests may become, and the
check before a pass for new tokens of caches as they are. The ledger of keys and values is below it, in
:mod:`mlx_flash.kv.kvledger`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.kv.kvledger import Coming, Kind, KVLedger, Layer
from mlx_flash.kv.options import NUM_SLOTS, KVOptions
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
    """The memory of tokens with one model and its settings.

    Attributes:
        cache: sizes of the caches of a sequence.
        activations: what a forward call allocates.
        options: how keys and values are kept; None leaves caches to mlx-lm.
        step: new tokens of a call at most, as planned.
        cut: the way the layers are cut, as in ``Streaming.cut``.
        is_tiled: whether linear layers pass through the slots in tiles of rows, or experts one by one.
        keeps_states: whether the prefix cache keeps windows and states after each call of a prompt.
    """

    cache: CacheSizes
    activations: ActivationSizes
    options: KVOptions | None = None
    step: int = 1
    cut: int = 0
    is_tiled: bool = False
    keeps_states: bool = False

    # Keys and values

    @property
    def _growth(self) -> int:
        """Tokens by which a cache in memory grows at most, as plans count it."""
        return CACHE_STEP if self.options is None else max(CACHE_STEP, self.options.step)

    def capacity(self, tokens: int) -> int:
        """Return the most tokens that a cache in memory has room for while it holds so many."""
        return stock_capacity(tokens) if self.options is None else self.options.most_capacity(tokens)

    def in_memory(self, capacities: Sequence[int]) -> int:
        """Return the memory of caches with room for so many tokens each, and of a copy of the largest layer."""
        return sum([self.cache.nbytes(room) for room in capacities]) + self.cache.largest_row * max(capacities)

    def of_a_sequence(self, length: int) -> int:
        """Return the memory of the caches of a sequence up to a length, and to offload a layer.

        A cache of mlx-lm's grows at any length.
        """
        capacity = round_up(length, self._growth) if self.options is not None else length + self._growth
        offload = self.options.offload_bytes(self.cache.rows) if self.options is not None and self.may_offload else 0
        return self.in_memory([capacity]) + offload

    @property
    def may_offload(self) -> bool:
        """True if keys and values may go to disk."""
        return self.options is not None and self.options.budget_bytes is not None

    def on_disk(self, lengths: Sequence[int], num_new: int, num_slots: int = NUM_SLOTS) -> int:
        """Return the memory of keys and values of sequences with every layer on disk, if so many come in a call."""
        rows, options = Counter(self.cache.rows).items(), self.options or KVOptions()
        kinds = [Kind(Layer(), Coming(row, n, n), number) for n in lengths for row, number in rows]
        return KVLedger(options, kinds, num_new, commits_lazily=False).least_with(num_slots)

    def rows_in_memory(self, tokens: int) -> int:
        """Return the most memory of keys and values that may go to disk, while they are in memory."""
        rows, capacity = self.cache.rows, max(tokens + self._growth, self.capacity(tokens))
        return (sum(rows) + max(rows, default=0)) * capacity

    def least_rows(self, tokens: int, num_new: int, num_slots: int = NUM_SLOTS) -> int:
        """Return their least memory: on disk if they may go there, or in memory if they are short."""
        in_memory = self.rows_in_memory(tokens)
        return min(in_memory, self.on_disk([tokens], num_new, num_slots)) if self.may_offload else in_memory

    @property
    def others(self) -> CacheSizes:
        """The caches that never go to disk."""
        rows = sum(self.cache.rows)
        return replace(self.cache, rows=(), token_bytes=self.cache.token_bytes - rows)

    # Calls

    def states(self, num_new: int) -> int:
        """Return the memory that recurrent states keep of a call."""
        return self.cache.call_bytes * num_new

    def computing(self, num_answer: int, context: int) -> int:
        """Return the memory of the larger of a part of a prompt without logits, and a call with those of all tokens."""
        num_prompt = max(self.step, num_answer)
        prompt = self.active(NewTokens(num_prompt, num_prompt, context, all_logits=False))
        return max(prompt, self.active(NewTokens(num_answer, num_answer, context)))

    def one_by_one(self, held: int, context: int) -> int:
        """Return the least memory of a sequence: token by token, with keys and values on disk if they may go there.

        These hold ``held`` tokens. The last token attends to ``context``.
        """
        rows = self.least_rows(held, 1, num_slots=1) + self.cache.others_bytes(context)
        return rows + self.active(NewTokens(1, 1, context))

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
        sizes = [self.slot_held(new) for new in together]
        return sum(sizes) - min(sizes)

    def slot_held(self, new: NewTokens, *, is_tight: bool = True) -> int:
        """Return the bytes of such a slot; 0 where units are whole layers."""
        if not self.cut or self.options is None:
            return 0
        return self.options.slot_bytes(self.cache.largest_row * new.batch_size, new.context, is_tight=is_tight)

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

    @property
    def shares_on_disk(self) -> bool:
        """True if parts of a prompt may share a pass with layers on disk: none holds the slots of all layers."""
        return self.may_offload and not self.activations.held.has_keys

    def parts_waiting(self, number: int, context: int, *, on_disk: bool = False) -> int:
        """Return the memory of some whole parts of one prompt that wait, with its keys and values on disk or not."""
        if number <= 0:
            return 0
        first = self.part_waiting(self.step, 1, context, is_first=True, on_disk=on_disk)
        return first + (number - 1) * self.part_waiting(self.step, 1, context, on_disk=on_disk)

    def parts_together(self, room: int, context: int, *, on_disk: bool = False) -> int:
        """Return how many whole parts of one prompt share a pass, if so many bytes are left for those that wait."""
        first, two = (self.parts_waiting(number, context, on_disk=on_disk) for number in (1, 2))
        return 1 if room < first else 2 + (room - first) // max(1, two - first)


def stock_capacity(tokens: int) -> int:
    """Return the most tokens that a cache of mlx-lm's has room for while it holds so many."""
    return round_up(tokens, CACHE_STEP) + CACHE_STEP


def reader_bytes(disk: DiskProfile, *, bounces: bool, decodes: bool) -> int:
    """Return the memory of the threads that read, through buffers of their own or of compressed tensors."""
    each = disk.read_size * bounces + decoding_bytes(disk.read_size) * decodes
    return each * disk.queue_depth
