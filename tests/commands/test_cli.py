"""The command line, run as a user runs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

import children
from children import ROOT
from mlx_flash import __version__, cli
from mlx_flash.commands import dispatch
from mlx_flash.commands.arguments import COMMANDS, DEFAULT_MODEL, DEFAULT_PROMPT, parse_arguments
from mlx_flash.commands.common import prompt_text
from mlx_flash.commands.report import render_plan
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import ConfigError
from mlx_flash.monitor.words import duration
from saved_models import random_model_fixture

SHAPE = "--layers 3 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2 --vocab-size 300"
PROMPT = "Tell me\\nabout\\tthe sea."


def run(
    *arguments: object, module: str = "mlx_flash", stdin: str = "", forks: bool = True
) -> subprocess.CompletedProcess[bytes]:
    return children.run("-m", module, *arguments, stdin=stdin, forks=forks)


def error_of(*arguments: object, status: int = 1) -> str:
    done = run(*arguments)
    assert done.returncode == status and done.stdout == b""
    text = done.stderr.decode()
    assert "Traceback" not in text
    line = text.splitlines()[-1]
    assert "error: " in line
    return line


def run_json(*arguments: object, stdin: str = "", forks: bool = True) -> dict[str, Any]:
    done = run(*arguments, "--json", stdin=stdin, forks=forks)
    assert done.returncode == 0, done.stderr.decode()
    result: dict[str, Any] = json.loads(done.stdout)
    return result


model = random_model_fixture(SHAPE, "tiny llama")
mixture = random_model_fixture(f"--architecture qwen3_moe --experts 16 --experts-per-token 2 {SHAPE} --dtype float32")
POOL = ("--ram-budget-gb", "min", "--expert-pool-gb", 0.002)
"""Experts are read one by one, in a pool of some of them."""


@pytest.fixture(scope="module")
def report(model: Path) -> dict[str, Any]:
    flags = ["--prompt", PROMPT, "-m", 24, "--ram-budget-gb", "min", "--context-length", 64]
    return run_json("generate", "--model", model, *flags, forks=False)


@pytest.mark.parametrize(
    "flags",
    [
        "--prefill-step-size 8",
        "--prefill-step-size 8 --temp 1 --top-p 0.9 --min-p 0.01 --top-k 50 --seed 3",
        "--prefill-step-size 16 --system-prompt sys --prefill-response Sure --max-kv-size 40",
        "--prefill-step-size 2048 --ignore-chat-template --extra-eos-token <|im_end|>",
    ],
)
def test_text_is_that_of_mlx_lm(model: Path, flags: str) -> None:
    command = ["generate", "--model", model, "--prompt", PROMPT, "--max-tokens", 30, *flags.split()]
    streamed = run(*command, "--ram-budget-gb", "min")
    expected = run(*command, "--verbose", "False", module="mlx_lm")
    if b"unrecognized arguments" in expected.stderr:
        pytest.skip("this mlx-lm has no such flag")
    assert streamed.returncode == expected.returncode == 0
    assert streamed.stdout == expected.stdout


def test_draft_models_give_the_text_of_mlx_lm(model: Path) -> None:
    command = ["generate", "--model", model, "--prompt", PROMPT, "-m", 20, "--prefill-step-size", 16]
    command += ["--draft-model", model, "--num-draft-tokens", 2]
    expected = run(*command, "--verbose", "False", module="mlx_lm")
    streamed = run(*command, "--ram-budget-gb", 0.25)
    assert streamed.returncode == expected.returncode == 0, streamed.stderr.decode()
    assert streamed.stdout == expected.stdout and b"within the budget" in streamed.stderr


def test_a_saved_prompt_cache_is_for_the_program_of_mlx_lm() -> None:
    """It is refused before a model is looked for, or downloaded."""
    line = error_of("generate", "--model", "no/such", "--prompt-cache-file", "x")
    assert "--prompt-cache-file x: only mlx-lm's own program" in line and "exec -- mlx_lm.generate" in line


def test_chat_goes_on_with_a_text_where_there_is_no_chat_template(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    done = run("chat", "--model", folder, "--max-tokens", 2, stdin="Hello")
    assert done.returncode == 0 and done.stdout.strip() and b"has no chat template" in done.stderr


def test_report_adds_up(report: dict[str, Any]) -> None:
    plan = report["plan"]
    assert report["peak_memory_bytes"] <= report["budget_bytes"] == plan["budget_bytes"]
    assert report["within_budget"] is True and report["generation_tokens"] == len(report["tokens"]) == 24
    assert report["bytes_read"] == report["prompt_bytes_read"] + report["generation_bytes_read"] > 0
    read_bytes = plan["streaming"]["read_bytes"] - report["lent_bytes"]
    assert report["bytes_read_per_token"] == pytest.approx(read_bytes * report["passes_per_token"], rel=0.25)
    assert report["prompt_passes"] >= 1 and report["generation_passes"] == 23 - report["guessed_tokens_right"] <= 23
    wall = report["time_to_first_token_seconds"] + report["generation_seconds"]
    assert report["read_bytes_per_second"] == pytest.approx(report["bytes_read"] / wall)
    share = report["reading_bytes_per_second"] / report["disk_bytes_per_second"]
    assert report["disk_speed_share"] == pytest.approx(share) and share > 0
    assert 0 <= report["generation_wait_share"] <= 1 and 0 <= report["prompt_wait_share"] <= 1
    assert plan["peak_bytes"] == sum(part["bytes"] for part in plan["parts"]) <= plan["budget_bytes"]
    assert report["prefill_as_mlx_lm"] is (report["prefill_step_size"] >= report["prompt_tokens"] - 1)


def test_a_mixture_is_planned_and_reported(mixture: Path) -> None:
    table = run("plan", "--model", mixture, *POOL).stdout.decode()
    words = ("predicted peak", "smallest workable budget", "Streamed layers:", "tokens/s", "16 000 tokens", "Experts:")
    assert all(each in " ".join(table.split()) for each in (*words, "of 48 in memory"))
    assert all(len(line) <= 80 for line in table.splitlines())
    command = ["generate", "--model", mixture, "--prompt", PROMPT, "-m", 12, "--prefill-step-size", 16]
    report = run_json(*command, *POOL, "--no-speculation", forks=False)
    assert 0 < report["expert_hit_rate"] < 1
    assert 0 < report["expert_bytes_read_per_token"] <= report["bytes_read_per_token"] and report["within_budget"]
    assert run(*command, "--verbose", "False", module="mlx_lm").stdout.decode() == f"{report['text']}\n"


def test_summary_goes_to_stderr(model: Path) -> None:
    done = run("generate", "--model", model, "-m", 4, "--ram-budget-gb", "min", "--prefill-step-size", 4, forks=False)
    summary = done.stderr.decode()
    assert done.stdout.endswith(b"\n")
    for words in ("Prompt:", "Generation:", "Peak memory:", "within the budget of", "per token", "Time:"):
        assert words in summary
    assert "--prefill-step-size 4" in " ".join(summary.split())
    assert all(len(line) <= 80 for line in summary.splitlines()) and "\x1b" not in summary


def test_verbose_false_says_only_that_a_smaller_step_changes_last_bits(model: Path) -> None:
    command = ["generate", model, "-m", 4, "--verbose", "False", "--prompt", "hello"]
    done = run(*command)
    assert done.stderr == b"" and done.stdout.endswith(b"\n")
    command += ["--prefill-step-size", 4]
    told = run(*command).stderr
    assert told.count(b"\n") == 1 and b"output is mlx-lm's own for --prefill-step-size 4" in told
    assert run(*command, "--quiet").stderr == b""


def test_prompt_is_given_piped_in_or_shown(model: Path) -> None:
    command = ["generate", model, "-m", 3]
    given = run_json(*command, "--prompt", "good morning")
    assert given["prompt_tokens"] > len("good morning")
    for more in ([], ["--prompt", "-"]):
        assert run_json(*command, *more, stdin="good morning")["tokens"] == given["tokens"]
    done = run(*command)
    assert b"there is no --prompt: the prompt is 'hello'" in done.stderr
    assert done.stdout == run(*command, "--prompt", "hello").stdout


def test_closed_standard_streams_are_no_files_of_the_model(model: Path) -> None:
    command = map(str, [sys.executable, "-m", "mlx_flash", "run", model, "Hello", "--max-tokens", 2, "--quiet"])
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&-', "sh", *command], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("where", ["--prompt", "--system-prompt", "--prefill-response"])
def test_bytes_that_are_no_text_are_refused_with_their_source(where: str) -> None:
    with pytest.raises(ConfigError, match=f"{where} is no text: it has bytes that are not UTF-8 after 3 characters"):
        prompt_text(parse_arguments(["generate", "--model", "m", where, "caf\udce9"]), input)


def test_no_encoding_ends_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin, stdout = (io.TextIOWrapper(io.BytesIO(data), encoding="ascii") for data in (b"caf\xe9", b""))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(["cache", "list"]) == 0
    assert stdin.read() == "caf\udce9" and stdout.write("\U0001f642") == 1
    stdout.flush()


def test_plan_warns_of_prompts_that_take_longer_than_a_minute(model: Path) -> None:
    prepared = prepare(model, FlashConfig(ram_budget_gb="min"))
    plan = replace(prepared.plan, prefill_step_size=16)
    for seconds, warned in ((0.01, False), (0.1, True), (30.0, True)):
        slow = replace(plan, streaming=replace(plan.streaming, seconds=seconds), opening_seconds=seconds)
        file = io.StringIO()
        Console(file=file, width=200).print(render_plan("tiny", prepared.layout, slow))
        text = file.getvalue()
        assert ("Warning:" in text) == warned == (slow.seconds_to_first_token(16_000) > 60)
        assert f"100 tokens {duration(30 * slow.prompt_passes(100))}" in text or seconds < 30
        assert "Hint: raise ram_budget_gb" in text or not warned
    assert "30.0 s per token, from a short probe; up to 90.0 s a token are likely" in text
    file = io.StringIO()
    Console(file=file, width=200).print(
        render_plan("tiny", prepared.layout, replace(plan, prompt_seconds_per_token=0.1))
    )
    assert "Computing takes most of it, which no budget shortens" in file.getvalue()
    assert "raise ram_budget_gb" not in file.getvalue() and duration(8_304_709) == "96.1 days"


def test_budget_too_small(model: Path) -> None:
    line = error_of("generate", "--model", model, "--ram-budget-gb", 0.01)
    assert line.startswith("mlx-flash: error: ram_budget_gb is 0.01") and "at least" in line


def test_model_that_is_not_there(tmp_path: Path) -> None:
    assert f"no directory '{tmp_path}/none'" in error_of("generate", "--model", tmp_path / "none")
    assert f"{tmp_path}/config.json" in error_of("generate", "--model", tmp_path)
    assert str(tmp_path) in error_of("plan", "--model", tmp_path)
    for command in (["generate", "--model"], ["run"]):
        line = error_of(*command, "llama3.2:3b")
        assert "'llama3.2:3b' is a name of Ollama" in line and "look for llama3.2 in MLX's format" in line
    line = error_of("generate", "--model", "no/such")
    assert "HF_HUB_OFFLINE" in line and len(line) < 300
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON" in error_of("generate", "--model", tmp_path)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_shows_the_basics_and_on_request_all(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for words in ([command, "--help"], ["help", command], [command, "--help-tuning"]):
        with contextlib.suppress(SystemExit):
            cli.main(words)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "--queue-depth" not in texts[0] and max(map(len, texts[0].splitlines())) < 80
    assert ("--queue-depth" in texts[2]) == COMMANDS[command].streams


def defaults_of(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the defaults of the flags of a program of mlx-lm, which parses its arguments first."""
    found: list[dict[str, Any]] = []

    def parse(self: argparse.ArgumentParser, *_: object) -> None:
        found.append({action.dest: action.default for action in self._actions})
        raise Stop

    class Stop(Exception):
        pass

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        importlib.import_module(f"mlx_lm.{program}").main()
    return found[0]


