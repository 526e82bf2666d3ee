"""The server as OpenAI's clients use it, and as others abuse it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler

from dialects import events_of
from live import Live, live
from mlx_flash.errors import RefusedError
from mlx_flash.server import grammar, loaded, prompts
from mlx_flash.server.request import Defaults, GenerationRequest
from mlx_flash.server.room import EngineRoom
from waiting import eventually

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def server(plain: str) -> Iterator[Live]:
    with live(plain) as running:
        yield running


def messages(text: str = "Tell me about the sea") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- answers ---------------------------------------------------------------------------------------------------------


def test_equal_requests_for_one_token(server: Live) -> None:
    """The kept cache holds the whole prompt: one token is left to compute."""
    body = {"messages": messages("Yes or no?"), "max_tokens": 1, "logprobs": True}
    replies = [server.post(CHAT, body) for _ in range(3)]
    assert [status for status, _ in replies] == [200, 200, 200]
    assert len({json.dumps(reply["choices"]) for _, reply in replies}) == 1
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for _, reply in replies] == [False, True, True]
    assert server.get("/health") == (200, {"status": "ok"})


def test_lists_of_prompts_are_answered_as_each_alone(server: Live) -> None:
    prompts = ["The sea", "A mountain", "x"]
    alone = [server.post(TEXT, {"prompt": prompt, "max_tokens": 6})[1]["choices"][0]["text"] for prompt in prompts]
    _, reply = server.post(TEXT, {"prompt": prompts, "max_tokens": 6})
    assert [choice["text"] for choice in reply["choices"]] == alone
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    _, reply = server.post(TEXT, {"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "n": 2})
    assert len(reply["choices"]) == 4 and reply["usage"]["prompt_tokens"] == 4


def test_seeded_requests_share_passes_and_are_mlx_lms(server: Live, plain: str) -> None:
    """The same seed, the same answer: that of mlx-lm after ``mx.random.seed``."""
    body = {"prompt": "Once upon a time", "max_tokens": 10, "temperature": 0.9, "seed": 11}
    alone = server.post(TEXT, body)[1]["choices"][0]["text"]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda seed: server.post(TEXT, {**body, "seed": seed})[1], (11, 12, 13)))
    found = [reply["choices"][0]["text"] for reply in replies]
    assert found[0] == alone and len(set(found)) == 3
    stock, tokenizer = mlx_lm.load(plain)[:2]
    mx.random.seed(11)
    assert mlx_lm.generate(stock, tokenizer, body["prompt"], max_tokens=10, sampler=make_sampler(0.9)) == alone


def test_the_seed_of_a_model(plain: str) -> None:
    """It stands for the same answer each time, as in Ollama. Each of several answers has its own, and -1 draws one."""
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 10, "temperature": 1.0}
    with live(plain, defaults=Defaults(seed=11)) as server:
        replies = [server.post(TEXT, {**body, **more})[1] for more in ({}, {}, {"seed": 11}, {"seed": 12}, {"n": 2})]
        texts = [[choice["text"] for choice in reply["choices"]] for reply in replies]
        assert texts[0] == texts[1] == texts[2] != texts[3] and texts[4] == [texts[0][0], texts[3][0]]
        asked = {"model": plain, "prompt": body["prompt"], "stream": False, "raw": True}
        options = {"temperature": 1.0, "num_predict": 10}
        given = [{}, {"seed": 11}, {"seed": -1}, {"seed": -1}]
        found = [server.post("/api/generate", {**asked, "options": options | one})[1]["response"] for one in given]
        assert found[0] == found[1] == texts[0][0] and len(set(found)) == 3
    with live(plain) as server:
        assert len({server.post(TEXT, body)[1]["choices"][0]["text"] for _ in range(3)}) == 3


def test_several_answers(server: Live) -> None:
    body = {"messages": messages(), "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 6}
    choices = server.post(CHAT, body)[1]["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and len(set(texts)) == 3
    events = events_of(server.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})[1])
    parts = ["", "", ""]
    for choice in [choice for event in events for choice in event["choices"]]:
        parts[choice["index"]] += choice["delta"].get("content") or ""
    assert parts == texts and events[-1]["usage"]["completion_tokens"] == 18
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)


def test_logprobs(server: Live) -> None:
    client = server.client()
    reply = client.chat.completions.create(
        model="default_model", messages=messages(), max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert content is not None and len(content) == 4
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob  # the likeliest one was taken
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)
    text = client.completions.create(model="default_model", prompt="The sea", max_tokens=4, logprobs=2)
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.tokens or []) == 4


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_answers_follow_a_schema(server: Live) -> None:
    """As llama.cpp has it, too; test_forms.py has the other forms."""
    _, reply = server.post(CHAT, {"messages": messages(), "response_format": {"type": "json_object"}, "max_tokens": 5})
    assert reply["choices"][0]["message"]["content"].lstrip().startswith("{")
    for path, more in ((CHAT, {"messages": messages(), "temperature": 1.0, "seed": 1}), (TEXT, {"prompt": "x"})):
        form = {"type": "json_object", "schema": SCHEMA}
        options = {"max_tokens": 200, "logprobs": True if path == CHAT else 1}
        (choice,) = server.post(path, {**more, **options, "response_format": form})[1]["choices"]
        value = json.loads(choice["text"] if path == TEXT else choice["message"]["content"])
        assert set(value) == {"name", "age"} and isinstance(value["name"], str) and 0 <= value["age"] <= 9


def test_blanks_do_not_fill_an_answer_that_follows_a_schema(server: Live) -> None:
    """A model that likes line feeds best ends its answer all the same."""
    tokenizer = next(iter(server.room.models)).tokenizer
    blanks = [number for text, number in tokenizer.get_vocab().items() if not tokenizer.decode([number]).strip(" \n\t")]
    body = {
        "messages": messages(),
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": dict.fromkeys(map(str, blanks), 50),
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    status, reply = server.post(CHAT, {**body, "response_format": form})
    assert status == 200 and reply["choices"][0]["finish_reason"] == "stop"
    text = reply["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"name", "age"} and "\n" in text


def test_a_grammar_that_has_no_room_is_refused(plain: str) -> None:
    """It takes memory that no plan has."""
    form = {"type": "json_object"}
    with live(plain, ram_budget_gb="min", context_length=1024) as running:
        room = next(iter(running.room.models))
        room._grammars._vocab_size = 10**9
        status, reply = running.post(CHAT, {"messages": messages(), "response_format": form, "max_tokens": 2})
        assert status == 413 and "the budget is" in reply["error"]["message"]
        assert running.say("Hi")


@pytest.mark.parametrize(
    ("kind", "shown", "data"),
    [("ByteLevel", "\u0120\u00c3\u00a9", " é"), ("ByteFallback", "\u2581é", " é"), ("ByteFallback", "<0x0A>", "\n")],
)
def test_bytes_of_tokens(kind: str, shown: str, data: str) -> None:
    to_bytes = grammar._bytes_of(SimpleNamespace(backend_tokenizer=SimpleNamespace(decoder=f"Sequence({kind}())")))
    assert to_bytes(shown) == data.encode()
    with pytest.raises(RefusedError, match="cannot follow a grammar"):
        grammar._bytes_of(SimpleNamespace())


def test_responses(server: Live) -> None:
    client = server.client()
    options: Any = {"model": "default_model", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(input="Tell me about the sea", **options)
    assert whole.output_text == server.say("Tell me about the sea", temperature=0)
    assert whole.status == "incomplete" and whole.usage is not None and whole.usage.output_tokens == 8
    asked: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"role": "user", "content": "Tell me about the sea"},
    ]
    whole = client.responses.create(input=asked, instructions="Be brief", **options)
    kinds, text, final = [], "", None
    for event in client.responses.create(input=asked, instructions="Be brief", stream=True, **options):
        kinds.append(event.type.removeprefix("response."))
        text += event.delta if event.type == "response.output_text.delta" else ""
        final = event.response if event.type == "response.incomplete" else final
    assert text == whole.output_text and final is not None and final.output_text == text
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]


def test_models_are_listed(server: Live, plain: str) -> None:
    import openai

    assert [found.id for found in server.client().models.list()] == [plain]
    assert server.client().models.retrieve(plain).id == plain
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        server.client().models.retrieve("other")


# --- requests that are wrong -----------------------------------------------------------------------------------------


def part(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields]}]


def form(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


SCHEMA_7: dict[str, Any] = {"type": 7}
FUNCTION = {"type": "function", "function": {"name": "f"}}
BASES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "x"}, CHAT: {"messages": messages()}, RESPONSES: {"input": "x"},
    MESSAGES: {"messages": messages(), "max_tokens": 2}, "/api/chat": {"messages": messages()},
    "/api/generate": {"prompt": "x"},
}  # fmt: skip
"""A right request of each dialect, without the model's name."""

