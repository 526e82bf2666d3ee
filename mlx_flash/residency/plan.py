"""A plan, and the ledger behind it: the memory that tokens need in each part of the process, now and at the peak. Pure.

The ledger answers a plan for one sequence of the planned length, admission for sequences as long as requests may
become, and the check before a pass for new tokens of caches as they are. That of keys and values is below it, in
:mod:`mlx_flash.kv.kvledger`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.kv.kvledger import NUM_SLOTS, PAGE_TOKENS, QUEUED_PAGES, KVLedger, KVOptions, Layers
from mlx_flash.layout.parts import CacheSizes, ModelLayout
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.machine import BASE_STEP
from mlx_flash.residency.sizes import ActivationSizes, ModelSizes
from mlx_flash.storage.blocks import Compression, decoding_bytes
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


MB = 1_000_000

TOKENS_AHEAD = 32
"""Tokens whose keys and values are not lent: the next ones must not wait for memory."""

UNLENT_SHARE = 0.01
"""Share of the budget that is not lent, ``BASE_STEP`` at least: intermediate results are known about so well."""

DEFAULT_PREFILL_STEP_SIZE = 2048
"""mlx-lm's own. Its name for it is newer than the oldest mlx-lm supported."""

PROBE_OPTIMISM = 3.0
"""A pass may take so many times what a short probe makes of it, which sees disk and processor at their best."""

