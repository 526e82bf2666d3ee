"""Requests that their JSON schema allows, and those with a wrong field, get an answer or a 4xx; so does the next one.

``SCHEMA_EXAMPLES=1000 pytest tests/server/test_schemas.py`` looks for longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from live import Live, live
from mlx_flash.server import ollama
from mlx_flash.server.anthropic import Conversation, MessagesRequest
from mlx_flash.server.openai import ChatRequest, CompletionRequest
from mlx_flash.server.request import Defaults
from mlx_flash.server.responses import ResponseRequest
from models import make_random_model
from scripted import with_template

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
TEXT = st.text(max_size=8) | st.sampled_from(["\ud800", "\x00", "<tool_call>", "</tool_call>", "é🦊", "\u202e"])
"""Texts with lone surrogates, marks of tool calls, and what else may go wrong."""


def bodies(kind: type[BaseModel], fixed: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Return a strategy of requests, with some fixed ones of fields by name, wherever they are."""
    schema = kind.model_json_schema(by_alias=True)
    return _Values(schema.get("$defs", {}), fixed).of(schema)


class _Values:
    def __init__(self, definitions: Mapping[str, Any], fixed: Mapping[str, st.SearchStrategy[Any]]) -> None:
        self._definitions, self._fixed = definitions, fixed
        self._found: dict[str, st.SearchStrategy[Any]] = {}

    def of(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self._found:  # definitions may refer to themselves
                self._found[name] = st.deferred(lambda: self.of(self._definitions[name]))
            return self._found[name]
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return st.one_of(*map(self.of, schema[word]))
        found = getattr(self, f"_{schema['type']}", None) if "type" in schema else None
        return JSON if found is None else found(schema)

    def _null(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.none()

    def _boolean(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _integer(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        least, most = schema.get("minimum"), schema.get("maximum")
        most = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else most
        return st.integers(least, most)

    def _number(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)

    def _string(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        return TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))

    def _array(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        most = min(schema.get("maxItems", 2), max(2, schema.get("minItems", 0)))
        return st.lists(self.of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=most)

    def _object(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "properties" not in schema:
            more = schema.get("additionalProperties")
            keys = self.of(schema["propertyNames"]) if "propertyNames" in schema else st.text(max_size=4)
            return st.dictionaries(keys, self.of(more) if isinstance(more, dict) else JSON, max_size=2)
        fields = {
            name: self._fixed[name] if name in self._fixed else self.of(part)
            for name, part in schema["properties"].items()
        }
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=fields)


SHAPE = "--layers 1 --hidden-size 64 --intermediate-size 64 --heads 4 --kv-heads 2 --vocab-size 300"
KINDS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/api/chat": ollama.ChatRequest,
    "/api/generate": ollama.GenerateRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": Conversation,
}
FEW = st.integers(1, 3)
NAME = st.sampled_from(["f", "g"])
FIXED: dict[str, Any] = {
    "model": st.just("default_model"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n"), FEW),
    "keep_alive": st.sampled_from([60, "1h", -1, "x"]),
    "name": NAME,
    "top_k": st.integers(0, 320),
    "prompt": st.text(max_size=5) | st.lists(st.integers(0, 305), min_size=1, max_size=4),
    # Half of the schemas are those of functions.
    **dict.fromkeys(
        ("parameters", "input_schema", "schema", "format"),
        st.dictionaries(st.text(max_size=4), st.text(max_size=3), max_size=2)
        | st.just({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
        | st.just({"type": "object", "additionalProperties": False}),
    ),
}
"""Few tokens, and names that fit together now and then."""

WRONG = st.sampled_from([2**70, -(2**70), -1, 1e300, 0.5, [], [[]], [-1], {}, {"-1": 1e300}, "", "x", True])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = make_random_model(tmp_path_factory.mktemp("models") / "schemas", *SHAPE.split())
    with live(str(with_template(path)), defaults=Defaults(max_tokens=2)) as running:
        yield running


@pytest.mark.parametrize("path", KINDS)
@settings(
    max_examples=int(os.environ.get("SCHEMA_EXAMPLES", "15")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(data=st.data())
def test_requests_get_an_answer_or_a_4xx(server: Live, path: str, data: st.DataObject) -> None:
    fixed = {name: strategy for name, strategy in FIXED.items() if (path, name) != ("/v1/responses", "format")}
    body = data.draw(bodies(KINDS[path], fixed))
    if data.draw(st.booleans()):  # a field that is wrong
        body[data.draw(st.sampled_from(sorted({*KINDS[path].model_fields} - {*FIXED})))] = data.draw(JSON | WRONG)
    status, reply = server.post(path, body)
    assert status == 200 or 400 <= status < 500, reply
    assert status != 200 or '"error": {' not in json.dumps(reply), reply
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
