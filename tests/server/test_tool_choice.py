"""Answers that have to call a function, and calls that follow a schema: with a model of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from live import Live, live
from models import make_random_model
from scripted import SHAPE
from tool_models import with_template

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
