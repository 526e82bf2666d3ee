"""A plan: the weights in memory, the weights that are streamed, and the memory of all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import RefusedError
from mlx_flash.layout.cachesizes import CacheSizes
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.ledger import KVShare, Ledger, NewTokens, stock_capacity
from mlx_flash.residency.machine import BASE_STEP
from mlx_flash.residency.sizes import ActivationSizes
from mlx_flash.storage.blocks import Compression

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
