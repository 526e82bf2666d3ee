"""Fixtures of models on disk, each written once for a file of tests, which only read them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from models import make_random_model, save

Directories = Callable[[str], Path]


def model_fixture(config: dict[str, Any], dtype: mx.Dtype = mx.float32, *, name: str = "model", **options: Any) -> Any:
    """Return a fixture that is the folder of a model of a configuration, with a name and options of `save`."""

    @pytest.fixture(scope="module")
    def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save(tmp_path_factory.mktemp("models") / name, config, dtype, **options)

    return directory


def random_model_fixture(shape: str, name: str = "model") -> Any:
    """Return a fixture that is the folder of a model of ``scripts/make_random_model.py``."""

    @pytest.fixture(scope="module")
    def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_random_model(tmp_path_factory.mktemp("models") / name, *shape.split())

    return directory


def models_fixture(configs: Mapping[str, dict[str, Any]]) -> Any:
    """Return a fixture that is a function from a name to a folder, which is written when it is first asked for."""

    @pytest.fixture(scope="module")
    def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
        return functools.cache(lambda name: save(tmp_path_factory.mktemp("models") / name, configs[name]))

    return directories
