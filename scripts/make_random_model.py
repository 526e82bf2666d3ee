#!/usr/bin/env python3
"""Write a random-weight model directory of any size in constant memory.

The result loads with stock mlx-lm: weights in safetensors shards, config.json, and a byte-level tokenizer with a chat
template, all made without network. Names, shapes and dtypes come from the mlx-lm model built from the config and never
evaluated, so every architecture of mlx-lm works. A tensor's values depend on the seed and its name alone: the same
model written with another shard size or naming holds the same numbers.

--routing-skew gives a mixture of experts the habits of trained ones, which random weights lack: some experts are chosen
far more often than others, tokens that follow each other share experts, and a layer's input tells much of what the next
layer will choose. How much of each is a design of this script, not a measurement of any real model.

Example:
    python scripts/make_random_model.py /tmp/model --layers 48 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
Array = np.ndarray[Any, Any]
Fill = Callable[[np.random.Generator, int], Array]
Pattern = Callable[[Array, int], Array]

# Values are made in blocks of this many, each from its own random stream, so that any slice of a tensor can be made
# alone. Memory is bounded by a few blocks per worker whatever the size of the model.
BLOCK = 1 << 18
WORKERS = min(8, os.cpu_count() or 1)

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "bool": "BOOL"}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "BOOL": 1}
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Those that flags can shape; ``--config`` takes any."""

