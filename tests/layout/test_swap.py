"""Modules that are put back as they were before calls."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.layout.swap import SwappedClass, holdings, remember, swap_class


class Tables(nn.Module):
    """A module that adds to its containers, as some compute tables of positions once for each length."""

    copy = None  # a name that the class answers before any child does

    def __init__(self) -> None:
        super().__init__()
        self.tables = {1: mx.zeros(1)}
        self.lengths = {1}
        self._calls = [1]
        self.weight = mx.ones(3)
        self["copy"] = nn.Identity()

    def __call__(self, x: mx.array) -> mx.array:
        self.tables[x.size] = x
        self.lengths.add(x.size)
        self._calls.append(x.size)
        return x


def test_what_calls_add_to_containers_goes() -> None:
    module = Tables()
    put_back, before = remember([module]), holdings(module)
    containers = [module.tables, module.lengths, module._calls]
    module(mx.ones(3))
    assert holdings(module) != before
    for _ in range(2):
        put_back()
        assert [list(container) for container in containers] == [[1], [1], [1]]
        assert module.tables is containers[0] and holdings(module) == before


def test_the_state_of_a_swapped_class_goes() -> None:
    module = Tables()
    put_back, before = remember([module]), dict(vars(module))
    swap_class(module, SwappedClass, "state")
    put_back()
    assert vars(module) == before
