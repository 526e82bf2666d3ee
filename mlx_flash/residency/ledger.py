"""The ledger: the memory that tokens need in each part of the process, now and at the peak. Pure.

A plan asks for one sequence of the planned length, admission for sequences as long as requests may become, and the
check before a pass for new tokens of caches as they are. The ledger of keys and values is below it, in
:mod:`mlx_flash.kv.kvledger`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import ConfigError
from mlx_flash.kv.kvledger import NUM_SLOTS, PAGE_TOKENS, QUEUED_PAGES, KVLedger, KVOptions, Layers
from mlx_flash.layout.cachesizes import CacheSizes
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.sizes import ActivationSizes, ModelSizes
from mlx_flash.storage.blocks import decoding_bytes
from mlx_flash.storage.probe import DiskProfile


class NewTokens(NamedTuple):
    """New tokens of one prompt cache in a pass."""

    num_tokens: int  # how many, over all sequences
    num_at_once: int  # how many of them go through the model at a time
    context: int  # tokens that the newest one attends to, itself included
    batch_size: int = 1
    all_logits: bool = True  # whether the logits of every new token are wanted
    in_parts: bool = False  # whether they go through the model in parts, so that the logits of all parts wait
    is_fused: bool = True  # whether keys and values are not quantized
    # tokens whose logits are kept while others compute, in arrays that are not made yet. 0 keeps those of all parts, in
    # 32 bits.
    num_kept: int = 0
    # bytes of a token of all sequences in the widest layer with quantized keys and values. MLX's kernels for these copy
    # what has room behind it: those of a whole layer, for each call.
    quantized_row: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory of tokens with one model and its settings."""

    cache: CacheSizes  # sizes of the caches of a sequence
    activations: ActivationSizes
    options: KVOptions | None = None  # how keys and values are kept; None leaves caches to mlx-lm
    step: int = 1  # new tokens of a call at most, as planned
    cut: int = 0  # the way the layers are cut, as in ``Streaming.cut``
    is_tiled: bool = False  # whether linear layers pass through the slots in tiles of rows, or experts one by one
    keeps_states: bool = False  # whether the prefix cache keeps windows and states after each call of a prompt

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
        layers = [Layers(row, num_new=n, number=number) for n in lengths for row, number in rows]
        return KVLedger(options, layers, num_new).least_with(num_slots)

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

    def slot_held(self, new: NewTokens) -> int:
        """Return the bytes of such a slot; 0 where units are whole layers."""
        if not self.cut or self.options is None:
            return 0
        return self.options.slot_bytes(self.cache.largest_row * new.batch_size, new.context)

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
        they are copied in each. In the slot of a layer on disk they are not copied. The only part that waits, or the
        first one, counts as much as its widest layer: attention that makes keys of latent ones takes more than
        :meth:`active` knows. ``kept`` are the bytes of windows and states that the prefix cache keeps for it; None if
        they are not known.
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


KV_SHARE = 0.25
"""Share of the budget that the KV cache may take in memory when the plan chooses."""

PROMISED_CONTEXT = 20_480
"""Every budget has room for a context of so many tokens, with keys and values on disk, if its length is unset."""

PROMISED_LOGITS = 80
"""Every such budget has room for the logits of so many tokens of one call, computed one after another."""

DENSE_PAGE_BYTES = 32 << 20
"""Keys and values of a page of tokens, in 16 bits, of a dense model of 8 billion weights, such as Llama 3."""

PROMPT_TOKEN_BYTES = 16
"""Bytes of a token of a prompt itself: four copies of 32 bits, of the caller and on the way into the model."""


@dataclass(frozen=True, slots=True)
class KVShare:
    """The KV cache of a plan. Sizes in bytes, at the planned length of the context."""

    options: KVOptions | None  # how keys and values are kept; None leaves caches to mlx-lm
    nbytes: int  # set aside in memory, for every kind of cache
    # the most of it for caches that can be on disk, what is under way to the disk and back included; None for as much
    # as a call finds free
    limit: int | None = None
    is_fixed: bool = False  # whether that is so though more may be free
    disk_bytes: int = 0  # what is in files; all of it is read for each token
    num_on_disk: int = 0  # layers of which that is so


def check_kv(config: FlashConfig) -> None:
    """Refuse settings that contradict each other. Raises: ConfigError."""
    directory = None if config.kv_directory is None else Path(config.kv_directory).expanduser()
    if directory is not None:
        _check_directory(directory)
    if config.kv_ram_gb is not None and config.kv_cache == "stock":
        raise ConfigError(
            f"kv_ram_gb is {config.kv_ram_gb:g}, but nothing goes to disk with kv_cache='stock'. Hint: kv_cache='disk'."
        )
    if config.writes_nothing and (config.kv_cache == "disk" or config.kv_ram_gb is not None):
        raise ConfigError(
            "ssd_write_gb_per_day is 0, so that no keys and values can go to disk. Hint: raise it, or leave kv_cache "
            "and kv_ram_gb open."
        )


def refuse_all_but(config: FlashConfig, where: str, **allowed: object) -> None:
    """Refuse (ConfigError) settings that are neither unset nor have the value that is allowed for them."""
    for name, value in allowed.items():
        if (found := getattr(config, name)) not in (None, value):
            raise ConfigError(f"{name}={found!r} is not available {where}. Hint: leave {name} unset.")


