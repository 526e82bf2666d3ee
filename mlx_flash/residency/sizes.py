"""The numbers a plan is made of, from a model's layout, its configuration and trials of attention. Reads no weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import mlx.core as mx

from mlx_flash.compat.arrays import AttentionCall
from mlx_flash.compat.require import installed
from mlx_flash.layout.parts import CacheSizes, ExpertStack, Held, ModelLayout, Unit
from mlx_flash.layout.units import matrices_of, place_experts, trunk_of
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.memory.driver import has_own_memory
from mlx_flash.memory.pagecache import DIRECT_ALIGNMENT
from mlx_flash.storage.placement import must_copy, padded_bytes
from mlx_flash.storage.probe import Measurements

RESULTS = Measurements("attention.json")

_NUM_TRIALS = 2
"""Trials of a figure that later runs use too. The larger one counts."""

_TOKENS, _CONTEXT = 16, 256
"""Size of the trial: more new tokens than kernels for decoding take, and little memory for keys."""

_BUSY = 256
"""Rows and columns of a product that takes longer than MLX takes to record a trial (some ms on the CPU back end)."""

_MARGIN = 1.25
"""The allocator leaves holes between arrays that grow with the context."""

_UNFUSED_COPIES, _MASK_BYTES = 3, 2
"""Scores that attention without MLX's kernel holds, before and after the mask and their softmax; and two masks."""


def bytes_per_pair(calls: Iterable[AttentionCall]) -> int:
    """Return the bytes for each pair of a new token and a token in context, for the call that takes most.

    Calls with scores of the model's own are not tried: see :func:`unfused_bytes_per_pair`.
    """
    tried = (_remembered_or_tried(call) for call in set(calls) if not call.has_own_scores)
    return math.ceil(_MARGIN * max(tried, default=0.0))


def unfused_bytes_per_pair(num_heads: int, itemsize: int) -> int:
    """Return the bytes for each pair where a model computes scores itself, or with quantized keys."""
    return _UNFUSED_COPIES * num_heads * itemsize + _MASK_BYTES


@cache
def _remembered_or_tried(call: AttentionCall) -> float:
    """Return the bytes for each pair that a call takes: what a run before this one found, or a trial does.

    Only on the CPU, where a trial takes 20 ms. On a GPU it also loads kernels, whose memory plans have to count.
    """
    if mx.default_device() != mx.cpu:
        return _tried(call)
    key = f"mlx {installed('mlx')}: {call}"
    match RESULTS.load().get(key):
        case {"bytes_per_pair": float(found)} if 0 <= found < math.inf:
            return found
    found = max(_tried(call) for _ in range(_NUM_TRIALS))
    RESULTS.save(key, {"bytes_per_pair": found})
    return found


def _tried(call: AttentionCall) -> float:
    """Return the bytes for each pair that a call takes with zeros. Resets MLX's peak of active memory."""
    queries = mx.zeros((1, call.num_heads, _TOKENS, call.key_size), call.dtype)
    keys = mx.zeros((1, call.num_kv_heads, _CONTEXT, call.key_size), call.dtype)
    values = mx.zeros((1, call.num_kv_heads, _CONTEXT, call.value_size), call.dtype)
    sinks = mx.zeros((call.num_heads,), call.dtype) if call.has_sinks else None
    factor = mx.zeros((_BUSY, _BUSY), mx.float32)
    mx.eval(queries, keys, values, factor, *([] if sinks is None else [sinks]))
    mx.synchronize()

    # Arrays that MLX lets go of while it still allocates would make the figure smaller, so it is kept busy meanwhile.
    busy = factor @ factor
    mx.async_eval(busy)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mask: str | mx.array | None
    if isinstance(call.mask, tuple):
        dtype, leading = call.mask
        mask = mx.zeros((*leading, _TOKENS, _CONTEXT), dtype)
    else:
        mask = call.mask
    found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask, sinks=sinks)
    mx.eval(found)
    return max(0, mx.get_peak_memory() - before - found.nbytes) / (_TOKENS * _CONTEXT)


