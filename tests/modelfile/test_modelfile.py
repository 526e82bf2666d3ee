"""Tests of Modelfiles: everything in one has its effect, is noted, or is refused with its line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from children import ROOT
from machines import some
from mlx_flash.config import FlashConfig, KVMode
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import PARAMETERS as BOUNDS
from mlx_flash.modelfile.parse import Modelfile, Note, parse_modelfile, read_modelfile

FROM = "FROM org/model\n"


def parse(*lines: str) -> Modelfile:
    """A Modelfile of a FROM and these lines, the first of which is line 2."""
    return parse_modelfile(FROM + "\n".join(lines), "Modelfile")


def wrong(*lines: str, line: int = 2) -> str:
    """What is said about a line of it."""
    with pytest.raises(ConfigError) as caught:
        parse(*lines)
    start = f"Modelfile, line {line}: "
    assert str(caught.value).startswith(start)
    return str(caught.value).removeprefix(start)


# --- the whole -------------------------------------------------------------------------------------------------------


def test_the_example() -> None:
    found = read_modelfile(ROOT / "examples" / "Modelfile")
    assert found.notes == ()
    assert f"KV cache: {', '.join(get_args(KVMode))};" in (ROOT / "examples" / "Modelfile").read_text()
    assert found.parameters.keys() == BOUNDS.keys()
    assert found.stop == ("<|eot_id|>", "<|start_header_id|>")
    assert found.system == "You are a patient teacher.\nAnswer in at most three sentences."
    assert found.chat_template
    assert [message["role"] for message in found.messages] == ["user", "assistant"]
    config = FlashConfig.resolve(modelfile=found.flash, environment={})
    assert (config.ram_budget_gb, config.context_length, config.prefill_step_size) == ("balanced", 4096, 512)
    left_out = {"poison_released_slots"}  # for tests
    assert {field.name for field in dataclasses.fields(FlashConfig)} - found.flash.keys() == left_out


def test_instructions_in_any_case_and_order_with_comments_between() -> None:
    text = "\n  # first\nparameter Top_K 3\n\n\tSystem  Be brief. # not a comment  \r\nFrom a/b\r\n#last"
    found = parse_modelfile(text, "M")
    assert (found.base, found.parameters["top_k"], found.system) == ("a/b", 3, "Be brief. # not a comment")


def test_encodings(tmp_path: Path) -> None:
    file = tmp_path / "Modelfile"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_text(FROM + "SYSTEM é", encoding=encoding)
        assert read_modelfile(file).system == "é"
    file.write_text(FROM + "SYSTEM é", encoding="latin-1")
    with pytest.raises(ConfigError, match="Modelfile: the Modelfile is not text: "):
        read_modelfile(str(file))
    with pytest.raises(ConfigError, match="none: the Modelfile cannot be read: "):
        read_modelfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("FORM a/b", "there is no instruction 'FORM'. Did you mean 'FROM'?"),
        ("FLASH_RAM_BUDGET_GB 3", "there is no instruction 'FLASH_RAM_BUDGET_GB'. Did you mean 'FLASH_RAM_GB'?"),
        ("You are Mario.", "there is no instruction 'You'"),
        ("FROM c/d", "there is a second FROM; the first is in line 1"),
        ("SYSTEM", "SYSTEM has no value"),
        ("PARAMETER", "PARAMETER has no value"),
        ("PARAMETER top_k", "PARAMETER top_k has no value"),
        ("PARAMETER temprature 1", "there is no parameter 'temprature'. Did you mean 'temperature'?"),
        ("PARAMETER stpo x", "there is no parameter 'stpo'. Did you mean 'stop'?"),
        ('PARAMETER stop ""', "PARAMETER stop is empty: every text would end before it begins"),
        ("PARAMETER top_k 4.5", "PARAMETER top_k is '4.5': it must be a whole number"),
        ("PARAMETER min_p 2", "PARAMETER min_p is 2: it must be between 0 and 1"),
        ("MESSAGE user", "MESSAGE user has no value"),
        ("MESSAGE usr hi", "MESSAGE is of 'usr': it must be one of system, user, assistant. Did you mean 'user'?"),
        ('ADAPTER ""', "ADAPTER is empty"),
        ("FLASH maybe", "enabled is 'maybe': it must be true or false"),
        ("FLASH_QUEUE_DEPTH 65", "queue_depth is 65: it must be between 1 and 64"),
    ],
)
def test_what_is_refused(line: str, words: str) -> None:
    assert wrong(line).startswith(words)
    assert wrong("# a comment", 'SYSTEM """a', '"""', line, line=5).startswith(words)


# --- quotes ----------------------------------------------------------------------------------------------------------


QUOTED = [
    ("  spaces  around\t ", "spaces  around"), ('" keeps spaces "  ', " keeps spaces "), ('""', ""), ('""""""', ""),
    ('"he said "hi" to me"', 'he said "hi" to me'), ("'single'", "'single'"), ('"back\\slash\\n"', "back\\slash\\n"),
    ('"two\n # "lines" .\n"', 'two\n # "lines" .\n'), ('"""a""" b\nc"""', 'a""" b\nc'), ('""""a""""', '"a"'),
    ('"""\nFROM x/y\n# no comment\n"""  ', "\nFROM x/y\n# no comment\n"),
]  # fmt: skip


