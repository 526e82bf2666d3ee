"""Requests of real programs: fields without effect are ignored and listed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dialects import events_of, text_of
from live import Live, live
from mlx_flash import FlashConfig
from mlx_flash.errors import RefusedError
from mlx_flash.server import responses
from mlx_flash.server.catalog import Source
from mlx_flash.server.request import Defaults, Messages
from mlx_flash.server.responses import ResponseRequest
from mlx_flash.server.service import IGNORED, checked
from scripted import make_scripted_model, saying

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "mcp:files/read", "description": "Read", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {}}


def post(server: Live, path: str, body: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return a reply, and the fields that had no effect, as the log has them."""
    IGNORED.clear()
    status, reply = server.post(path, body)
    assert status == 200, reply
    return reply, sorted(IGNORED)


FUNCTION = {"type": "function", "function": TOOL}
RESULT = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {
        "name": "read", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}]},
]  # fmt: skip
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"max_completion_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.5,
      "frequency_penalty": 0.5, "repetition_penalty": 1.1, "stop": ["###", "User:"], "logit_bias": {"5": 1}, "seed": 1,
      "n": 2}, ""),
    (dict.fromkeys(("max_completion_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "logprobs",
                    "tools", "tool_choice", "parallel_tool_calls", "guided_json", "logit_bias", "n", "functions"))
     | {"max_tokens": 9, "temprature": 1}, "temprature"),
    ({"model": "gpt-4o", "max_tokens": -1, "seed": -1, "top_k": -1, "stop": ""}, ""),
    ({"model": None, "max_tokens": 100_000_000, "logprobs": True, "top_logprobs": 2, "tools": [], "tool_choice": "auto",
      "stop": ["", "x"], "temperature": 1, "top_k": 100_000, "xtc_probability": None}, ""),
    ({"user": "me", "metadata": {"a": "b"}, "modalities": ["text"], "reasoning_effort": "medium", "format": "",
      "response_format": {"type": "text"}}, "user, metadata, format"),
    ({"model": "anthropic/claude-sonnet-4", "conversation": "x", "prompt": "x", "background": True,
      "stream_options": {"include_usage": None, "extra": 1}},
     "conversation, prompt, background, stream_options.extra"),
    ({"tools": [{**FUNCTION, "function": {**TOOL, "strict": True}, "cache_control": {}},
                {"type": "web_search_preview"}], "parallel_tool_calls": False},
     "tools.cache_control, tools.function.strict, tools (web_search_preview)"),
    ({"tools": [FUNCTION, {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}]},
     "tools (custom), tools.custom"),
    ({"tools": [FUNCTION], "tool_choice": "none"}, ""),
    ({"messages": [*HELLO, *RESULT]}, ""),
    ({"messages": [*HELLO, *RESULT], "tools": [FUNCTION]}, ""),
    ({"messages": [
        {"role": "developer", "content": "Be brief"}, {**HELLO[0], "name": "Ada"}, {"role": "user", "content": ""},
        {"role": "system", "content": [{"type": "text", "text": "Be", "cache_control": {}}]},
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hm", "refusal": None, "audio": {"id": "x"}},
        *HELLO]}, "messages.content.cache_control, messages.audio"),
    ({"reasoning_effort": "none"}, ""),
    ({"reasoning_effort": "xhigh", "thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ({"reasoning": {"enabled": False, "max_tokens": 5}}, "reasoning.max_tokens"),
    ({"reasoning": {"effort": "high", "exclude": True}}, "reasoning.exclude"),
    ({"thinking": False, "chat_template_kwargs": {"levels": [1]}}, ""),
    ({"enable_thinking": True, "preserve_thinking": True}, "preserve_thinking"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, ""),
]  # fmt: skip
"""Fields that clients of chat completions send beside the messages, and those of them that have no effect."""

BLOCK = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
READ = {"name": "read", "description": "Read", "input_schema": SCHEMA}
USES: list[dict[str, Any]] = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}, "caller": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "No", "is_error": True}]},
]
MESSAGES_OF_CLIENTS: list[tuple[dict[str, Any], str]] = [
    ({"system": [BLOCK, BLOCK], "messages": [{"role": "user", "content": [BLOCK]}], "temperature": 0.7, "top_p": 0.9,
      "top_k": 40, "stop_sequences": ["###"], "thinking": {"type": "enabled", "budget_tokens": 1024}, "unheard_of": 1},
     "messages.content.cache_control, system.cache_control, thinking.budget_tokens, unheard_of"),
    ({"thinking": {"type": "adaptive", "display": "full"}, "model": "claude-x"}, "thinking.display"),
    (dict.fromkeys(("system", "tools", "tool_choice", "thinking", "metadata", "stop_sequences", "stream", "temperature",
                    "top_k", "context_management", "container")), ""),
    ({"system": [], "tools": [], "stop_sequences": [""], "top_k": 100_000, "temperature": 1}, ""),
    ({"system": "Be brief", "thinking": {"type": "disabled"}, "output_config": {"effort": "low", "task_budget": 5}},
     "output_config.task_budget"),
    ({"tools": [{**READ, "defer_loading": True}, {"type": "web_search_20250305", "name": "web_search"}],
      "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     "tools.defer_loading, tools (web_search_20250305)"),
    ({"tools": [{**READ, "type": "custom", "strict": True}, {"type": "bash_20250124", "name": "bash"}],
      "tool_choice": {"type": "none"}}, "tools.strict"),
    ({"messages": [*HELLO, *USES], "tools": [READ]}, "messages.content.caller, messages.content.is_error"),
    ({"messages": [
        {"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It is deep."},
             "title": "Sea", "context": "x", "citations": {"enabled": True}}]}, *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search"}, {"type": "text", "text": "Yes"}]},
        {"role": "system", "content": [BLOCK]}, *HELLO]},
     "messages.content.source.media_type, messages.content.citations, "
     "messages.content.signature, messages.content.data, messages.content.cache_control, messages.content "
     "(redacted_thinking), messages.content (server_tool_use)"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "So"}]}, ""),
]  # fmt: skip