PREFILL_STEPS = (DEFAULT_PREFILL_STEP_SIZE, 1024, 512, 256, 128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Streaming:
    """The weights that pass through the slots on every pass."""

    # of each layer that is not in memory whole, its name and the names of the parameters that are read
    layers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # rows a tile of each head, or embedding table serving as head, that is computed tile by tile
    heads: tuple[tuple[str, int], ...] = ()
    tables: tuple[str, ...] = ()  # names of the embedding tables of which rows are read on demand
    num_units: int = 0  # number of units that take turns in the slots: layers, and tiles of heads
    num_slots: int = 0
    slot_bytes: int = 0
    read_bytes: int = 0  # bytes read on a pass that decodes one token, embedding rows aside
    seconds: float = 0.0  # predicted time of that pass
    compute_seconds: float = 0.0  # the part of it that is not spent reading
    cut: int = 0  # the cut whose units ``layers`` names: 0 for whole layers, ``i`` for ``finer[i - 1]`` of the layout
    is_tiled: bool = False  # whether linear layers of the layers are in ``heads``

    def parameters(self, layout: ModelLayout) -> set[str]:
        """Return the names of the parameters that are read on every pass, or by rows."""
        apart = {*dict(self.heads), *self.tables}
        units = [*layout.cut(self.cut), *layout.heads, *layout.embeddings]
        partly = {name for _, names in self.layers for name in names}
        return partly | {parameter.name for unit in units if unit.name in apart for parameter in unit.large}


@dataclass(frozen=True, slots=True)
class Pool:
    """Experts that are kept from token to token."""

    num_slots: int
    slot_bytes: int
    num_experts: int  # how many there are, over all layers
    hit_rate: float  # share of the experts of a token that will be in the pool, as predicted
    read_bytes: int  # bytes of those that will not
    seconds: float  # what experts add to the time of a decoding pass, as predicted

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.num_slots * self.slot_bytes


@dataclass(frozen=True)
class ResidencyPlan:
    """The weights in memory, the streamed weights, and the memory of all parts. Sizes in bytes."""

    budget_bytes: int  # the promise
    minimum_bytes: int  # the smallest budget that would do for these settings
    model_bytes: int  # all weights
    base_bytes: int  # the process before any weight, and what running adds to it
    active_bytes: int  # the part of it that MLX arrays of others took when the plan was made
    resident_bytes: int  # small and derived parameters, always in memory
    pinned_bytes: int  # layers, heads and tables that stay in memory
    streaming: Streaming
    pool: Pool | None  # the experts that are kept, if experts are read one by one
    kv: KVShare
    prefix_bytes: int  # set aside for pages of the prefix cache on their way to disk and back
    activation_bytes: int  # set aside for a forward call's intermediate results
    bounce_bytes: int  # the reader's own buffers
    read_size: int
    queue_depth: int
    disk_bytes_per_second: float  # what the disk was probed to give
    cache_limit: int  # what MLX may keep of freed buffers
    prefill_step_size: int  # new tokens in a call that ``activation_bytes`` is enough for
    context_length: int  # tokens that ``kv`` is enough for
    kv_bytes_per_token: int  # what one more token adds to the KV cache of all layers
    activations: ActivationSizes
    cache: CacheSizes
    # set aside, besides ``kv`` and activations, so that a context of ``PROMISED_CONTEXT`` tokens can be computed with
    # its keys and values on disk, or parts of a prompt can wait for each other, whatever is more
    spare_bytes: int = 0
    # predicted time of a pass that decodes one token at the beginning of a conversation, while memory that is set aside
    # for its tokens is lent to weights
    opening_seconds: float = 0.0
    kv_seconds: float = 0.0  # what reading the KV cache of that context adds to a pass
    lent_seconds: float = 0.0  # what weights in the room for waiting parts of prompts save a pass that decodes
    prompt_seconds_per_token: float = 0.0  # predicted time to compute one token of a prompt, without reading
    compression: Compression | None = None  # of the checkpoint; None where nothing is compressed
    keeps_states: bool = False  # whether the prefix cache keeps windows and states after each call of a prompt
    context_bytes: int = 0  # the part of it that CUDA's context and kernels take on a GPU
    mtp_bytes: int = 0  # the model's own head for guesses, with its keys and values; 0 where it is not used

    @property
    def kv_bytes(self) -> int:
        """Set aside for the KV cache."""
        return self.kv.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Set aside for tokens: keys, values and activations."""
        return self.kv_bytes + self.activation_bytes + self.spare_bytes

    @cached_property
    def ledger(self) -> Ledger:
        """The memory of tokens."""
        return Ledger(
            self.cache,
            self.activations,
            self.kv.options,
            self.prefill_step_size,
            self.streaming.cut,
            self.streaming.is_tiled or self.pool is not None,
            self.keeps_states,
        )

    @cached_property  # asked for each token
    def process_bytes(self) -> int:
        """Memory of the process itself, without arrays, and buffers."""
        return self.base_bytes - self.active_bytes + self.bounce_bytes + self.prefix_bytes + self.cache_limit

    @property
    def room_bytes(self) -> int:
        """Memory that the budget has for tokens: reserved for them, or left over."""
        return self.budget_bytes - self.peak_bytes + self.reserved_bytes

    @property
    def unlent_bytes(self) -> int:
        """Bytes of the budget that are never lent."""
        return max(BASE_STEP, int(UNLENT_SHARE * self.budget_bytes)) + TOKENS_AHEAD * self.kv_bytes_per_token

    @property
    def slots_bytes(self) -> int:
        """Memory of all slots."""
        return self.streaming.num_slots * self.streaming.slot_bytes

    @property
    def pool_bytes(self) -> int:
        """Memory of the experts that are kept."""
        return self.pool.nbytes if self.pool else 0

    @property
    def read_bytes(self) -> int:
        """Bytes of weights read on a pass that decodes one token, embedding rows aside; of experts, as predicted."""
        return self.streaming.read_bytes + (self.pool.read_bytes if self.pool else 0)

    @property
    def weights_seconds(self) -> float:
        """Predicted time of that pass, keys and values aside, while nothing is lent."""
        return self.streaming.seconds + (self.pool.seconds if self.pool else 0.0)

    @property
    def row_seconds(self) -> float:
        """Predicted time to compute a row of one token, and to read its experts."""
        return self.streaming.compute_seconds + (self.pool.seconds if self.pool else 0.0)

    @property
    def seconds(self) -> float:
        """Predicted time of that pass, in a context of the planned length."""
        return self.weights_seconds - self.lent_seconds + self.kv_seconds

    def seconds_to_first_token(self, num_tokens: int) -> float:
        """Return the predicted time from a prompt to its first token, with no token found in a cache."""
        num_passes = self.prompt_passes(num_tokens)
        reading = self.prompt_read_bytes(num_tokens) / self.disk_bytes_per_second
        computing = num_tokens * self.prompt_seconds_per_token
        if self.streaming.num_slots > 1:
            return max(reading, computing, num_passes * self.seconds)
        return max(reading + computing, num_passes * self.seconds)

    def prompt_passes(self, num_tokens: int) -> int:
        """Return the passes over the weights in which a prompt of so many tokens is computed.

        Parts of ``prefill_step_size`` tokens share a pass as far as the budget has room for their intermediate results
        beside the prompt's own keys and values, which go to disk if they do not fit. Where units are smaller than
        layers, each takes a copy of a layer's keys and values, except on disk.
        """
        ledger = self.ledger
        num_parts = -(-num_tokens // ledger.step)
        if not self.read_bytes:
            return num_parts
        free = self.room_bytes - self.activation_bytes
        together = ledger.parts_together(free - self.cache.nbytes(num_tokens), num_tokens)
        in_memory, limit = ledger.of_a_sequence(num_tokens), self.kv.limit
        is_over = limit is not None and in_memory - ledger.others.nbytes(num_tokens) > limit
        if ledger.shares_on_disk and (in_memory > free or (self.kv.is_fixed and is_over)):
            room = free - ledger.on_disk([num_tokens], ledger.step, num_slots=1) - ledger.others.nbytes(num_tokens)
            together = max(together, ledger.parts_together(room, num_tokens, on_disk=True))
        return -(-num_parts // together)

    def prompt_read_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a prompt of so many tokens reads: all streamed weights once a pass."""
        num_passes = self.prompt_passes(num_tokens)
        if self.pool is None:
            return num_passes * self.streaming.read_bytes
        missing = (self.pool.num_experts - min(self.pool.num_slots, self.pool.num_experts)) * self.pool.slot_bytes
        experts = min(missing, self.pool.read_bytes * min(num_tokens, self.prefill_step_size))
        return num_passes * (self.streaming.read_bytes + experts)

    @cached_property
    def peak_bytes(self) -> int:
        """Predicted peak of the process."""
        weights = self.resident_bytes + self.pinned_bytes + self.slots_bytes + self.pool_bytes + self.mtp_bytes
        return self.process_bytes + self.active_bytes + weights + self.reserved_bytes

    def parts(self) -> list[tuple[str, int]]:
        """Return the parts of the predicted peak: (words for people, bytes)."""
        pool, streaming = self.pool, self.streaming
        on_disk = f", {self.kv.disk_bytes / GB:.3f} GB on disk" if self.kv.disk_bytes else ""
        others = self.active_bytes if self.active_bytes >= MB else 0
        parts = [  # and whether each is named where it takes nothing
            ("process (interpreter, libraries)", self.base_bytes - self.context_bytes - others, True),
            ("CUDA context and kernels", self.context_bytes, False),
            ("other models and arrays", others, False),
            ("small and derived parameters", self.resident_bytes, True),
            ("pinned weights", self.pinned_bytes, True),
            (f"slots ({streaming.num_slots} x {streaming.slot_bytes / MB:.1f} MB)", self.slots_bytes, True),
            (f"experts ({pool.num_slots} of {pool.num_experts})" if pool else "", self.pool_bytes, False),
            ("own guesses (MTP)", self.mtp_bytes, False),
            (f"KV cache ({self.context_length} tokens{on_disk})", self.kv_bytes, True),
            ("prefix cache", self.prefix_bytes, False),
            (f"activations ({self.prefill_step_size} tokens a call)", self.activation_bytes, True),
            ("room for longer prompts", self.spare_bytes, False),
            ("read buffers", self.bounce_bytes, True),
            ("MLX buffer cache", self.cache_limit, True),
        ]
        return [(words, nbytes) for words, nbytes, always in parts if nbytes or always]


def in_gb(nbytes: int) -> str:
    """Return a size in GB, rounded up to a whole MB: a budget of so much holds it."""
    return f"{round_up_to_mb(nbytes) / GB:.3f}"


def in_mb(nbytes: int) -> str:
    """Return a size in MB, rounded up as in :func:`in_gb`."""
    return f"{round_up_to_mb(nbytes) / MB:.0f}"


def round_up_to_mb(nbytes: int) -> int:
    """Return the next whole MB, in bytes."""
    return round_up(nbytes, MB)


def step_in_words(step: int, config: FlashConfig) -> str:
    """Return the limit that cuts prompts into parts, and the mlx-lm run that has the same output."""
    limit = "prefill_step_size is" if config.prefill_step_size == step else "the budget has room for"
    return f"{limit} {step} prompt tokens at a time: output is mlx-lm's own for --prefill-step-size {step}"


Decision = Literal["batch", "alone", "wait"]


def together_bytes(plan: ResidencyPlan, lengths: Sequence[int], batching: str, may_offload: bool | None = None) -> int:
    """Return the most memory of requests that are answered together. Lengths are tokens of each, prompt and answer.

    mlx-lm's batches (``"stock"``) pad all of them to the longest. Otherwise they share passes, each with a cache of its
    own length. ``may_offload`` says that keys and values may go to disk; None is as planned.
    """
    if not lengths:
        return 0
    ledger, longest, num_others, num_together = plan.ledger, max(lengths), len(lengths) - 1, 1
    if batching == "stock":
        capacity, num_together = stock_capacity(longest), len(lengths)
        nbytes = ledger.in_memory([capacity] * (num_together + num_others))
        nbytes += num_others * ledger.cache.largest_row * capacity
    else:
        nbytes = ledger.in_memory([*map(ledger.capacity, lengths)])
        if (bool(plan.kv.num_on_disk) if may_offload is None else may_offload) and ledger.may_offload:
            others = sum([ledger.others.nbytes(tokens) for tokens in lengths])
            nbytes = min(nbytes, ledger.on_disk(lengths, ledger.step) + others)
        nbytes += num_others * ledger.waiting(NewTokens(1, 1, 1))
    return nbytes + ledger.computing(num_together, longest) + ledger.states(ledger.step)


def alone_bytes(plan: ResidencyPlan, length: int) -> int:
    """Return the least memory of a request that is in no batch: token by token, with keys and values on disk."""
    ledger = plan.ledger
    return together_bytes(plan, [length], "stock") if ledger.options is None else ledger.one_by_one(length, length)


def decide(
    plan: ResidencyPlan, num_prompt: int, num_answer: int, running: Sequence[int], *, may_batch: bool, batching: str
) -> Decision:
    """Return where a request is answered now: in a batch with those that run, alone, or not yet.

    ``running`` are the tokens of each request that is being answered, prompt and answer.

    Raises: RefusedError: the budget has no room for it, even when nothing else runs.
    """
    room, length = plan.room_bytes, num_prompt + num_answer
    if may_batch and together_bytes(plan, [length], batching) <= room:
        return "batch" if together_bytes(plan, [*running, length], batching) <= room else "wait"
    needed = alone_bytes(plan, length)
    if needed <= room:
        return "wait" if running else "alone"
    raise RefusedError(
        f"a prompt of {num_prompt} tokens and an answer of at most {num_answer} need {in_mb(needed)} MB for keys, "
        f"values and activations; the budget is {in_mb(plan.budget_bytes)} MB, which leaves {in_mb(max(0, room))} MB "
        f"beside the model. Hint: send a shorter prompt or set a smaller max_tokens, or give --ram-budget-gb "
        f"{in_gb(plan.budget_bytes + needed - room)}.",
        413,
    )
