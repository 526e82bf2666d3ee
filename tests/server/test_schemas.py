"""Requests that their JSON schema allows, and those with a wrong field, get an answer or a 4xx; so does the next one.

``SCHEMA_EXAMPLES=1000 pytest tests/server/test_schemas.py`` looks for longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from live import Live, live
from mlx_flash.server import ollama
from mlx_flash.server.anthropic import Conversation, MessagesRequest
from mlx_flash.server.openai import ChatRequest, CompletionRequest
from mlx_flash.server.request import Defaults
from mlx_flash.server.responses import ResponseRequest
from models import make_random_model
from schemas import JSON, bodies
from tool_models import with_template

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
