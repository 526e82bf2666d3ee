"""Tiny random models on disk, and the output of stock mlx-lm for them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from children import ROOT

MAKE_RANDOM_MODEL = ROOT / "scripts" / "make_random_model.py"
VOCAB_SIZE = 1000
Computed = TypeVar("Computed", bound=Callable[..., Any])

TINY: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
TINY |= {"vocab_size": VOCAB_SIZE, "rope_theta": 1e4, "tie_word_embeddings": False}

LLAMA = TINY | {"model_type": "llama", "num_hidden_layers": 5, "intermediate_size": 352}

NARROW_LLAMA = LLAMA | {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32}
"""The same layers and cache with a third of the weights, for tests of many passes."""

WIDE_LLAMA = LLAMA | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
WIDE_LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4}
"""0.08 GB in fp32."""

GEMMA3 = TINY | {"model_type": "gemma3_text", "num_hidden_layers": 6, "intermediate_size": 256, "head_dim": 32}
GEMMA3 |= {"sliding_window": 8, "sliding_window_pattern": 3}

MAMBA2: dict[str, Any] = {"model_type": "mamba2", "num_hidden_layers": 4, "num_heads": 8, "head_dim": 32}
MAMBA2 |= {"hidden_size": 128, "vocab_size": VOCAB_SIZE, "state_size": 16}
MAMBA2 |= {"layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "n_groups": 1, "use_bias": False}
MAMBA2 |= {"use_conv_bias": True, "tie_word_embeddings": True, "time_step_limit": (0.0, 100.0)}
MAMBA2 |= {"time_step_rank": "auto", "chunk_size": 16, "ssm_state_size": 16, "intermediate_size": 256}

QWEN3_MOE = TINY | {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96}
QWEN3_MOE |= {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
QWEN3_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_position_embeddings": 512}

MIXTRAL = TINY | {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 100}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}


@functools.cache
def random_model_script() -> ModuleType:
    """Return ``scripts/make_random_model.py`` as a module."""
    return script("make_random_model")


def script(name: str) -> ModuleType:
    """Return a program of ``scripts/`` as a module."""
    spec = importlib.util.spec_from_file_location(name, MAKE_RANDOM_MODEL.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def load_benchmark(name: str) -> Any:
    """Import a module of ``benchmarks/``, whose modules import each other by their plain names."""
    if (folder := str(ROOT / "benchmarks")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def make_random_model(directory: Path, *arguments: str) -> Path:
    """Write a model with ``scripts/make_random_model.py``, in this process, which has imported mlx-lm already."""
    stderr = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
        status = random_model_script().main([str(directory), *arguments])
    assert status == 0, stderr.getvalue()
    return directory


def build(config: dict[str, Any], dtype: mx.Dtype = mx.float32, bits: int | None = None) -> nn.Module:
    """Return a random model of mlx-lm; with ``bits`` set, quantized."""
    mx.random.seed(7)
    model_class, args_class = mlx_lm_utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda a: (0.05 * mx.random.normal(a.shape)).astype(dtype), model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    mx.eval(model.parameters())
    return model


def save_initialised(directory: Path, config: dict[str, Any]) -> Path:
    """Write a model with the weights that mlx-lm gives a new one. Unlike those of :func:`save`, states matter to it."""
    mx.random.seed(7)
    model_class, args_class = mlx_lm_utils._get_classes(config)
    weights = dict(tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


def save(
    directory: Path,
    config: dict[str, Any],
    dtype: mx.Dtype = mx.float32,
    *,
    bits: int | None = None,
    num_shards: int = 1,
    header_shift: int = 0,
) -> Path:
    """Write a random model. Every tensor starts ``header_shift`` bytes past a multiple of 64, as in files by mlx."""
    mx.random.seed(7)
    saved = _saved(json.dumps(config), dtype, bits, num_shards, header_shift)
    return Path(shutil.copytree(saved, directory, dirs_exist_ok=True, copy_function=shutil.copyfile))


@functools.cache
def _saved(config_json: str, dtype: mx.Dtype, bits: int | None, num_shards: int, header_shift: int) -> Path:
    """Return a directory with a model that :func:`save` copies: random numbers take ten times as long as a copy."""
    directory, config = Path(tempfile.mkdtemp(dir=_kept_models())), json.loads(config_json)
    model = build(config, dtype, bits)
    weights = dict(tree_flatten(model.parameters()))
    (directory / "config.json").write_text(json.dumps(config))
    names = list(weights)
    for i in range(num_shards):
        name = "model.safetensors" if num_shards == 1 else f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        shard = {key: weights[key] for key in names[i::num_shards]}
        mx.save_safetensors(str(directory / name), shard, {"format": "mlx"})
        pad_header(directory / name, header_shift)
    return directory


@functools.cache
def _kept_models() -> str:
    """Return a directory that is removed when the process ends."""
    directory = tempfile.mkdtemp(prefix="models-")
    # Not by atexit, which a child that was forked skips.
    util.Finalize(None, shutil.rmtree, [directory], {"ignore_errors": True}, exitpriority=1)
    return directory


def pad_header(path: Path, shift: int) -> None:
    """Rewrite a safetensors file so that its data begins ``shift`` bytes past a multiple of 64."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padding = (shift - 8 - length) % 64
    header = data[8 : 8 + length] + b" " * padding
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def stock(directory: Path) -> nn.Module:
    """Load a model with mlx-lm, in memory."""
    return mlx_lm_utils.load_model(directory)[0]