def ledger_of(sizes: ModelSizes, config: FlashConfig, prefill_step_size: int = 1) -> Ledger:
    """Return the memory of tokens in a plan."""
    options = None
    if sizes.cache.rows and config.kv_cache != "stock":
        options = KVOptions(
            step=config.kv_step,
            budget_bytes=None if config.writes_nothing else 0,
            directory=None if config.kv_directory is None else Path(config.kv_directory).expanduser(),
            direct=config.io != "buffered",
        )
    keeps = config.caches_prefixes
    return Ledger(sizes.cache, sizes.activations, options, prefill_step_size, keeps_states=keeps)


def in_memory(ledger: Ledger, context_length: int) -> KVShare:
    """Return the share with all of it in memory. A cache that grows beyond the plan may go to disk."""
    nbytes = ledger.of_a_sequence(context_length) + ledger.states(ledger.step)
    return KVShare(ledger.options, nbytes)


def on_disk(ledger: Ledger, context_length: int, room: int, kv_ram_gb: float | None = None) -> KVShare:
    """Return the share with as much of it in memory as there is room for, the rest on disk.

    Raises: ConfigError: ``kv_ram_gb`` is below what is needed at least.
    """
    assert ledger.options is not None
    rows = ledger.cache.rows
    whole, least = ledger.rows_in_memory(context_length), ledger.least_rows(context_length, ledger.step)
    limit = max(least, min(room, whole)) if kv_ram_gb is None else round(kv_ram_gb * GB)
    if limit < least:
        raise ConfigError(
            f"kv_ram_gb is {kv_ram_gb:g}, but a context of {context_length} tokens needs at least "
            f"{-(-least // 1000) / 1e6:.6f}: two slots of a layer each, the last tokens of every layer, and what is "
            "under way to the disk and back. Hint: give more, or set a smaller context_length."
        )
    # layers in memory have room, too, for a copy of the largest one that grows
    left = limit - least - max(rows) * context_length
    offloaded = _offloaded(rows, context_length, left) if limit < whole else []
    return KVShare(
        options=replace(ledger.options, budget_bytes=limit),
        nbytes=limit + ledger.others.nbytes(context_length) + ledger.states(ledger.step),
        limit=limit,
        is_fixed=kv_ram_gb is not None,
        disk_bytes=sum(offloaded) * context_length,
        num_on_disk=len(offloaded),
    )


def _check_directory(directory: Path) -> None:
    """Refuse a folder that is no folder, or that cannot be made or written to."""
    at = directory.absolute()
    while not os.path.lexists(at):
        at = at.parent
    if not at.is_dir():
        what = "which" if at == directory.absolute() else f"and {at}"
        raise ConfigError(
            f"kv_directory is {directory}, {what} is not a directory. Hint: name another one, or remove it."
        )
    if not os.access(at, os.W_OK | os.X_OK):
        raise ConfigError(f"kv_directory is {directory}: this user cannot write to {at}. Hint: name another one.")


def prefix_bytes(cache: CacheSizes, config: FlashConfig, context_length: int) -> int:
    """Return the bytes of pages of the prefix cache on their way to disk and back.

    Some wait to be written while one is copied. Those with large windows and states are written while the call waits.
    """
    if not config.caches_prefixes:
        return 0
    page, largest = sum(cache.rows) * PAGE_TOKENS, largest_page(cache, context_length)
    return largest + QUEUED_PAGES * (largest if largest <= DENSE_PAGE_BYTES else page)


def largest_page(cache: CacheSizes, context_length: int) -> int:
    """Return the bytes of the largest page of the prefix cache, with windows and states."""
    return sum(cache.rows) * PAGE_TOKENS + cache.states_bytes(0, context_length)


def promised_bytes(sizes: ModelSizes, config: FlashConfig) -> int:
    """Return the memory in which a context of :data:`PROMISED_CONTEXT` is computed, token by token if need be.

    The same memory holds the logits of a call with :data:`PROMISED_LOGITS` tokens. It is 0
    where a setting limits the context or the KV cache, and where caches that grow cannot be on disk.
    """
    is_limited = config.context_length is not None or config.kv_ram_gb is not None or config.writes_nothing
    if is_limited or config.kv_cache == "stock" or sizes.cache.growing > 0:
        return 0
    ledger, logits = ledger_of(sizes, config), PROMISED_LOGITS * sizes.activations.returned_per_token
    long, short = (
        ledger.one_by_one(context, context) + context * PROMPT_TOKEN_BYTES
        for context in (PROMISED_CONTEXT, PROMISED_LOGITS)
    )
    return max(long, short + logits)


def for_context(sizes: ModelSizes, config: FlashConfig, num_tokens: int | None) -> FlashConfig:
    """Return settings with room for so many tokens, prompt and answer. Where it is promised anyway, they stay."""
    if num_tokens is None or config.context_length is not None:
        return config
    if num_tokens <= PROMISED_CONTEXT and promised_bytes(sizes, config):
        return config
    return replace(config, context_length=num_tokens)


def _offloaded(rows: Sequence[int], tokens: int, room: int) -> list[int]:
    """Return the rows of layers on disk: all but as many as there is room for."""
    room //= max(1, tokens)
    left = sorted(rows)
    while left and left[0] <= room:
        room -= left.pop(0)
    return left
