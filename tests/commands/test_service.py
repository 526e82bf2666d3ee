"""``mlx-flash service``: what systemd and launchd are given, and asked to do."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_flash import cli
from mlx_flash.commands import service as module
from mlx_flash.commands.service import agent, unit

COMMAND = [sys.executable, "-m", "mlx_flash", "serve", "--model", 'a "b" $HOME %h\\']


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = unit(COMMAND, tmp_path, {"HF_HOME": "/a b%", "PATH": "/bin"}).text.decode()
    assert '"a \\"b\\" $$HOME %%h\\\\"' in text and 'Environment="HF_HOME=/a b%%"' in text
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd")
    (tmp_path / "mlx-flash.service").write_text(text)
    words = ["systemd-analyze", "--user", "verify", "--man=no", str(tmp_path / "mlx-flash.service")]
    done = subprocess.run(words, capture_output=True, timeout=60)
    assert b"mlx-flash.service" not in done.stderr, done.stderr  # other units may be wrong


def test_launchd_gets_a_property_list(tmp_path: Path) -> None:
    made = agent(COMMAND, tmp_path, {"PATH": "/bin"})
    found = plistlib.loads(made.text)
    assert found["ProgramArguments"] == COMMAND and found["EnvironmentVariables"] == {"PATH": "/bin"}
    assert found["Label"] == made.file.stem and found["StandardErrorPath"] == made.logs[0][-1]
    assert made.install[0][-1] == str(made.file) and found["KeepAlive"] == {"SuccessfulExit": False}


def test_install_status_logs_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def run(command: Sequence[str], *, check: bool) -> SimpleNamespace:
        asked.append(" ".join(command))
        return SimpleNamespace(returncode=3 if "status" in command else 0)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module.shutil, "which", lambda program: None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MLX_FLASH_API_KEY", "secret")
    monkeypatch.setenv("MLX_FLASH_IO", "direct")
    file = tmp_path / "systemd" / "user" / "mlx-flash.service"
    with pytest.raises(SystemExit):
        cli.main(["service", "install", "--modle", "x"])
    assert cli.main(["service", "install"]) == 1 and "systemctl is not on this machine" in capsys.readouterr().err
    assert not file.exists() and not asked
    monkeypatch.setattr(module.shutil, "which", lambda program: program)
    assert cli.main(["service", "logs"]) == 1 and "Hint: mlx-flash service install" in capsys.readouterr().err
    assert cli.main(["service", "install", "--model", "qwen3-30b-a3b", "--port", "8081"]) == 0
    text = file.read_text()
    assert '"serve" "--model" "qwen3-30b-a3b" "--port" "8081"' in text and "MLX_FLASH_IO=direct" in text
    told = capsys.readouterr()
    assert "secret" not in text and f"wrote {file}" in told.out
    assert "the service does not get MLX_FLASH_API_KEY. Hint: --api-key-file FILE" in told.err
    assert cli.main(["service", "status"]) == 3 and cli.main(["service", "logs"]) == 0
    assert cli.main(["service", "status", "--port", "1"]) == 1
    assert cli.main(["service", "remove"]) == 0 and not file.exists()
    assert [words.split()[2] for words in asked] == ["daemon-reload", "enable", "status", "--unit", "disable"]