WRONG_FIELDS: dict[str, dict[str, list[Any]]] = {
    TEXT: {
        "prompt": ["", [], [[]], [1000], [-1], [2**70], ...], "stop": [5, [5]], "min_p": [2],
        "logit_bias": [{"1000": 1}, {str(2**63): 1}, {"-1": 1}, {"5": 1e300}, [1]], "repetition_context_size": [2**70],
        "repetition_penalty": [-1], "temperature": [-1, "hot", True], "seed": [-2, 2**63, 1.5], "max_tokens": [-2, "8"],
        "n": [0, 1000], "echo": [1], "best_of": [3], "suffix": ["y"], "model": [5, "\x00"], "adapters": ["x"],
        "stream": ["yes"], "top_k": [2**63], "xtc_threshold": [0.6], "structured_outputs": [{"regex": "[0-9]"}],
    },
    CHAT: {
        "messages": [[], "hi", ...], "chat_template": ["{{ 1 }}"], "thinking": ["x"], "functions": [[{"name": "f"}]],
        "reasoning_effort": ["much"], "tools": [[FUNCTION]], "tool_choice": ["required"], "guided_json": [SCHEMA_7],
        "response_format": [form(), {"type": "text", "schema": {}}, {**form(schema={}), "type": "text"}],
        "adapters": ["other"], "grammar": ["root ::= [0-9]"],
    },
    RESPONSES: {
        "input": [[]], "background": [True], "conversation": ["x"], "prompt": [{"id": "pmpt_1"}], "n": [2],
        "response_format": [{"type": "json_object"}],
    },
    MESSAGES: {
        "max_tokens": [0], "messages": [[]], "tool_choice": [{"type": "any"}, {"type": "tool", "name": "g"}],
        "temperature": [True], "response_format": [{"type": "json_object"}],
    },
    "/api/chat": {
        "format": ["xml"], "keep_alive": ["soon"], "think": ["deeply"], "tools": [[FUNCTION]], "n": [3],
    },
    "/api/generate": {
        "suffix": ["y"], "template": ["{{ .Prompt }}"], "images": [["a*b"]], "context": [[1, 2]],
    },
}  # fmt: skip
"""Values that are refused, and fields whose answer would not be the one that was asked for, and nobody would see it."""

