"""Models by name: ``pull``, ``create``, and named models in ``models`` and ``run``."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

import children
from hub import Hub, serving
from mlx_flash import cli
from mlx_flash.commands import models as modellist
from mlx_flash.errors import ConfigError, WriteError
from mlx_flash.modelfile.parse import (
    create_model,
    find_modelfile,
    models_folder,
    named_models,
    parse_modelfile,
    read_modelfile,
)
from models import LLAMA, save
from terminals import ROOT

DRAFT = ROOT / "examples" / "pair" / "draft"


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("remote") / "model", {**LLAMA, "vocab_size": 30_000}, num_shards=2)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((DRAFT / file).read_bytes())
    return folder


@pytest.fixture
def hub(remote: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of programs that use a hub with one model."""
    with serving(remote) as endpoint:
        yield {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}


def command(env: dict[str, str], *words: object) -> subprocess.CompletedProcess[bytes]:
    return children.run("-m", "mlx_flash", *words, env=env, forks=False)


def test_a_download_that_failed_goes_on_with_the_shards_that_are_missing(
    hub: dict[str, str], remote: Path, tmp_path: Path
) -> None:
    first, second = sorted(shard.name for shard in remote.glob("*.safetensors"))
    Hub.broken = second
    done = command(hub, "pull", "some/model", "--ram-budget-gb", "min")
    told = done.stderr.decode()
    assert done.returncode == 1 and "the download of some/model broke off: " in told
    assert told.index("read for each token") < told.index("broke off") and "Traceback" not in told
    assert told.splitlines()[-1].endswith("Hint: the same command goes on, and keeps every file that is complete.")
    assert (first, None) in Hub.requests
    Hub.broken, Hub.requests = None, []
    done = command(hub, "generate", "some/model")  # which is here in part
    assert done.returncode == 1 and b"some/model is not on this machine. Download " in done.stderr, done.stderr
    assert all(part for _, part in Hub.requests)  # headers
    Hub.requests = []
    done = command(hub, "pull", "some/model", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (first, None) not in Hub.requests and (second, None) in Hub.requests
    folder = Path(found["folder"])
    assert (folder / second).read_bytes() == (remote / second).read_bytes()
    assert found["downloaded_bytes"] == (remote / second).stat().st_size
    assert found["way"] == "in memory" and folder.is_relative_to(tmp_path / "cache")


def test_what_the_hub_does_not_have_is_not_pulled(hub: dict[str, str], tmp_path: Path) -> None:
    done = command(hub, "pull", "some/nothing")
    told = done.stderr.decode()
    assert done.returncode == 1 and "Hint: names are NAMESPACE/NAME" in told and "`hf auth login`" in told
    assert told.count("\n") == 1 and not (tmp_path / "cache" / "models--some--nothing" / "snapshots").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["pull", "llama3.2:3b"], "is a name of Ollama"),
        (["pull", str(ROOT)], "it is a folder on this machine"),
        (["create", "a/b", "-f", "x"], "is no name for a model"),
        (["create", "ab", "-f", "/nonexistent"], "the Modelfile cannot be read"),
    ],
)
def test_errors_have_one_shape(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(modellist, "scan_cache_dir", lambda: scan_cache_dir(tmp_path / "hub"))
    assert cli.main(words) == 1
    told = capsys.readouterr().err
    assert told.startswith("mlx-flash: error: ") and told.count("\n") == 1 and error in told


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "mlx-flash" / "models"


@pytest.mark.usefixtures("own_config")
def test_a_named_modelfile_is_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "base").symlink_to(DRAFT)
    source = tmp_path / "source" / "Modelfile"
    source.write_text(
        f'# mine\nFROM {source.parent}/base\nSYSTEM """a\nFROM b\n"""\nPARAMETER num_predict 3\nFLASH_RAM_GB 1\n'
    )
    assert cli.main(["create", "tiny:v1", "-f", str(source)]) == 0
    assert "created tiny:v1" in capsys.readouterr().out
    made, given_ = read_modelfile(named_models()["tiny:v1"]), read_modelfile(source)
    assert (made.base, made.system, made.parameters) == (
        str(tmp_path / "source" / "base"),
        "a\nFROM b\n",
        given_.parameters,
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "tiny:v1", "Hello"]) == 0
    answer = capsys.readouterr().out
    assert answer.strip() and cli.main(["run", "-f", str(source), "Hello"]) == 0
    assert capsys.readouterr().out == answer
    monkeypatch.setattr(modellist, "scan_cache_dir", lambda: scan_cache_dir(tmp_path / "source"))
    assert cli.main(["models", "--json"]) == 0
    (listed,) = [model for model in json.loads(capsys.readouterr().out)["models"] if model["is_here"]]
    assert (listed["name"], listed["modelfile"]) == ("tiny:v1", str(models_folder() / "tiny:v1"))
    assert listed["way"] == "in memory" and listed["budget_bytes"] == 10**9