def run(model: Any, chunks: Sequence[Sequence[int]]) -> list[mx.array]:
    """Return the logits of successive forward calls on one prompt cache."""
    vocab_size = getattr(getattr(model, "args", None), "vocab_size", VOCAB_SIZE)
    # MLX reads memory beyond an embedding for such a token, so a comparison would depend on what lies there.
    assert max(map(max, chunks)) < vocab_size, f"a token of {chunks} is beyond the vocabulary of {vocab_size}"
    num_positions = getattr(getattr(model, "args", None), "n_positions", sum(map(len, chunks)))
    assert sum(map(len, chunks)) <= num_positions, f"{chunks} are beyond the table of {num_positions} positions"
    cache = make_prompt_cache(model)
    outputs = []
    for chunk in chunks:
        outputs.append(model(mx.array([list(chunk)]), cache=cache))
        mx.eval(outputs[-1], [entry.state for entry in cache])
    return outputs


def computed(model: Any, tokens: mx.array, cache: list[Any], step: int = 2048) -> mx.array:
    """Compute new tokens with a streamed model, in one pass if memory allows. Return the logits of the last one."""
    row = model.row(tokens, cache, step)
    while not row.is_done:
        model.advance([row])
    if row.error is not None:
        raise row.error
    return cast(mx.array, row.outputs[-1])


def guessed(model: Any, tokens: list[int], cache: list[Any]) -> Any:
    """Compute a token and guesses with a streamed model in one pass. Return the row, which takes guesses back."""
    row = model.row(mx.array([tokens]), cache, 2048, num_guesses=len(tokens) - 1)
    model.advance([row])
    if row.error is not None:
        raise row.error
    mx.eval(row.outputs)
    return row


def computed_once(function: Computed) -> Computed:
    """Keep the results of a function for numbers, paths and lists of numbers. With samplers and the like, call it."""
    kept: dict[Any, Any] = {}

    @functools.wraps(function)
    def look_up(*args: Any, **options: Any) -> Any:
        given = [tuple(value) if isinstance(value, list) else value for value in (*args, *options.values())]
        if not all(isinstance(value, int | Path | tuple) for value in given):
            return function(*args, **options)
        key = (*given, *options)
        if key not in kept:
            kept[key] = function(*args, **options)
        return kept[key]

    return cast(Computed, look_up)


PREFILL_AND_DECODE = ([5, 17, 900, 3, 3, 42, 64, 99, 128, 7, 21], [12], [999], [0], [512, 4, 8])


def same_bits(left: Sequence[mx.array], right: Sequence[mx.array]) -> bool:
    """Return True when all arrays are equal bit for bit, and finite."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b)) and bool(mx.isfinite(a).all())
        for a, b in zip(left, right, strict=True)
    )