PNG = "iVBORw0KGgo="
DOCUMENT = {"type": "document", "source": {"type": "base64", "data": ""}}
WRONG_PLACES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    CHAT: [
        ("messages.0.role", {"messages": [{"role": "robot", "content": "hi"}]}),
        ("messages.0.role", {"messages": [{"content": "hi"}]}),
        ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages.0.content.0.image_url.url", {"messages": part(type="image_url", image_url={"url": "data:"})}),
        ("messages.0.content.0", {"messages": part(type="image_url", image_url=None)}),
        ("messages.0.content.0.type", {"messages": part(type="input_audio")}),
        ("messages.0.content.0.type", {"messages": part(type="file", file={})}),
        ("messages.images", {"messages": [{**messages()[0], "images": ["x"]}]}),
        *((f"chat_template_kwargs.{name}", {"chat_template_kwargs": {name: "x"}})
          for name in ("chat_template", "return_tensors", "tokenize", "messages")),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema.schema", {"response_format": form(schema=SCHEMA_7)}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}), ("top_logprobs", {"top_logprobs": 2}),
        ("tool_choice.type", {"tool_choice": {"type": "web_search"}}),
        ("tool_choice.type", {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}),
        ("modalities.0", {"modalities": ["audio"]}), ("tools.0", {"tools": [{"type": "function"}]}),
    ],
    RESPONSES: [("input.0.content.0.type", {"input": part(type="input_file", file_id="x")})],
    MESSAGES: [
        ("messages.0.content.0", {"messages": part(type="image", source={})}),
        ("messages.0", {"messages": part(type="thinking", thinking="x")}),
        ("messages.0.content.0.type: blocks of type container_upload", {"messages": part(type="container_upload")}),
        ("messages.0.content.0.type: blocks of type document with a source of type base64",
         {"messages": part(**DOCUMENT)}),
        ("tool_choice", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}}),
        ("tools.0", {"tools": [{"name": "f"}]}), ("thinking.type", {"thinking": {"type": "deep"}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA_7}}}),
    ],
    "/api/generate": [("images", {"raw": True, "images": [PNG]})],
    "/api/chat": [
        ("options.temperature", {"options": {"temperature": True}}), ("options.top_k", {"options": {"top_k": -2}}),
        ("schema", {"format": SCHEMA_7}), ("messages.0.role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("messages.0.images", {"messages": [{**messages()[0], "images": ["a*b"]}]}),
    ],
}  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (path, {name: it}, name)
    for path, fields in WRONG_FIELDS.items()
    for name, values in fields.items()
    for it in values
] + [(path, fields, place) for path, wrong in WRONG_PLACES.items() for place, fields in wrong]