def test_a_folder_comes_before_a_name(own_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_config.mkdir(parents=True)
    (own_config / "mine").write_text(f"FROM {DRAFT}")
    monkeypatch.chdir(tmp_path)
    assert find_modelfile("mine").base == str(DRAFT)
    (tmp_path / "mine").mkdir()
    assert find_modelfile("mine").base == "mine"


def test_an_own_name_may_be_of_a_folder(own_config: Path) -> None:
    own_config.parent.mkdir(parents=True)
    (own_config.parent / "config.toml").write_text(f'[models]\nmine = "{DRAFT}"\nlost = "/lost/model"\n')
    assert find_modelfile("mine").base == parse_modelfile("FROM mine", "Modelfile").base == str(DRAFT)
    with pytest.raises(ConfigError, match="'/lost/model' is not there"):
        parse_modelfile("FROM lost", "Modelfile")


@pytest.mark.parametrize("line", ["FROM ./base", "FROM base", "FROM /\nADAPTER base"])
def test_paths_of_a_named_modelfile_do_not_depend_on_its_folder(own_config: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "Modelfile").write_text(line)
    with pytest.raises(ConfigError, match=r"its paths depend on its folder\. Hint: "):
        create_model("mine", tmp_path / "Modelfile")
    assert not named_models()


def test_a_modelfile_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "Modelfile").write_text(f"FROM {DRAFT}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(WriteError, match=r"cannot write the Modelfile .*/file/mlx-flash/models/mine: .* Hint: "):
        create_model("mine", tmp_path / "Modelfile")


def test_a_download_is_asked_for(hub: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mlx-flash").mkdir()
    (tmp_path / "mlx-flash" / "config.toml").write_text('[models]\nmine = "some/model"\n')
    env = {**hub, "XDG_CONFIG_HOME": str(tmp_path)}
    asking: list[tuple[object, ...]] = [("run", "mine", "Hello"), ("generate", DRAFT, "--draft-model", "mine")]
    for words in (*asking, ("generate", "mine"), ("pack", "mine", tmp_path / "packed")):
        done = command(env, *words)
        told = done.stderr.decode()
        assert done.returncode == 1 and not done.stdout and all(part for _, part in Hub.requests), told  # headers
        assert "some/model: within " in told and " to download, " in told and f" free in {tmp_path / 'cache'}" in told
        assert "some/model is not on this machine. Download " in told and "Traceback" not in told
        assert told.splitlines()[-1].endswith("There is no terminal to ask. Hint: -y downloads it.")
    for words in (("run", "mine", "Hello"), ("generate", "mine")):
        done = command({**env, "MLX_FLASH_ENABLED": "false"}, *words, "-y")
        assert done.returncode == 1 and b"enabled is False" in done.stderr and all(part for _, part in Hub.requests)
    done = command(env, "run", "mine", "Hello", "-y", "--max-tokens", "2")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert len([name for name, part in Hub.requests if part is None]) == 2
    Hub.requests = []
    done = command(env, "plan", "mine", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["model"] == "some/model" and not Hub.requests, done.stderr


def test_a_no_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_config: Path
) -> None:
    monkeypatch.setattr(modellist, "_announced", lambda *_: ({}, 17_200_000_000))
    monkeypatch.setattr(modellist, "is_remote", lambda name: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert cli.main(["run", "qwen3-30b-a3b", "Hello"]) == 1
    told = capsys.readouterr().err
    assert "mlx-community/Qwen3-30B-A3B-4bit is not on this machine. Download 17.2 GB? [y/N]" in told
    assert "mlx-community/Qwen3-30B-A3B-4bit was not downloaded" in told


@pytest.mark.usefixtures("own_config")
def test_commands_take_names_of_modelfiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "Modelfile"
    file.write_text(f"FROM {DRAFT}\nSYSTEM Be brief.\nFLASH_RAM_GB 1\n")
    assert cli.main(["create", "mine", "-f", str(file)]) == 0
    capsys.readouterr()
    plain = ["--prompt", "Hello", "--max-tokens", "3", "--system-prompt", "Be brief.", "--json"]
    assert cli.main(["generate", str(DRAFT), *plain]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert cli.main(["generate", "mine", "--prompt", "Hello", "--max-tokens", "3", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["tokens"] == expected["tokens"] and found["budget_bytes"] == 10**9
    assert "gives generate its model and settings; `mlx-flash run` takes all of it" in told.err
    assert cli.main(["plan", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == 10**9
    assert cli.main(["pack", "mine", str(tmp_path / "packed"), "--json"]) == 0
    assert (tmp_path / "packed" / "config.json").exists()
    assert cli.main(["run", "qwen3-30b-a3"]) == 1
    assert "Did you mean 'qwen3-30b-a3b'?" in capsys.readouterr().err
    assert cli.main(["run", "a long prompt " * 30]) == 1
    assert "neither a model nor ./Modelfile" in capsys.readouterr().err


@pytest.mark.usefixtures("own_config")
def test_completion_offers_names_and_words_of_the_budget(tmp_path: Path) -> None:
    from mlx_flash.commands.arguments import make_parser
    from mlx_flash.commands.dispatch import _values

    models_folder().mkdir(parents=True)
    (models_folder() / "mine").write_text(f"FROM {DRAFT}")
    (models_folder().parent / "config.toml").write_text('[models]\nother = "some/model"\n')
    actions = {action.dest: action for action in make_parser("generate")[1]._actions}  # type: ignore[union-attr]
    assert {"qwen3-30b-a3b", "mine", "other"} <= set(_values("", actions["model"]))
    assert _values("", actions["ram_budget_gb"]) == ["min", "auto", "safe", "balanced", "performance"]
