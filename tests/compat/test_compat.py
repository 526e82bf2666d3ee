"""The private parts of MLX and mlx-lm that are relied on exist; where one is missing, an error says so."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import utils
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.models.switch_layers import SwitchGLU

from children import ROOT
from mlx_flash import CompatibilityError, compat
from mlx_flash.compat.arrays import CHANGING, wrapped_functions
from mlx_flash.compat.require import TESTED, require

MODULES = sorted(path.stem for path in Path(compat.__path__[0]).glob("*.py") if path.stem != "__init__")


def test_ci_runs_the_oldest_and_the_newest_release() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r'mlx-lm: \[?"([\d.]+)"', workflow)) == set(TESTED["mlx-lm"])


MISSING = {
    "loaders": (utils, "_download"),
    "callers": (utils, "save_model"),
    "caches": (KVCache, "to_quantized"),
    "arrays": (mx, "concatenate"),
}


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


@pytest.mark.parametrize("name", MODULES)
def test_installed_versions_pass_the_checks(name: str, reloaded: None) -> None:
    if name == "vlm":
        pytest.importorskip("mlx_vlm")
    import_anew(name)


@pytest.mark.parametrize("name", MISSING)
def test_missing_part_is_named_with_the_versions_that_work(
    name: str, reloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute = MISSING[name]
    monkeypatch.delattr(owner, attribute)
    with pytest.raises(CompatibilityError) as caught:
        import_anew(name)
    assert f"{attribute} is missing in the installed mlx-lm" in str(caught.value)
    assert f"mlx-lm {TESTED['mlx-lm'][0]} to {TESTED['mlx-lm'][1]}" in str(caught.value)


def test_changed_signature_is_named() -> None:
    with pytest.raises(CompatibilityError, match=r"_download\(\) takes no parameter 'colour'"):
        require(utils, "_download", "path_or_hf_repo", "colour")


def test_changed_sorting_threshold_is_named(reloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        return x

    monkeypatch.setattr(SwitchGLU, "__call__", call)
    with pytest.raises(CompatibilityError, match="SwitchGLU does not sort from 64 indices on"):
        import_anew("expertstacks")


def test_cache_without_a_counter_is_named(reloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchKVCache, "__init__", lambda self, left_padding: None)
    with pytest.raises(CompatibilityError, match="BatchKVCache lacks one of _idx, left_padding, offset"):
        import_anew("caches")


def test_a_batch_generator_without_an_attribute_is_named(monkeypatch: pytest.MonkeyPatch, reloaded: None) -> None:
    def initialize(self: BatchGenerator) -> None:
        self._unprocessed_sequences, self._counters, self.prefill_batch_size = [], None, 1

    monkeypatch.setattr(BatchGenerator, "__init__", initialize)
    with pytest.raises(CompatibilityError, match="BatchGenerator sets no completion_batch_size"):
        import_anew("generation")


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
    with pytest.raises(ZeroDivisionError), wrapped_functions(lambda name, function: names.append(name) or function):
        raise ZeroDivisionError
    assert {"__setitem__", "__iadd__", "__itruediv__"} < {name for name in names if name in CHANGING}
    assert sorted(set(names) - set(CHANGING)) == [
        "concatenate",
        "contiguous",
        "flatten",
        "reshape",
        "split",
        "stack",
        "view",
    ]
    assert before == (mx.stack, mx.concatenate, mx.split, mx.array.view, mx.array.reshape, mx.array.flatten)
