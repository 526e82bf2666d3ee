"""The private parts of MLX and mlx-lm that are relied on exist; where one is missing, an error says so."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import utils
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.models.switch_layers import SwitchGLU

from children import ROOT
from mlx_flash import CompatibilityError
from mlx_flash.compat.arrays import CHANGING, result_bytes, tape_of, wrapped_functions
from mlx_flash.compat.require import TESTED


def test_ci_runs_the_oldest_and_the_newest_release() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r'mlx-lm: \[?"([\d.]+)"', workflow)) == set(TESTED["mlx-lm"])


def call(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    return x


def initialize(self: BatchGenerator) -> None:
    self._unprocessed_sequences, self._counters, self.prefill_batch_size = [], None, 1


IS_MISSING = "{} is missing in the installed mlx-lm.*mlx-lm " + " to ".join(TESTED["mlx-lm"])
CHANGES: list[tuple[str, Any, str, Any, str]] = [
    ("loaders", utils, "_download", None, IS_MISSING),
    ("callers", utils, "save_model", None, IS_MISSING),
    ("caches", KVCache, "to_quantized", None, IS_MISSING),
    ("arrays", mx, "concatenate", None, IS_MISSING),
    ("loaders", utils, "_download", lambda name: name, r"_download\(\) takes no parameter '"),
    ("expertstacks", SwitchGLU, "__call__", call, "SwitchGLU does not sort from 64 indices on"),
    ("caches", BatchKVCache, "__init__", lambda self, left_padding: None, "lacks one of _idx, left_padding, offset"),
    ("generation", BatchGenerator, "__init__", initialize, "BatchGenerator sets no completion_batch_size"),
]
"""A module, what it relies on, what that is replaced by, or removed, and words of the error."""


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Puts the modules of ``compat`` back, which a test imports anew."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("mlx_flash.compat")}
    yield
    for name in [name for name in sys.modules if name.startswith("mlx_flash.compat")]:
        del sys.modules[name]
    sys.modules.update(before)


def import_anew(name: str) -> None:
    sys.modules.pop(f"mlx_flash.compat.{name}", None)
    importlib.import_module(f"mlx_flash.compat.{name}")


@pytest.mark.parametrize(("name", "owner", "attribute", "change", "words"), CHANGES)
def test_a_part_that_is_missing_or_another_is_named(
    name: str, owner: Any, attribute: str, change: Any, words: str, reloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change is None:
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, change)
    with pytest.raises(CompatibilityError, match=words.format(attribute)):
        import_anew(name)


def test_pyproject_has_the_tested_bounds() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, (oldest, newest) in TESTED.items():
        bounds = re.findall(rf'"{name}(?:\[\w+\])?>=([\d.]+),<([\d.]+)', text)
        assert bounds
        for lower, upper in bounds:
            assert release(lower) == release(oldest)
            assert release(newest) < release(upper) <= (release(newest)[0], release(newest)[1] + 1, 0)


def release(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".")]
    return (*numbers, 0, 0)[:3]


def test_wrapped_functions_are_put_back_after_an_error() -> None:
    before = mx.stack, mx.concatenate, mx.split, mx.array.view, mx.array.reshape, mx.array.flatten
    names = []
    with (
        pytest.raises(ZeroDivisionError),
        wrapped_functions(lambda name, function: names.append(name) or partial(function)),
    ):
        raise ZeroDivisionError
    assert {"__setitem__", "__iadd__", "__itruediv__"} < {name for name in names if name in CHANGING}
    others = {"concatenate", "contiguous", "flatten", "reshape", "split", "stack", "view"}
    assert set(names) - set(CHANGING) == others
    assert before == (mx.stack, mx.concatenate, mx.split, mx.array.view, mx.array.reshape, mx.array.flatten)


# --- MLX's record of operations ---------------------------------------------------------------------------------------


class OwnAttention(nn.Module):
    """Attention with scores of its own."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(width, 3 * width), nn.Linear(width, width), num_heads

    def __call__(self, x: mx.array) -> mx.array:
        parts = mx.split(self.qkv(x), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3) for part in parts)
        scores = mx.softmax(q @ k.swapaxes(-1, -2) * 0.1, axis=-1)
        return self.out((scores @ v).transpose(0, 2, 1, 3).reshape(x.shape))


def taken(module: nn.Module, x: mx.array) -> int:
    mx.eval(module.parameters(), x)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(module(x))
    return int(mx.get_peak_memory() - before)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="other back ends have other kernels")
@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.parametrize("kind", ["own", "convolution"])
def test_a_record_foretells_what_results_take(kind: str, length: int) -> None:
    module, shape = OwnAttention(256, 8), (1, length, 256)
    if kind == "convolution":
        module, shape = nn.Conv2d(3, 256, 14, 14), (1, 448, 14 * length // 32, 3)
    found = result_bytes(tape_of(module, [mx.broadcast_to(mx.zeros(()), shape)]))
    needed = taken(module, mx.random.normal(shape))
    assert found == pytest.approx(needed, rel=0.5) and found * 1.25 >= needed


def test_views_and_weights_take_nothing() -> None:
    weight = mx.broadcast_to(mx.zeros(()), (512, 512))
    x = mx.zeros((8, 512))
    assert result_bytes(tape_of(lambda x: x.reshape(2, 4, 512)[1:].swapaxes(0, 1), [x])) == 0
    assert result_bytes(tape_of(lambda x: x @ weight.T, [x])) == 8 * 512 * 4 + 4  # and one zero


def test_looking_at_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="eval"):
        tape_of(lambda x: x * x.sum().item(), [mx.zeros((2,))])
