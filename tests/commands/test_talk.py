"""Conversations in a terminal: lines, history, slash commands, and what is shown around answers."""

from __future__ import annotations

import io
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlx_flash.commands import run
from mlx_flash.commands.run import NAMES, Conversation, Talk
from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.modelfile.parse import parse_modelfile
from mlx_flash.server.batch import BatchOptions, Job
from mlx_flash.server.catalog import Source
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.models import Models
from mlx_flash.server.request import GenerationRequest
from models import make_random_model
from terminals import ROOT

MODEL = ROOT / "examples" / "pair" / "draft"
TEXT = f"FROM {MODEL}\nSYSTEM You are brief.\nPARAMETER num_predict 6\nPARAMETER stop end\nLICENSE mine"


@given(st.text('a" \n', max_size=20))
def test_triple_quotes_are_open_until_they_are_closed(text: str) -> None:
    stripped = text.strip()
    assert run.is_open(text) == (stripped.startswith('"""') and not (stripped[3:].endswith('"""')))
    if not run.is_open(text):
        assert run.unquote(text) == (stripped[3:-3].strip("\n") if stripped.startswith('"""') else text)


def test_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('one\n"""two\n three\n"""\n'))
    read = run.make_reader(NAMES)
    assert read is run.read_plainly
    assert [read(), read()] == ["one", "two\n three"]
    with pytest.raises(EOFError):
        read()
    assert capsys.readouterr().err == ">>> >>> ... ... >>> "
    monkeypatch.setattr(sys, "stdin", io.StringIO('"""one\n two\n'))
    with pytest.raises(ConfigError, match="the input ends within a message"):
        run.make_reader(NAMES)()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def keyboard(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("prompt_toolkit.output.create_output", lambda stdout: DummyOutput())
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


def test_the_editor_takes_pasted_lines_quotes_and_history(keyboard: Any, state: Path) -> None:
    read = run.make_reader(NAMES)
    keyboard.send_text("\x1b[200~one\ntwo\x1b[201~\r")
    assert read() == "one\ntwo"
    keyboard.send_text('"""three\rfour"""\r')
    assert read() == "three\nfour"
    keyboard.send_text("five\x1b\rsix\r")  # Alt-Enter
    assert read() == "five\nsix"
    keyboard.send_text("wrong\x03right\r")
    assert read() == "right"
    keyboard.send_text("\x1b[A\x1b[A\x1b[D!\r")
    assert read() == "five\nsi!x"
    keyboard.send_text("\x03")
    with pytest.raises(KeyboardInterrupt):
        read()
    keyboard.send_text("\x04")
    with pytest.raises(EOFError):
        read()
    file = state / "mlx-flash" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and "right" in file.read_text()
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    keyboard.send_text("\x1b[A\r")
    assert run.make_reader(NAMES)() == "five\nsi!x"  # of the run before


def test_a_history_that_others_could_read_becomes_private(state: Path) -> None:
    file = run.state_folder() / "history"
    file.parent.mkdir(parents=True)
    file.write_text("")
    file.chmod(0o644)
    assert run.open_history(file) and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_place_messages_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert not run.open_history(run.state_folder() / "history")
    assert "messages are not kept" in capsys.readouterr().err


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    config = FlashConfig(ram_budget_gb=1.0, context_length=1024)
    with closing(Models(BatchOptions(is_conversation=True))) as models:
        model = models.load(Source(name="model", base=str(MODEL), config=config), lambda *_: None)
        assert model is not None
        yield model


@pytest.fixture
def conversation(loaded: LoadedModel) -> Conversation:
    return Conversation(loaded, parse_modelfile(TEXT, "Modelfile"))


def test_slash_commands_change_the_next_answers(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(conversation, 0.0, io.StringIO(), verbose=False)
    first = "".join(conversation.answer("Hello"))
    talk.command("/set parameter num_predict 2")
    talk.command("/clear")
    shorter = "".join(conversation.answer("Hello"))
    assert first.startswith(shorter) and len(shorter) < len(first)
    talk.command("/set system Answer in French.")
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[0]["content"] == "Answer in French."
    talk.command("/set system")
    assert conversation.messages[0]["role"] == "user"
    talk.command('/set parameter stop "a b"')
    assert conversation.modelfile.stop == ("a b",)
    talk.command("/set quiet")
    assert talk.is_quiet
    talk.command("/set verbose")
    assert talk.is_verbose and not talk.is_quiet
    capsys.readouterr()
    for line, words in {
        "/show": f"Model:       {MODEL}",
        "/show ": "num_predict: 2",
        "/help": "begins and ends a message of several lines",
    }.items():
        talk.command(line)
        assert " ".join(words.split()) in " ".join(capsys.readouterr().err.split()), line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/etc/hosts is a file", "there is no command /etc/hosts; there are /set, /show"),
        ("/sho", "Did you mean '/show'?"),
        ("/set", "/set : it must be one of parameter"),
        ("/set parameter", "there is no value"),
        ("/set parameter temprature 1", "Did you mean 'temperature'?"),
        ("/set parameter top_p 2", "above 0 and at most 1"),
        ("/set parameter num_ctx 9", "reserved when the model is loaded"),
    ],
)
def test_wrong_commands_are_refused(conversation: Conversation, line: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        Talk(conversation, 0.0, io.StringIO(), verbose=False).command(line)
    assert words in str(found.value)


def test_a_conversation_goes_on_after_errors_and_shows_speed_and_memory(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    messages = iter(["/nothing", "", "Hello", " /etc is a folder", "/set quiet", " /bye", "/bye now", "never read"])
    Talk(conversation, 0.0, out, verbose=False).converse(lambda: next(messages))
    told = " ".join(capsys.readouterr().err.split())
    assert "there is no command /nothing" in told and told.count("6 tokens, ") == 2
    assert ", memory " in told and "of 1.00 GB" in told and "prompt " in told
    asked = [message["content"] for message in conversation.messages if message["role"] == "user"]
    assert asked == ["Hello", "/etc is a folder", "/bye"] and next(messages) == "never read"
    assert Talk(conversation, 0.0, out, verbose=False).converse(lambda: "/quit") == 0


def test_messages_that_cannot_become_tokens_do_not_end_a_conversation(
    conversation: Conversation, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shown = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}{{ messages }}"
    with monkeypatch.context() as patch:
        patch.setattr(loaded.tokenizer._tokenizer, "chat_template", shown)
        patch.setattr(loaded.tokenizer._tokenizer, "has_chat_template", True)
        with pytest.raises(RefusedError, match="the model's chat template refuses the messages: System role not"):
            list(conversation.answer("Hello"))
    conversation.set_system(None)
    messages = iter(["caf\udce9", "Hello", "/bye"])
    Talk(conversation, 0.0, io.StringIO(), verbose=False).converse(lambda: next(messages))
    told = " ".join(capsys.readouterr().err.split())
    assert "the message of the user is no text: it has bytes that are not UTF-8 after 3 characters" in told
    assert [message["content"] for message in conversation.messages if message["role"] == "user"] == ["Hello"]
    with pytest.raises(ConfigError, match="the prompt is empty"):
        list(Conversation(loaded, parse_modelfile(f"FROM {MODEL}", "Modelfile")).answer(""))


def test_a_conversation_whose_cache_rotates_may_be_of_any_length(tmp_path: Path) -> None:
    shape = "--architecture qwen3 --layers 2 --hidden-size 64 --heads 4 --kv-heads 4"
    make_random_model(tmp_path / "model", *shape.split())
    config = FlashConfig(ram_budget_gb="min", context_length=64, prefill_step_size=16, kv_cache="stock")
    source = Source(name="model", base=str(tmp_path / "model"), config=config)
    for most, refuses in [(None, pytest.raises(RefusedError, match="need")), (32, nullcontext())]:
        with closing(Models(BatchOptions(is_conversation=True, max_kv_size=most))) as models:
            model = models.load(source, lambda *_: None)
            assert model is not None
            with refuses:
                asked = GenerationRequest(model="model", tokens=[5] * 2_000_000, max_tokens=5)
                model.prepare(Job(asked, source, None))


def test_an_answer_without_text_is_part_of_the_conversation(conversation: Conversation) -> None:
    first = "".join(conversation.answer("Hello"))
    conversation.clear()
    Talk(conversation, 0.0, io.StringIO(), verbose=False).command(f"/set parameter stop {first[:1]}")
    assert "".join(conversation.answer("Hello")) == "" and conversation.finish_reason == "stop"
    assert [message["content"] for message in conversation.messages] == ["You are brief.", "Hello", ""]
    with pytest.raises(ConfigError, match="is no text"):
        list(conversation.answer("caf\udce9"))
    assert len(conversation.messages) == 3


def test_an_answer_cannot_control_the_terminal(conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(conversation, "answer", lambda *_: (piece for piece in ["a\x1b]0;title\x07b", "\tc\n"]))
    Talk(conversation, 0.0, out, verbose=False).answer("Hello")
    assert out.getvalue() == "a]0;titleb\tc\n\n"