_DEFAULT_EXPERTS = 8
_NODE_BYTES = 600
"""Memory of an operation that MLX records. Measured: Mamba on Linux, 490 bytes, and 560 with holes in the heap."""
_SCAN_COPIES = 12
"""Arrays with the states after every token that MLX holds at once in a layer that computes these. Measured: Jamba."""
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_NUM_MASKS = 2
"""Masks that a call holds: of its windows, and of its other layers."""


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """Memory of one forward call beside weights and KV cache, in bytes."""

    per_token: int  # intermediate results of the widest layer, for each new token
    # attention scores for each pair of a new token and a token in context; 0 where the back end never stores them
    scores_per_pair: int
    unfused_per_pair: int  # the same where keys are quantized, which no fused kernel takes
    logits_per_token: int  # one row of the output head, in 32 bits
    embedding_per_token: int  # one row of the embedding tables
    # what MLX records before it computes, in loops over tokens. Counted for all layers, though streamed ones are
    # computed one by one.
    graph_per_token: int = 0
    # for each pair of new tokens, where states are written one after another into an array that is copied each time
    copies_per_pair: int = 0
    returned_per_token: int = 0  # the logits of a token, as a call returns them
    held: Held = field(default_factory=Held)  # what a call holds while it waits for a unit
    masks_per_pair: int = 0  # bytes of the masks that it holds, for each pair of a new token and a token in context
    # matrices that a call makes, of however many tokens: of an adapter, or of weights in a wider type
    per_call: int = 0

    def nbytes(self, num_tokens: int, context_length: int, *, all_logits: bool, fused: bool = True) -> int:
        """Return the bytes for one call of new tokens over all sequences, each of which attends to so many tokens."""
        rows = 4 + (num_tokens if all_logits else 1)  # sampling makes copies of the last one
        per_pair = self.scores_per_pair if fused else self.unfused_per_pair
        return self.layer_bytes(num_tokens, context_length, per_pair) + rows * self.logits_per_token

    def layer_bytes(self, num_tokens: int, context_length: int, scores_per_pair: int) -> int:
        """Return the bytes of such a call without logits, if attention stores so many bytes of scores for each pair."""
        scores = scores_per_pair * num_tokens * max(context_length, num_tokens) + self.copies_per_pair * num_tokens**2
        per_token = self.per_token + self.embedding_per_token + self.graph_per_token
        return self.per_call + num_tokens * per_token + scores

    def waiting_bytes(self, num_tokens: int) -> int:
        """Bytes of a call that waits for its turn in lockstep: less than what a layer computes for its tokens."""
        return num_tokens * (self.per_token + self.embedding_per_token)

    def held_bytes(self, num_tokens: int, context_length: int, cut: int | None) -> int:
        """Return the bytes of a call that waits for its turn in lockstep, as far as they were measured.

        Without a ``cut`` it waits at other places, too, such as tiles or experts.
        """
        most = self.waiting_bytes(num_tokens)
        if cut is None or not self.held.per_token:
            return most
        masks = self.masks_per_pair * num_tokens * context_length
        return min(most, num_tokens * self.held.per_token[cut] * 9 // 8 + masks)


def measure_activations(layout: ModelLayout, config: dict[str, Any]) -> ActivationSizes:
    """Return the numbers of a model, given its text configuration."""
    itemsize = max((unit.itemsize for unit in layout.layers), default=2)
    top_k = {id(p): stack.top_k for stack in layout.experts for p in stack.unit.large}
    default = config.get("num_experts_per_tok") or _DEFAULT_EXPERTS
    widths = [_outputs(unit, top_k, default) for unit in layout.layers]
    tried = bytes_per_pair(layout.trace.attention)
    num_heads = max((call.num_heads for call in layout.trace.attention), default=0)
    num_heads = num_heads or next((config[key] for key in _NUM_HEADS if config.get(key)), 1)
    unfused = max(tried, unfused_bytes_per_pair(num_heads, itemsize))
    heads = [int(unit.module["weight"].shape[0]) for unit in [*layout.heads, *layout.embeddings]]
    rows = sum(p.nbytes // p.array.shape[0] for unit in layout.embeddings for p in unit.large)
    states = _SCAN_COPIES * layout.cache.largest_scan
    if mx.default_device() == mx.cpu or not mx.metal.is_available():
        # mlx-lm's kernels for recurrences are Metal's. Without them it holds a state and a decay for each token. Mamba
        # 2 also has two numbers for each pair of tokens of a chunk of 256 and each head, which take at most two states
        # for each token.
        states += 4 * layout.cache.largest_state
    logits_per_token = max(heads, default=0) * max(itemsize, 4)
    masks = [call.mask[0].size for call in layout.trace.attention if isinstance(call.mask, tuple)]
    return ActivationSizes(
        per_token=2 * itemsize * max(widths, default=0) + states,
        scores_per_pair=unfused if layout.trace.has_own_attention else tried,
        unfused_per_pair=unfused,
        logits_per_token=logits_per_token,
        embedding_per_token=2 * rows,
        graph_per_token=_NODE_BYTES * layout.trace.nodes_per_token,
        # MLX on CUDA keeps the array before each token until all are computed, so it cannot write in place.
        copies_per_pair=layout.cache.largest_scan if has_own_memory() else 0,
        returned_per_token=layout.trace.logits_bytes or logits_per_token,
        held=layout.held,
        masks_per_pair=_NUM_MASKS * max([*masks, *([1] if layout.cache.windows else [])], default=0),
        per_call=layout.made_bytes,
    )


def _outputs(unit: Unit, top_k: Mapping[int, int], default: int) -> int:
    """Return the outputs of the weight matrices of a unit, of stacks of the chosen experts', for one token."""
    found = 0
    for parameter in unit.large:
        shape = parameter.array.shape
        if parameter.key == "weight" and len(shape) > 1:
            found += shape[-2] * (min(shape[0], top_k.get(id(parameter), default)) if len(shape) == 3 else 1)
    return found


DEFAULT_HITS = (0.0, 0.33, 0.55, 0.7, 0.8, 0.87, 0.93, 0.97, 1.0)
"""Expected hit rates of pools of 0, 1/8, 2/8 ... of many experts. Measured with random models whose routing is as
skewed as that of trained ones."""

EVEN_EXPERTS, UNEVEN_EXPERTS = 8, 32
"""Experts of a layer up to which all are chosen about equally often, and from which some are chosen far more often than
others. Measured with models of 8, 32 and 64 experts: benchmarks/results/matrix-mixtures-few-many-fp32.json."""


@dataclass(frozen=True, slots=True)
class TensorSize:
    """A tensor that can be pinned or streamed."""

    name: str  # the parameter's path in the model
    nbytes: int  # its bytes on disk and in memory
    buffer_bytes: int  # what it takes of a buffer at most, padding included


@dataclass(frozen=True)
class UnitSize:
    """A unit in numbers."""

    name: str
    tensors: tuple[TensorSize, ...]
    num_rows: int | None = None  # output rows, for a unit that can be cut into row tiles; else None
    idle_bytes: int = 0  # of experts that a token is not routed to: they are read with the rest, not computed with
    # for an embedding table, whether it serves as the head too, which needs all of it for every output
    is_tied: bool = False
    nbytes: int = field(init=False)  # of all its tensors
    buffer_bytes: int = field(init=False)  # memory for them
    computed_bytes: int = field(init=False)  # bytes that a token is computed with
    row_bytes: int = field(init=False)  # of an output row of a unit with such
    largest_first: list[TensorSize] = field(init=False, compare=False)  # its tensors by size

    def __post_init__(self) -> None:
        nbytes = sum(map(attrgetter("nbytes"), self.tensors))
        vars(self).update(
            nbytes=nbytes,
            buffer_bytes=sum(map(attrgetter("buffer_bytes"), self.tensors)),
            computed_bytes=nbytes - self.idle_bytes,
            row_bytes=-(-nbytes // (self.num_rows or 1)),
            largest_first=sorted(self.tensors, key=attrgetter("nbytes"), reverse=True),
        )


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A model's experts in numbers."""

    num_experts: tuple[int, ...]  # of each layer that has any
    slot_bytes: int  # memory for one in the pool
    least_slots: int  # the smallest pool that works
    nbytes: int  # of all experts
    token_bytes: int  # of those that compute one token

    def hit_rate(self, num_slots: int) -> float:
        """Return the share of the experts of a token that a pool of so many slots is expected to hold."""
        return expected_hits(num_slots / sum(self.num_experts), max(self.num_experts))


def expected_hits(share: float, num_experts: int) -> float:
    """Return the share of the experts of a token that a pool is expected to hold, with slots for a share of all."""
    share = min(1.0, share)
    at = share * (len(DEFAULT_HITS) - 1)
    low = min(int(at), len(DEFAULT_HITS) - 2)
    uneven = DEFAULT_HITS[low] + (at - low) * (DEFAULT_HITS[low + 1] - DEFAULT_HITS[low])
    even, many = math.log2(EVEN_EXPERTS), math.log2(UNEVEN_EXPERTS)
    unevenness = min(1.0, max(0.0, (math.log2(num_experts) - even) / (many - even)))
    return share + unevenness * (uneven - share)


@dataclass(frozen=True)
class ModelSizes:
    """A model in numbers."""

    layers: tuple[UnitSize, ...]  # in calling order
    heads: tuple[UnitSize, ...]  # linear layers outside the layers
    tables: tuple[UnitSize, ...]  # embedding tables, whose rows can be read one by one
    resident_bytes: int  # everything that is always in memory
    cache: CacheSizes
    activations: ActivationSizes
    # the layers cut into smaller units, each cut finer than the one before, in calling order
    finer: tuple[tuple[UnitSize, ...], ...] = ()
    kept: tuple[UnitSize, ...] = ()  # parts of layers that stay in memory, between those that are streamed
    experts: ExpertSizes | None = None  # what is read expert by expert, and is in no layer then
    trunk: ModelSizes | None = None  # the same model with its experts read so, if it has any
    copies: bool = False  # whether direct reads of some unit go through a bounce buffer
    num_operations: int = 0  # operations of a call for one token, as far as the time to start them matters
    # bytes of the head that guesses tokens, and of its keys and values for a token; None without one
    own_head: tuple[int, int] | None = None
    guesses: bool = False  # whether that is in memory

    @cached_property
    def guessing(self) -> ModelSizes:
        """The same model with the head that guesses in memory, and the one that makes its logits, which they share."""
        tables, heads = tuple([table for table in self.tables if not table.is_tied]), self.all_heads
        trunk = None if self.trunk is None else self.trunk.guessing
        return replace(self, heads=(), tables=tables, kept=(*self.kept, *heads), trunk=trunk, guesses=True)

    def cut(self, units: tuple[UnitSize, ...]) -> ModelSizes:
        """Return the same model with smaller units instead of its layers. The rest of the layers stays in memory."""
        rest = self.layer_bytes - sum([unit.nbytes for unit in units])
        return replace(self, layers=units, resident_bytes=self.resident_bytes + rest, finer=())

    @cached_property
    def sums(self) -> dict[tuple[int, bool], Any]:
        """Results of ``spread`` by their target: tasks with the same model ask for them again."""
        return {}

    @cached_property
    def cuts(self) -> tuple[ModelSizes, ...]:
        """The model with whole layers, then with smaller and smaller units in their place."""
        return self, *map(self.cut, self.finer)

    @cached_property
    def linears(self) -> tuple[UnitSize, ...]:
        """The linear layers in the finest cut."""
        return tuple([unit for unit in (self.finer[-1] if self.finer else self.layers) if unit.num_rows])

    def tiled(self, names: Collection[str]) -> ModelSizes:
        """Return the same model in its finest cut, with the linear layers of these names in row tiles."""
        finest = self.finer[-1] if self.finer else self.layers
        streamed = tuple([unit for unit in self.linears if unit.name in names])
        others = tuple([unit for unit in finest if not unit.num_rows])
        kept = tuple([unit for unit in self.linears if unit.name not in names])
        return replace(self.cut(finest), layers=others, heads=(*streamed, *self.heads), kept=(*self.kept, *kept))

    @cached_property
    def all_heads(self) -> tuple[UnitSize, ...]:
        """The units that every output needs whole: heads, and embedding tables that serve as one."""
        return (*self.heads, *(table for table in self.tables if table.is_tied))

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of all layers."""
        return sum([unit.nbytes for unit in self.layers])

    @cached_property
    def layer_buffer_bytes(self) -> int:
        """Memory for all layers, and for what of them stays in memory anyway."""
        return sum([unit.buffer_bytes for unit in [*self.layers, *self.kept]])

    @cached_property
    def head_buffer_bytes(self) -> int:
        """Memory for all heads."""
        return sum([unit.buffer_bytes for unit in self.all_heads])

    @cached_property
    def table_buffer_bytes(self) -> int:
        """Memory for the tables that are no heads."""
        return sum([unit.buffer_bytes for unit in self.tables if not unit.is_tied])

    @cached_property
    def nbytes(self) -> int:
        """All weights."""
        units = [*self.layers, *self.kept, *self.heads, *self.tables]
        experts = self.experts.nbytes if self.experts else 0
        return sum([unit.nbytes for unit in units]) + self.resident_bytes + experts


def measure(layout: ModelLayout, config: dict[str, Any]) -> ModelSizes:
    """Return the numbers of a model, given its configuration with Hugging Face's names. Reads no weights."""
    activations = measure_activations(layout, config.get("text_config", config))
    sizes = _measure(layout, activations)
    if not layout.experts:
        return sizes
    trunk = _measure(trunk_of(layout), activations)
    records = [parameter.records for stack in layout.experts for parameter in stack.unit.large]
    copies = any(place_experts(stack).read.copied for stack in layout.experts) or must_copy(records, kernel_alignment())
    return replace(sizes, trunk=replace(trunk, experts=_expert_sizes(layout.experts), copies=trunk.copies or copies))


def _unit_sizes(layout: ModelLayout) -> dict[int, UnitSize]:
    """Return the units of a model and of all its cuts in numbers, by ``id``."""
    units = {id(unit): unit for unit in [*layout.units, *chain.from_iterable(layout.finer)]}
    buffers = {nbytes: padded_bytes(nbytes) for nbytes in {p.nbytes for unit in layout.units for p in unit.large}}
    idle = {
        id(p): p.nbytes * max(0, stack.num_experts - stack.top_k) // stack.num_experts
        for stack in layout.experts
        for p in stack.unit.large
    }
    found = dict[int, UnitSize]()
    for key, unit in units.items():
        tensors, idle_bytes = list[TensorSize](), 0
        for p in unit.large:
            tensors.append(TensorSize(p.name, p.nbytes, buffers[p.nbytes]))
            idle_bytes += idle.get(id(p), 0)
        found[key] = UnitSize(unit.name, tuple(tensors), unit.num_rows, idle_bytes, unit.name in layout.tied)
    return found


def _measure(layout: ModelLayout, activations: ActivationSizes) -> ModelSizes:
    small = [parameter for unit in layout.units for parameter in unit.small]
    sizes = _unit_sizes(layout)
    layers, heads, tables, *finer = [
        tuple([sizes[id(unit)] for unit in units])
        for units in (layout.layers, layout.heads, layout.embeddings, *layout.finer)
    ]
    return ModelSizes(
        layers=layers,
        heads=heads,
        tables=tables,
        resident_bytes=sum([parameter.nbytes for parameter in [*small, *layout.resident]]) + layout.tower_bytes,
        cache=layout.cache,
        activations=activations,
        finer=tuple(finer),
        copies=must_copy([p.records for unit in layout.units for p in unit.large], kernel_alignment()),
        num_operations=layout.trace.num_operations,
        own_head=None if layout.head is None else (layout.head.nbytes, layout.head.row_bytes),
    )


def _expert_sizes(stacks: Sequence[ExpertStack]) -> ExpertSizes:
    placed = [place_experts(stack) for stack in stacks]
    slot_bytes = max([placement.nbytes for placement in placed])
    staged = [[stack.unit.large[i].nbytes for i in matrix] for stack in stacks for matrix in matrices_of(stack)]
    stage_bytes = max([sum(map(padded_bytes, sizes)) for sizes in staged]) + DIRECT_ALIGNMENT
    return ExpertSizes(
        num_experts=tuple([stack.num_experts for stack in stacks]),
        slot_bytes=slot_bytes,
        least_slots=max(-(-stage_bytes // slot_bytes), *(stack.top_k for stack in stacks)),
        nbytes=sum([stack.unit.nbytes for stack in stacks]),
        token_bytes=sum([min(stack.top_k, stack.num_experts) * stack.expert_bytes for stack in stacks]),
    )
