"""Agents do a small job: they read a file, change it, and run a program. The model's words are those of this test.

One model is in memory, and one is streamed within the smallest budget.

It needs programs of npm: ``npm install --prefix DIR @openai/codex @anthropic-ai/claude-code opencode-ai``, and DIR in
the environment variable ``MLX_FLASH_AGENTS``. `test_bodies.py` has what they send.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import cycle
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
    tools = "Read,Edit,Bash"  # all of them make 57,000 tokens of the tiny model's
    return ["claude", "-p", JOB, "--tools", tools, "--allowedTools", tools], environment, steps


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


@pytest.fixture(scope="module", params=[2.0, "min"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = make_scripted_model(tmp_path_factory.mktemp("models") / "tiny")
    with live(str(model), ram_budget_gb=request.param, context_length=131072) as running:
        running.say("Hi", max_tokens=1)
        assert (running.model.plan.read_bytes > 0) == (request.param == "min")
        yield running


class Agent:
    """A program of npm in a folder of its own, whose model says what this test writes.

    Attributes:
        work: the folder.
        num_results: results of tools in the last prompt.
        text: the answer, for as long as it is read; None for the steps of the job.
    """

    def __init__(
        self, make: Callable[[Path, str], Any], folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "hello.py").write_text("print('helo')\n")
        (program, *self._words), self._environment, self._steps = make(folder, url)
        self._program = BIN / program
        if not self._program.exists():
            pytest.skip(f"{BIN} has no {program}")
        self._environment |= {"HOME": str(folder), "PWD": str(self.work), "NO_COLOR": "1"}
        self.num_results = 0
        self.text: str | None = None
        self._make_prompt = loaded.make_prompt
        monkeypatch.setattr(loaded, "make_prompt", self._noted)
        monkeypatch.setattr(loaded, "sampler_of", self._sampler_of)

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [str(self._program), *self._words],
            env={**os.environ, **self._environment},
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as program:
            try:
                yield program
            finally:
                program.kill()

    def _noted(self, request: Any, *given: Any) -> Any:
        self.num_results = sum(message["role"] == "tool" for message in request.messages)
        return self._make_prompt(request, *given)

    def _sampler_of(self, sampling: Any, tokenizer: Any, vocab_size: int) -> Any:
        if self.text is not None:
            words = cycle(tokenizer.encode(self.text, add_special_tokens=False))
            return lambda logprobs: mx.array([next(words)])
        text = DONE
        if self.num_results < len(self._steps):
            name, arguments = self._steps[self.num_results]
            text = f"I take step {self.num_results}."
            text += f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        tokens = iter([*tokenizer.encode(text, add_special_tokens=False), *sorted(tokenizer.eos_token_ids)])
        return lambda logprobs: mx.array([next(tokens)])


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 900
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("make", [codex, claude, opencode])
def test_an_agent_does_a_job(server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    agent = Agent(make, tmp_path, server.url, monkeypatch)
    with agent.running() as running:
        printed, _ = running.communicate(timeout=1000)
    assert running.returncode == 0 and DONE in printed, printed
    assert (agent.work / "hello.py").read_text() == "print('hello')\n"


@pytest.mark.parametrize("make", [codex, claude, opencode])
def test_an_agent_is_interrupted(server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Its request ends, and the next one is answered."""
    agent = Agent(make, tmp_path, server.url, monkeypatch)
    agent.text = "And so on, "
    jobs = next(iter(server.room.models)).jobs
    with agent.running() as running:
        until(lambda: any(len(job.tokens) > 20 for job in list(jobs.values())))
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    until(lambda: not jobs)
    assert (agent.work / "hello.py").read_text() == "print('helo')\n"
    agent.text = None
    assert server.say("Hi", max_tokens=20).startswith("I take step 0.")