@pytest.mark.parametrize(("path", "fields", "place"), WRONG, ids=[f"{it[2][:40]}-{i}" for i, it in enumerate(WRONG)])
def test_wrong_requests_name_the_field(server: Live, path: str, fields: dict[str, Any], place: str) -> None:
    whole = {"model": "default_model", "temperature": 1, "xtc_probability": 1.0, **BASES[path], **fields}
    body = {name: value for name, value in whole.items() if value is not ...}
    for each in (body, {**body, "stream": body.get("stream", path[:4] != "/api")}):
        status, reply = server.post(path, each)
        error = reply["error"]
        assert status == 400, reply
        if path == MESSAGES:
            assert (reply["type"], error["type"]) == ("error", "invalid_request_error") and place in error["message"]
        elif path.startswith("/api"):
            assert place in error
        else:
            assert error["param"].startswith(place) and error["param"].islower(), reply  # no names of classes
    assert server.get("/health") == (200, {"status": "ok"})


# --- failures --------------------------------------------------------------------------------------------------------


def test_any_exception_ends_one_request_alone(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it falls: while the prompt is made, in a sampler, in a processor, when text is made."""

    class OddError(Exception):
        pass

    def fail(*_: object, **__: object) -> Any:
        raise OddError("odd")

    expected = server.say("Hi")
    for name in ("make_prompt", "TextStream", "details_of", "_taken"):
        with monkeypatch.context() as patch:
            patch.setattr(loaded, name, fail)
            body = {"messages": messages("Hi"), "max_tokens": 3, "logprobs": True}
            status, reply = server.post(CHAT, body)
            assert status in (400, 500) and "OddError" in reply["error"]["message"]
        assert server.say("Hi") == expected


def test_a_stream_that_fails_ends_with_an_error(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    calls = []
    detail = loaded.details_of

    def later(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise ArithmeticError("late")
        return detail(*given)

    monkeypatch.setattr(loaded, "details_of", later)
    stream = server.client().chat.completions.create(
        model="default_model", messages=messages(), stream=True, logprobs=True, max_tokens=9
    )
    with pytest.raises(openai.APIError, match="ArithmeticError: late"):
        list(stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_generation_thread_is_told(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(plain) as running:
        assert running.get("/ready") == (200, {"status": "ready"})
        monkeypatch.setattr(EngineRoom, "_news", lambda self: 1 / 0)
        assert running.post(TEXT, {"prompt": "x", "max_tokens": 500})[0] == 503
        assert running.get("/health")[0] == running.get("/ready")[0] == 503
        assert running.post(TEXT, {"prompt": "x"})[0] == 503


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["in a batch", "alone"])
def test_a_client_that_leaves_ends_its_request(server: Live, fields: dict[str, Any]) -> None:
    for streams, is_early in ((True, True), (True, False), (False, True)):
        with server.leaving(TEXT, prompt="x", max_tokens=20_000, stream=streams, **fields) as connection:
            assert is_early or connection.recv(100)
        passes = server.model.counters.num_passes
        eventually(lambda: not server.room.num_answers and not any(loaded.jobs for loaded in server.room.models))
        assert server.model.counters.num_passes - passes < 500


LONG = "x y " * 30
LONG_CHATS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": LONG}, {"role": "user", "content": "x"}],
    "short messages": [{"role": role, "content": LONG[:60]} for role in ("user", "assistant", "user")],
    "text parts": [{"role": "user", "content": [{"type": "text", "text": LONG[:60]}, {"type": "image"}] * 2}],
    "tool result": [{"role": "user", "content": "x"}, {"role": "tool", "content": LONG}],
    "tool call": [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": LONG}}}]}
    ],
}


@pytest.mark.parametrize("kind", LONG_CHATS)
def test_all_texts_of_a_chat_together_are_counted_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """59 messages of 65,000 characters took 1,107 MB of memory, in a budget of 300 MB."""
    monkeypatch.setattr(prompts, "PIECE_CHARACTERS", 100)
    pieces = list[str]()
    tokenizer = SimpleNamespace(encode=lambda text, **_: pieces.append(text) or text.split())
    request = GenerationRequest(model="m", messages=LONG_CHATS[kind])
    assert prompts.least_tokens(request, tokenizer) >= 50
    assert max(map(len, pieces)) == 100 and len(pieces) == 2
    assert prompts.least_tokens(GenerationRequest(model="m", messages=[{"role": "user"}]), tokenizer) == 0


def test_a_kept_cache_has_the_kind_of_the_segment_that_it_ends_in() -> None:
    """Also where a pass ends several segments, or a prompt that is begun again ends one once more."""
    prompt = prompts.Prompt([*range(9)], "normal", {"system": 2, "user": 6})
    kinds = [prompt.kind_at(number) for number in (2, 3, 6, 8)]
    assert kinds == ["system", "user", "user", "assistant"]
    assert prompt.after(3) == [[3, 4, 5], [6, 7, 8]] and prompt.after(6) == [[6, 7, 8]]


def test_a_text_that_is_too_long_is_counted_in_pieces(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB of text took the process from 126 to 981 MB, in a budget of 300 MB, before it was refused."""
    monkeypatch.setattr(prompts, "PIECE_CHARACTERS", 100)
    text, lengths = "x y " * 250, list[int]()

    def decide(plan: Any, num_prompt: int, *args: Any, **options: Any) -> str:
        raise RefusedError(f"a prompt of {num_prompt} tokens has no room", 413)

    assert server.post(TEXT, {"prompt": text, "max_tokens": 1})[0] == 200  # there is room
    tokenizer = next(iter(server.room.models)).tokenizer._tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **how: lengths.append(len(text)) or encode(text, **how))
    monkeypatch.setattr(loaded, "decide", decide)
    status, reply = server.post(TEXT, {"prompt": text})
    assert status == 413 and reply["error"]["message"].startswith("counted in pieces: a prompt of "), reply
    assert sum(lengths) == len(text) and max(lengths) == 100
