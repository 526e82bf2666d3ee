"""``mlx-flash plan`` of a repository that is not downloaded: from headers, served by a local server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from hub import Hub, serving
from mlx_flash import CheckpointNotFoundError
from mlx_flash.commands import models as module
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.commands.doctor import plan
from mlx_flash.commands.models import is_remote, preview
from mlx_flash.storage import probe
from models import LLAMA, save


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model that the hub has, whose tensors are not aligned."""
    found = save(tmp_path / "model", LLAMA, num_shards=2, header_shift=3)
    with serving(found) as endpoint:
        monkeypatch.setattr(module, "HfApi", lambda: HfApi(endpoint=endpoint, token=False))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(probe, "SAMPLE_BYTES", 1 << 20)
        yield found


def planned(model: object) -> dict[str, Any]:
    out = io.StringIO()
    words = ["plan", "--model", str(model), "--ram-budget-gb", "min", "--budgets", "--json"]
    assert plan(parse_arguments(words), out) == 0
    return dict(json.loads(out.getvalue()))


def test_plan_is_that_of_the_downloaded_model(folder: Path) -> None:
    remote, local = planned("some/model"), planned(folder)
    for name in ("model_bytes", "resident_bytes", "num_layers", "kv_bytes_per_token"):
        assert remote[name] == local[name]
    assert remote["streaming"]["read_bytes"] == local["streaming"]["read_bytes"] > 0
    assert len(remote["budgets"]) > 1
    assert 0 < Hub.sent <= 2 * 100_001 < sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["some/missing", "other/model"])
def test_missing_repository_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointNotFoundError, match="Hugging Face has no such model here"), preview(name):
        pass


def test_folders_are_not_remote(tmp_path: Path) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert not is_remote(str(tmp_path / "some" / "model"))
    assert not is_remote("./some/model") and not is_remote("model")
    assert is_remote("some/model")
