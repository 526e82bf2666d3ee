"""MLX starts a C++ compiler for compiled functions that it has not met; in a memory limit it may be killed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import mlx.core as mx
import pytest

import children
from mlx_flash.errors import CompilerError
from mlx_flash.server.batch import SeededSampler, refusal_of
from models import WIDE_LLAMA, save

FAKE = """#!/bin/sh
case "$*" in *-shared*) echo "g++: fatal error: Killed signal terminated program cc1plus"; exit 1;; esac
echo "g++ 12"
"""

CALL = """
import sys
from mlx_flash import FlashConfig, load_model
from mlx_flash.generation import generate_step
import mlx.core as mx
budget, tokens = sys.argv[2], mx.array([1, 2, 3])
config = FlashConfig(ram_budget_gb=budget if budget == "min" else float(budget), context_length=8, telemetry=False)
with load_model(sys.argv[1], config)[0] as model:
    assert bool(model.plan.read_bytes) == (budget == "min")
    next(generate_step(tokens, model))
"""


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="GPU back ends have compilers of their own")
@pytest.mark.parametrize("budget", ["min", "2"])
def test_killed_compiler_is_named_with_a_hint(tmp_path: Path, budget: str) -> None:
    """The caller got a bare RuntimeError with the name of a kernel."""
    model = save(tmp_path / "model", WIDE_LLAMA)
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(FAKE)
    compiler.chmod(0o755)
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {"PATH": f"{compiler.parent}:{os.environ['PATH']}", "TMPDIR": str(empty)}
    errors = children.run("-c", CALL, model, budget, env=env, forks=False).stderr.decode()
    assert "CompilerError: MLX compiles kernels of this model with g++" in errors, errors
    assert "Hint: each takes about 115 MB beside the budget" in errors
    assert f"keeps them in a folder mlx of {empty};" in errors and "run the model once without the limit" in errors


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="GPU back ends have compilers of their own")
@pytest.mark.parametrize("name", ["missing", "file/below"])
def test_a_temporary_folder_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    model = save(tmp_path / "model", WIDE_LLAMA)
    errors = children.run("-c", CALL, model, "2", env={"TMPDIR": str(tmp_path / name)}).stderr.decode()
    named = rf"CompilerError: MLX .* in a folder mlx of {tmp_path / name};.* set TMPDIR to a folder"
    assert re.search(named, errors), errors


def test_a_compiler_that_fails_while_a_token_is_chosen_is_named_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[Compile::eval_cpu] Failed to compile function x: Failed to execute command")

    monkeypatch.setattr(mx, "async_eval", full)
    sampler = SeededSampler(lambda logprobs: mx.argmax(logprobs, -1), 7)
    with pytest.raises(CompilerError) as raised:
        sampler(mx.zeros((1, 4)))
    for error in (raised.value, raised.value.__cause__):
        assert isinstance(error, Exception)
        assert "MLX compiles kernels of this model with g++" in str(refusal_of(error))
