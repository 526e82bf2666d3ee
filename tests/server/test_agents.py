"""Agents do a small job: they read a file, change it, and run a program. The model's words are those of this test.

It needs programs of npm: ``npm install --prefix DIR @openai/codex @anthropic-ai/claude-code opencode-ai``, and DIR in
the environment variable ``MLX_FLASH_AGENTS``. `test_bodies.py` has what they send.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from live import Live, live
from mlx_flash.server import loaded
from scripted import make_scripted_model

FOLDER = os.environ.get("MLX_FLASH_AGENTS")
BIN = Path(FOLDER or "") / "node_modules" / ".bin"
JOB = "Read hello.py, mend the typo, and run it."
DONE = "The typo is mended, and the program prints hello."

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="MLX_FLASH_AGENTS names no folder with agents of npm"),
    pytest.mark.timeout(1200),
]

Step = tuple[str, dict[str, Any]]


def codex(folder: Path, url: str) -> tuple[list[str], dict[str, str], list[Step]]:
    home = folder / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "gpt-5"\nmodel_provider = "here"\nweb_search = "disabled"\nsandbox_mode = "danger-full-access"\n'
        f'[model_providers.here]\nname = "here"\nbase_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "KEY"\n'
        "request_max_retries = 0\nstream_max_retries = 0\n"
    )
    commands = ("cat hello.py", "sed -i s/helo/hello/ hello.py", "python3 hello.py")
    steps = [("exec_command", {"cmd": command}) for command in commands]
    return ["codex", "exec", "--skip-git-repo-check", JOB], {"CODEX_HOME": str(home), "KEY": "none"}, steps


def claude(folder: Path, url: str) -> tuple[list[str], dict[str, str], list[Step]]:
    path = str(folder / "work" / "hello.py")
    steps: list[Step] = [
        ("Read", {"file_path": path}),
        ("Edit", {"file_path": path, "old_string": "helo", "new_string": "hello"}),
        ("Bash", {"command": "python3 hello.py", "description": "Run it"}),
    ]
    environment = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none"}
    return ["claude", "-p", JOB, "--allowedTools", "Read,Edit,Bash"], environment, steps


def opencode(folder: Path, url: str) -> tuple[list[str], dict[str, str], list[Step]]:
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"tiny": {"name": "tiny"}}}
    (folder / "work" / "opencode.json").write_text(json.dumps({"provider": {"here": provider}, "model": "here/tiny"}))
    path = str(folder / "work" / "hello.py")
    steps: list[Step] = [
        ("read", {"filePath": path}),
        ("edit", {"filePath": path, "oldString": "helo", "newString": "hello"}),
        ("bash", {"command": "python3 hello.py", "description": "Run it"}),
    ]
    return ["opencode", "run", "-m", "here/tiny", JOB], {}, steps


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(str(make_scripted_model(tmp_path_factory.mktemp("models") / "tiny"))) as running:
        yield running


@pytest.mark.parametrize("agent", [codex, claude, opencode])
def test_an_agent_does_a_job(
    server: Live,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: Callable[[Path, str], tuple[list[str], dict[str, str], list[Step]]],
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "hello.py").write_text("print('helo')\n")
    (program, *words), environment, steps = agent(tmp_path, server.url)
    if not (BIN / program).exists():
        pytest.skip(f"{BIN} has no {program}")
    make_prompt, num_results = loaded.make_prompt, [0]

    def noted(request: Any, *given: Any) -> Any:
        num_results[0] = sum(message["role"] == "tool" for message in request.messages)
        return make_prompt(request, *given)

    def sampler_of(sampling: Any, defaults: Any, tokenizer: Any, vocab_size: int) -> Any:
        text = DONE
        if num_results[0] < len(steps):
            name, arguments = steps[num_results[0]]
            text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        tokens = iter([*tokenizer.encode(text, add_special_tokens=False), *sorted(tokenizer.eos_token_ids)])
        return lambda logprobs: mx.array([next(tokens)])

    monkeypatch.setattr(loaded, "make_prompt", noted)
    monkeypatch.setattr(loaded, "sampler_of", sampler_of)
    home = {"HOME": str(tmp_path), "PWD": str(work), "NO_COLOR": "1"}
    done = subprocess.run(
        [str(BIN / program), *words],
        env={**os.environ, **home, **environment},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0 and DONE in done.stdout, done.stdout + done.stderr
    assert (work / "hello.py").read_text() == "print('hello')\n"