@pytest.mark.parametrize(
    ("command", "program", "of_its_own"),
    [
        # the prompt is piped in, the step is the plan's, and the number of guesses follows the pace
        ("generate", "generate", {"prompt", "prefill_step_size", "num_draft_tokens", "image", "quantize_activations"}),
        ("chat", "chat", {"prefill_step_size", "temp", "top_p", "max_tokens"}),  # a Modelfile may have some
        (
            "serve",
            "server",
            {"prefill_step_size", "num_draft_tokens", "max_tokens", "allowed_origins", "chat_template_args"},
        ),
    ],
)
def test_flags_have_the_names_and_defaults_of_mlx_lm(
    command: str, program: str, of_its_own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = vars(parse_arguments([command, "--model", "x"])), defaults_of(program, monkeypatch)
    assert len(theirs) > 10
    for name in theirs.keys() - of_its_own - {"help", "model"}:
        assert ours[name] == theirs[name], name
    if command == "generate":
        assert theirs["prompt"] == DEFAULT_PROMPT
    elif command == "chat":
        assert theirs["model"] == DEFAULT_MODEL


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.model])
def test_a_model_is_the_first_argument_or_a_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["target"] if command == "pack" else []
    found = [
        parse_arguments([command, *words]) for words in (["m", *more], ["--model", "m", *more], ["--quiet", "m", *more])
    ]
    assert {str(args.model) for args in found} == {"['m']" if "..." in COMMANDS[command].model else "m"}
    if "..." not in COMMANDS[command].model:
        with pytest.raises(SystemExit):
            parse_arguments([command, "m", *more, "--model", "n"])
        assert "two models are given, m and --model n" in capsys.readouterr().err


