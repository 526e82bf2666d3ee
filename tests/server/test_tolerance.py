"""Requests of real programs: fields without effect are ignored and listed."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from live import Live, live
from mlx_flash.errors import RefusedError
from mlx_flash.server import responses
from mlx_flash.server.body import checked
from mlx_flash.server.responses import ResponseRequest
from mlx_flash.server.sampling import Defaults
from scripted import make_scripted_model, saying

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "mcp:files/read", "description": "Read", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(str(folder), defaults=Defaults(max_tokens=20)) as running:
        yield running


def post(server: Live, path: str, body: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return a reply, and the fields that it says had no effect."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        listed = reply.headers["x-mlx-flash-ignored"]
        return json.loads(reply.read()), listed.split(", ") if listed else []


ANSWERED: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, {"messages": HELLO}, []),
    (CHAT, {"messages": HELLO, "user": "me", "metadata": {"a": "b"}, "store": False}, ["user", "metadata", "store"]),
    (CHAT, {"messages": HELLO, "temprature": 1, "logit_bias": None, "n": None}, ["temprature"]),
    (CHAT, {"messages": HELLO, "verbosity": "low", "prediction": {"type": "content"}}, ["verbosity", "prediction"]),
    (CHAT, {"messages": HELLO, "model": "gpt-4o", "max_tokens": -1, "seed": -1, "top_k": -1, "stop": ""}, []),
    (CHAT, {"messages": HELLO, "model": None, "stop": ["", "x"], "functions": None, "tools": []}, []),
    (CHAT, {"messages": HELLO, "temperature": 1, "top_k": 100_000, "xtc_probability": None}, []),
    (CHAT, {"messages": HELLO, "reasoning_effort": "minimal", "thinking": {"type": "enabled", "budget_tokens": 9}},
     ["thinking.budget_tokens"]),
    (CHAT, {"messages": HELLO, "reasoning": {"effort": "high", "exclude": True}}, ["reasoning.exclude"]),
    (CHAT, {"messages": HELLO, "enable_thinking": False, "chat_template_kwargs": {"levels": [1]}}, []),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
     ["messages.content.cache_control"]),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": None, "refusal": None, "audio": {"id": "x"}}]},
     ["messages.audio"]),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": TOOL, "cache_control": {}}]},
     ["tools.cache_control"]),
    (CHAT, {"messages": HELLO, "tools": [{"type": "web_search_preview"}], "parallel_tool_calls": True},
     ["tools (web_search_preview)"]),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": None, "extra": 1}}, ["stream_options.extra"]),
    (TEXT, {"prompt": "x", "user": "me", "truncate": 5, "model": "text-davinci-003"}, ["user", "truncate"]),
    (RESPONSES, {"input": "x", "include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}},
     ["include", "client_metadata"]),
    (RESPONSES, {"input": "x", "text": {"verbosity": "low"}, "truncation": "auto", "model": "gpt-5-codex"},
     ["text.verbosity"]),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}, {"type": "custom", "name": "patch"}],
                 "reasoning": {"summary": "auto"}}, ["reasoning.summary", "tools (web_search)"]),
    (RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "x"}, {"role": "user", "content": "x"}]},
     ["input.encrypted_content", "input (compaction)"]),
    (MESSAGES, {"messages": HELLO, "context_management": {"edits": []}, "speed": "fast", "container": "x",
                "mcp_servers": [], "service_tier": "auto", "unheard_of": 1},
     ["context_management", "speed", "container", "mcp_servers", "service_tier", "unheard_of"]),
    (MESSAGES, {"messages": HELLO, "thinking": {"type": "adaptive", "display": "full"}, "model": "claude-x"},
     ["thinking.display"]),
    (MESSAGES, {"messages": HELLO, "stop_sequences": [""], "top_k": 100_000, "temperature": 1,
                "output_config": {"effort": "max", "task_budget": 5}}, ["output_config.task_budget"]),
    (MESSAGES, {"messages": HELLO, "tools": [{"name": "f", "input_schema": SCHEMA, "defer_loading": True},
                                             {"type": "web_search_20250305", "name": "web_search"}]},
     ["tools.defer_loading", "tools (web_search_20250305)"]),
    (MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s", "name": "web_search"},
        {"type": "text", "text": "So"}]}, {"role": "user", "content": "Go on"}]},
     ["messages.content.data", "messages.content (redacted_thinking)", "messages.content (server_tool_use)"]),
]  # fmt: skip


FUNCTION = {"type": "function", "function": TOOL}
RESULT = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {
        "name": "read", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}]},
]  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"max_completion_tokens": 9},
    {"max_tokens": 9, "max_completion_tokens": None},
    {"max_tokens": 100_000_000},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    {"temperature": None, "top_p": None, "seed": None, "stream": None, "stream_options": None, "logprobs": None},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"n": 2},
    {"stop": ["###", "User:"]},
    {"logprobs": True, "top_logprobs": 2},
    {"logit_bias": {"5": 1}},
    {"seed": 1},
    {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y", "prompt_cache_retention": "24h"},
    {"service_tier": "flex", "store": True, "metadata": {"a": "b"}},
    {"modalities": ["text"]},
    {"web_search_options": {}},
    {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
    {"tools": [], "tool_choice": "auto"},
    {"tools": [FUNCTION]},
    {"tools": [FUNCTION], "tool_choice": "none"},
    {"tools": [FUNCTION], "parallel_tool_calls": False},
    {"tools": [{**FUNCTION, "function": {**TOOL, "strict": True}}]},
    {"tools": [{"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}]},
    {
        "tools": [FUNCTION],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": TOOL["name"]}}]},
        },
    },
    {"messages": [*HELLO, *RESULT]},
    {"messages": [*HELLO, *RESULT], "tools": [FUNCTION]},
    {"messages": [{"role": "developer", "content": "Be brief"}, *HELLO]},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief"}]}, *HELLO]},
    {"messages": [*HELLO, *HELLO]},
    {"messages": [*HELLO, {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}, *HELLO]},
    {"messages": [{**HELLO[0], "name": "Ada"}]},
    {"messages": [{"role": "user", "content": ""}]},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "xhigh"},
    {"reasoning": {"enabled": False, "max_tokens": 5}},
    {"thinking": False},
    {"enable_thinking": True, "preserve_thinking": True},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"response_format": {"type": "text"}},
    {"model": "gpt-5", "reasoning_effort": "medium", "verbosity": "medium"},
    {"model": "anthropic/claude-sonnet-4"},
    {"extra_body": {}, "extra_headers": {}, "timeout": 60},
    {"num_ctx": 8192, "keep_alive": "5m", "options": {}},
    {"mirostat": 1, "typical_p": 0.9, "dynatemp_range": 0.1, "cache_prompt": True, "slot_id": -1},
    {"add_generation_prompt": True, "include_reasoning": True, "guided_json": None, "ignore_eos": False},
    {"conversation": "x", "prompt": "x", "background": True, "format": ""},
    {"provider": {"order": ["x"]}, "transforms": ["middle-out"], "route": "fallback", "models": ["x"]},
    {"plugins": [], "usage": {"include": True}, "session_id": "x"},
]
"""Fields that clients of chat completions send, beside the messages."""

BLOCK = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
READ = {"name": "read", "description": "Read", "input_schema": SCHEMA}
USES: list[dict[str, Any]] = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}, "caller": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "No", "is_error": True}]},
]
MESSAGES_KINDS: list[dict[str, Any]] = [
    {},
    {"system": "Be brief"},
    {"system": [BLOCK, BLOCK], "messages": [{"role": "user", "content": [BLOCK]}]},
    {"system": None, "tools": None, "tool_choice": None, "thinking": None, "metadata": None, "stop_sequences": None},
    {"system": [], "tools": [], "stop_sequences": [], "stream": None, "temperature": None, "top_k": None},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "stop_sequences": ["###"]},
    {"metadata": {"user_id": "x"}, "service_tier": "standard_only", "inference_geo": "eu"},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
    {"tools": [READ], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"tools": [{**READ, "type": "custom", "strict": True}], "tool_choice": {"type": "none"}},
    {"tools": [READ, {"type": "bash_20250124", "name": "bash"}, {"type": "memory_20250818", "name": "memory"}]},
    {"messages": [*HELLO, *USES], "tools": [READ]},
    {"messages": [*HELLO, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "text", "text": "Yes"}]}, *HELLO]},
    {"messages": [{"role": "user", "content": [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It is deep."},
         "title": "Sea", "context": "x", "citations": {"enabled": True}}, BLOCK]}]},
    {"messages": [{"role": "user", "content": [
        {"type": "search_result", "source": "x", "title": "Sea", "content": [BLOCK]}, BLOCK]}]},
    {"messages": [*HELLO, {"role": "system", "content": [BLOCK]}, *HELLO]},
    {"messages": [*HELLO, {"role": "assistant", "content": "So"}]},
    {"messages": [*HELLO, *HELLO], "betas": ["x"], "context_management": None, "container": None},
]  # fmt: skip
"""Fields that clients of messages send."""

RESPONSES_KINDS: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief", "store": False, "metadata": {"a": "b"}},
    {"instructions": None, "tools": None, "tool_choice": None, "reasoning": None, "text": None, "stream": None},
    {"input": [{"role": "developer", "content": "Be brief"}, *HELLO], "temperature": 0.7, "top_p": 0.9},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}], "id": "m"}]},
    {"reasoning": {"effort": "medium", "summary": "detailed"}, "include": ["reasoning.encrypted_content"]},
    {"tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": True}]},
    {"tools": [{"type": "function", "name": "read"}], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "read"}]}},
    {"tools": [{"type": "local_shell"}, {"type": "mcp", "server_label": "x"}, {"type": "image_generation"}]},
    {"tools": [{"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}]},
    {"text": {"format": {"type": "text"}, "verbosity": "high"}, "truncation": "disabled"},
    {"input": [*HELLO, {"type": "web_search_call", "id": "w", "status": "completed"}, *HELLO]},
    {"prompt_cache_key": "x", "safety_identifier": "y", "service_tier": "flex", "max_tool_calls": 3, "n": 1},
    {"conversation": None, "prompt": None, "background": False, "response_format": None},
    {"parallel_tool_calls": False, "stream_options": {"include_obfuscation": False}, "background": False},
]  # fmt: skip
"""Fields that clients of responses send."""

BODIES = [
    *((CHAT, {"messages": HELLO, **more}) for more in KINDS),
    *((MESSAGES, {"messages": HELLO, "max_tokens": 20, **more}) for more in MESSAGES_KINDS),
    *((RESPONSES, {"input": "x", **more}) for more in RESPONSES_KINDS),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": HELLO, "functions": [TOOL]}, "functions"),
    (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities.1"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "messages.0.content.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://host/x.png"}}]}]}, "messages.0.content.0.image_url.url"),
    (CHAT, {"messages": [{**HELLO[0], "images": ["x"]}]}, "messages.images"),
    (CHAT, {"messages": HELLO, "guided_json": SCHEMA}, "guided_json"),
    (CHAT, {"messages": HELLO, "grammar": "root ::= [0-9]"}, "grammar"),
    (TEXT, {"prompt": "x", "structured_outputs": {"regex": "[0-9]"}}, "structured_outputs"),
    (CHAT, {"messages": HELLO, "n": 17}, "n"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": HELLO, "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
    (RESPONSES, {"input": "x", "background": True}, "background"),
    (RESPONSES, {"input": "x", "conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"input": "x", "n": 2}, "n"),
    (RESPONSES, {"input": "x", "response_format": {"type": "json_object"}}, "response_format"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
     "input.0.content.0.type"),
    (MESSAGES, {"messages": HELLO, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    (MESSAGES, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    ("/api/chat", {"messages": HELLO, "n": 3}, "n"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "x"}]}]},
     "messages.0"),
]  # fmt: skip
"""Requests whose answer would not be the one that was asked for, and nobody would see it."""


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_fields_of_clients_are_answered(server: Live, number: int) -> None:
    path, body = BODIES[number]
    with saying("Yes."):
        reply, _ = post(server, path, {"model": "default_model", **body})
    assert json.dumps(reply).count("Yes.") == body.get("n", 1)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_would_change_the_answer_unseen_is_refused(server: Live, number: int) -> None:
    path, body, field = REFUSED[number]
    more = {"max_tokens": 20} if path == MESSAGES else {}
    status, reply = server.post(path, {**more, "model": "default_model", **body})
    assert status == 400 and field in json.dumps(reply), reply


@pytest.mark.parametrize("number", range(len(ANSWERED)))
def test_fields_without_effect_are_ignored_and_listed(server: Live, number: int) -> None:
    path, body, ignored = ANSWERED[number]
    with saying("Yes."):
        more = {"max_tokens": 20} if path == MESSAGES else {}
        reply, listed = post(server, path, {**more, "model": "default_model", **body})
    assert "Yes." in json.dumps(reply)
    assert listed == ignored
    assert reply["model"] in ("default_model", None) or reply["model"].endswith("tiny"), reply["model"]


def test_a_strict_server_refuses_unknown_fields(folder: Path) -> None:
    with live(str(folder), defaults=Defaults(max_tokens=2), is_strict=True) as strict:
        assert strict.post(CHAT, {"messages": HELLO, "temprature": 1})[1]["error"]["param"] == "temprature"
        status, reply = strict.post(MESSAGES, {"messages": HELLO, "model": "x", "max_tokens": 2, "unheard_of": 1})
        assert status == 400 and "unheard_of" in reply["error"]["message"]
        sent_back = [*HELLO, {"role": "assistant", "content": "Yes", "annotations": []}, *HELLO]
        assert strict.post(CHAT, {"messages": sent_back, "user": "me", "metadata": {}})[0] == 200


def test_fields_are_counted_and_logged_once(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mlx_flash"):
        for _ in range(3):
            server.say("Hi", max_tokens=1, only_here=1)
    assert sum("only_here" in record.message for record in caplog.records) == 1
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as reply:
        assert 'mlx_flash_ignored_fields_total{field="only_here"} 3.0' in reply.read().decode()


def test_any_name_reaches_the_only_model(folder: Path, server: Live) -> None:
    with saying("Yes."):
        reply, _ = post(server, MESSAGES, {"model": "claude-opus", "messages": HELLO, "max_tokens": 9})
    assert reply["model"] == str(folder)
    with live(str(folder), any_name=False, defaults=Defaults(max_tokens=2)) as named:
        status, reply = named.post(CHAT, {"model": "gpt-5", "messages": HELLO})
        assert status == 404 and f"'gpt-5' here. Hint: this server has 'default_model', '{folder}'" in str(reply)
        assert named.post(CHAT, {"model": f"{folder}:latest", "messages": HELLO})[0] == 200


def test_an_adapter_is_named_as_the_server_was_started(server: Live) -> None:
    status, reply = server.post(CHAT, {"messages": HELLO, "adapters": "other"})
    assert status == 404 and "was not started with the adapter 'other'" in reply["error"]["message"]


def test_an_answer_is_as_long_as_memory_allows(folder: Path) -> None:
    """Claude Code asks for 32,000 tokens each time."""
    with live(str(folder), ram_budget_gb="min") as small, saying("Yes."):
        reply, _ = post(small, MESSAGES, {"model": "x", "messages": HELLO, "max_tokens": 10**8})
    assert reply["content"][0]["text"] == "Yes." and reply["stop_reason"] == "end_turn"


def test_later_system_messages_and_documents_reach_the_model(server: Live) -> None:
    prompts: list[str] = []
    document = {"type": "document", "title": "Sea", "source": {"type": "text", "data": "It is deep."}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [
        {"type": "tool_reference", "tool_name": "dive"}, {"type": "text", "text": "Found"}]}  # fmt: skip
    conversation = [
        {"role": "user", "content": [document, {"type": "text", "text": "How deep?"}]},
        {"role": "system", "content": "Be brief"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "find", "input": {"q": 1}}]},
        {"role": "user", "content": [result]},
    ]
    with saying("Yes.", prompts):
        post(server, MESSAGES, {"model": "x", "messages": conversation, "max_tokens": 9})
    assert "<|user|>Sea\nIt is deep.\nHow deep?" in prompts[-1] and "<|system|>Be brief" in prompts[-1]
    assert "<|tool|>dive\nFound" in prompts[-1]


@pytest.mark.parametrize("path", [MESSAGES, "/api/chat", CHAT])
def test_an_answer_goes_on_from_the_assistants_message(server: Live, path: str) -> None:
    prompts: list[str] = []
    body = {"model": "default_model", "messages": [*HELLO, {"role": "assistant", "content": "The sea is"}]}
    body |= {"max_tokens": 9} if path == MESSAGES else {"stream": False}
    body |= {"continue_final_message": True} if path == CHAT else {}
    with saying(" deep.", prompts):
        reply, _ = post(server, path, body)
    assert prompts[-1].endswith("<|assistant|>The sea is") and '" deep."' in json.dumps(reply)


def test_a_conversation_that_a_template_refuses_is_folded(folder: Path, tmp_path: Path) -> None:
    """Gemma's and Mistral's templates want one system message at most, and user and assistant in turn."""
    strict = make_scripted_model(tmp_path / "strict")
    settings = json.loads((strict / "tokenizer_config.json").read_text())
    check = (
        "{%- for message in messages %}{%- if not loop.first and (message.role == 'system' or "
        "message.role == messages[loop.index0 - 1].role) %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"
    )
    settings["chat_template"] = check + settings["chat_template"]
    (strict / "tokenizer_config.json").write_text(json.dumps(settings))
    prompts: list[str] = []
    conversation = [{"role": "system", "content": "A"}, *HELLO, {"role": "system", "content": "B"}, *HELLO]
    with live(str(strict)) as server, saying("Yes.", prompts):
        post(server, CHAT, {"messages": conversation})
    assert "<|system|>A" in prompts[-1] and "<|user|>Hello\n\nB\n\nHello" in prompts[-1]


def test_a_response_goes_on_from_an_earlier_one(server: Live) -> None:
    prompts: list[str] = []
    with saying("Blue.", prompts):
        first, _ = post(server, RESPONSES, {"input": "Which colour?", "instructions": "Be brief"})
        lines = server.post(RESPONSES, {"input": "Why?", "previous_response_id": first["id"], "stream": True})[1]
        second = json.loads(lines[-2].removeprefix("data: "))["response"]["id"]
        post(server, RESPONSES, {"input": "Sure?", "previous_response_id": second, "store": False})
    assert "Be brief" not in prompts[1] and "<|user|>Which colour?<|assistant|>Blue.<|user|>Why?" in prompts[1].replace(
        "\n", ""
    )
    assert prompts[2].replace("\n", "").count("<|assistant|>Blue.") == 2
    status, reply = server.post(RESPONSES, {"input": "x", "previous_response_id": "resp_gone"})
    assert status == 404 and reply["error"]["param"] == "previous_response_id"


def test_items_of_earlier_responses_are_named(server: Live) -> None:
    """Vercel's SDK sends the numbers of reasoning and text in the place of these."""
    prompts: list[str] = []
    with saying("<think>Hm.</think>Blue.", prompts):
        first, _ = post(server, RESPONSES, {"input": "Which colour?"})
        named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        body = {"input": [{"role": "user", "content": "Which colour?"}, *named, *HELLO]}
        _, listed = post(server, RESPONSES, body)
        unkept, _ = post(server, RESPONSES, {**body, "store": False})
    assert len(named) == 2 and not listed
    assert "<|user|>Which colour?<|assistant|><think>Hm.</think>Blue.<|user|>Hello" in prompts[1].replace("\n", "")
    for name in (unkept["output"][0]["id"], first["id"], "msg_gone"):
        status, reply = server.post(RESPONSES, {"input": [{"type": "item_reference", "id": name}, *HELLO]})
        assert (status, reply["error"]["param"]) == (404, "input.0.id"), reply
    status, reply = server.post(RESPONSES, {"input": "x", "previous_response_id": first["output"][0]["id"]})
    assert (status, reply["error"]["param"]) == (404, "previous_response_id")


