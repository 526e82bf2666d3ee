"""Modules that are put back as they were before calls."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_flash.layout.swap import clone_tree, clone_with, expose_children, holdings, remember, restore_class


class Tables(nn.Module):
    """A module that adds to its containers, as some compute tables of positions once for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {1: mx.zeros(1)}
        self.lengths = {1}
        self._calls = [1]

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


class Twice(nn.Module):
    """A child."""

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * x


class Parent(nn.Module):
    copy = None  # a name that the class answers before any child does

    def __init__(self) -> None:
        super().__init__()
        self.child = Twice()
        self["copy"] = Twice()
        self.weight = mx.ones(3)

    def __call__(self, x: mx.array) -> mx.array:
        return self.child(x)


class Half(nn.Module):
    """Another child."""

    def __call__(self, x: mx.array) -> mx.array:
        return x / 2


def test_the_state_of_a_swapped_class_goes() -> None:
    module = Parent()
    put_back, before = remember([module]), dict(vars(module))
    expose_children(module)
    put_back()
    assert vars(module) == before


WRITES: dict[str, Callable[[Any, nn.Module], object]] = {
    "set": lambda parent, other: setattr(parent, "child", other),
    "set as an item": lambda parent, other: operator.setitem(parent, "child", other),
    "update of modules": lambda parent, other: parent.update_modules({"child": other}),
    "update in place": lambda parent, other: operator.ior(parent, {"child": other}),
    "delete, and set": lambda parent, other: (delattr(parent, "child"), setattr(parent, "child", other)),
    "pop, and set": lambda parent, other: (parent.pop("child"), parent.setdefault("child", other)),
    "clear, and set": lambda parent, other: (parent.clear(), operator.setitem(parent, "child", other)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_exposed_child_can_be_replaced(write: Callable[[Any, nn.Module], object]) -> None:
    parent, other = Parent(), Half()
    put_back = remember([parent])
    expose_children(parent)
    assert vars(parent)["child"] is parent["child"] and "copy" not in vars(parent)
    assert type(parent).__name__ == "Parent" and parent(mx.array(8)).item() == 16
    write(parent, other)
    assert parent(mx.array(8)).item() == 4
    restore_class(parent)
    put_back()
    assert type(parent) is Parent and "child" not in vars(parent) and parent(mx.array(8)).item() == 16


def test_a_copy_of_exposed_children_has_its_own() -> None:
    parent = Parent()
    expose_children(parent)
    clone = clone_tree(parent, {})
    assert clone.child is clone["child"] is not parent.child
    for other in (copy.deepcopy(parent), copy.copy(parent), pickle.loads(pickle.dumps(parent))):
        assert type(other) is Parent and "child" not in vars(other) and other(mx.array(8)).item() == 16
    assert copy.deepcopy(parent).child is not parent.child is copy.copy(parent).child


def test_attributes_that_are_no_children_stay() -> None:
    parent = Parent()
    expose_children(parent)
    friend = Twice()
    object.__setattr__(parent, "friend", friend)
    parent.child = Half()
    assert vars(parent)["friend"] is friend and clone_with(parent, {}).friend is friend