def test_words_of_run_stand_anywhere() -> None:
    args = parse_arguments(["run", "m", "--max-tokens", "3", "a prompt", "--verbose"])
    assert args.words == ["m", "a prompt"] and args.max_tokens == 3
    args = parse_arguments(["run", "--model", "m", "a prompt"])
    assert args.words == ["a prompt"] and args.model == "m"


NO_BACK_END = """
class NoBackEnd:
    def find_spec(self, name, *_):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open", name="core", path="/site-packages/mlx/core.cpython-311.so")
sys.meta_path.insert(0, NoBackEnd())
"""
LOW_LIMIT = """
import resource
def refuse(*_):
    raise ValueError("not allowed to raise maximum limit")
resource.setrlimit = refuse
"""


@pytest.mark.parametrize(
    ("beginning", "words"),
    [
        (NO_BACK_END, ["libmlx.so", "Hint: on Linux MLX needs a back end: pip install 'mlx[cpu]'"]),
        (LOW_LIMIT, ["the hard limit of open files to 4096", "Hint: LimitNOFILE=4096"]),
    ],
    ids=["no back end", "low limit of open files"],
)
def test_failed_import_of_mlx_is_an_error_with_a_hint(beginning: str, words: list[str]) -> None:
    program = f"""
import sys
import time
{beginning}
from mlx_flash import cli
status = cli.main(["plan", "x"])
try:
    from mlx_flash import load
except ImportError as error:
    sys.exit(str(error) if status == 1 else 3)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and len(lines) == 2 and lines[0] == f"mlx-flash: error: {lines[1]}"
    assert all(word in lines[1] for word in words)


@pytest.mark.parametrize("command", [["--help"], ["help", "serve"], ["generate", "--help"], ["-V"]])
def test_help_imports_nothing_that_takes_long(command: list[str]) -> None:
    program = f"""
