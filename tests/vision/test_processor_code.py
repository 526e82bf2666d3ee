"""Code in the folder of a model that sees is not run, unless the user trusts it."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_vlm")

import mlx_vlm.utils

from mlx_flash.errors import CheckpointError
from mlx_flash.vision.flashvlm import load_processor_of
from vocabularies import write_tokenizer

EVIL = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import PreTrainedTokenizerFast
class T(PreTrainedTokenizerFast):
    pass
class P:
    @classmethod
    def from_pretrained(cls, *args, **options):
        return cls()
    @classmethod
    def register_for_auto_class(cls):
        pass
"""
ARCHITECTURES = ["gemma4", "glm4v", "got", "inkling", "molmo2", "phi3_v", "qwen2_vl", "of no library"]
"""Some trust code by default, some whatever they are told, and some never."""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a folder whose code leaves the file ``ran``."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")

    def make(architecture: str) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        write_tokenizer(folder, 300)
        (folder / "evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
        maps = {"AutoTokenizer": ["evil.T", "evil.T"], "AutoProcessor": "evil.P", "AutoImageProcessor": "evil.P"}
        file = folder / "tokenizer_config.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {"tokenizer_class": "T", "processor_class": "P", "auto_map": maps}))
        for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
            values = {"model_type": architecture, "processor_class": "P", "image_processor_type": "P", "auto_map": maps}
            (folder / name).write_text(json.dumps(values))
        return folder

    return make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_code_of_a_processor_is_not_run(make: Any, tmp_path: Path, architecture: str) -> None:
    folder = make(architecture)
    model: Any = SimpleNamespace(config=SimpleNamespace(eos_token_id=None))
    with contextlib.suppress(CheckpointError):  # some need it, others have all they need in mlx-vlm
        load_processor_of(folder, model)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_processor_runs_if_it_is_trusted(make: Any, tmp_path: Path) -> None:
    folder = make("of no library")
    model: Any = SimpleNamespace(config=SimpleNamespace(eos_token_id=None))
    load_processor_of(folder, model, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_mlx_vlm_alone_runs_the_code(make: Any, tmp_path: Path) -> None:
    """Otherwise the tests above prove nothing."""
    importlib.import_module("mlx_vlm.models.inkling")  # as loading its model does: it registers the processor
    mlx_vlm.utils.load_processor(make("inkling"), trust_remote_code=False)
    assert (tmp_path / "ran").exists()
