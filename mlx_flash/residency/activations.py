"""The memory of a forward call beside weights and KV cache, in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_flash.compat.arrays import AttentionCall
from mlx_flash.compat.require import installed
from mlx_flash.layout.parts import Held, ModelLayout, Parameter
from mlx_flash.memory.driver import has_own_memory
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
    """Memory of one forward call beside weights and KV cache, in bytes.

    Attributes:
        per_token: intermediate results of the widest layer, for each new token.
        scores_per_pair: attention scores for each pair of a new token and a token in context; 0 where the back end
            never stores them.
        unfused_per_pair: the same where keys are quantized, which no fused kernel takes.
        logits_per_token: one row of the output head, in 32 bits.
        embedding_per_token: one row of the embedding tables.
        graph_per_token: what MLX records before it computes, in loops over tokens. Counted for all layers, though
            streamed ones are computed one by one.
        copies_per_pair: for each pair of new tokens, where states are written one after another into an array that is
            copied each time.
        returned_per_token: the logits of a token, as a call returns them.
        held: what a call holds while it waits for a unit.
        masks_per_pair: bytes of the masks that it holds, for each pair of a new token and a token in context.
        per_call: matrices that a call makes, of however many tokens: of an adapter, or of weights in a wider type.
    """

    per_token: int
    scores_per_pair: int
    unfused_per_pair: int
    logits_per_token: int
    embedding_per_token: int
    graph_per_token: int = 0
    copies_per_pair: int = 0
    returned_per_token: int = 0
    held: Held = field(default_factory=Held)
    masks_per_pair: int = 0
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
    widths = [sum(_outputs(p, top_k.get(id(p), default)) for p in unit.large) for unit in layout.layers]
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


def _outputs(parameter: Parameter, top_k: int) -> int:
    """Return the outputs of a weight matrix, or of the chosen experts' matrices of a stack, for one token."""
    shape = parameter.array.shape
    if parameter.key != "weight" or len(shape) < 2:
        return 0
    return int(shape[-2]) * (min(shape[0], top_k) if len(shape) == 3 else 1)
