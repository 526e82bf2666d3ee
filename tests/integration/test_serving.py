"""mlx-lm's own programs under the patch, run and used as their users do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import children
from live import Port, free_port, served
from models import make_random_model
from waiting import eventually

openai: Any = None


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    """Import the client's library here: each worker imports every file, and the tests of this one run in one."""
    global openai
    openai = pytest.importorskip("openai")


SHAPE = "--layers 4 --hidden-size 256 --intermediate-size 704 --heads 8 --kv-heads 4 --vocab-size 1000"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_random_model(tmp_path_factory.mktemp("models") / "llama", *SHAPE.split()))


class Server(Port):
    """A program in a process of its own."""

    def __init__(self, port: int, process: BaseProcess, log: Path) -> None:
        super().__init__(port)
        self.process, self.log = process, log


@contextlib.contextmanager
def running(log: Path, *command: str, forks: bool = True) -> Iterator[Server]:
    port = free_port()
    program = command if command[0] == "-c" else ("-m", *command)
    with (
        served([*program, "--port", port], port, log, forks=forks) as process,
        contextlib.closing(Server(port, process, log)) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def resident(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("logs") / "log", "mlx_lm", "server", "--model", model) as server:
        yield server


@pytest.fixture(scope="module")
def streaming(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = ["mlx_flash", "serve", "--model", model, "--ram-budget-gb", "0.4"]
    with running(tmp_path_factory.mktemp("logs") / "log", *command) as server:
        yield server


def chat(server: Server, text: str, **options: Any) -> str:
    responses = server.client().chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": text}],
        stream=True,
        **{"max_tokens": 16, **options},
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in responses if chunk.choices)


def test_a_streamed_completion_is_the_resident_servers(resident: Server, streaming: Server) -> None:
    assert chat(streaming, "Tell me about the sea") == chat(resident, "Tell me about the sea") != ""
    options = {"temperature": 0.8, "seed": 5}
    assert chat(streaming, "And the sky?", **options) == chat(resident, "And the sky?", **options)
    assert "in a budget of 0.400 GB" in streaming.log.read_text()


def scrape(server: Server) -> dict[str, float]:
    """Return the metrics of the server's one engine by name, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        found = re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", answer.read().decode(), re.M)
    return {name: float(value) for name, value in found}


def test_metrics_count_tokens(streaming: Server) -> None:
    before = chat(streaming, "Hello", max_tokens=1) and scrape(streaming)
    chat(streaming, "Tell me about the sea", max_tokens=12)
    name = "mlx_flash_generated_tokens_total"
    eventually(lambda: scrape(streaming)[name] != before[name])  # the state is published four times a second
    after = scrape(streaming)
    assert after["mlx_flash_budget_bytes"] == 400_000_000 >= after["mlx_flash_memory_peak_bytes"] > 0
    assert after["mlx_flash_input_tokens_total"] > before["mlx_flash_input_tokens_total"]
    assert "mlx_flash_routed_experts_total" not in after and after["mlx_flash_requests"] == 0


def test_requests_beyond_the_budget_together_wait_and_keep_it(model: str, resident: Server, tmp_path: Path) -> None:
    command = ["mlx_flash", "serve", "--model", model, "--ram-budget-gb", "min"]
    texts = ["word " * 100, "Hi", "word " * 130, "Who are you?"]
    expected = [chat(resident, text) for text in texts]
    with running(tmp_path / "log", *command, forks=False) as server, ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda text: chat(server, text), texts)) == expected
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        budget_bytes = int(server.log.read_text().partition("in a budget of ")[2].split()[0])
        assert int(status.partition("VmHWM:")[2].split()[0]) * 1024 <= budget_bytes


def test_a_refusal_does_not_wait_for_others(streaming: Server) -> None:
    long_one: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 12_000}
    with streaming.leaving("/v1/chat/completions", **long_one, stream=True) as first:
        assert first.recv(100)  # the batch is under way: a request that is in none has to wait
        with streaming.leaving("/v1/chat/completions", **long_one, seed=1):
            time.sleep(1)
            with pytest.raises(openai.APIStatusError, match=r"need [\d.]+ MB .* --ram-budget-gb"):
                chat(streaming, "Hi " * 300_000)


ENDS_SOON = """
import runpy
from mlx_flash.server import serving
serving.DRAIN_SECONDS = 1.0
runpy.run_module("mlx_flash", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server(model: str, tmp_path: Path, number: signal.Signals) -> None:
    """An answer of hours is under way; after SIGTERM it goes on a little."""
    command = ["-c", ENDS_SOON, "serve", "--model", model, "--ram-budget-gb", "0.4"]
    with running(tmp_path / "log", *command, forks=False) as server:
        request = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 12_000, "stream": True}
        responses = server.client().chat.completions.create(model="default_model", **request)
        next(iter(responses))
        os.kill(server.process.pid or 0, number)
        with pytest.raises(openai.APIError, match="the server stops"):  # the last event
            list(responses)
        server.process.join(20)
        assert server.process.exitcode == 0, server.log.read_text()
        assert "terminate called" not in server.log.read_text()


SIGNALLED = """
import os, runpy, sys, time
from mlx_flash.server.models import Models
number, load = int(sys.argv.pop(1)), Models.load
def signalled(*args):
    os.kill(os.getpid(), number)
    time.sleep(0.5)
    return load(*args)
Models.load = signalled
runpy.run_module("mlx_flash", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_while_it_loads(model: str, number: signal.Signals) -> None:
    flags = ["--model", model, "--ram-budget-gb", "0.4", "--port", str(free_port())]
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 128 + number, done.stderr
    assert "loaded" not in done.stderr and "terminate called" not in done.stderr


def test_a_port_in_use_is_reported_before_the_model_is_loaded(model: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run("mlx_flash", "serve", "--model", model, "--ram-budget-gb", "0.4", "--port", port)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use. Hint: " in done.stderr
    assert "of weights" not in done.stderr


def run(*command: object, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    done = children.run("-m", *command, stdin=stdin, env=variables)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("program", [["mlx_lm", "generate"], ["python", "-m", "mlx_lm.generate"]])
def test_exec_runs_mlx_lms_commands(model: str, program: list[str]) -> None:
    flags = ["--model", model, "--prompt", "The sea", "--max-tokens", "12", "--verbose", "False"]
    expected = run("mlx_lm", "generate", *flags)
    found = run("mlx_flash", "exec", "--ram-budget-gb", "min", "--", *program, *flags)
    assert found.returncode == expected.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == expected.stdout.splitlines()[-1] != ""


def test_a_prompt_cache_that_was_saved_goes_on(model: str, tmp_path: Path) -> None:
    budget = ["--ram-budget-gb", "min", "--"]
    texts = []
    for name, flash in (("resident", []), ("streamed", ["mlx_flash", "exec", *budget])):
        file = tmp_path / f"{name}.safetensors"
        prefix = ["mlx_lm"] if not flash else [*flash, "mlx_lm"]
        made = run(*prefix, "cache_prompt", "--model", model, "--prompt", "Once upon", "--prompt-cache-file", file)
        assert made.returncode == 0, made.stderr
        flags = ["--prompt-cache-file", file, "--prompt", " a time", "--max-tokens", "12", "--verbose", "False"]
        texts.append(run(*prefix, "generate", *flags))
        assert texts[-1].returncode == 0, texts[-1].stderr
    assert texts[0].stdout == texts[1].stdout != ""


def test_exec_runs_a_file_with_its_arguments_and_status(model: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, mlx_lm, helper\n"
        "model, tokenizer, *_ = mlx_lm.load(sys.argv[1])\n"
        "print(type(model).__name__, helper.NAME)\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "helper.py").write_text("NAME = 'beside'\n")
    done = run("mlx_flash", "exec", "--ram-budget-gb", "min", "--", script, model)
    assert (done.returncode, done.stdout) == (7, "FlashLLM beside\n"), done.stderr


def test_exec_of_nothing(model: str) -> None:
    done = run("mlx_flash", "exec", "no-such-program", "--model", "x")
    assert done.returncode == 1 and "no such Python program" in done.stderr
    done = run("mlx_flash", "exec", "--")
    assert done.returncode == 1 and "no program is named" in done.stderr
