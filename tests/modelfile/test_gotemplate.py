"""Tests of translated prompt templates: rendered, they are what Ollama would give the model."""

from __future__ import annotations

import functools
from typing import Any

import jinja2
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_flash.modelfile.gotemplate import Obstacle, to_jinja

CHATML = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
SYSTEM = ("system", "S")
USER, ANSWER, AGAIN = ("user", "U1"), ("assistant", "A1"), ("user", "U2")


def some(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, derandomize=True)


def fail(message: str) -> None:
    raise jinja2.TemplateError(message)


def render(template: str, *messages: tuple[str, Any], ask: bool = True, **more: Any) -> str:
    """The template rendered in an environment with the options that chat templates are rendered with."""
    listed = [{"role": role, "content": content} for role, content in messages]
    return compiled(template).render(messages=listed, add_generation_prompt=ask, **more)


@functools.cache
def compiled(template: str) -> jinja2.Template:
    jinja = to_jinja(template)
    assert isinstance(jinja, str), jinja
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = fail
    return environment.from_string(jinja)


def obstacle(template: str) -> Obstacle:
    found = to_jinja(template)
    assert isinstance(found, Obstacle)
    return found


def chatml(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_a_question() -> None:
    assert render(CHATML, USER) == chatml("user", "U1") + "<|im_start|>assistant\n"
    assert render(CHATML, SYSTEM, USER) == chatml("system", "S") + chatml("user", "U1") + "<|im_start|>assistant\n"


def test_a_conversation() -> None:
    turn = chatml("system", "S") + chatml("user", "U1") + chatml("assistant", "A1")
    assert render(CHATML, SYSTEM, USER, ANSWER, AGAIN) == turn + chatml("user", "U2") + "<|im_start|>assistant\n"
    assert render(CHATML, SYSTEM, USER, ANSWER, AGAIN, ask=False) == turn + chatml("user", "U2")
    assert render(CHATML, SYSTEM, USER, ANSWER, ask=False) == turn
    assert render(CHATML, SYSTEM, USER, ANSWER) == turn + "<|im_start|>assistant\n"


def test_messages_of_one_role_in_a_row_are_one() -> None:
    assert render(CHATML, USER, AGAIN, ask=False) == chatml("user", "U1\n\nU2")
    assert render(CHATML, SYSTEM, ("system", "T"), USER, ask=False) == chatml("system", "S\n\nT") + chatml("user", "U1")
    assert render(CHATML, ANSWER, ("assistant", "A2"), ask=False) == chatml("assistant", "A1\n\nA2")


def test_a_system_prompt_in_the_middle() -> None:
    found = render(CHATML, USER, ANSWER, SYSTEM, AGAIN, ask=False)
    turn = chatml("user", "U1") + chatml("assistant", "A1")
    assert found == turn + chatml("system", "S") + chatml("user", "U2")


def test_no_messages() -> None:
    assert render(CHATML) == "<|im_start|>assistant\n"
    assert render(CHATML, ask=False) == ""


def test_a_template_whose_prompt_stands_in_no_if() -> None:
    template = "[INST] {{ if .System }}{{ .System }} {{ end }}{{ .Prompt }} [/INST] {{ .Response }}</s>"
    assert render(template, SYSTEM, USER, ANSWER, AGAIN) == "[INST] S U1 [/INST] A1</s>[INST] U2 [/INST] "
    assert render(template, SYSTEM, USER, ask=False) == "[INST] S U1"


def test_a_template_without_a_response_ends_with_it() -> None:
    assert render("Q: {{ .Prompt }}\nA: ", USER, ANSWER, AGAIN) == "Q: U1\nA: A1Q: U2\nA: "


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ if .System }}[{{ .System }}]{{ else }}none{{ end }} {{ .Prompt }}", "none U1"),
        ("{{ if .Response }}r{{ else if .Prompt }}p{{ else }}n{{ end }} {{ .Prompt }}", "p U1"),
        ("{{ if .Prompt }}{{ if .System }}both{{ else }}one{{ end }} {{ .Prompt }}{{ end }}!", "one U1!"),
        ("{{.Prompt}}", "U1"),
        ("{{if   .Prompt}}{{.Prompt}}{{end}}", "U1"),
        ("a \n {{- .Prompt }} b", "aU1 b"),
        ("a {{ .Prompt -}} \n\t b", "a U1b"),
        ("a \n {{- if .System -}} \n x {{- else -}} \n y \n {{- end -}} \n {{ .Prompt }}", "ayU1"),
        ("a {{/* a comment */}} {{ .Prompt }}", "a  U1"),
        ("a {{- /* a comment */ -}} {{ .Prompt }}", "aU1"),
        ("'{{ .Prompt }}' \"\\n {# %} }} {% raw", None),
        ("\n{{ .Prompt }}\n\n", "\nU1\n\n"),
        (
            "é 你 \U0001f600 \\ ' \" {# #} }} %} \x00 \r\t{{ .Prompt }}",
            "é 你 \U0001f600 \\ ' \" {# #} }} %} \x00 \r\tU1",
        ),
        ("{ { .System } } {{ .Prompt }}", "{ { .System } } U1"),
    ],
)
def test_forms(template: str, expected: str | None) -> None:
    if expected is None:  # what has Jinja's marks is taken for Jinja
        assert to_jinja(template) == template
    else:
        assert render(template, USER) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        "{{ messages[0]['content'] }}",
        "{{ raise(messages) }}",
        "{{- bos_token }}{%- if true %}{% endif %}",
    ],
)
def test_jinja_is_used_as_it_is(template: str) -> None:
    assert to_jinja(template) == template


