"""Tests of published checkpoints, whose parameters mlx-lm partly computes while loading: streaming changes no bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
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
from zoo.compare import GENERATIONS, TURNS, difference_in, find_difference, find_flaw, trace
from zoo.weights import VARIANTS, build

Weights = dict[str, mx.array]

Config = dict[str, Any]


def write(directory: Path, config: Config, weights: Weights, fp8: frozenset[str] = frozenset()) -> None:
    """Write a checkpoint in two shards, as PyTorch programs do, with 8-bit floats as bytes, since MLX has none."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(weights)
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        arrays = {name: mx.contiguous(weights[name]) for name in part}
        mx.eval(list(arrays.values()))
        specs = [
            TensorSpec(name, "F8_E4M3" if name in fp8 else derived._DTYPES[array.dtype], tuple(array.shape))
            for name, array in arrays.items()
        ]
        shard = ShardPlan(f"model-{i + 1:05}-of-00002.safetensors", specs, {"format": "pt"})
        shard.write(directory, lambda tensor, arrays=arrays: cut(memoryview(arrays[tensor.name])))  # type: ignore[misc]


def random_weights(config: Config, variant: str) -> Weights:
    """Return the parameters of a random model of mlx-lm."""
    return dict(tree_flatten(build(config, VARIANTS[variant]).parameters()))


def gemma3(directory: Path) -> None:
    config = configuration("gemma3")
    weights = random_weights(config, "bf16")
    write(directory, config, {**weights, "vision_tower.patches.weight": mx.ones((64, 64), mx.bfloat16)})


def mixtral(directory: Path) -> None:
    config, result = configuration("mixtral"), Weights()
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, array in random_weights(config, "fp32").items():
        if found := re.fullmatch(r"(.*\.block_sparse_moe)\.switch_mlp\.(\w+)\.weight", name):
            result |= {f"{found[1]}.experts.{i}.{names[found[2]]}.weight": expert for i, expert in enumerate(array)}
        else:
            result[name] = array
    write(directory, config, result)


def latent(weights: Weights) -> Weights:
    """Rename to DeepSeek's form: the halves of the latent projection are one tensor."""
    result = {}
    for name, array in weights.items():
        if name.endswith("embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            joined = mx.concatenate([array.swapaxes(-1, -2), values], axis=1)
            result[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            result[name] = array
    return result


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


AWQ_ORDER = mx.array([0, 4, 1, 5, 2, 6, 3, 7])


def pack_awq(numbers: mx.array) -> mx.array:
    """Pack eight 4-bit numbers into a word, in the order of AutoAWQ's kernels."""
    rows, columns = numbers.shape
    words = (numbers.reshape(rows, columns // 8, 8).astype(mx.uint32) << (4 * AWQ_ORDER)).sum(axis=-1)
    return words.astype(mx.uint32).view(mx.int32)


def awq(directory: Path) -> None:
    config = {**configuration("llama"), "num_hidden_layers": 2}
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    result: Weights = {}
    for name, array in random_weights(config, "fp16").items():
        if not re.search(r"layers\.\d+\..*_proj\.weight", name):
            result[name] = array
            continue
        base, (rows, columns) = name.removesuffix(".weight"), array.shape
        result[f"{base}.qweight"] = pack_awq(mx.random.randint(0, 16, (columns, rows)))
        result[f"{base}.scales"] = (0.01 + 0.01 * mx.random.uniform(shape=(columns // 32, rows))).astype(mx.float16)
        result[f"{base}.qzeros"] = pack_awq(mx.random.randint(6, 10, (columns // 32, rows)))
    write(directory, config, result)


SOME = TURNS[1]
"""Generations that are compared: where bytes come from is the same for all. `test_zoo` runs all of them."""


@pytest.fixture(autouse=True)
def _tiny_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(derived, "LEAST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def streamed() -> Iterator[Callable[..., FlashLLM]]:
    with ExitStack() as stack:
        yield lambda directory: stack.enter_context(streamed_whole(directory, tile_rows=64))


def records(model: FlashLLM) -> dict[str, set[Path]]:
    """Return the files that each streamed parameter is read from."""
    return {p.name: {record.path for record in p.records} for unit in model.layout.units for p in unit.large}


def expected_of(directory: Path) -> list[Any]:
    expected = trace(stock(directory), numbers=SOME)
    assert not find_flaw(expected[0])
    return expected


@pytest.mark.parametrize("save", [gemma3, mixtral])
def test_renamed_and_stacked_tensors_are_read_in_place(
    save: Callable[[Path], None], tmp_path: Path, streamed: Callable[..., FlashLLM]
) -> None:
    save(tmp_path / "model")
    expected = expected_of(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    assert not derived_parameters(load_lazily(tmp_path / "model", checkpoint))
    model = streamed(tmp_path / "model")
    assert not difference_in(model, expected, SOME)
    assert not list_copies()
    assert set().union(*records(model).values()) <= {shard.path for shard in checkpoint.shards}


@pytest.mark.parametrize("save", [deepseek_fp8, awq])
def test_computed_tensors_are_streamed_from_a_copy(
    save: Callable[[Path], None], tmp_path: Path, streamed: Callable[..., FlashLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    save(directory)
    expected = expected_of(directory)
    computed = {p.spec.name for p in derived_parameters(load_lazily(directory, read_checkpoint(directory)))}
    assert computed

    model = streamed(directory)
    assert not difference_in(model, expected, SOME)
    (copy,) = list_copies()
    assert copy.is_complete and copy.source == str(directory)
    sources = records(model)
    from_copy = {name for name, paths in sources.items() if {path.parent for path in paths} == {copy.folder}}
    assert from_copy == computed & sources.keys()
    assert from_copy

    monkeypatch.setattr(derived, "compute", lambda *_: pytest.fail("computed again"))
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