RESPONSES_OF_CLIENTS: list[tuple[dict[str, Any], str]] = [
    ({"instructions": "Be brief", "store": False, "metadata": {"a": "b"}, "n": 1, "parallel_tool_calls": False,
      "background": False, "reasoning": {"effort": "medium", "summary": "detailed"}, "truncation": "auto",
      "text": {"format": {"type": "text"}, "verbosity": "high"}, "model": "gpt-5-codex"},
     "n, reasoning.summary, text.verbosity"),
    (dict.fromkeys(("instructions", "tools", "tool_choice", "reasoning", "text", "stream", "conversation", "prompt",
                    "response_format")), ""),
    ({"input": [
        {"role": "developer", "content": "Be brief"}, *HELLO, {"type": "web_search_call", "id": "w"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}], "id": "m"}]},
     "input.encrypted_content, input (web_search_call), input (compaction)"),
    ({"tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": True}, {"type": "local_shell"},
                {"type": "mcp", "server_label": "x"}, {"type": "image_generation"},
                {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}]},
     "tools.server_label, tools (local_shell), tools (mcp), tools (image_generation)"),
]  # fmt: skip

ANSWERED: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"messages": HELLO, **more}, ignored) for more, ignored in CHATS),
    *((MESSAGES, {"messages": HELLO, "max_tokens": 20, **more}, ignored) for more, ignored in MESSAGES_OF_CLIENTS),
    *((RESPONSES, {"input": "x", **more}, ignored) for more, ignored in RESPONSES_OF_CLIENTS),
    (TEXT, {"prompt": "x", "user": "me", "truncate": 5, "model": "text-davinci-003"}, "user, truncate"),
]


@pytest.mark.parametrize("number", range(len(ANSWERED)))
def test_fields_of_clients_are_answered_and_those_without_effect_listed(server: Live, number: int) -> None:
    path, body, ignored = ANSWERED[number]
    with saying("Yes."):
        reply, listed = post(server, path, {"model": "default_model", **body})
    assert json.dumps(reply).count("Yes.") == (body.get("n") or 1)
    assert listed == sorted(filter(None, ignored.split(", ")))
    assert reply["model"] in ("default_model", None) or reply["model"].endswith("tiny"), reply["model"]


