"""Tests of published checkpoints, whose parameters mlx-lm partly computes while loading: streaming changes no bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_flash import FileChangedError, FlashLLM
from mlx_flash.convert import derived
from mlx_flash.convert.derived import derived_directory, derived_parameters, list_copies
from mlx_flash.convert.pack import ShardPlan, TensorSpec, cut
from mlx_flash.layout.load import load_lazily
from mlx_flash.storage.safetensors import read_checkpoint
from models import stock
from streamed import streamed_whole
from zoo import configuration
from zoo.compare import GENERATIONS, LONGEST_CALL, TURNS, find_difference, find_flaw, trace
from zoo.weights import VARIANTS, build

Weights = dict[str, mx.array]

Config = dict[str, Any]

CODES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.int64: "I64",
}


def write(directory: Path, config: Config, weights: Weights, fp8: frozenset[str] = frozenset()) -> None:
    """Write a checkpoint in two shards, as PyTorch programs do, with 8-bit floats as bytes, since MLX has none."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(weights)
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        arrays = {name: mx.contiguous(weights[name]) for name in part}
        mx.eval(list(arrays.values()))
        specs = [
            TensorSpec(name, "F8_E4M3" if name in fp8 else CODES[array.dtype], tuple(array.shape))
            for name, array in arrays.items()
        ]
        shard = ShardPlan(f"model-{i + 1:05}-of-00002.safetensors", specs, {"format": "pt"})
        shard.write(directory, lambda tensor, arrays=arrays: cut(memoryview(arrays[tensor.name])))  # type: ignore[misc]


def random_weights(config: Config, variant: str) -> Weights:
    """Return the parameters of a random model of mlx-lm."""
    return dict(tree_flatten(build(config, VARIANTS[variant]).parameters()))


def with_single_experts(weights: Weights, stack: str, single: str, names: dict[str, str]) -> Weights:
    """Split stacks of experts."""
    result = {}
    for name, array in weights.items():
        found = re.fullmatch(rf"(.*\.){re.escape(stack)}\.(\w+)\.(\w+)", name)
        if found is None:
            result[name] = array
            continue
        for i, expert in enumerate(array):
            result[f"{found[1]}{single}.{i}.{names[found[2]]}.{found[3]}"] = expert
    return result


PROJECTIONS = {name: name for name in ("gate_proj", "up_proj", "down_proj")}


def gemma3(directory: Path) -> None:
    config = configuration("gemma3")
    weights = random_weights(config, "bf16")
    write(directory, config, {**weights, "vision_tower.patches.weight": mx.ones((64, 64), mx.bfloat16)})


def mixtral(directory: Path) -> None:
    config = configuration("mixtral")
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    weights = random_weights(config, "fp32")
    write(
        directory,
        config,
        with_single_experts(weights, "block_sparse_moe.switch_mlp", "block_sparse_moe.experts", names),
    )


def qwen3_moe(directory: Path) -> None:
    config = configuration("qwen3_moe")
    weights = random_weights(config, "fp32")
    write(directory, config, with_single_experts(weights, "mlp.switch_mlp", "mlp.experts", PROJECTIONS))


DIRECT = {
    "gemma3": gemma3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}