@pytest.mark.parametrize(
    ("template", "offset", "words"),
    [
        ("ab{{ range .Messages }}{{ .Content }}{{ end }}", 2, "{{ range .Messages }}"),
        ("{{ .Prompt }}{{ .Tools }}", 13, "{{ .Tools }}"),
        ("{{ .Prompt }}{{ json .Prompt }}", 13, "{{ json .Prompt }}"),
        ("{{ if and .System .Prompt }}{{ .Prompt }}{{ end }}", 0, "{{ if and .System .Prompt }}"),
        ("{{ if not .System }}{{ .Prompt }}{{ end }}", 0, "{{ if not .System }}"),
        ("{{ if }}{{ .Prompt }}{{ end }}", 0, "{{ if }}"),
        ("{{ .Prompt }}{{ $x := 1 }}", 13, "{{ $x := 1 }}"),
        ("{{ .Prompt }}{{-end}}", 13, "{{ -end }}"),
        ("{{ .prompt }}", 0, "{{ .prompt }}"),
        ("{{}}", 0, "{{  }}"),
        ("{{ .Prompt }}\n{{ .Response", 14, "{{ {{ .Response }}"),
        ("{{ if .Prompt }}x{{ .Prompt }}", 0, "has no {{ end }}"),
        ("{{ .Prompt }}{{ end }}", 13, "{{ end }} has no if"),
        ("{{ .Prompt }}{{ else }}", 13, "{{ else }} has no if"),
        ("{{ if .Prompt }}{{ else }}{{ else }}{{ end }}", 26, "{{ else }} has no if"),
        ("{{ if .Prompt }}{{ else }}{{ else if .System }}{{ end }}", 26, "{{ else if .System }} has no if"),
        ("{{ .Prompt }}{{ .Response }}{{ .Response }}", 28, "twice"),
        ("{{ .Prompt }}{{ if .Response }}{{ .Response }}{{ end }}", 31, "in an if"),
        ("{{ .System }}", 0, "no {{ .Prompt }} before"),
        ("{{ .Response }}{{ .Prompt }}", 0, "no {{ .Prompt }} before"),
        ("", 0, "no {{ .Prompt }} before"),
        ("hello", 0, "no {{ .Prompt }} before"),
    ],
)
def test_obstacles(template: str, offset: int, words: str) -> None:
    found = obstacle(template)
    assert words in found.reason
    assert found.offset == offset


def test_the_bos_token_comes_first_once() -> None:
    assert render("<s>{{ .Prompt }}", USER, bos_token="<s>") == "<s>U1"
    assert render("[{{ .Prompt }}]", USER, ANSWER, AGAIN, bos_token="<s>") == "<s>[U1]A1[U2]"
    assert render("[{{ .Prompt }}]", USER, bos_token=None) == "[U1]"


@pytest.mark.parametrize("message", [("tool", "x"), ("", "x"), ("user", [{"type": "text", "text": "x"}])])
def test_other_messages_are_refused(message: tuple[str, Any]) -> None:
    with pytest.raises(jinja2.TemplateError, match="system, user and assistant"):
        render(CHATML, USER, message)


texts = st.text().filter(lambda text: "{" not in text)


@some(150)
@given(texts, texts, texts, st.text(min_size=1), st.text(), st.text(min_size=1))
@example("'\"\\", "\n", "\r\n", "{{ x }}", "{% y %}", "'")
def test_text_comes_out_as_it_is(before: str, between: str, after: str, asked: str, answer: str, again: str) -> None:
    template = f"{before}{{{{ .Prompt }}}}{between}{{{{ .Response }}}}{after}"
    assume(isinstance(to_jinja(template), str))
    found = render(template, ("user", asked), ("assistant", answer), ("user", again))
    assert found == before + asked + between + answer + after + before + again + between


conversations = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=5)), max_size=6)
pieces = st.lists(
    st.sampled_from(
        [
            *("{{ .System }}", "{{ .Prompt }}", "{{- .Response }}", "{{ if .System -}}", "{{ if .Prompt }}"),
            *("{{ else }}", "{{ else if .System }}", "{{ end }}", "{{", "}}", "{{/* c */}}", "a", " \n"),
        ]
    ),
    max_size=12,
)


@some(400)
@given(pieces.map("".join), conversations)
@example(CHATML, [SYSTEM, USER])
def test_a_question_is_the_beginning_of_what_is_to_be_answered(template: str, messages: list[tuple[str, str]]) -> None:
    found = to_jinja(template)
    if isinstance(found, Obstacle):
        assert 0 <= found.offset <= len(template)
    else:
        assert render(template, *messages).startswith(render(template, *messages, ask=False))


@some(300)
@given(st.text(alphabet="{}%- .#SystemPromptResponseifelsend\n\"'") | st.text())
def test_any_text_is_translated_or_not(template: str) -> None:
    found = to_jinja(template)
    assert isinstance(found, str) or (0 <= found.offset <= len(template) and found.reason)


@some(150)
@given(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=7))
@example(["user", "system", "user"])
def test_no_message_is_lost(roles: list[str]) -> None:
    messages = [(role, f"<{i}>") for i, role in enumerate(roles)]
    found = render(CHATML, *messages, ask=False)
    positions = [found.find(content) for _, content in messages]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_in_a_tokenizer() -> None:
    """As mlx-lm's users meet it: in a tokenizer of transformers, which may also go on with an answer that was begun."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>")
    tokenizer.chat_template = to_jinja(CHATML)
    messages = [{"role": role, "content": content} for role, content in (USER, ANSWER)]
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<s>" + chatml("user", "U1") + "<|im_start|>assistant\n"
    begun = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert begun == asked + "A1"