def test_fields_without_effect_are_logged_once(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mlx_flash"):
        for _ in range(3):
            server.say("Hi", max_tokens=1, only_here=1)
    assert sum("only_here" in record.message for record in caplog.records) == 1


def test_any_name_reaches_the_only_model(folder: Path, server: Live) -> None:
    with saying("Yes."):
        reply, _ = post(server, MESSAGES, {"model": "claude-opus", "messages": HELLO, "max_tokens": 9})
    assert reply["model"] == str(folder)
    with live(str(folder), any_name=False, defaults=Defaults(max_tokens=2)) as named:
        status, reply = named.post(CHAT, {"model": "gpt-5", "messages": HELLO})
        assert status == 404 and f"'gpt-5' here. Hint: this server has 'default_model', '{folder}'" in str(reply)
        assert named.post(CHAT, {"model": f"{folder}:latest", "messages": HELLO})[0] == 200


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
        second = events_of(lines)[-1]["response"]["id"]
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


def test_responses_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = responses.KeptResponses()
    monkeypatch.setattr(responses, "MAX_KEPT_BYTES", 1000)
    conversation = Messages()
    conversation.add("user", [{"type": "text", "text": "x" * 300}])
    kept.keep("resp_1", conversation)
    kept.keep("msg_1", {"type": "message", "text": "x" * 300})
    kept.find("resp_1", Messages, "previous_response_id")
    kept.keep("msg_2", {"text": "x" * 500})  # for which the least recently used leaves
    with pytest.raises(RefusedError, match="'msg_1' is not kept"):
        kept.find("msg_1", dict, "input.0.id")
    assert kept.find("resp_1", Messages, "previous_response_id") and kept.find("msg_2", dict, "")
    kept.keep("msg_3", {"text": "x" * 2000})
    with pytest.raises(RefusedError):
        kept.find("msg_3", dict, "")


NAMESPACE = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
TOOLS = [NAMESPACE, {"type": "custom", "name": "patch", "description": "Change a file"}]
CALLS = (
    '<tool_call>{"name": "files__read", "arguments": {"path": "x"}}</tool_call>'
    '<tool_call>{"name": "patch", "arguments": {"input": "-1 +2"}}</tool_call>'
)
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
    with saying("Done.", prompts):
        post(server, RESPONSES, {"input": ITEMS, "tools": TOOLS})
    expected = f"<|assistant|><think>Hm.</think>I look.{CALLS}<|tool|>1<|tool|>done<|assistant|>"
    assert prompts[-1].endswith(expected)
    assert '"name": "files__read"' in prompts[-1] and '"required": ["input"]' in prompts[-1]


@pytest.mark.parametrize(
    "choice", [{"type": "function", "name": name} for name in ("read", "files__read")] + ["required"]
)
def test_a_function_of_a_namespace_is_forced_by_its_own_name(choice: Any) -> None:
    body = checked({"input": "x", "tools": [NAMESPACE], "tool_choice": choice}, ResponseRequest)
    found = responses._generation_request(body, [], responses.functions_of(body))
    assert list(found.must_call) == ["files__read"]


@pytest.mark.parametrize("streams", [False, True])
def test_calls_come_back_in_the_form_of_their_tools(server: Live, streams: bool) -> None:
    body = {"input": "Mend it", "tools": TOOLS, "stream": streams, "max_output_tokens": 300}
    with saying(CALLS):
        _, reply = server.post(RESPONSES, body)
    if streams:
        events = events_of(reply)
        deltas = {event["type"].split(".")[1]: event["delta"] for event in events if event["type"].endswith(".delta")}
        assert deltas == {"function_call_arguments": '{"path": "x"}', "custom_tool_call_input": "-1 +2"}
        reply = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == reply["output"]
    read, patch = reply["output"]
    assert (read["type"], read["name"], read["namespace"]) == ("function_call", "read", "files")
    assert json.loads(read["arguments"]) == {"path": "x"}
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "-1 +2")


# --- recorded bodies --------------------------------------------------------------------------------------------------

# Words of ours are in the place of theirs. bodies/MANIFEST.json says with which version each was recorded, and to which
# path it goes; bodies/ollama/*.json are those of clients of Ollama's API, each with its path and the answer it gets.


BODIES = Path(__file__).parent / "bodies"
PATHS: dict[str, str] = {
    name: entry["path"] for name, entry in json.loads((BODIES / "MANIFEST.json").read_text()).items()
}
LAST = {
    "/v1/chat/completions": '"finish_reason": "stop"',
    "/v1/responses": '"status": "completed"',
    "/v1/messages": '"stop_reason": "end_turn"',
}
OF_OLLAMA = {path.stem: json.loads(path.read_text()) for path in BODIES.glob("ollama/*.json")}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SAID = {"text": "Aye.", "thinking": "<think>Hm.</think>Aye.", "json": '{"age": 7}', "call": CALL, "openai call": CALL}


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Live]:
    with live(Source(name="tiny", base=str(folder), config=FlashConfig(ram_budget_gb=2.0, telemetry=False))) as running:
        yield running


@pytest.mark.parametrize("name", PATHS)
def test_bodies_of_programs_are_answered(tiny: Live, name: str) -> None:
    path, body = PATHS[name], json.loads((BODIES / f"{name}.json").read_text())
    for streams in (False, True):
        with saying("It rains."):
            status, reply = tiny.post(path, {**body, "stream": streams})
        assert status == 200, reply
        assert text_of(reply) == "It rains."
        assert LAST[path] in ("\n".join(reply) if streams else json.dumps(reply))


@pytest.mark.parametrize("name", sorted(OF_OLLAMA))
def test_bodies_of_clients_of_ollama_are_answered(tiny: Live, name: str) -> None:
    sent = OF_OLLAMA[name]
    kind = sent["answer"]
    with saying(SAID.get(kind, "")):
        status, reply = tiny.post(sent["path"], sent["body"])
    assert status == 200, reply
    if kind == "facts":  # as VS Code reads them
        info = reply["model_info"]
        assert info["general.basename"] == "tiny" and info[f"{info['general.architecture']}.context_length"] == 32768
        assert {"completion", "tools"} <= set(reply["capabilities"]) and reply["details"]["family"]
        return
    if kind == "openai call":
        choices = [choice for event in events_of(reply) for choice in event["choices"]]
        found = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert found[0]["name"] == "weather"
        assert json.loads("".join(call.get("arguments", "") for call in found)) == {"city": "Oslo"}
        return
    parts = events_of(reply) if isinstance(reply, list) else [reply]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True] and parts[-1]["eval_count"] > 0
    assert text_of(parts).strip() == {"call": "", "json": SAID["json"]}.get(kind, "Aye.")
    messages = [part.get("message", part) for part in parts]
    reasoning = "".join(message.get("thinking") or "" for message in messages)
    assert reasoning == ("Hm." if kind == "thinking" else "")
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", {"city": "Oslo"})] * (kind == "call")