def latent(weights: Weights) -> Weights:
    """Rename to DeepSeek's form: the halves of the latent projection are one tensor, experts are single tensors."""
    result = {}
    for name, array in weights.items():
        if name.endswith("embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            joined = mx.concatenate([array.swapaxes(-1, -2), values], axis=1)
            result[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            result[name] = array
    return with_single_experts(result, "mlp.switch_mlp", "mlp.experts", PROJECTIONS)


def deepseek_fp8(directory: Path) -> None:
    """Write a checkpoint without experts, since MLX's CPU back end multiplies experts in fp32 only."""
    config = {**configuration("deepseek_v3"), "first_k_dense_replace": 4}
    weights = latent(random_weights(config, "bf16"))
    linear = frozenset(name for name in weights if re.search(r"layers\.\d+\..*(_proj\w*)\.weight", name))
    assert len(linear) > 20
    result = dict(weights)
    for name in linear:
        rows, columns = (-(-n // 128) for n in weights[name].shape)
        scale = 2.0 ** mx.random.randint(-2, 3, (rows, columns)).astype(mx.float32)
        whole = mx.repeat(mx.repeat(scale, 128, 0), 128, 1)[: weights[name].shape[0], : weights[name].shape[1]]
        result[name] = mx.to_fp8(weights[name] / whole.astype(mx.bfloat16))
        result[f"{name}_scale_inv"] = scale
    write(directory, config, result, linear)


def kimi_int4(directory: Path) -> None:
    """Write a checkpoint without the experts' biases, which mlx-lm computes from their scales."""
    config = configuration("deepseek_v3")
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    result = {}
    for name, array in latent(random_weights(config, "fp32")).items():
        if ".experts." not in name:
            result[name] = array
            continue
        words, scales, _ = mx.quantize(array, group_size=32, bits=4)
        result[f"{name}_packed"] = words.view(mx.int32)
        result[f"{name}_scale"] = scales
        result[f"{name}_shape"] = mx.array(array.shape, mx.int64)
    write(directory, config, result)


def gpt_oss_weights(config: Config) -> Weights:
    """Interleave the rows of gate and up projections, as GPT-OSS does."""
    result = {}
    weights = random_weights(config, "fp32")
    for name, array in weights.items():
        if ".gate_proj." in name:
            other = weights[name.replace("gate_proj", "up_proj")]
            both = mx.stack([array, other], axis=2).reshape(array.shape[0], -1, *array.shape[2:])
            result[name.replace("gate_proj.bias", "gate_up_proj_bias").replace("gate_proj", "gate_up_proj")] = both
        elif ".up_proj." not in name:
            result[name.replace("down_proj.bias", "down_proj_bias")] = array
    return result


def gpt_oss_mxfp4(directory: Path) -> None:
    config = configuration("gpt_oss")
    config["quantization_config"] = {"quant_method": "mxfp4"}
    result = {}
    for name, array in gpt_oss_weights(config).items():
        if re.search(r"experts\.\w+\.weight", name):
            words, scales = mx.quantize(array, group_size=32, bits=4, mode="mxfp4")
            base = name.removesuffix(".weight")
            result[f"{base}_blocks"] = words.view(mx.uint8).reshape(*scales.shape, 16)
            result[f"{base}_scales"] = scales
        else:
            result[name] = array
    write(directory, config, result)


def llama4(directory: Path) -> None:
    config = configuration("llama4")
    weights = random_weights(config, "fp32")
    result: Weights = {"vision_model.patches.weight": mx.ones((64, 64))}
    for name, array in weights.items():
        if ".experts.gate_proj." in name:
            other = weights[name.replace("gate_proj", "up_proj")]
            both = mx.concatenate([array, other], axis=1)
            result[name.replace("gate_proj.weight", "gate_up_proj")] = both.swapaxes(1, 2)
        elif ".experts.down_proj." in name:
            result[name.removesuffix(".weight")] = array.swapaxes(1, 2)
        elif ".experts.up_proj." not in name:
            result[name] = array
    write(directory, config, result)


AWQ_ORDER = mx.array([0, 4, 1, 5, 2, 6, 3, 7])


def pack_awq(numbers: mx.array) -> mx.array:
    """Pack eight 4-bit numbers into a word, in the order of AutoAWQ's kernels."""
    rows, columns = numbers.shape
    words = (numbers.reshape(rows, columns // 8, 8).astype(mx.uint32) << (4 * AWQ_ORDER)).sum(axis=-1)
    return words.astype(mx.uint32).view(mx.int32)


def autoawq(method: str, has_zeros: bool) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        config = {**configuration("llama"), "num_hidden_layers": 2}
        config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
        result: Weights = {}
        for name, array in random_weights(config, "fp16").items():
            if not re.search(r"layers\.\d+\..*_proj\.weight", name):
                result[name] = array
                continue
            base, (rows, columns) = name.removesuffix(".weight"), array.shape
            result[f"{base}.qweight"] = pack_awq(mx.random.randint(0, 16, (columns, rows)))
            result[f"{base}.scales"] = (0.01 + 0.01 * mx.random.uniform(shape=(columns // 32, rows))).astype(mx.float16)
            if has_zeros:
                result[f"{base}.qzeros"] = pack_awq(mx.random.randint(6, 10, (columns // 32, rows)))
        write(directory, config, result)

    return make


SOME = TURNS[1]
"""Generations that are compared: where bytes come from is the same for all. `test_zoo` runs all of them."""

DERIVED = {
    "deepseek_v3-fp8": deepseek_fp8,
    "kimi-int4": kimi_int4,
    "gpt_oss-mxfp4": gpt_oss_mxfp4,
    "llama4": llama4,
    "awq": autoawq("awq", True),
    "gptq": autoawq("gptq", False),
}


@pytest.fixture(autouse=True)
def _tiny_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(derived, "LEAST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def never(*args: Any) -> Any:
    raise AssertionError("computed again")


@pytest.fixture
def streamed(tmp_path: Path) -> Iterator[Callable[..., FlashLLM]]:
    opened: list[FlashLLM] = []

    def load(directory: Path) -> FlashLLM:
        model = streamed_whole(directory, tile_rows=64)
        opened.append(model)
        model.plan = replace(model.plan, prefill_step_size=LONGEST_CALL)  # longer calls are cut
        return model

    yield load
    for model in opened:
        model.close()


def records(model: FlashLLM) -> dict[str, set[Path]]:
    """Return the files that each streamed parameter is read from."""
    return {p.name: {record.path for record in p.records} for unit in model.layout.units for p in unit.large}


def expected_of(directory: Path) -> list[Any]:
    model: nn.Module = stock(directory)
    expected = trace(model, numbers=SOME)
    assert not find_flaw(expected[0])
    return expected


@pytest.mark.parametrize("name", DIRECT)
def test_renamed_and_stacked_tensors_are_read_in_place(
    name: str, tmp_path: Path, streamed: Callable[..., FlashLLM]
) -> None:
    DIRECT[name](tmp_path / "model")
    expected = expected_of(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    assert not derived_parameters(load_lazily(tmp_path / "model", checkpoint))
    model = streamed(tmp_path / "model")
    assert not find_difference(expected, trace(model, numbers=SOME))
    assert not list_copies()
    assert set().union(*records(model).values()) <= {shard.path for shard in checkpoint.shards}


@pytest.mark.parametrize("name", DERIVED)
def test_computed_tensors_are_streamed_from_a_copy(
    name: str, tmp_path: Path, streamed: Callable[..., FlashLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    DERIVED[name](directory)
    expected = expected_of(directory)
    computed = {p.spec.name for p in derived_parameters(load_lazily(directory, read_checkpoint(directory)))}
    assert computed

    model = streamed(directory)
    assert not find_difference(expected, trace(model, numbers=SOME))
    (copy,) = list_copies()
    assert copy.is_complete and copy.source == str(directory)
    sources = records(model)
    from_copy = {name for name, paths in sources.items() if {path.parent for path in paths} == {copy.folder}}
    assert from_copy == computed & sources.keys()
    assert from_copy

    monkeypatch.setattr(derived, "compute", never)
    again, last = streamed(directory), trace(model, GENERATIONS[-1:])
    assert not find_difference(expected[-len(last) :], last)
    assert not find_difference(last, trace(again, GENERATIONS[-1:]))
    assert [each.folder for each in list_copies()] == [copy.folder]
    assert not find_difference(last, trace(again.close(), GENERATIONS[-1:]))
    assert not derived_parameters(again._life.prepared.loaded)

    for path in derived_directory().glob("*/*.safetensors"):
        path.unlink()
    with pytest.raises(FileChangedError, match=re.escape(str(copy.folder))):
        trace(model, numbers=SOME)