def test_responses_are_kept_for_some_time_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now = responses.KeptResponses(), [0.0]
    monkeypatch.setattr(responses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(responses, "MAX_KEPT_BYTES", 1000)
    kept.keep("resp_1", [{"role": "user", "content": "x" * 300}])
    kept.keep("msg_1", {"type": "message", "text": "x" * 300})
    now[0] = responses.KEPT_SECONDS - 1
    kept.find("resp_1", list, "previous_response_id")
    kept.keep("msg_2", {"text": "x" * 500})  # for which the least recently used leaves
    with pytest.raises(RefusedError, match="'msg_1' is not kept"):
        kept.find("msg_1", dict, "input.0.id")
    now[0] += responses.KEPT_SECONDS - 1
    assert kept.find("resp_1", list, "previous_response_id") and kept.find("msg_2", dict, "")
    now[0] += responses.KEPT_SECONDS + 1
    with pytest.raises(RefusedError):
        kept.find("resp_1", list, "previous_response_id")
    kept.keep("msg_3", {"text": "x" * 2000})
    with pytest.raises(RefusedError):
        kept.find("msg_3", dict, "")


ITEMS = [
    {"role": "user", "content": "Mend it"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": None},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "name": "read", "namespace": "files", "call_id": "a", "arguments": '{"path": "x"}'},
    {"type": "custom_tool_call", "name": "patch", "call_id": "b", "input": "-1 +2"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
]


def test_items_of_one_answer_are_one_message(server: Live) -> None:
    """The model's input then equals what it had written, so that its kept cache fits."""
    prompts: list[str] = []
    namespace = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    tools = [namespace, {"type": "custom", "name": "patch", "description": "Change a file"}]
    with saying("Done.", prompts):
        post(server, RESPONSES, {"input": ITEMS, "tools": tools})
    expected = (
        "<|assistant|><think>Hm.</think>I look."
        '<tool_call>{"name": "files__read", "arguments": {"path": "x"}}</tool_call>'
        '<tool_call>{"name": "patch", "arguments": {"input": "-1 +2"}}</tool_call><|tool|>1<|tool|>done<|assistant|>'
    )
    assert prompts[-1].endswith(expected)
    assert '"name": "files__read"' in prompts[-1] and '"required": ["input"]' in prompts[-1]


@pytest.mark.parametrize("choice", [{"name": "read"}, {"name": "files__read"}, {"mode": "required"}])
def test_a_function_of_a_namespace_is_forced_by_its_own_name(choice: dict[str, Any]) -> None:
    namespace = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    function = {"type": "function", "name": choice.get("name", "read")}
    choice = function if "name" in choice else {"type": "allowed_tools", "tools": [function], **choice}
    body = checked({"input": "x", "tools": [namespace], "tool_choice": choice}, ResponseRequest)
    found = responses._generation_request(body, [], responses.functions_of(body))
    assert list(found.must_call) == ["files__read"]


@pytest.mark.parametrize("streams", [False, True])
def test_calls_come_back_in_the_form_of_their_tools(server: Live, streams: bool) -> None:
    namespace = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    tools = [namespace, {"type": "custom", "name": "patch"}]
    calls = (
        '<tool_call>{"name": "files__read", "arguments": {"path": "x"}}</tool_call>'
        '<tool_call>{"name": "patch", "arguments": {"input": "-1 +2"}}</tool_call>'
    )
    body = {"input": "Mend it", "tools": tools, "stream": streams, "max_output_tokens": 300}
    with saying(calls):
        _, reply = server.post(RESPONSES, body)
    if streams:
        events = [json.loads(line.removeprefix("data: ")) for line in reply if line.startswith("data: ")]
        assert "response.custom_tool_call_input.delta" in [event["type"] for event in events]
        reply = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == reply["output"]
    read, patch = reply["output"]
    assert (read["type"], read["name"], read["namespace"]) == ("function_call", "read", "files")
    assert json.loads(read["arguments"]) == {"path": "x"}
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "-1 +2")