SHAPE_DEFAULTS = {
    "architecture": "llama",
    "layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "heads": 32,
    "kv_heads": 8,
    "vocab_size": 32000,
    "experts": 8,
    "experts_per_token": 2,
    "tie_word_embeddings": False,
}
# How Hugging Face's checkpoints of mixtures name what mlx-lm stacks.
PROJECTIONS = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
EXPERT_NAMES: dict[str, tuple[str, str, dict[str, str]]] = {
    "qwen3_moe": ("mlp.switch_mlp", "mlp.experts", PROJECTIONS),
    "mixtral": (
        "block_sparse_moe.switch_mlp",
        "block_sparse_moe.experts",
        {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
    ),
}


class UsageError(Exception):
    """A request that cannot be met as given; reported in one line."""


@dataclass(frozen=True)
class Tensor:
    """One tensor to write.

    Attributes:
        name: Its name in the checkpoint.
        shape: Its shape.
        dtype: Its safetensors dtype code.
        fill: Makes the first n values of a block from the block's random stream.
        source: The name that keys the random stream; a slice of a larger tensor keeps the larger one's.
        start: Where in the source's values this tensor begins.
        pattern: Changes values, given them and where in the source's values they begin.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: Fill
    source: str
    start: int = 0
    pattern: Pattern | None = None

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.count * ITEM_BYTES[self.dtype]


# Values


def normal(std: float) -> Fill:
    """Make normally distributed values."""

    def fill(rng: np.random.Generator, count: int) -> Array:
        values = rng.standard_normal(count, dtype=np.float32)
        values *= np.float32(std)
        return values

    return fill


def constant(value: float) -> Fill:
    """Make equal values."""
    return lambda _rng, count: np.full(count, value, np.float32)


def words(rng: np.random.Generator, count: int) -> Array:
    """Make uniform 32-bit words."""
    return rng.integers(0, 1 << 32, count, dtype=np.uint32)


def spread(middle: float) -> Fill:
    """Make values uniform between half and one and a half times the middle."""
    return lambda rng, count: (rng.random(count, dtype=np.float32) + np.float32(0.5)) * np.float32(middle)


def round_to_bfloat16(values: Array) -> Array:
    """Round finite float32 values to bfloat16, ties to even, as their 16 bits."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    return odd.astype(np.uint16)


def encode(values: Array, dtype: str) -> Array:
    """Bring values into the bytes of a safetensors dtype."""
    if dtype == "BF16":
        return round_to_bfloat16(np.ascontiguousarray(values, np.float32))
    numpy_types = {"F32": "<f4", "F16": "<f2", "BOOL": "?"}
    kind = numpy_types.get(dtype) or f"<{dtype[0].lower()}{ITEM_BYTES[dtype]}"
    return np.ascontiguousarray(values, np.dtype(kind))


def random_stream(seed: int, source: str, block: int) -> np.random.Generator:
    """The random stream of one block of a source of values."""
    key = hashlib.sha256(f"{seed}\0{source}\0{block}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "little")))


def make_piece(seed: int, tensor: Tensor, block: int, low: int, high: int) -> Array:
    """Make the values [low, high) of one block of a tensor, encoded."""
    values = tensor.fill(random_stream(seed, tensor.source, block), high)[low:]
    if tensor.pattern is not None:
        values = tensor.pattern(values, block * BLOCK + low)
    return encode(values, tensor.dtype)


def pieces(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Split a tensor into (block, low, high) in order."""
    position, end = tensor.start, tensor.start + tensor.count
    while position < end:
        block, low = divmod(position, BLOCK)
        high = min(BLOCK, low + end - position)
        yield block, low, high
        position += high - low


def make_all(seed: int, tensors: Iterable[Tensor], pool: ThreadPoolExecutor) -> Iterator[Array]:
    """Yield the encoded values of all tensors in order, a bounded number of pieces ahead."""
    waiting: deque[Future[Array]] = deque()
    for tensor in tensors:
        for block, low, high in pieces(tensor):
            waiting.append(pool.submit(make_piece, seed, tensor, block, low, high))
            if len(waiting) >= 2 * WORKERS:
                yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


# Routing like a trained model's


NUM_TOPICS = 16
# Parts of the variance of a token's embedding; the rest is the token's own.
COMMON_SHARE, TOPIC_SHARE = 0.05, 0.1
# Deviations that a router's logits get from a token's topic and from the token itself. Together they are as wide as the
# Gumbel noise that would make drawing without replacement of them.
TOPIC_LOGIT, TOKEN_LOGIT = 0.8, 1.0
# Logit of the tokens of the present topic in the head, and the share of tokens that lead to another topic.
NEXT_LOGIT, CHANGE_SHARE = 4.0, 0.08
# Factors of what is added to the residual stream, for other modules and for stacks of experts, whose mean is small as
# it is: the stream changes slowly, but by more than what is the same for all tokens. What a layer then adds to the
# stream's variance, as measured.
OUTPUT_SCALE, EXPERT_SCALE = 0.5, 2.0
LAYER_VARIANCE = 0.38
OUTPUT_NAMES = frozenset({"o", "o_proj", "out_proj", "wo", "dense", "down_proj", "fc2", "w2", "output_linear"})


@dataclass(frozen=True)
class Rows:
    """The pattern of a matrix whose columns are those of the residual stream.

    Attributes:
        std: Deviation of the random part.
        masked: Columns, from the first, without random part.
        width: Number of columns.
        make: Makes what is added to the rows of the given numbers, ``(rows, width)``.
    """

    std: float
    masked: int
    width: int
    make: Callable[[Array], Array]

    @property
    def fill(self) -> Fill:
        """The random part, before the pattern."""
        return normal(self.std)

    def __call__(self, values: Array, start: int) -> Array:
        """Add the pattern to values."""
        end = start + len(values)
        rows = np.arange(start // self.width, -(-end // self.width))
        skip = start % self.width
        values[np.arange(start, end) % self.width < self.masked] = 0
        values += self.make(rows).reshape(-1)[skip : skip + len(values)]
        return values


class SkewedRouting:
    """The weights that make a model's routing skewed.

    A token's embedding is a direction common to all, the direction of its topic, and noise. A router weighs the common
    direction with a bias for each expert, the topics with a preference of each expert, and the noise at random. The
    head prefers tokens of the present topic. The common direction lies in a few columns, so that leaving it out of the
    head, which would favour a few tokens always, needs no sums over rows.

    Attributes:
        patterns: By parameter, for embedding, head and routers.
        output_scales: By path, for modules whose results are added to the residual stream.
    """

    def __init__(self, model: Any, exponent: float, seed: int) -> None:
        """Find what is to be patterned.

        Args:
            model: An unevaluated model that is not quantized yet.
            exponent: How often an expert is chosen falls with about this power of its rank.
            seed: Of directions, topics and preferences.

        Raises:
            UsageError: The model has no experts, or is not built in a way that is known here.
        """
        from mlx.utils import tree_flatten

        self._seed, self._exponent = seed, exponent
        self._modules = dict(model.named_modules())
        leaves: Any = tree_flatten(model.parameters())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in leaves}
        routers = find_routers(self._modules, self._shapes)
        embedding, head = self._find_ends()
        tokens, self._width = self._shapes[embedding]
        self._masked = max(1, self._width // 16)
        signs = random_stream(seed, "topics", 0).integers(0, 2, (NUM_TOPICS, self._width))
        self._topics = (2 * signs - 1).astype(np.float32)
        self._topics[:, : self._masked] = 0
        self._topic_unit = np.float32(1 / (math.sqrt(TOPIC_SHARE) * (self._width - self._masked)))
        self.patterns = {embedding: self._embedding(tokens), head: self._head(tokens)}
        self.patterns |= {name: self._router(name) for name in routers}
        scales = {path: self._output_scale(path) for path in self._modules}
        self.output_scales = {path: scale for path, scale in scales.items() if scale is not None}

    def _find_ends(self) -> tuple[str, str]:
        """Names of the embedding's and the head's weights."""
        embeddings = [path for path, module in self._modules.items() if isinstance(module, mlx_nn().Embedding)]
        embedding = max(embeddings, key=lambda path: self._modules[path].weight.shape[0], default="") + ".weight"
        shape = self._shapes.get(embedding)
        heads = [name for name in self._shapes if self._shapes[name] == shape and name != embedding]
        if len(heads) != 1:
            message = "needs a model with an embedding and one head of its own: with tied ones it would repeat a token"
            raise UsageError(f"--routing-skew {message}; this one has {len(heads)} heads")
        return embedding, heads[0]

    def _output_scale(self, path: str) -> float | None:
        shape = self._shapes.get(f"{path}.weight", ())
        if path.rpartition(".")[2] not in OUTPUT_NAMES or len(shape) < 2 or shape[-2] != self._width:
            return None
        return EXPERT_SCALE if len(shape) == 3 else OUTPUT_SCALE

    def _rms(self, name: str) -> float:
        """Root mean square of the residual stream where a parameter reads it; at the end for one in no layer."""
        numbers = (int(part) for path in self._modules for part in path.split(".") if part.isdigit())
        depth = next((int(part) for part in name.split(".") if part.isdigit()), max(numbers) + 1)
        return math.sqrt(1 + depth * LAYER_VARIANCE)

    def _topic_of(self, tokens: int, changed: bool) -> Array:
        """Topic of each token: the one that it leads to, or the one in which it is said."""
        rng = random_stream(self._seed, "tokens", 0)
        said = rng.integers(0, NUM_TOPICS, tokens)
        leads = rng.random(tokens) < CHANGE_SHARE
        other: Array = rng.integers(0, NUM_TOPICS, tokens)
        return np.where(leads, other, said) if changed else said

    def _embedding(self, tokens: int) -> Rows:
        common = np.zeros(self._width, np.float32)
        common[: self._masked] = math.sqrt(COMMON_SHARE * self._width / self._masked)
        topic_of = self._topic_of(tokens, changed=True)
        topics = self._topics * np.float32(math.sqrt(TOPIC_SHARE)) + common
        own = math.sqrt(1 - COMMON_SHARE - TOPIC_SHARE)
        return Rows(own, self._masked, self._width, lambda rows: topics[topic_of[rows]])

    def _head(self, tokens: int) -> Rows:
        topic_of = self._topic_of(tokens, changed=False)
        topics = self._topics * self._topic_unit * np.float32(NEXT_LOGIT * self._rms(""))
        return Rows(1 / math.sqrt(self._width), self._masked, self._width, lambda rows: topics[topic_of[rows]])

    def _router(self, name: str) -> Rows:
        experts, width = self._shapes[name]
        if width != self._width:
            raise UsageError(f"--routing-skew: {name} reads {width} values, but the residual stream has {self._width}")
        rng, rms = random_stream(self._seed, f"routing of {name}", 0), self._rms(name)
        bias = -self._exponent * np.log1p(rng.permutation(experts))
        bias_unit = rms / math.sqrt(COMMON_SHARE * width * self._masked)
        biases = ((bias - bias.mean()) * bias_unit).astype(np.float32)
        liking = rng.standard_normal((experts, NUM_TOPICS), np.float32) * np.float32(TOPIC_LOGIT * rms)

        def make(rows: Array) -> Array:
            values = (liking[rows] @ self._topics) * self._topic_unit
            values[:, : self._masked] = biases[rows, None]
            return values

        own = rms**2 - COMMON_SHARE - TOPIC_SHARE
        return Rows(TOKEN_LOGIT * rms / math.sqrt(own * width), self._masked, width, make)


def find_routers(modules: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Find the parameter that chooses among the experts of each stack of experts.

    It is the only one with a row for each expert in the smallest module around a stack that has such a one.

    Args:
        modules: A model's modules by path.
        shapes: Shapes of its parameters by name.

    Returns:
        Names of parameters.

    Raises:
        UsageError: There are no stacks, or it cannot be told what chooses among one's experts.
    """
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    stacks = [path for path, module in modules.items() if isinstance(module, (SwitchGLU, SwitchMLP))]
    if not stacks:
        raise UsageError("--routing-skew needs a mixture of experts; this model has no stacks of experts of mlx-lm's")
    return [find_router(path, stacks, shapes) for path in stacks]


def find_router(stack: str, stacks: list[str], shapes: dict[str, tuple[int, ...]]) -> str:
    """Find the parameter that chooses among the experts of one stack."""
    experts = next(shape[0] for name, shape in shapes.items() if name.startswith(f"{stack}."))
    around, found = stack, list[str]()
    while around and not found:
        around = around.rpartition(".")[0]
        names = (name for name in shapes if name.startswith(f"{around}.") and not name.startswith(f"{stack}."))
        found = [name for name in names if len(shapes[name]) == 2 and shapes[name][0] == experts]
    if len(found) != 1 or sum(path.startswith(f"{around}.") for path in stacks) != 1:
        listed = ", ".join(found) or "nothing"
        raise UsageError(f"--routing-skew: cannot tell what chooses among the {experts} experts of {stack}: {listed}")
    return found[0]


# Tensors of a model


def mlx_nn() -> Any:
    """The module mlx.nn, imported late so that a mistaken command line is told of at once."""
    return importlib.import_module("mlx.nn")


def build_model(config: Config) -> Any:
    """Build the mlx-lm model of a config; nothing is evaluated, so nothing is allocated."""
    from mlx_lm.utils import _get_classes

    try:
        model_class, args_class = _get_classes(config)
        return model_class(args_class.from_dict(config))
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        name = config.get("model_type", "?")
        raise UsageError(f"mlx-lm cannot build a {name!r} model from this config: {error!r}") from error


def quantize(model: Any, config: Config, spared: frozenset[str]) -> Config:
    """Quantize a model lazily as the config says, except spared modules; returns the complete config."""
    from mlx_lm.utils import quantize_model

    settings = config["quantization"]
    own = getattr(model, "quant_predicate", None) or (lambda _path, _module: True)

    def wanted(path: str, module: Any) -> Any:
        return path not in spared and own(path, module)

    plain = {key: value for key, value in config.items() if key != "quantization"}
    with contextlib.redirect_stdout(io.StringIO()):
        completed: Config = quantize_model(
            model, plain, settings["group_size"], settings["bits"], quant_predicate=wanted
        )[1]
    return completed


class Describer:
    """Decides dtype and values of each parameter of an unevaluated model."""

    def __init__(self, model: Any, dtype: str, routing: SkewedRouting | None) -> None:
        """Take the modules of a model, whose floating parameters will have the dtype."""
        nn = mlx_nn()
        self._modules = dict(model.named_modules())
        self._dtype = DTYPES[dtype]
        self._casts: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _name: True)
        kinds = (nn.Embedding, nn.QuantizedEmbedding)
        self._embeddings = {path for path, module in self._modules.items() if isinstance(module, kinds)}
        self._tied = not self._has_head()
        self._routing = routing

    def _has_head(self) -> bool:
        """Return whether a module other than the embedding has a row for each token."""
        tokens = max((self._modules[path].weight.shape[0] for path in self._embeddings), default=0)
        others = (module for path, module in self._modules.items() if path not in self._embeddings)
        return any("weight" in module and module.weight.shape[0] == tokens for module in others)

    def describe(self, name: str, parameter: Any) -> Tensor:
        """Describe one parameter."""
        path, _, leaf = name.rpartition(".")
        code = DTYPES[str(parameter.dtype).rpartition(".")[2]]
        if code.startswith(("F", "BF")) and self._casts(name):
            code = self._dtype
        module = self._modules.get(path, {})
        if "scales" in module and leaf in ("weight", "scales", "biases"):
            fill = self._quantized_fill(path, leaf, module)
        else:
            fill = self._fill(path, leaf, parameter.shape, code)
        # The biases follow from the scales, so both read the same stream.
        source = f"{path}.scales" if leaf == "biases" else name
        pattern = self._routing.patterns.get(name) if self._routing else None
        return Tensor(name, tuple(parameter.shape), code, pattern.fill if pattern else fill, source, pattern=pattern)

    def _quantized_fill(self, path: str, leaf: str, module: Any) -> Fill:
        std = self._std(path, module.weight.shape[-1] * 32 // module.bits)
        if leaf == "weight":
            return words
        scale = std / math.sqrt((4**module.bits - 1) / 12)  # the root mean square of random words
        return spread(scale * (1.0 if leaf == "scales" else -(2**module.bits - 1) / 2))

    def _fill(self, path: str, leaf: str, shape: tuple[int, ...], code: str) -> Fill:
        if code not in ("F32", "F16", "BF16"):
            return constant(0)
        if leaf == "bias":
            return normal(0.02)
        module_name = path.rpartition(".")[2]
        norm = leaf == "weight" and ("norm" in module_name or len(shape) == 1)
        if norm or leaf == "global_scale" or math.prod(shape) == 1:
            return constant(1)
        if len(shape) < 2:
            return constant(1) if "norm" in leaf else normal(0.02)
        fan_in = math.prod(shape[1:]) if "conv" in module_name else shape[-1]
        return normal(self._std(path, fan_in))

    def _std(self, path: str, fan_in: int) -> float:
        # A tied embedding of deviation 1 would dominate the residual stream, and the model only echo its last token.
        std = 1.0 if path in self._embeddings and not self._tied else 1 / math.sqrt(fan_in)
        return std * self._routing.output_scales.get(path, 1.0) if self._routing else std


def list_tensors(config: Config, dtype: str, skew: float, seed: int) -> tuple[list[Tensor], Config]:
    """List the tensors of a config's model in the model's order.

    Args:
        config: A config.json, with "quantization" when the weights are quantized.
        dtype: The dtype of floating parameters.
        skew: How skewed the routing is; 0 leaves it to chance.
        seed: Of what the routing's patterns share. The tensors' own streams get it when they are made.

    Returns:
        The tensors, and the config completed with what the quantization decided per module.
    """
    from mlx.utils import tree_flatten

    model = build_model(config)
    routing = SkewedRouting(model, skew, seed) if skew else None
    if "quantization" in config:
        spared = frozenset(name.rpartition(".")[0] for name in routing.patterns) if routing else frozenset()
        try:
            config = quantize(model, config, spared)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"cannot quantize this model so: {error}") from error
    describer = Describer(model, dtype, routing)
    leaves: Any = tree_flatten(model.parameters())
    return [describer.describe(name, parameter) for name, parameter in leaves], config


# Hugging Face's names


def to_huggingface(tensors: list[Tensor], config: Config) -> list[Tensor]:
    """Rename and split tensors into the checkpoint that mlx-lm's sanitize turns into the given ones."""
    model_type = config["model_type"]
    if "quantization" in config:
        raise UsageError("--naming huggingface does not go with quantization: those checkpoints are mlx-lm's own")
    if model_type not in EXPERT_NAMES:
        raise UsageError(f"--naming huggingface is not known for {model_type!r}; known: {', '.join(EXPERT_NAMES)}")
    return split_experts(tensors, *EXPERT_NAMES[model_type])


def split_experts(tensors: list[Tensor], stacked: str, separate: str, names: dict[str, str]) -> list[Tensor]:
    """Split stacked expert tensors into one tensor per expert, expert after expert."""
    pattern = re.compile(rf"(.*\.){re.escape(stacked)}\.(\w+)\.weight")
    placed: list[tuple[tuple[int, int], Tensor]] = []
    first: dict[str, int] = {}
    for index, tensor in enumerate(tensors):
        match = pattern.fullmatch(tensor.name)
        if match is None:
            placed.append(((index, 0), tensor))
            continue
        prefix, projection = match[1], match[2]
        place = first.setdefault(prefix, index)
        for expert in range(tensor.shape[0]):
            name = f"{prefix}{separate}.{expert}.{names[projection]}.weight"
            placed.append(((place, expert), take_row(tensor, expert, name)))
    return [tensor for _, tensor in sorted(placed, key=lambda entry: entry[0])]


def take_row(tensor: Tensor, row: int, name: str) -> Tensor:
    """One row of a tensor's first axis as a tensor of its own, with the same values."""
    shape = tensor.shape[1:]
    return replace(tensor, name=name, shape=shape, start=tensor.start + row * math.prod(shape))


# The config


def check_shape(shape: Config) -> None:
    """Refuse shapes that no model can have."""
    for key, value in shape.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UsageError(f"--{key.replace('_', '-')} must be at least 1")
    if shape["hidden_size"] % shape["heads"]:
        raise UsageError(f"--hidden-size {shape['hidden_size']} is not divisible by --heads {shape['heads']}")
    if shape["hidden_size"] // shape["heads"] % 2:
        raise UsageError("--hidden-size / --heads must be even, for the rotary embedding")
    if shape["heads"] % shape["kv_heads"]:
        raise UsageError(f"--heads {shape['heads']} is not divisible by --kv-heads {shape['kv_heads']}")
    if shape["experts_per_token"] > shape["experts"]:
        raise UsageError("--experts-per-token is larger than --experts")


def preset_config(shape: Config) -> Config:
    """Make the config of one of the architectures that the command line can shape."""
    check_shape(shape)
    model_type = shape["architecture"]
    config: Config = {
        "model_type": model_type,
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["hidden_size"] // shape["heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "vocab_size": shape["vocab_size"],
        "tie_word_embeddings": shape["tie_word_embeddings"],
    }
    return config | expert_config(shape)


def expert_config(shape: Config) -> Config:
    """The part of a config that only a mixture of experts has."""
    count, used = shape["experts"], shape["experts_per_token"]
    if shape["architecture"] == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": used}
    if shape["architecture"] == "qwen3_moe":
        sparse: Config = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
        sizes = {"moe_intermediate_size": shape["intermediate_size"], "num_experts": count, "num_experts_per_tok": used}
        return sparse | sizes
    return {}


def read_config(path: Path) -> Config:
    """Read a config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(f"{path} is not a model's config: it has no model_type")
    return config


def text_part(config: Config) -> Config:
    """The part of a config that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def quantization_settings(args: argparse.Namespace) -> Config | None:
    """The quantization asked for on the command line."""
    if args.quantize_bits is None:
        if args.group_size is not None:
            raise UsageError("--group-size needs --quantize-bits")
        return None
    group_size = args.group_size or 64
    if args.quantize_bits not in BITS or group_size not in GROUPS:
        raise UsageError(f"--quantize-bits is one of {BITS}, and --group-size one of {GROUPS}")
    return {"group_size": group_size, "bits": args.quantize_bits, "mode": "affine"}


def base_config(args: argparse.Namespace) -> Config:
    """The config that the arguments name, before dtype and quantization."""
    given_shape = {key: getattr(args, key) for key in SHAPE_DEFAULTS if getattr(args, key) is not None}
    if args.config is None:
        return preset_config(SHAPE_DEFAULTS | given_shape)
    if given_shape:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in given_shape)
        raise UsageError(f"{flags}: does not go with --config, whose shapes count")
    return read_config(args.config)


def choose_dtype(args: argparse.Namespace, config: Config) -> str:
    """The dtype asked for, or the config's own."""
    part = text_part(config)
    own = [holder.get(key) for holder in (config, part) for key in ("torch_dtype", "dtype")]
    dtype = args.dtype or next((name for name in own if name), "bfloat16")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise UsageError(f"unknown dtype {dtype!r}; one of bfloat16, float16, float32")
    return str(dtype)


def finish_config(args: argparse.Namespace) -> Config:
    """The config to write, complete but for what quantization adds per module."""
    config = base_config(args)
    config["torch_dtype"] = choose_dtype(args, config)
    for part in (config, text_part(config)):
        part.update(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    check_vocabulary(config)
    if "quantization" in config or "quantization_config" in config:
        raise UsageError("this config is of a quantized model. Hint: remove that part, and give --quantize-bits.")
    settings = quantization_settings(args)
    return config if settings is None else config | {"quantization": settings}


# The tokenizer


def grown_words(count: int, alphabet: list[str]) -> Iterator[tuple[str, str]]:
    """Yield merges of (known token, letter) that add one new token each: pairs first, then longer ones."""
    letters = list("etaoinshrdlucmfwypvbgkjqxz")
    tokens = ["Ġ", *letters] if "Ġ" in alphabet else letters
    while count > 0:
        merges = list(itertools.islice(((token, letter) for token in tokens for letter in letters), count))
        yield from merges
        count -= len(merges)
        tokens = [token + letter for token, letter in merges]


def make_tokenizer(vocab_size: int) -> Any:
    """Make a byte-level tokenizer with exactly one token for each row of the embedding."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = [*SPECIAL_TOKENS, *alphabet]
    merges = list(grown_words(vocab_size - len(base), alphabet))
    names = base + [left + right for left, right in merges]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config() -> Config:
    """The tokenizer_config.json of the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }


def vocabulary_size(config: Config) -> int:
    """The number of tokens of the model."""
    size = text_part(config).get("vocab_size", config.get("vocab_size"))
    if not isinstance(size, int):
        raise UsageError("this config does not say its vocab_size")
    return size


def check_vocabulary(config: Config) -> None:
    """Refuse a vocabulary without room for all bytes and the special tokens."""
    least, size = len(SPECIAL_TOKENS) + 256, vocabulary_size(config)
    if size < least:
        raise UsageError(f"the vocabulary needs at least {least} tokens; this model has {size}")


# The files


def write_file(path: Path, chunks: Iterable[Any]) -> None:
    """Write a file under another name and rename it, so that a killed run leaves nothing that looks complete."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    write_file(path, [json.dumps(value, indent=4).encode() + b"\n"])


def make_header(tensors: list[Tensor], metadata_format: str) -> bytes:
    """Make the head of a safetensors file whose data are the tensors in order."""
    ends = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=0)
    entries = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        for tensor, start in zip(tensors, ends, strict=False)
    }
    named = {"__metadata__": {"format": metadata_format}, **dict(sorted(entries.items()))}
    text = json.dumps(named, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def split_shards(tensors: list[Tensor], limit: float) -> list[list[Tensor]]:
    """Split tensors in order into shards of at most the limit, or of one tensor."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """File names of the shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def shuffled(tensors: list[Tensor]) -> list[Tensor]:
    """Order tensors like mlx's writer does: by a hash of their names."""
    return sorted(tensors, key=lambda tensor: hashlib.sha256(tensor.name.encode()).digest())


def write_weights(args: argparse.Namespace, tensors: list[Tensor]) -> int:
    """Write the shards and their index; returns the number of shards."""
    shards = split_shards(tensors, args.shard_size_gb * 1e9)
    names = shard_names(len(shards))
    metadata_format = "pt" if args.naming == "huggingface" else "mlx"
    with ThreadPoolExecutor(WORKERS) as pool:
        for name, shard in zip(names, shards, strict=True):
            ordered = shuffled(shard)
            body = make_all(args.seed, ordered, pool)
            write_file(args.out / name, itertools.chain([make_header(ordered, metadata_format)], body))
            if len(shards) > 1 and sys.stderr.isatty():
                print(f"wrote {name}", file=sys.stderr, flush=True)
    if len(shards) > 1:
        write_index(args.out, dict(zip(names, shards, strict=True)))
    return len(shards)


def write_index(out: Path, shards: dict[str, list[Tensor]]) -> None:
    """Write the index that says which shard holds which tensor."""
    places = {tensor.name: name for name, shard in shards.items() for tensor in shard}
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(out / "model.safetensors.index.json", index)


def prepare(out: Path, force: bool, nbytes: int) -> None:
    """Make the output folder; refuse to overwrite one in use, or to fill the disk."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a directory")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UsageError(f"{out} is not empty; --force overwrites the model in it")
    out.mkdir(parents=True, exist_ok=True)
    remove_model(out)
    free = shutil.disk_usage(out).free
    if nbytes > free:
        raise UsageError(f"the model needs {nbytes / 1e9:.2f} GB, and {out} has {free / 1e9:.2f} GB free")


def remove_model(out: Path) -> None:
    """Remove an earlier model's files, the config first: without it the rest is no model."""
    (out / "config.json").unlink(missing_ok=True)
    for pattern in ("model*.safetensors", "model.safetensors.index.json", "tokenizer*.json", ".*.partial"):
        for path in out.glob(pattern):
            path.unlink()


def create(args: argparse.Namespace) -> str:
    """Write the model that the arguments describe; returns a line about it."""
    plan = finish_config(args)
    tensors, config = list_tensors(plan, plan["torch_dtype"], args.routing_skew, args.seed)
    if args.naming == "huggingface":
        tensors = to_huggingface(tensors, config)
    tokenizer = make_tokenizer(vocabulary_size(config))
    size = sum(tensor.nbytes for tensor in tensors)
    prepare(args.out, args.force, size)
    began = time.monotonic()
    files = write_weights(args, tensors)
    write_file(args.out / "tokenizer.json", [tokenizer.to_str().encode()])
    write_json(args.out / "tokenizer_config.json", tokenizer_config())
    write_json(args.out / "config.json", config)
    seconds = time.monotonic() - began
    contents = f"{size / 1e9:.4g} GB, {len(tensors)} tensors, {files} files"
    return f"wrote {args.out}: {contents}, {seconds:.1f} seconds"


# The command line


def positive(text: str) -> float:
    """Read a number above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def not_negative(text: str) -> float:
    """Read a number of at least zero."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least zero")
    return value


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that shape a model without --config."""
    group = parser.add_argument_group("shape", "defaults: " + ", ".join(f"{k} {v}" for k, v in SHAPE_DEFAULTS.items()))
    group.add_argument("--architecture", choices=ARCHITECTURES)
    for name in ("layers", "hidden-size", "intermediate-size", "heads", "kv-heads", "vocab-size"):
        group.add_argument(f"--{name}", type=int, metavar="N")
    for name in ("experts", "experts-per-token"):
        group.add_argument(f"--{name}", type=int, metavar="N", help="for mixtral and qwen3_moe")
    group.add_argument("--tie-word-embeddings", action="store_true", default=None)
    group.add_argument("--config", type=Path, metavar="FILE", help="a config.json of any mlx-lm architecture instead")


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about values and files."""
    group = parser.add_argument_group("values and files")
    group.add_argument("--dtype", metavar="NAME", help="bfloat16 (default, or the config's), float16 or float32")
    group.add_argument("--quantize-bits", type=int, metavar="N", help="quantize to N bits")
    group.add_argument("--group-size", type=int, metavar="N", help="values per scale (default 64)")
    group.add_argument("--shard-size-gb", type=positive, default=1.0, metavar="GB", help="largest file (default 1)")
    group.add_argument("--naming", choices=["mlx", "huggingface"], default="mlx", help="whose tensor names")
    group.add_argument("--seed", type=int, default=0, metavar="N")
    group.add_argument(
        "--routing-skew",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="choose experts like a trained model seems to: how often falls with about the power X of the rank, "
        "neighbouring tokens share experts, each layer foretells the next one's. Synthetic: made up here, real models "
        "differ. Routers, embedding and head are not quantized then (default 0: routing by chance)",
    )
    group.add_argument("--force", action="store_true", help="overwrite the model in OUT")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    add_shape_arguments(parser)
    add_format_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit status.
    """
    try:
        print(create(parse(arguments)))
    except UsageError as error:
        print(f"make_random_model: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make_random_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
