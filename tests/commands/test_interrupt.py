"""Ctrl-C at every moment of a command: it ends, quickly and without a traceback."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from mlx_flash.commands.dispatch import EXIT_HUNG_UP, EXIT_INTERRUPTED
from terminals import ROOT, Shell
from waiting import eventually

TINY = ROOT / "examples" / "pair" / "draft"
START = """
import sys
from mlx_flash.cli import main

class Imports:
    def find_spec(self, name, *_):
        if name == "mlx_flash.commands.dispatch":
            print("started", flush=True)

sys.meta_path.insert(0, Imports())
sys.exit(main())
"""
"""A start of the command line that tells when it begins to import modules."""

SLOW = """
import sys, time
from mlx_flash.cli import main
from mlx_flash.model import FlashLLM

call = FlashLLM.__call__

def call_slowly(*args, **kwargs):
    time.sleep(30)
    return call(*args, **kwargs)

FlashLLM.__call__ = call_slowly
sys.exit(main())
"""
"""The command line with passes of a large model, so that both Ctrl-C fall into the same pass."""


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1, 0.2, 0.4, 0.8])
def test_ctrl_c_while_a_command_starts(seconds: float) -> None:
    shell = Shell("-c", START, "run", TINY, "--max-tokens", "-1")
    shell.wait_for("started")
    time.sleep(seconds)
    shell.interrupt()
    assert shell.end() == EXIT_INTERRUPTED
    assert "mlx-flash: interrupted" in shell.text and "Traceback" not in shell.text


@pytest.mark.parametrize("seconds", [0.2, 0.4])
def test_the_second_ctrl_c_ends_the_program(seconds: float) -> None:
    shell = Shell("-c", SLOW, "run", TINY, "--max-tokens", "-1")
    shell.wait_for(">>>")
    shell.type("Hello\r")
    shell.wait_for("computing the prompt")
    time.sleep(seconds)
    shell.interrupt()
    shell.wait_for("Ctrl-C again ends the program")
    shell.interrupt()
    assert shell.end(20) == EXIT_INTERRUPTED
    assert "Traceback" not in shell.text


@pytest.mark.parametrize("is_closed", [False, True], ids=["signal", "terminal"])
def test_a_terminal_that_closes_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shell = Shell("-m", "mlx_flash", "run", TINY, "Hello", "--max-tokens", "-1")
    shell.wait_for("computing the prompt")
    eventually(lambda: any(path.is_file() for path in tmp_path.rglob("*")))  # the published state
    if is_closed:
        shell.close()
    else:
        shell.process.send_signal(signal.SIGHUP)
    assert shell.process.wait(20) == EXIT_HUNG_UP
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    if not is_closed:
        assert shell.end() == EXIT_HUNG_UP and "mlx-flash: terminated" in shell.text
