"""The models and the server that most files use: models for all of them, a server for each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from live import Live, live
from models import make_random_model
from scripted import make_scripted_model


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of random weights, which tests only read."""
    shape = "--layers 3 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 1000"
    return str(make_random_model(tmp_path_factory.mktemp("models") / "plain", *shape.split()))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template has tools and reasoning, for answers that a test writes. Tests only read it."""
    return make_scripted_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    """A server of that model."""
    with live(str(folder)) as running:
        yield running