import sys
from mlx_flash import cli
try:
    cli.main({command})
finally:
    assert not {{"mlx", "mlx.core", "mlx_lm", "numpy", "rich"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("generate --model x --ram-bugdet-gb 2", "Did you mean '--ram-budget-gb'?"),
        ("generate --modle x", "unrecognized arguments: --modle. Did you mean '--model'?"),
        ("plan --model x --kv-prefixs=exact", "Did you mean '--kv-prefixes'?"),
        ("serve --model x --prot 80", "Did you mean '--port'?"),
        ("chat --model x --tmep 1", "Did you mean '--temp'?"),
        ("genrate --model x", "there is no command 'genrate'. Did you mean 'generate'? Hint: mlx-flash --help"),
        ("ps --json", "there is no command 'ps' any more. Hint: flash-monitor --once\n"),
        ("list /models", "there is no command 'list' any more. Hint: mlx-flash models\n"),
        ("stop 12", "there is no command 'stop' any more. Hint: kill PID, a process that flash-monitor --once shows\n"),
        ("help show", "there is no command 'show' any more. Hint: mlx-flash plan MODEL\n"),
        ("generate --prompt x", "the following arguments are required: MODEL, as the first argument or by --model"),
    ],
)
def test_misspelt_flags_and_commands_get_a_suggestion(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words.split())
    assert exit_.value.code == 2 and hint in capsys.readouterr().err


def test_serve_takes_several_models_and_none() -> None:
    assert parse_arguments(["serve", "--model", "a", "--model", "b=c"]).model == ["a", "b=c"]
    args = parse_arguments(["serve", "--pipeline", "--prompt-cache-bytes", "1.5GB"])
    assert (args.model, args.prompt_cache_bytes, args.max_tokens) == ([], 1_500_000_000, 4096)
    assert args.host == "127.0.0.1"  # other machines cannot connect unless that is asked for


