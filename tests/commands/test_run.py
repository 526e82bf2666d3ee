"""Modelfiles: prompted, in conversation, served."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.sample_utils import make_logits_processors

import children
from mlx_flash import FlashConfig, cli
from mlx_flash.commands.run import Conversation
from mlx_flash.config import GB
from mlx_flash.memory.footprint import footprint
from mlx_flash.modelfile.parse import Modelfile, parse_modelfile
from mlx_flash.server.batch import BatchOptions
from mlx_flash.server.catalog import Source, source_of
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.models import Models
from mlx_flash.server.prompts import opened
from mlx_flash.server.request import Defaults, GenerationRequest
from models import GEMMA3, MAMBA2, save
from saved_models import random_model_fixture
from terminals import Shell

SHAPE = "--layers 4 --hidden-size 256 --intermediate-size 704 --heads 8 --kv-heads 4 --vocab-size 1000"


model_dir = random_model_fixture(f"--dtype float32 {SHAPE}", "llama")


def modelfile(model_dir: Path, text: str = "") -> Modelfile:
    budget_gb = footprint() / GB + 0.3  # the process may be large already, of other tests
    return parse_modelfile(
        f"FROM {model_dir}\nFLASH_RAM_GB {budget_gb:.3f}\nFLASH_CONTEXT_LENGTH 1024\n{text}", "Modelfile"
    )


@contextmanager
def opened_model(described: Modelfile) -> Iterator[LoadedModel]:
    """Yield the model of a conversation."""
    config = FlashConfig.resolve(modelfile=described.flash, environment={})
    with closing(Models(BatchOptions(is_conversation=True))) as models:
        model = models.load(source_of(described, "model", Source(config=config)), lambda *_: None)
        assert model is not None
        yield model


def say(described: Modelfile, turns: Sequence[str]) -> list[str]:
    """The answers, by the engine."""
    with opened_model(described) as model:
        conversation = Conversation(model, described)
        return ["".join(conversation.answer(text)) for text in turns]


def expected_answer(described: Modelfile, messages: list[dict[str, str]], max_tokens: int) -> str:
    """What mlx-lm alone makes of a whole conversation, from nothing."""
    model, tokenizer, *_ = mlx_lm.load(described.base)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    processors = make_logits_processors(
        repetition_penalty=described.parameters.get("repeat_penalty"), repetition_context_size=64
    )
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens, logits_processors=processors)


def follow(described: Modelfile, turns: Sequence[str], max_tokens: int) -> None:
    """Check that each answer is what mlx-lm makes of the conversation before it."""
    messages = [*described.first_messages]
    for turn, answer in zip(turns, say(described, turns), strict=True):
        messages.append({"role": "user", "content": turn})
        assert answer == expected_answer(described, messages, max_tokens) != ""
        messages.append({"role": "assistant", "content": answer})


def test_a_conversation_is_what_mlx_lm_makes_of_all_of_it(model_dir: Path) -> None:
    described = modelfile(
        model_dir,
        "SYSTEM You are brief.\nMESSAGE user Hi\nMESSAGE assistant Hello.\nPARAMETER num_predict 12\n"
        "PARAMETER repeat_penalty 1.3\nPARAMETER top_k 20",
    )
    assert [message["role"] for message in described.first_messages] == ["system", "user", "assistant"]
    follow(described, ["Tell me about the sea", "And the sky?", "Go on"], 12)


def test_a_seed_repeats_and_stop_ends(model_dir: Path) -> None:
    sampled = "PARAMETER temperature 1\nPARAMETER seed 4\nPARAMETER num_predict 40"
    (first, again) = say(modelfile(model_dir, sampled), ["Hello"]) + say(modelfile(model_dir, sampled), ["Hello"])
    assert first == again
    (other,) = say(modelfile(model_dir, sampled.replace("seed 4", "seed 5")), ["Hello"])
    assert other != first
    middle = first[len(first) // 2 :][:3]
    (cut,) = say(modelfile(model_dir, f'{sampled}\nPARAMETER stop "{middle}"'), ["Hello"])
    assert cut == first[: first.index(middle)]


@pytest.mark.parametrize("architecture", [GEMMA3, MAMBA2], ids=["sliding window", "recurrent"])
def test_caches_that_cannot_be_trimmed(model_dir: Path, tmp_path: Path, architecture: dict[str, Any]) -> None:
    """Their conversation starts afresh, and says the same."""
    directory = save(tmp_path / "model", architecture)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((model_dir / name).read_bytes())
    follow(modelfile(directory, "PARAMETER num_predict 10"), ["Tell me about the sea", "And the sky?"], 10)


@pytest.mark.parametrize("own_system", [False, True])
def test_a_served_modelfile_opens_every_conversation(own_system: bool) -> None:
    first = [{"role": "system", "content": 'A "brief" {% one %} }} é 🦊\n'}, {"role": "user", "content": "Hi"}]
    asked = [{"role": "system", "content": "mine"}] * own_system + [{"role": "user", "content": "What?"}]
    system = {"role": "system", "content": "mine"} if own_system else first[0]
    assert opened(GenerationRequest(model="", messages=asked), first).messages == [system, first[1], asked[-1]]


def test_a_served_modelfile_sets_defaults(model_dir: Path) -> None:
    described = modelfile(
        model_dir,
        "PARAMETER temperature 0.5\nPARAMETER min_p 0.1\nPARAMETER seed 3\nPARAMETER num_predict 7\n"
        "PARAMETER repeat_penalty 1.2\nPARAMETER stop END\nSYSTEM Hi",
    )
    source = source_of(described, "name", Source(config=FlashConfig(), defaults=Defaults(top_k=4)))
    said = {"temperature": 0.5, "min_p": 0.1, "seed": 3, "max_tokens": 7, "top_k": 4, "stop": ("END",)}
    assert source.defaults == Defaults(**said, repetition_penalty=1.2, repetition_context_size=64)  # type: ignore[arg-type]
    assert source.base == str(model_dir)
    assert source.first_messages == ({"role": "system", "content": "Hi"},)


def test_a_stopped_answer_stays_in_the_conversation_and_a_stopped_prompt_does_not(model_dir: Path) -> None:
    described = modelfile(model_dir, "PARAMETER num_predict 12")
    with opened_model(described) as model:
        conversation = Conversation(model, described)
        assert list(conversation.answer("Never answered", is_stopped=lambda: True)) == []
        assert conversation.messages == []
        pieces = conversation.answer("Tell me about the sea")
        begun = next(pieces)
        pieces.close()
        assert [message["content"] for message in conversation.messages] == ["Tell me about the sea", begun]
        (answer,) = ["".join(conversation.answer("Go on"))]
        assert conversation.job is not None
        assert conversation.job.num_cached > len(conversation.job.prompt.tokens) / 2  # which is not computed again
        assert answer == expected_answer(described, conversation.messages[:-1], 12)
        conversation.clear()
        assert conversation.messages == []


def test_a_stopped_answer_begins_no_further_pass(model_dir: Path) -> None:
    """Not even to complete a text that may become a stop text, which is held back."""
    described = modelfile(model_dir, "PARAMETER num_predict 12")
    with opened_model(described) as model:
        (answer,) = ["".join(Conversation(model, described).answer("Hello"))]
        passes: list[int] = []
        conversation = Conversation(model, replace(described, stop=(answer[:3] + "never",)))
        said = conversation.answer(
            "Hello",
            on_token=lambda job: passes.append(model.model.counters.num_passes),
            is_stopped=lambda: bool(passes),
        )
        assert answer.startswith("".join(said))
        assert len(passes) == 1 and model.model.counters.num_passes == passes[0]


@pytest.mark.parametrize("command", [["run", "--max-tokens", "-1"], ["chat", "--max-tokens", "-1", "--model"]])
def test_ctrl_c_stops_an_answer_and_slash_commands_work(model_dir: Path, command: list[str]) -> None:
    shell = Shell("-m", "mlx_flash", *command, model_dir)
    shell.wait_for(">>>")
    shell.type("/?\r")
    shell.wait_for("forget the conversation")
    shell.wait_for(">>>")
    shell.type("\x1b[200~Hello\nthere\x1b[201~\r")
    shell.wait_for("computing the prompt")
    shell.interrupt()
    shell.wait_for(">>>")
    shell.type("Hello\r")
    shell.wait_for("computing the prompt")
    time.sleep(0.5)
    shell.interrupt()
    shell.wait_for("Ctrl-C again ends the program")
    shell.wait_for(", prompt ")
    shell.wait_for(" tokens in ")
    shell.wait_for(">>>")
    shell.type("/bye\r")
    assert shell.end() == 0


def test_an_empty_line_takes_two_interrupts(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shell = Shell("-m", "mlx_flash", "run", model_dir, "-m", "3")
    for message in ("Hello", "Again"):
        shell.wait_for(">>>")
        shell.type(f"{message}\r")
        shell.wait_for(", prompt ")
        shell.wait_for(">>>")
        if message == "Hello":
            shell.interrupt()
            shell.wait_for("Ctrl-C again")
    for _ in range(2):
        time.sleep(0.1)
        shell.type("\x03")
    assert shell.end() == 130 and "Traceback" not in shell.text
    (file,) = tmp_path.rglob("last.json")
    assert file.stat().st_mode & 0o077 == 0
    asked = [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]
    assert asked == ["Hello", "Again"]


def test_conversations_are_the_same_in_pieces_and_in_both_commands(model_dir: Path, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}

    def lines(*words: object, stdin: str) -> tuple[int, str, str]:
        done = children.run("-m", "mlx_flash", *words, "-m", 6, stdin=stdin, env=env)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    whole = lines("run", model_dir, stdin='Hello\n"""And\nthen"""\nGo on\n/bye\nnever\n')
    assert whole[0] == 0 and whole[1] == lines("chat", model_dir, stdin='Hello\n"""And\nthen"""\nGo on')[1]
    first = lines("run", model_dir, stdin='Hello\n"""And\nthen"""\n/save sea\n')
    second = lines("chat", model_dir, stdin="/load sea\nGo on\n/save last\n")
    assert whole[1] == first[1] + second[1] and second[0] == 0
    told = lines("run", model_dir, stdin="/load see\n/save a/b\nHello\n")
    assert told[0] == 1 and told[1] and "there are: last, sea" in told[2] and "no name for" in told[2]
    status, answer, _ = lines("run", "--resume", "And now?", stdin="")
    kept = json.loads((tmp_path / "mlx-flash" / "conversations" / "last.json").read_text())
    assert status == 0 and kept["model"] == str(model_dir) and len(kept["messages"]) == 8
    assert kept["messages"][-1]["content"] + "\n" == answer


@pytest.mark.parametrize("command", ["run", "chat"])
def test_without_a_prompt_nothing_is_loaded(model_dir: Path, command: str) -> None:
    done = children.run("-m", "mlx_flash", command, model_dir, "--ram-budget-gb", 0.001, stdin="\n")
    assert done.returncode == 1 and b"there is no prompt: standard input is empty. Hint: " in done.stderr


def test_a_dash_reads_one_prompt(model_dir: Path) -> None:
    command = ["-m", "mlx_flash", "run", model_dir, "-m", 4]
    one = children.run(*command, "-", stdin="Hello\nthere")
    assert one.stdout == children.run(*command, "Hello\nthere").stdout and one.returncode == 0
    assert b"the prompt is empty" in children.run(*command, "-", stdin=" \n").stderr


def test_answers_follow_a_format_within_the_budget(model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    command = ["-m", "mlx_flash", "run", model_dir, "-m", 60, "--ram-budget-gb", "min", "--verbose"]
    done = children.run(*command, "--format", tmp_path / "schema.json", stdin="Hello\nAgain", forks=False)
    first, end = json.JSONDecoder().raw_decode(text := done.stdout.decode())
    assert first == json.loads(text[end:]) == {"n": 7} and done.stderr.count(b"within the budget") == 2
    (tmp_path / "list.json").write_text("[1]")
    for text, words in (
        ("none.json", b"No such file"),
        (str(tmp_path / "list.json"), b"'list' object is not a mapping"),
    ):
        assert words in children.run(*command, "--format", text, "Hello").stderr


def test_a_model_is_prompted_without_a_modelfile(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = modelfile(model_dir, "PARAMETER num_predict 8")
    monkeypatch.setenv("MLX_FLASH_RAM_BUDGET_GB", described.flash["ram_budget_gb"])
    monkeypatch.setenv("MLX_FLASH_CONTEXT_LENGTH", "1024")
    monkeypatch.setattr("mlx_flash.commands.report.peak_footprint", lambda: 100_000_000)  # not that of earlier tests
    assert cli.main(["run", str(model_dir), "Hello", "-m", "8", "--verbose"]) == 0
    told = capsys.readouterr()
    assert told.out.rstrip("\n") == say(described, ["Hello"])[0].rstrip("\n")
    for words in ("Prompt:", "Generation:", "8 tokens", "Peak memory:", "within the budget of"):
        assert words in told.err
    assert cli.main(["run", str(model_dir), "Hello", "there"]) == 1
    assert "put a prompt of several words in quotes" in capsys.readouterr().err
    monkeypatch.chdir(model_dir)
    assert cli.main(["run", "Hello"]) == 1
    assert "neither a model nor ./Modelfile" in capsys.readouterr().err


def test_the_command_tells_what_it_does_not_do(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "Modelfile"
    file.write_text(f"FROM {model_dir}\nPARAMETER num_gpu 4\nPARAMETER num_predict 6\nFLASH_RAM_GB min\n")
    assert cli.main(["run", "-f", str(file), "Hello"]) == 0
    told = capsys.readouterr()
    assert f"{file}:2:" in told.err and "num_gpu" in told.err
    answer = told.out
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert cli.main(["run", "-f", str(file)]) == 0
    assert capsys.readouterr().out == answer != ""
