"""Layers in memory: those that calls wait for where there is a GPU, which works far behind, and linear ones."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_flash import load_model
from mlx_flash.layout.swap import expose_children, restore_class
from mlx_flash.streaming import layers
from mlx_flash.streaming.layers import PinnedLayers, TransposedLinear, transpose_once
from models import LLAMA, PREFILL_AND_DECODE, run, same_bits, save, stock
from streamed import LARGE_GB, config


class Layer(nn.Module):
    """A layer with a child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.linear(x)


@pytest.fixture
def pinned() -> PinnedLayers:
    found = PinnedLayers()
    found.modules += [Layer() for _ in range(7)]
    for module in found.modules[:4]:
        expose_children(module)
    return found


def waits(pinned: PinnedLayers, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the layers after which a call waits, and check its result."""
    x, seen, position = mx.ones(4), [], 0
    with monkeypatch.context() as patch:
        patch.setattr(layers, "compute", lambda *roots: seen.append(position))
        y = expected = x
        for position, module in enumerate(pinned.modules, 1):  # noqa: B007  (the function above has it)
            y, expected = module(y), expected + module.linear(expected)
    assert mx.array_equal(y, expected)
    return seen


def test_a_call_waits_after_so_many_layers(pinned: PinnedLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [type(module) for module in pinned.modules]
    for number in (None, 3, 2, 2, None, 1, 7, None):
        pinned.compute_at_once(number)
        assert waits(pinned, monkeypatch) == [i for i in range(1, 8) if number and i % number == 0]
    assert [type(module) for module in pinned.modules] == kinds


@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, 3), (2, None)])
def test_an_interrupted_change_is_made_whole(
    pinned: PinnedLayers, monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None
) -> None:
    kinds = [type(module) for module in pinned.modules]
    pinned.compute_at_once(before)
    num_changes = 0

    def interrupted(change: Any) -> Any:
        def changed(*args: Any) -> None:
            nonlocal num_changes
            num_changes += 1
            if num_changes == 2:
                raise KeyboardInterrupt
            change(*args)

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(layers, "swap_class", interrupted(layers.swap_class))
        patch.setattr(layers, "restore_class", interrupted(layers.restore_class))
        with pytest.raises(KeyboardInterrupt):
            pinned.compute_at_once(after)
    pinned.compute_at_once(before)
    assert waits(pinned, monkeypatch) == [i for i in range(1, 8) if before and i % before == 0]
    pinned.compute_at_once(None)
    assert [type(module) for module in pinned.modules] == kinds


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_transposed_layer_computes_the_same_bits(has_bias: bool, dtype: mx.Dtype) -> None:
    linear, x = nn.Linear(96, 40, bias=has_bias), mx.random.normal((3, 5, 96)).astype(dtype)
    linear.set_dtype(dtype)
    for rows in (x, x[:1, :1]):
        own = linear(rows)
        transpose_once(linear)
        assert isinstance(linear, TransposedLinear)
        assert mx.array_equal(linear(rows), own)
        restore_class(linear)
    assert type(linear) is nn.Linear and not vars(linear).keys() - vars(nn.Linear(1, 1)).keys()


def test_a_transposed_layer_takes_no_memory_and_its_weight_may_be_replaced() -> None:
    linear, x = nn.Linear(512, 512), mx.ones((1, 512))
    mx.eval(linear.parameters(), x)
    before = mx.get_active_memory()
    transpose_once(linear)
    assert mx.get_active_memory() - before < 4096
    linear.weight = mx.eye(512)
    linear.bias = mx.zeros(512)
    assert mx.array_equal(linear(x), x)
    copy = deepcopy(linear)
    assert type(copy) is nn.Linear and mx.array_equal(copy(x), x)


def _through_a_tree(linear: Any) -> None:
    parameters = linear.parameters()
    parameters["weight"] *= 2
    linear.update(parameters)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a row": lambda linear: operator.setitem(linear.weight, 0, mx.ones(96)),
    "multiplied": lambda linear: setattr(linear, "weight", operator.imul(linear.weight, 2)),
    "as an item": lambda linear: operator.iadd(linear["weight"], 1),
    "got with a default": lambda linear: operator.iadd(linear.get("weight", None), 1),
    "taken out": lambda linear: linear.setdefault("weight", operator.iadd(linear.pop("weight"), 1)),
    "update in place": lambda linear: operator.ior(linear, {"weight": mx.ones((40, 96))}),
    "tree of parameters": _through_a_tree,
    "loaded": lambda linear: linear.load_weights([("weight", mx.ones((40, 96)))], strict=False),
    "bias": lambda linear: operator.setitem(linear.bias, 0, 7),
    "no bias": lambda linear: setattr(linear, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_transposed_layer_follows_a_weight_that_is_changed(change: str) -> None:
    linear, x = nn.Linear(96, 40), mx.random.normal((1, 2, 96))
    mx.eval(linear.parameters(), x)
    own, before = deepcopy(linear), linear(x)
    transpose_once(linear)
    for module in (linear, own):
        CHANGES[change](module)
    assert not mx.array_equal(linear(x), before) and mx.array_equal(linear(x), own(x))


def test_other_uses_of_a_transposed_layer_leave_it_transposed() -> None:
    linear = nn.Linear(96, 40)
    own = repr(linear)
    transpose_once(linear)
    linear.eval()
    linear.freeze()
    assert repr(linear) == own and type(deepcopy(linear)) is nn.Linear
    assert linear.bias.shape == (40,) and not hasattr(linear, "scales") and linear.parameters()
    assert isinstance(linear, TransposedLinear)


def test_other_layers_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    for module in (Doubled(8, 8), nn.QuantizedLinear(64, 64), nn.Embedding(8, 8)):
        transpose_once(module)
        assert not isinstance(module, TransposedLinear)


def test_the_linear_layers_of_a_model_in_memory_are_transposed(tmp_path: Path) -> None:
    save(tmp_path, LLAMA)
    with load_model(tmp_path, config(ram_budget_gb=LARGE_GB))[0] as model:
        layer = model.layers[0]
        found = run(model, PREFILL_AND_DECODE)
        assert isinstance(layer.self_attn.q_proj, TransposedLinear) and isinstance(layer.mlp.up_proj, TransposedLinear)
    assert type(layer.self_attn.q_proj) is nn.Linear
    assert same_bits(found, run(stock(tmp_path), PREFILL_AND_DECODE))