def test_no_arguments_show_help_and_a_flag_the_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([]) == 2
    assert "generate" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["flash-monitor", "--version"])
    for command in (lambda: cli.main(["--version"]), lambda: cli.main(["-V"]), cli.monitor):
        with pytest.raises(SystemExit) as exit_:
            command()
        assert exit_.value.code == 0 and capsys.readouterr().out == f"mlx-flash {__version__}\n"


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("two\n lines"), 1, "error: two lines"),
        (FileNotFoundError(2, "No such file", "x/y"), 1, "error: No such file: x/y"),
        (KeyError("k"), 1, "KeyError: 'k'. Hint: --traceback"),
    ],
)
def test_errors_are_one_line(
    error: BaseException, status: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("mlx_flash.commands.doctor.is_vision", fail)
    assert cli.main(["plan", "--model", str(ROOT)]) == status
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == 1
    if status == 1:
        monkeypatch.setenv(dispatch.TRACEBACK_VARIABLE, "1")
        cli.main(["plan", "--model", str(ROOT)])
        assert "Traceback" in capsys.readouterr().err


@contextlib.contextmanager
def generating(model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that would take long, and whose first text has come."""
    command = [sys.executable, "-m", "mlx_flash", "generate", "--model", str(model), "-m", "100000", "-p", "hello"]
    command += ["--ram-budget-gb", "min"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None and process.stdout.read(1)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "status", "words"), [(signal.SIGINT, 130, b"interrupted"), (signal.SIGTERM, 143, b"terminated")]
)
def test_a_signal_ends_generation_with_its_summary(model: Path, number: int, status: int, words: bytes) -> None:
    with generating(model) as process:
        until_then, others = psutil.Process(process.pid).cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = ended.ru_utime + ended.ru_stime - others.ru_utime - others.ru_stime
        assert seconds - until_then.user - until_then.system < 3
    assert process.returncode == status and out.endswith(b"\n")
    assert all(each in err for each in (b"ended by: interrupted", b"Peak memory", words)) and b"Traceback" not in err


def test_broken_pipe_is_quiet(model: Path) -> None:
    with generating(model) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("plan --help", ""), ("models --json", ""), ("cache list", "1")],
)
def test_full_disk_below_standard_output_is_named(words: str, unbuffered: str) -> None:
    """Python writes at once with PYTHONUNBUFFERED; else when its buffer is full, or the process ends."""
    command = [sys.executable, "-m", "mlx_flash", *words.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 1 and b"No space left on device. Hint: " in done.stderr
    assert b"standard output" in done.stderr and done.stderr.count(b"\n") == 1


# --- mixtures of experts ---------------------------------------------------------------------------------------------


WRONG = [
    ("serve", "--port -1", "-1 is not between"),
    ("serve", "--prompt-cache-bytes x", "x"),
    ("chat", "--temp nan", "nan is not between 0 and 1000"),
    ("chat", "--max-tokens 0", "0 is not between 1 and 2147483647; -1 sets no limit"),
    ("generate", "--max-tokens -2", "is not between"),
    ("generate", "--chat-template-config [1]", "[1]"),
    ("generate", "--top-p 2", "2 is not between 0 and 1"),
    ("generate", "--xtc-threshold 0.7", "0.7 is not between 0 and 0.5"),
    ("generate", "--seed 18446744073709551616", "is not between 0"),
    ("generate", "--kv-bits 7", "'7' is not one of 2, 3, 4"),
    ("generate", "--context-length 0", "context_length is 0: it must be at least 1"),
    *(("plan", f"--ram-budget-gb {text}", f"ram_budget_gb is '{text}'") for text in ("abc", "nan", "-1", "0")),
    ("doctor", "--prompt-tokens 1e9", "'1e9' is not a whole number"),
    ("monitor", "--interval nan", "nan"),
]


@pytest.mark.parametrize(("command", "flags", "words"), WRONG)
def test_wrong_values_are_usage_errors(
    command: str, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, *(["--model", "x"] if command not in ("run", "monitor") else []), *flags.split()])
    told = capsys.readouterr().err
    assert exit_.value.code == 2 and words in told and flags.split()[-2] in told


def test_a_programs_own_handler_of_ctrl_c_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a command is imported, too, where Python's own handler is replaced."""
    own, seen, load = lambda *_: None, [], dispatch._load_command
    monkeypatch.setattr(
        dispatch, "_load_command", lambda name: seen.append(signal.getsignal(signal.SIGINT)) or load(name)
    )
    before = signal.signal(signal.SIGINT, own)
    try:
        assert cli.main(["cache", "list"]) == 0 and seen == [own]
    finally:
        signal.signal(signal.SIGINT, before)
