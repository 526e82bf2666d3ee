"""Answers that have to call a function, and calls that follow a schema: with a model of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from call_forms import LLAMA
from live import Live, live
from mlx_flash.engine.prepared import load_tokenizer
from mlx_flash.errors import RefusedError
from mlx_flash.server.calltemplates import complete, form_of
from mlx_flash.server.request import GenerationRequest
from models import make_random_model
from scripted import SHAPE
from tool_models import END, QWEN, TOOLS, takes, with_template

CALL = "{% set f = c.function %}"
MISTRAL = (
    TOOLS
    + "{% for c in m.tool_calls or [] %}"
    + CALL
    + '{{ "[TOOL_CALLS] [" if loop.first else ", " }}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, '
    + '"id": "{{ c.id }}"}{{ "]<|eos|>" if loop.last else "" }}'
    + END
)
HEADERS = (
    TOOLS + "{% for c in m.tool_calls or [] %}" + CALL + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"
)
HEADERS += "{% endfor %}{% if m.tool_calls %}<|eos|>{% endif %}{% endfor %}"
XML = (
    TOOLS
    + "{% for c in m.tool_calls or [] %}"
    + CALL
    + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
    + "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endfor %}"
)
PARSERS = {QWEN: "json_tools", MISTRAL: "mistral", HEADERS: "mistral", XML: "qwen3_coder", LLAMA: None}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS: dict[str, Any] = {"weather": CITY, "now": EMPTY}
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name], **more}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("models") / "calls", *SHAPE.split())


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Live]:
    with live(str(with_template(model))) as running:
        yield running


def check(name: str, arguments: Any) -> None:
    jsonschema.validate(arguments if isinstance(arguments, dict) else json.loads(arguments), FUNCTIONS[name])


def test_a_call_is_forced_in_every_dialect(server: Live) -> None:
    body = {"model": "default_model", "messages": MESSAGES, "max_tokens": 400, "seed": 3, "temperature": 1.0}
    body |= {"tools": [tool("weather"), tool("now")], "parallel_tool_calls": False}
    choice: Any
    for choice, names in (("required", {*FUNCTIONS}), ({"function": {"name": "now"}, "type": "function"}, {"now"})):
        _, reply = server.post("/v1/chat/completions", {**body, "tool_choice": choice})
        (found,) = reply["choices"][0]["message"]["tool_calls"]
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert reply["choices"][0]["message"]["content"] is None and found["function"]["name"] in names
        check(found["function"]["name"], found["function"]["arguments"])
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in FUNCTIONS.items()]
    body = {"input": "Weather?", "tools": tools, "temperature": 0.0, "parallel_tool_calls": False}
    choice = {"type": "function", "name": "weather"}
    status, reply = server.post("/v1/responses", {**body, "tool_choice": choice})
    (item,) = reply["output"]
    assert (status, item["type"], item["name"], reply["tool_choice"]) == (200, "function_call", "weather", choice)
    check("weather", item["arguments"])
    tools = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]
    body = {"model": "default_model", "messages": MESSAGES, "max_tokens": 400, "tools": tools}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        choice["disable_parallel_tool_use"] = True
        status, reply = server.post("/v1/messages", {**body, "tool_choice": choice})
        assert (status, reply["stop_reason"]) == (200, "tool_use"), reply
        (block,) = reply["content"]
        check(block["name"], block["input"])


NAMED = {"type": "function", "function": {"name": "x"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"tools": [tool("now")], "tool_choice": NAMED}),
        ("chat/completions", {"tools": [tool("now")], "tool_choice": "some"}),
        ("messages", {"tools": [{"name": "now", "input_schema": EMPTY}], "tool_choice": {"type": "tool"}}),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(server: Live, path: str, body: dict[str, Any]) -> None:
    body = {"model": "default_model", "messages": MESSAGES, "max_tokens": 5, **body}
    status, reply = server.post(f"/v1/{path}", body)
    assert status == 400 and "tool_choice" in json.dumps(reply)


# --- forms of templates -----------------------------------------------------------------------------------------------

TEXTS = {
    QWEN: '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "AbC123xyz"}]',
    HEADERS: "[TOOL_CALLS]now[ARGS]{}",
    LLAMA: '{"name": "now", "parameters": {}}',
}


def tokenizer_with(model: Path, folder: Path, template: str) -> Any:
    """Return a model's tokenizer with another chat template, as a server has it."""
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(with_template(folder, template, PARSERS[template]))
    complete(tokenizer)
    return tokenizer


def matches(tokenizer: Any, request: GenerationRequest, text: str) -> bool:
    return takes(tokenizer, request, "none", text, form=form_of(tokenizer, "tools"))


@pytest.mark.parametrize("template", TEXTS)
def test_grammars_follow_the_form_of_the_template(model: Path, tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_with(model, tmp_path, template)
    tools = [tool("now"), tool("weather")]
    must = GenerationRequest(model="m", tools=tools, must_call=["now"])
    text = TEXTS[template]
    assert matches(tokenizer, must, text)
    for wrong in ("Well.", f"Well. {text}", text.replace("now", "weather"), text.replace("{}", '{"a": 1}'), text[:-4]):
        assert not matches(tokenizer, must, wrong)
    assert matches(tokenizer, must, text + text) == (template is HEADERS)


def test_forms_that_are_not_json_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no form of calls with JSON") as caught:
        form_of(tokenizer_with(model, tmp_path, XML), "tool_choice")
    assert (caught.value.status, caught.value.field) == (400, "tool_choice")
