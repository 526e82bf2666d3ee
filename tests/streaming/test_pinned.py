"""Layers in memory: those that calls wait for where there is a GPU, which works far behind, and linear ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_flash.streaming import layers
from mlx_flash.streaming.layers import PinnedLayers


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
