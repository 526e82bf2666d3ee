"""Model folders made by somebody who wants to run code, or to read what is not theirs."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_flash.engine.prepare import load_tokenizer
from mlx_flash.errors import CheckpointError
from mlx_flash.layout.load import load_config, load_lazily
from mlx_flash.storage.safetensors import read_checkpoint
from models import LLAMA, make_random_model, save


@pytest.mark.parametrize("content", ["[]", "3", "1" * 5000, '"x"', "[" * 100_000, '{"a"', "\xff"])
def test_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json is (not JSON|no JSON object).*Hint"):
        load_config(tmp_path)


def test_the_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    save(tmp_path, LLAMA)
    file = tmp_path / "generation_config.json"
    file.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        load_config(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*generation_config\.json: Is a directory"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"caf\\udce9': this path is not UTF-8.*Hint: rename"):
        load_config(tmp_path / "caf\udce9")


@pytest.mark.parametrize(
    "change", [{"model_type": None}, {"quantization": {}}, {"quantization_config": {"quant_method": "gptq"}}]
)
def test_an_error_of_mlx_lm_without_a_reason_names_the_folder(tmp_path: Path, change: dict[str, object]) -> None:
    config = json.loads((save(tmp_path, LLAMA) / "config.json").read_text())
    changed = {name: value for name, value in (config | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: mlx-lm cannot build the model \(\w+Error: .*Hint"):
        load_lazily(tmp_path, read_checkpoint(tmp_path))


def test_tensors_that_mlx_lm_does_not_know_are_told_with_the_folder(tmp_path: Path) -> None:
    save(tmp_path, LLAMA)
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"model.layers.1.input_layernorm", b"model.layerw.1.input_layernorm"))
    words = rf"{tmp_path}: mlx-lm cannot build the model \(ValueError: Received 1 parameters not in model.*layerw.*Hint"
    with pytest.raises(CheckpointError, match=words):
        load_lazily(tmp_path, read_checkpoint(tmp_path))


EVIL = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast as T
Path(__file__).with_name("ran").touch()
"""


@pytest.mark.parametrize("loading", [{}, {"trust_remote_code": True}])
def test_code_of_the_models_folder_is_not_run(tmp_path: Path, loading: dict[str, bool]) -> None:
    save(tmp_path, LLAMA | {"model_file": "evil.py"})
    (tmp_path / "evil.py").write_text(EVIL)
    with pytest.raises(CheckpointError, match=r"built by code of its own \(model_file\)"):
        load_lazily(tmp_path, read_checkpoint(tmp_path), **loading)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_tokenizer_is_not_run_whatever_stdin_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    make_random_model(tmp_path / "model", "--layers=1", "--hidden-size=64", "--heads=4", "--kv-heads=2")
    file = tmp_path / "model" / "tokenizer_config.json"
    settings = {"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    (tmp_path / "model" / "evil.py").write_text(EVIL)
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        load_tokenizer(tmp_path / "model")
    assert not list(tmp_path.rglob("ran"))


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "it is a FIFO, not a regular file.*Hint: "),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device or socket.*Hint: "),
    "folder": (Path.mkdir, ""),
    "link to itself": (lambda path: path.symlink_to(path), ""),
}
NAMES = ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja")
CASES = [*itertools.product(NAMES[:2], KINDS), *itertools.product(NAMES[2:], ("FIFO", "device"))]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    save(tmp_path, LLAMA | {"num_hidden_layers": 1})
    path, (make, words) = tmp_path / name, KINDS[kind]
    path.unlink(missing_ok=True)
    make(path)
    words = f"cannot read {path}: {words}" if words and name != "model.safetensors" else name
    with pytest.raises(CheckpointError, match=words):
        load_lazily(tmp_path, read_checkpoint(tmp_path))
