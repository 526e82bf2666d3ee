"""Models, engines and shells: ``models``, ``completion``, ``--quiet`` and ``--verbose``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir

import children
from children import ROOT
from mlx_flash import cli
from mlx_flash.commands import models as modellist
from mlx_flash.commands.arguments import COMMANDS
from mlx_flash.commands.models import reckon
from mlx_flash.config import FlashConfig, parse_budget
from mlx_flash.engine.prepare import prepare
from mlx_flash.layout.names import Known, known_models
from mlx_flash.residency.sizes import expected_hits
from mlx_flash.storage.probe import DiskProfile
from models import make_random_model

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


def here(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    """Return the models of this machine."""
    found = [model for model in answer(capsys, "models", *words)["models"] if model["is_here"]]
    return sorted(found, key=lambda model: str(model["name"]))


@pytest.mark.parametrize(("budget", "way"), [("min", "streamed"), ("2", "in memory"), ("0.01", "too large")])
def test_models_of_a_folder_are_planned(
    budget: str, way: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modellist, "scan_cache_dir", lambda: scan_cache_dir(folder))  # no repositories
    llama, other = here(capsys, folder, "--ram-budget-gb", budget)
    assert llama["name"] == str(folder / "llama") and llama["way"] == way
    assert llama["bytes"] == (folder / "llama" / "model.safetensors").stat().st_size
    assert other["way"] == "not supported" and "no such" in other["why"]
    if way == "too large":
        assert llama["budget_bytes"] > 10_000_000 and llama["tokens_per_second"] is None
    else:
        plan = prepare(folder / "llama", FlashConfig.resolve(ram_budget_gb=parse_budget(budget)), writes=False).plan
        assert llama["read_bytes"] == plan.read_bytes and llama["tokens_per_second"] > 0
        assert (llama["read_bytes"] == 0) == (way == "in memory")


def test_the_newest_download_is_planned(
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
    (found,) = here(capsys)
    assert found["folder"].endswith("new")
    assert cli.main(["models", "--ram-budget-gb", "0.01"]) == 0
    assert re.search(r"\* someone/small .* needs ", capsys.readouterr().out)


def test_names_of_folders_move_no_cursor(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\x1b[31mb").symlink_to(folder / "llama")
    assert cli.main(["models", str(tmp_path), "--ram-budget-gb", "2"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert cli.main(["models", str(tmp_path / "gone")]) == 1
    assert f"{tmp_path / 'gone'} is not a folder. Hint: " in capsys.readouterr().err


ENDLESS = (3e9, 1e15, 1e15)
"""A disk of 3 GB/s beside a processor that never waits."""


def model(**numbers: Any) -> Known:
    return Known(repository="some/model", licence="mit", source="a page", **numbers)


def test_estimates_are_the_arithmetic_of_readme() -> None:
    dense = model(bytes=40_000_000_000, token=40_000_000_000)
    found = reckon(dense, 9_100_000_000, *ENDLESS)
    assert found["read_bytes"] == 32_100_000_000 and found["way"] == "streamed"
    assert found["tokens_per_second"] == pytest.approx(3 / 32.1)
    assert reckon(dense, 41_200_000_000, *ENDLESS)["way"] == "in memory"
    assert reckon(dense, 41_200_000_000, 3e9, 1e9, 2e9)["tokens_per_second"] == pytest.approx(1 / 20)


def test_a_mixture_keeps_its_trunk_and_then_experts() -> None:
    mixture = model(bytes=72_000_000_000, token=4_400_000_000, experts=70_400_000_000, chosen=(4, 128))
    trunk = mixture.token - mixture.chosen_bytes
    assert trunk == 2_200_000_000
    assert reckon(mixture, 2_200_000_000, *ENDLESS)["read_bytes"] == 3_400_000_000  # a part of the trunk, too
    half = reckon(mixture, 1_200_000_000 + trunk + 35_200_000_000, *ENDLESS)["read_bytes"]
    assert half == round(2_200_000_000 * (1 - expected_hits(0.5, 128)))
    assert reckon(mixture, 80_000_000_000, *ENDLESS)["read_bytes"] == 0


def test_models_here_are_planned_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder = known_models()["qwen3-30b-a3b"].repository, str(ROOT / "examples" / "pair" / "draft")
    monkeypatch.setattr(modellist, "downloaded", lambda: [modellist._model(name, folder, 1)])
    monkeypatch.setattr(modellist, "profile_for", lambda *_: DiskProfile(3e9, 1 << 20, 4, True))
    assert cli.main(["models", "--ram-budget-gb", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget_bytes"] == 2_000_000_000 and found["disk_bytes_per_second"] == 3e9
    rows = {row["name"]: row for row in found["models"]}
    assert rows.keys() == known_models().keys()
    speeds = [row["tokens_per_second"] for row in found["models"]]
    assert speeds == sorted(speeds, reverse=True)
    planned = rows["qwen3-30b-a3b"]
    assert planned["is_here"] and planned["way"] == "in memory"  # the stand-in is small
    assert not rows["llama-3.3-70b"]["is_here"]
    assert rows["llama-3.3-70b"]["read_bytes"] == known_models()["llama-3.3-70b"].token - 800_000_000
    assert cli.main(["models", "--ram-budget-gb", "2"]) == 0
    told = capsys.readouterr().out
    assert "* qwen3-30b-a3b" in told and "8 of 128" in told and "3.00 GB/s" in told
    assert all(len(line) <= 80 for line in told.splitlines())


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