def test_quotes() -> None:
    for written, text in QUOTED:
        found = parse(f"SYSTEM {written}", "PARAMETER seed 7")
        assert found.system == text
        assert found.parameters["seed"] == 7  # the next line is read as such
        assert parse(f"MESSAGE user {written}").messages == ({"role": "user", "content": text},)
    for written in ('"""never ends', '"""', '""""', '"never ends', '"', '"""a"', '"""a\n"', '"""a\n""" b'):
        quote = '"""' if written.startswith('"""') else '"'
        end = f"the text that begins with {quote} has no closing {quote} at the end of a line"
        assert wrong("", f"SYSTEM {written}", "", line=3) == end
    assert "text after the closing quote" in wrong('PARAMETER stop "x" # comment', 'SYSTEM "a"')


lines_of_text = st.text().map(lambda text: text.replace("\r", ""))


@some(200)
@given(lines_of_text)
@example('\n"""x')
@example("\x85\u2028\x1c")
def test_quoting_and_back(text: str) -> None:
    if not any(line.rstrip().endswith('"""') for line in text.split("\n")[:-1]):
        assert parse(f'SYSTEM """{text}"""', "LICENSE x").system == text
    first, *rest = text.split("\n")
    if '"' not in first and not any(line.rstrip().endswith('"') for line in rest[:-1]) and not text.startswith('"'):
        assert parse(f'SYSTEM "{text}"', "LICENSE x").system == text
    if "\n" not in text and not text.strip().startswith('"') and text.strip():
        assert parse(f"SYSTEM {text}", "LICENSE x").system == text.strip()


# --- the model -------------------------------------------------------------------------------------------------------


def test_repositories(tmp_path: Path) -> None:
    names = {"org/model": "org/model", '"org/model-1.5_x"': "org/model-1.5_x", "gpt2": "gpt2"}
    for written, base in (names | {"hf.co/o/m": "o/m", "https://huggingface.co/o/m": "o/m"}).items():
        assert parse_modelfile(f"FROM {written}", "M").base == base
    (tmp_path / "gpt2").write_text("FROM gpt2")  # a file beside a Modelfile is no model: this is the Modelfile
    assert read_modelfile(tmp_path / "gpt2").base == "gpt2"
    assert wrong("ADAPTER org/adapter").startswith("'org/adapter' is not there: looked at org/adapter")


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "my models" / "m"
    model.mkdir(parents=True)
    path = tmp_path / "Modelfile"
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in ("my models/m", "./my models/m", str(model), "~/my models/m", '"my models/m"'):
        path.write_text(f"FROM {written}\nADAPTER {written}")
        found = read_modelfile(path)
        assert found.base == str(model) or Path(found.base).samefile(model)
        assert Path(found.base).is_absolute()
        assert found.adapter is not None and found.adapter.samefile(model) and found.adapter.is_absolute()
    monkeypatch.chdir(model)
    assert parse_modelfile("FROM .", "Modelfile").base == str(model)
    (model / "org" / "model").mkdir(parents=True)
    assert parse_modelfile("FROM org/model", "Modelfile").base == str(model / "org" / "model")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("./nowhere", "'./nowhere' is not there: looked at "),
        ("~/nowhere/at/all", "is not there"),
        ("./file", "'./file' is not a directory"),
        ("llama3.2:3b", "neither a directory nor a Hugging Face repository"),
        ("a/b/c", "neither a directory nor a Hugging Face repository"),
        ('""', "FROM is empty"),
        ("./model-*.GGUF", "GGUF files are not read"),
        ("a\0b", "is not a path|neither a directory"),
        ("~no-such-user/x", "is not a path"),
        ("/" + "x" * 5000, "is not a path|is not there"),
    ],
)
def test_models_that_are_none(written: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"Modelfile, line 2: .*({words})"):
        parse_modelfile(f"\nFROM {written}", tmp_path / "Modelfile")
    with pytest.raises(ConfigError, match=r"^M: there is no FROM"):
        parse_modelfile("# FROM a/b", "M")


# --- parameters ------------------------------------------------------------------------------------------------------


PARAMETERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "num_ctx": ({"1": 1, "4096": 4096}, ["0", "-1", "1.5", "x"]),
    "num_predict": ({"1": 1, "-1": -1, "-2": -2}, ["0", "-3", "1.0"]),
    "temperature": ({"0": 0.0, "0.7": 0.7, "2": 2.0}, ["-0.1", "hot", "nan", "inf", "1e999", "0,7", '""']),
    "top_p": ({"1": 1.0, "0.9": 0.9, "1e-3": 0.001}, ["0", "1.1", "-1", "nan"]),
    "top_k": ({"0": 0, "40": 40}, ["-1", "1.5", str(2**31)]),
    "min_p": ({"0": 0.0, "0.05": 0.05, "1": 1.0}, ["-0.1", "1.01"]),
    "seed": ({"0": 0, str(2**64 - 1): 2**64 - 1, "-1": -1}, ["-2", str(2**64), "random"]),
    "repeat_penalty": ({"1.1": 1.1, "0.5": 0.5, "2": 2.0}, ["0", "-1", "inf"]),
    "repeat_last_n": ({"0": 0, "64": 64, "-1": -1}, ["-2", "0.5", str(2**31), "9" * 5000]),
    "presence_penalty": ({"0.5": 0.5, "-1": -1.0}, ["101", "x"]),
    "frequency_penalty": ({"0.5": 0.5, "-1": -1.0}, ["-101", "nan"]),
}
"""Values of each parameter by their texts, and texts that are refused."""


def test_parameters() -> None:
    assert PARAMETERS.keys() == BOUNDS.keys()
    for name, (values, refused) in PARAMETERS.items():
        for text, value in values.items():
            for written in (text, f'"{text}"'):
                found = parse(f"PARAMETER {name} {written}").parameters[name]
                assert found == value and type(found) is type(value)
        for text in refused:
            assert wrong(f"PARAMETER {name} {text}").startswith(f"PARAMETER {name} is ")
    message = wrong("PARAMETER temperature 0.7 # warm")
    assert message.endswith("it must be a number. Hint: a comment needs a line of its own")


def test_stops_add_up() -> None:
    found = parse('PARAMETER stop "</s>"', "PARAMETER stop User:", 'PARAMETER stop " \n"')
    assert found.stop == ("</s>", "User:", " \n")
    assert found.notes == ()


# --- streaming -------------------------------------------------------------------------------------------------------


def test_the_context_is_planned_for_unless_told_otherwise() -> None:
    assert parse("PARAMETER num_ctx 5000").flash == {"context_length": "5000"}
    found = parse("FLASH_CONTEXT_LENGTH 300", "PARAMETER num_ctx 5000")
    assert found.flash == {"context_length": "300"}
    assert found.parameters["num_ctx"] == 5000
    assert found.notes == (Note(3, "PARAMETER num_ctx sets no memory aside: FLASH_CONTEXT_LENGTH does"),)


# --- notes -----------------------------------------------------------------------------------------------------------


def test_what_has_no_effect_is_noted() -> None:
    names = ("mirostat", "num_gpu", "num_thread", "num_batch", "repeat_last_n")
    others = ("REQUIRES 0.14.0", "RENDERER qwen3", "PARSER qwen3")
    for line in (*(f"PARAMETER {name} 2" for name in names), *others):
        (note,) = parse("", line).notes
        assert note.line == 3
        assert note.text.startswith(f"{line.rpartition(' ')[0]} has no effect: ")


@pytest.mark.parametrize("what", ["SYSTEM", "PARAMETER top_k", "FLASH_NUM_SLOTS", "TEMPLATE"])
def test_what_is_said_twice_counts_once(what: str) -> None:
    text = "{{ messages }}" if what == "TEMPLATE" else ""
    found = parse(f"{what} 3{text}", f"{what} 1{text}", f"{what} 2{text}", "PARAMETER num_gpu 1")
    assert [note.line for note in found.notes] == [2, 3, 5]
    assert found.notes[0].text == f"{what} has no effect: line 3 says it again"
    said = (found.system, found.parameters.get("top_k"), found.flash.get("num_slots"), found.chat_template)
    assert [str(value)[0] for value in said if value is not None] == ["2"]


# --- templates -------------------------------------------------------------------------------------------------------


def test_templates() -> None:
    assert parse().chat_template is None
    jinja = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert parse(f'TEMPLATE "{jinja}"').chat_template == jinja
    found = parse("# a", 'TEMPLATE """{{ .Prompt }}', '{{ .Response }}"""')
    assert found.chat_template is None
    (note,) = found.notes
    assert note.line == 3 and note.text.startswith("TEMPLATE has no effect: templates of Go are not read")
