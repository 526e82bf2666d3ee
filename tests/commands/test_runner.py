"""Models, engines and shells: ``list``, ``ps``, ``stop``, ``completion``, ``--quiet`` and ``--verbose``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir

import children
from children import ROOT
from mlx_flash import cli, telemetry
from mlx_flash.commands import dispatch, engines
from mlx_flash.commands import models as modellist
from mlx_flash.commands.arguments import COMMANDS
from mlx_flash.commands.engines import choose, published_name
from mlx_flash.config import FlashConfig, parse_budget
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import create_model
from models import make_random_model
from waiting import eventually

SHAPE = "--layers 3 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 300"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_random_model(path / "llama", *SHAPE.split())
    (path / "other").mkdir()
    (path / "other" / "config.json").write_text('{"model_type": "no such"}')
    shard = (path / "llama" / "model.safetensors").read_bytes()
    (path / "other" / "model.safetensors").write_bytes(shard)
    (path / "no weights").mkdir()
    (path / "no weights" / "config.json").write_text("{}")
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert cli.main([*map(str, words), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(("budget", "way"), [("min", "streamed"), ("2", "in memory"), ("0.01", "too large")])
def test_list_has_the_plan_of_each_model(
    budget: str, way: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modellist, "scan_cache_dir", lambda: scan_cache_dir(folder))  # no repositories
    llama, other = answer(capsys, "list", folder, "--ram-budget-gb", budget)["models"]
    assert llama["name"] == str(folder / "llama") and llama["way"] == way
    assert llama["bytes"] == (folder / "llama" / "model.safetensors").stat().st_size
    assert other["way"] == "not supported" and "no such" in other["why"]
    if way == "too large":
        assert llama["budget_bytes"] > 10_000_000 and llama["tokens_per_second"] is None
    else:
        plan = prepare(folder / "llama", FlashConfig.resolve(ram_budget_gb=parse_budget(budget)), writes=False).plan
        assert llama["read_bytes"] == plan.read_bytes and llama["tokens_per_second"] > 0
        assert (llama["read_bytes"] == 0) == (way == "in memory")


def test_list_finds_downloaded_models(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, revision in enumerate(["old", "new"]):
        snapshot = tmp_path / "models--someone--small" / "snapshots" / revision
        snapshot.mkdir(parents=True)
        for file in (folder / "llama").iterdir():
            (snapshot / file.name).write_bytes(file.read_bytes())
            os.utime(snapshot / file.name, (number, number))
    (tmp_path / "datasets--someone--words" / "snapshots" / "only").mkdir(parents=True)
    monkeypatch.setattr(modellist, "scan_cache_dir", lambda: scan_cache_dir(tmp_path))
    assert cli.main(["list", "--ram-budget-gb", "2"]) == 0
    text = capsys.readouterr().out
    assert "someone/small" in text and "in memory" in text and "planned with a budget of 2.00 GB" in text
    assert cli.main(["list", "--ram-budget-gb", "0.01"]) == 0
    assert "needs " in capsys.readouterr().out
    (found,) = answer(capsys, "list")["models"]
    assert found["folder"].endswith("new")


def test_list_shows_no_control_characters(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\x1b[31mb").symlink_to(folder / "llama")
    assert cli.main(["list", str(tmp_path), "--ram-budget-gb", "2"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_list_of_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["list", str(tmp_path / "gone")]) == 1
    assert f"{tmp_path / 'gone'} is not a folder. Hint: " in capsys.readouterr().err


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep engines of other programs of this user out of sight, so that no test can stop one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert all(folder.is_relative_to(tmp_path) for folder in telemetry.folders())
    return tmp_path


def test_ps_shows_an_engine_and_stop_ends_it(folder: Path, private: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--model", folder / "llama", "-m", -1, "--ignore-chat-template", "--ram-budget-gb", 0.3]
    files = [Path(os.devnull), private / "out", private / "err"]
    process = children.start("-m", "mlx_flash", *words, files=files, env={"MLX_FLASH_SPECULATION": "false"})
    try:
        (engine,) = eventually(lambda: [each for each in answer(capsys, "ps")["engines"] if each["tokens"] > 2], 60)
        assert engine["pid"] == process.pid and engine["state"] == "running"
        assert 0 < engine["footprint_bytes"] <= engine["budget_bytes"] == 300_000_000
        assert engine["tokens_per_second"] > 0
        assert cli.main(["ps"]) == 0 and str(process.pid) in capsys.readouterr().out
        assert cli.main(["stop", "another"]) == 1 and process.is_alive()
        assert cli.main(["stop", str(process.pid)]) == 0
        assert f"stopped process {process.pid} (" in capsys.readouterr().out
        process.join(20)
        assert process.exitcode == dispatch.EXIT_TERMINATED and not telemetry.find()
        assert b"Peak memory" in files[2].read_bytes() and b"terminated" in files[2].read_bytes()
    finally:
        process.kill()
        process.join()


def published(pid: int, name: str, number: int = 0) -> telemetry.Published:
    return telemetry.Published(Path(), pid, number, 0.0, 1, 0.0, 0.0, {"model": {"name": name}})


def test_stop_names_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {5: "mlx-flash run", 6: "mlx-flash serve", 7: "mlx-flash serve", 8: "chat.py"}
    monkeypatch.setattr(engines, "program_of", programs.__getitem__)
    shown = [published(5, "a"), published(6, "a"), published(7, "b"), published(7, "draft", 1), published(8, "c")]
    assert [choose(word, shown).pid for word in ("5", "6", "b", "draft", "8")] == [5, 6, 7, 7, 8]
    for word, count in {"a": 2, "d": 0, "": 0}.items():
        with pytest.raises(
            ConfigError, match=rf"{count} running engines match.*: 5 \(a, mlx-flash run\), 6 .a.*8 .c, chat"
        ):
            choose(word, shown)
    with pytest.raises(ConfigError, match=r"process 8 of user .*program is chat.py. Hint: `mlx-flash stop 8` ends"):
        choose("c", shown)
    with pytest.raises(SystemExit):
        cli.main(["stop"])  # nothing is stopped that was not named


def test_stop_takes_folders_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (tmp_path / "Modelfile").write_text(f"FROM {folder}")
    create_model("mine", tmp_path / "Modelfile")
    assert {published_name(word) for word in (f"{folder}/", "mine", "tiny")} == {"tiny"}
    assert published_name("qwen3-8b") == published_name("mlx-community/Qwen3-8B-4bit") == "mlx-community/Qwen3-8B-4bit"
    (tmp_path / "config" / "mlx-flash" / "config.toml").write_text("wrong")
    assert published_name("4321") == "4321"


def test_programs_have_names() -> None:
    with subprocess.Popen([sys.executable, "-X", "dev", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert engines.program_of(process.pid).startswith("python")
        process.communicate(b"\n")
    assert engines.program_of(process.pid) == "?"
    with subprocess.Popen(["sleep", "60"]) as process:
        assert engines.program_of(process.pid) == "sleep"
        process.kill()


@pytest.mark.parametrize("columns", [100, 80, 77, 60, 59, 40])
def test_ps_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "model": {"name": "Qwen2.5-Coder-1.5B-Instruct-4bit-with-a-long-name"},
        "memory": {"footprint": 123_456_789_012},
        "budget": {"bytes": 123_456_789_012},
        "passes": {"num_tokens_out": 1_234_567},
    }
    one = telemetry.Published(Path(), os.getpid(), 0, time.time() - 100_000, 1, time.time(), 0.0, state)
    programs = iter(["LM Studio Helper", "mlx-flash serve"])
    monkeypatch.setattr(engines, "program_of", lambda pid: next(programs))
    monkeypatch.setattr(engines, "find", lambda: [one, one])
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["ps"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert text.index("mlx-flash") < text.index("LM") and "user" in text
    words = " ".join(text.split())
    assert words.count(f"{os.getpid()}:") == 2 and words.count("123.5 GB of 123.5 GB, 1234567 tokens") == 2


def complete(tmp_path: Path, line: str, **env: str) -> list[str]:
    file = tmp_path / "completions"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(file)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    program = "from mlx_flash.cli import main; main()"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **asked, **env}, cwd=ROOT, check=True)
    return [word.strip() for word in file.read_text().split("\n")]


def test_completion_knows_commands_flags_and_models(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert set(complete(tmp_path, "mlx-flash ")) >= set(COMMANDS)
    assert complete(tmp_path, "mlx-flash generate --ram-b") == ["--ram-budget-gb"]
    (tmp_path / "models--some--model").mkdir()
    assert complete(tmp_path, "mlx-flash serve --model so", HF_HUB_CACHE=str(tmp_path)) == ["some/model"]
    assert f"{folder / 'llama'}/" in complete(tmp_path, f"mlx-flash plan --model {folder}/")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_code_registers_the_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert cli.main(["completion", shell]) == 0
    assert "mlx-flash" in capsys.readouterr().out


def test_quiet_leaves_the_answer_and_verbose_adds_the_log(folder: Path) -> None:
    words = ["generate", "--model", folder / "llama", "-m", 4, "--ram-budget-gb", 0.3]
    usual, quiet, verbose = (
        children.run("-m", "mlx_flash", *words, *more) for more in ([], ["--quiet"], ["--verbose"])
    )
    assert quiet.returncode == 0 and quiet.stderr == b""
    assert quiet.stdout == usual.stdout == verbose.stdout != b""
    note = b"starts in a budget of 300000000 bytes"
    assert b"Peak memory" in usual.stderr and note not in usual.stderr
    assert b"Peak memory" in verbose.stderr and note in verbose.stderr
