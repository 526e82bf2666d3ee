"""Answers that follow a schema after the reasoning and beside functions, and raw text of a model that reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from call_forms import LLAMA, TEMPLATES
from dialects import events_of, text_of
from live import Live, live
from mlx_flash.engine.prepare import load_tokenizer
from mlx_flash.errors import RefusedError
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.request import GenerationRequest
from models import make_random_model
from scripted import SHAPE, TEMPLATE, make_scripted_model, saying, takes, wishing, with_template

CHAT = "/v1/chat/completions"
OPENS = "{% if add_generation_prompt and opens %}<think>\n{% endif %}"
CLOSES = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
JSON = '{"city": "Rome", "days": 3}'
FORM = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "go", "arguments": ' + JSON + "}</tool_call>"
BODY = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 120, "stop": ""}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_scripted_model(tmp_path_factory.mktemp("models") / "forms")
    return with_template(folder, TEMPLATE.replace("-{% endif %}", "{% endif %}") + OPENS + CLOSES)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Live]:
    with live(str(model)) as running:
        yield running


def ask(server: Live, text: str, **more: Any) -> Any:
    """Return the message of an answer that would be a text, and check that a stream has the same parts."""
    tokenizer = next(iter(server.room.models)).tokenizer
    with wishing(tokenizer, text):
        status, reply = server.post(CHAT, {**BODY, **more})
        assert status == 200, reply
        _, lines = server.post(CHAT, {**BODY, **more, "stream": True})
    message = reply["choices"][0]["message"]
    reasons = [event["choices"][0]["delta"].get("reasoning") or "" for event in events_of(lines) if event["choices"]]
    assert text_of(lines) == (message.get("content") or "")
    assert "".join(reasons) == (message.get("reasoning") or "")
    return {**message, "reason": reply["choices"][0]["finish_reason"]}


@pytest.mark.parametrize(
    ("options", "opening", "thoughts"),
    [
        ({"opens": True}, "", True),
        ({}, "<think>", True),
        ({"enable_thinking": False}, "<think>", False),
        ({}, "", False),
    ],
    ids=["the template opens", "the model opens", "the client closes", "the model does not reason"],
)
def test_schema_binds_from_the_end_of_the_reasoning(
    server: Live, options: dict[str, bool], opening: str, thoughts: bool
) -> None:
    text = f'{opening}I say {{"x": 1}}.</think>\n\n{JSON}' if thoughts or opening else JSON
    options_of = {"chat_template_kwargs": options, "response_format": FORM}
    found = ask(server, text, **options_of)
    assert (found.get("reasoning") or "") == ('I say {"x": 1}.' if thoughts else "")
    jsonschema.validate(json.loads(found["content"]), SCHEMA)
    assert found["reason"] == "stop" and (found["content"].strip() == JSON or not thoughts)
    if thoughts:  # what is not JSON is not taken after the mark, and neither a call nor an end before it
        found = ask(server, f"{opening}Hm.</think>\nWell, {JSON}", **options_of)
        jsonschema.validate(json.loads(found["content"]), SCHEMA)
        for other in ("<tool_call>", ""):
            found = ask(server, f"{opening}Hm.{other}", **{**options_of, "max_tokens": 12})
            assert (found["content"], found["reason"]) == ("", "length") and found["reasoning"].startswith("Hm.")
            assert "<tool_call>" not in found["reasoning"]


def test_schema_binds_in_every_dialect_and_in_a_batch(server: Live) -> None:
    tokenizer = next(iter(server.room.models)).tokenizer
    bodies = {
        "/v1/responses": {
            "input": "Where?",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
        "/v1/messages": {
            "messages": BODY["messages"],
            "max_tokens": 120,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        "/api/chat": {"messages": BODY["messages"], "format": SCHEMA, "stream": False},
    }
    for path, body in bodies.items():
        with wishing(tokenizer, f"<think>Hm.</think>\n{JSON}"):
            status, reply = server.post(path, {"model": "default_model", **body})
        assert status == 200 and "Hm." in json.dumps(reply) and json.dumps(JSON)[1:-1] in json.dumps(reply), reply
    bias = {str(tokenizer.think_end_id): 3}
    body = {**BODY, "n": 4, "temperature": 1.0, "seed": 1, "logit_bias": bias, "max_tokens": 300}
    body["chat_template_kwargs"] = {"opens": True}
    status, reply = server.post(CHAT, {**body, "response_format": FORM})
    assert status == 200
    lengths = set()
    for choice in reply["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        lengths.add(len(choice["message"].get("reasoning") or ""))
    assert len(lengths) > 1


def test_answer_is_a_call_or_follows_the_schema(server: Live) -> None:
    both = {"tools": [TOOL], "response_format": FORM}
    for opening in ("", "<think>Hm.</think>\n\n"):
        found = ask(server, opening + CALL + CALL, **{**both, "max_tokens": 300})
        call, other = found["tool_calls"]
        assert found["content"] is None and call["function"] == other["function"]
        assert call["function"]["name"] == "go" and json.loads(call["function"]["arguments"]) == json.loads(JSON)
        assert ask(server, opening + JSON, **both)["content"].strip() == JSON
    for text, more in (("Well.", {}), (CALL, {"tool_choice": "none"})):
        found = ask(server, text, **both, **more, chat_template_kwargs={"enable_thinking": False})
        jsonschema.validate(json.loads(found["content"]), SCHEMA)
        assert "tool_calls" not in found
    wrong = '{"name": "go", "arguments": ' + JSON.replace("3", '"x"') + "}"
    found = ask(server, f"<think>Hm.</think>\n{wrong}", tools=[TOOL], tool_choice="required")
    jsonschema.validate(json.loads(found["tool_calls"][0]["function"]["arguments"]), SCHEMA)
    assert found["reasoning"] == "Hm."


@pytest.mark.parametrize("name", [None, "stop"])
def test_a_call_is_forced_in_every_dialect(server: Live, name: str | None) -> None:
    schemas = {"go": SCHEMA, "stop": {"type": "object", "properties": {}, "additionalProperties": False}}
    functions = [{"name": each, "parameters": schema} for each, schema in schemas.items()]
    asked = {"model": "default_model", "messages": BODY["messages"], "max_tokens": 300}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"tools": [{"type": "function", "function": each} for each in functions], **asked},
        "/v1/responses": {"tools": [{"type": "function", **each} for each in functions], "input": "Where?"},
        "/v1/messages": {"tools": [{"name": each, "input_schema": schemas[each]} for each in schemas], **asked},
    }
    choices: dict[str, Any] = dict.fromkeys(bodies, "required") | {"/v1/messages": {"type": "any"}}
    if name is not None:
        choices = {
            CHAT: {"type": "function", "function": {"name": name}},
            "/v1/responses": {"type": "function", "name": name},
            "/v1/messages": {"type": "tool", "name": name},
        }
    find: dict[str, Any] = {
        CHAT: lambda reply: reply["choices"][0]["message"]["tool_calls"][0]["function"],
        "/v1/responses": lambda reply: reply["output"][-1],
        "/v1/messages": lambda reply: reply["content"][-1],
    }
    for path, body in bodies.items():
        with wishing(next(iter(server.room.models)).tokenizer, "<think>Hm.</think>"):
            status, reply = server.post(path, {**body, "tool_choice": choices[path]})
        assert status == 200, reply
        call = find[path](reply)
        arguments = call.get("input", call.get("arguments"))
        assert call["name"] == name or (name is None and call["name"] in schemas)
        jsonschema.validate(arguments if path == "/v1/messages" else json.loads(arguments), schemas[call["name"]])


def test_calls_are_free_beside_a_schema_and_json_where_they_are_forced(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    call = "<tool_call>\n<function={{ c.function.name }}>\n</function>\n</tool_call>"
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        + call
        + "{% endfor %}{% endfor %}"
        + CLOSES
    )
    with live(str(with_template(tmp_path, template, "qwen3_coder"))) as server:
        both = {"tools": [TOOL], "response_format": FORM}
        text = "<tool_call>\n<function=go>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        (found,) = ask(server, f"<think>Hm.</think>{text}\n", **both)["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == {"days": 3}
        assert ask(server, JSON, **both)["content"] == JSON
        assert not (ask(server, f"Well.{text}", **both)["content"] or "").startswith("Well")
        for written in (f'{{"name": "go", "arguments": {JSON}}}', text):
            (made,) = ask(server, f"<think>Hm.</think>{written}", tools=[TOOL], tool_choice="required")["tool_calls"]
            jsonschema.validate(json.loads(made["function"]["arguments"]), SCHEMA)


def test_completions_have_the_marks_of_reasoning_and_calls_as_text(server: Live) -> None:
    text = f"<think>Hm.</think>\nWell. {CALL} <think>So"
    for body in ({"prompt": "Where?"}, {"prompt": "<think>"}):
        with saying(text):
            _, whole = server.post("/v1/completions", {**body, "max_tokens": 200})
            _, lines = server.post("/v1/completions", {**body, "max_tokens": 200, "stream": True})
            raw = {"model": "default_model", "raw": True, "stream": False, "options": {"stop": ["", "never"]}, **body}
            _, ollama = server.post("/api/generate", raw)
        assert text_of(whole) == text_of(lines) == text_of(ollama) == text
        assert whole["choices"][0]["finish_reason"] == "stop"


# --- grammars ---------------------------------------------------------------------------------------------------------

MARKS = {
    "one token": ("<think>", "</think>", ()),
    "a special token and a word": ("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    "special tokens around a word": (
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
}


def with_special(model: Path, folder: Path, special: tuple[str, ...]) -> Any:
    """Return the tokenizer of a model with more special tokens, for which the model has no weights."""
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    if special:
        fields["added_tokens"] = [each for each in fields["added_tokens"] if "think" not in each["content"]]
        first = 1 + max(*(each["id"] for each in fields["added_tokens"]), *fields["model"]["vocab"].values())
        for number, content in enumerate(special, first):
            fields["added_tokens"].append({**fields["added_tokens"][0], "id": number, "content": content})
    path.write_text(json.dumps(fields))
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", MARKS)
def test_marks_of_several_tokens_end_the_reasoning(model: Path, tmp_path: Path, name: str) -> None:
    start, end, special = MARKS[name]
    tokenizer = with_special(model, tmp_path, special)
    assert (tokenizer.think_start, tokenizer.think_end) == (start, end)
    fits = partial(takes, tokenizer, GenerationRequest(model="m", messages=[], grammar=json_grammar(SCHEMA, "")))
    for blanks in ("", "\n\n"):
        assert fits("open", f"Hm, {start} {{.{end}{blanks}{JSON}") and fits("possible", f"{start}Hm{end}{blanks}{JSON}")
    assert fits("open", end, JSON) and fits("possible", JSON) and fits("none", JSON)
    assert not fits("none", f"{start}Hm{end}{JSON}") and not fits("open", JSON)
    assert not fits("open", f"Hm{end}Well") and not fits("open", f"Hm{end}{JSON}{end}{JSON}")
    if not special:
        assert fits("open", "Hm<", "/thin", "k", ">\n", JSON) and not fits("open", "Hm</thin", "k>\nx", JSON)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
AGAIN = "<|end|><|start|>assistant"
STATES = {
    "initial_state": "header",
    "transitions": {
        "header": [(ANALYSIS, "reasoning"), ("<|message|>", "normal"), (" to=functions.", "tool")],
        "reasoning": [("<|end|>", "header")],
        "normal": [("<|end|>", "header")],
    },
}
HEADED = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_schema_binds_behind_the_header_of_text(model: Path, tmp_path: Path) -> None:
    tokenizer = with_special(model, tmp_path, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"))
    tokenizer.chat_template = HEADED
    tokenizer._response_format, tokenizer._tool_call_start, tokenizer._tool_call_end = STATES, " to=functions.", ""
    plain = GenerationRequest(model="m", messages=[], grammar=json_grammar(SCHEMA, ""))
    beside = replace(plain, tools=[TOOL])
    call = f"<|channel|>commentary to=functions.go <|constrain|>json<|message|>{JSON}"
    for request in (plain, beside):
        fits = partial(takes, tokenizer, request, "headers")
        for thoughts in ("", f"{ANALYSIS}Hm.{AGAIN}", f"{ANALYSIS}<|message|>{AGAIN}{ANALYSIS}{JSON}{AGAIN}"):
            assert fits(f"{thoughts}{FINAL}{JSON}") and not fits(f"{thoughts}{FINAL}Well") and not fits(thoughts)
            assert fits(f"{thoughts}{call}") == (request is beside)
        assert not fits(JSON) and not fits(f"{ANALYSIS}{JSON}") and not fits(f"{FINAL}{JSON}{AGAIN}{FINAL}Well")
        assert not fits(f"{call}{AGAIN}{FINAL}Well") and not fits("<|channel|>commentary<|message|>Well")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RefusedError, match="does not show how they begin"):
        takes(tokenizer, plain, "headers", JSON)


HARMONY = TEMPLATES["harmony"].replace("<|eos|>", "<|call|>")
PREAMBLE = f"{ANALYSIS}Call to=functions.go?{AGAIN}"


def test_a_call_of_harmony_is_forced(tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "harmony", *SHAPE.split())
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    for mark in ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"):
        number = fields["model"]["vocab"].pop("".join(fields["model"]["merges"].pop()))
        fields["added_tokens"].append({**fields["added_tokens"][0], "id": number, "content": mark})
    path.write_text(json.dumps(fields))
    with live(str(with_template(folder, HARMONY, None))) as server:
        for choice in ("required", {"type": "function", "function": {"name": "go"}}):
            for text in (f'{FINAL}{{"name": "go", "arguments": {JSON}}}', f"{FINAL}Well."):
                found = ask(server, PREAMBLE + text, tools=[TOOL], tool_choice=choice)
                (call,) = found["tool_calls"]
                assert call["function"]["name"] == "go" and found["reason"] == "tool_calls"
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
                assert (found["content"], found["reasoning"]) == (None, "Call to=functions.go?")
        found = ask(server, f"{FINAL}Well.", tools=[TOOL], response_format=FORM)
        jsonschema.validate(json.loads(found["content"]), SCHEMA)


def test_a_call_without_a_mark_or_a_schema(tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "llama", *SHAPE.split())
    call = '{"name": "go", "parameters": ' + JSON + "}"
    with live(str(with_template(folder, LLAMA, None))) as server:
        both = {"tools": [TOOL], "response_format": FORM}
        for more in (both, {**both, "tool_choice": "required"}, {"tools": [TOOL], "tool_choice": "required"}):
            for text in (call, call.replace("3", '"x"')):
                (made,) = ask(server, text, **more)["tool_calls"]
                jsonschema.validate(json.loads(made["function"]["arguments"]), SCHEMA)
        for answer in (JSON, '{"name": "Jane"}', '{"named": {"name": "go"}}', '{"name": "go"}', '{ "name": "gone"}'):
            form = FORM if answer == JSON else {"type": "json_object"}
            found = ask(server, answer, tools=[TOOL], response_format=form)
            assert found["content"] == answer and "tool_calls" not in found
        found = ask(server, "Well.", **both)
        jsonschema.validate(json.loads(found["content"]), SCHEMA)
