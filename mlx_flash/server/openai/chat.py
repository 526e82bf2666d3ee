"""``/v1/chat/completions``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.server.events import CallArguments, CallBegun, End, Event, Piece, TokenChance, TokenDetail, ToolCall
from mlx_flash.server.grammars import schema_grammar
from mlx_flash.server.openai.common import (
    Chunks,
    head,
    sampling_of,
    usage_of,
)
from mlx_flash.server.openai.schemas import (
    AllowedChoice,
    ChatRequest,
    FunctionChoice,
    Message,
    MessageCall,
    Part,
    Thinking,
)
from mlx_flash.server.replies import Whole, collect_all, stream
from mlx_flash.server.request import GenerationRequest, stop_texts, thinking_options
from mlx_flash.server.requestpictures import content_of, picture_part
from mlx_flash.server.service import Service
from mlx_flash.server.toolchoice import TEXT, called, function, text_function, tool_fields

T = TypeVar("T")


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer a request for the next message of a conversation."""
    answers = service.submit(*generation_requests(body))
    if not body.stream:
        wholes = await collect_all(request, answers)
        choices = [_choice(i, whole) for i, whole in enumerate(wholes)]
        usage = usage_of([whole.end for whole in wholes])
        return JSONResponse({**head("chatcmpl", "chat.completion", body.model), "choices": choices, "usage": usage})
    return await stream(request, answers, _Chunks(body, len(answers)))


def generation_requests(body: ChatRequest) -> list[GenerationRequest]:
    """Return the answers that a request asks for.

    Raises:
        RefusedError: a field is wrong.
    """
    messages = [message_of(message, f"messages.{i}") for i, message in enumerate(body.messages)]
    return [
        GenerationRequest(
            model=body.model,
            adapter=body.adapters,
            messages=messages,
            **_tool_fields(body),
            template_options=_template_options(body),
            sampling=sampling_of(body, number),
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            stop=stop_texts(body.stop),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=_grammar(body),
            one_call=body.parallel_tool_calls is False,
            continues=bool(body.continue_final_message),
        )
        for number in range(body.n or 1)
    ]


def _tool_fields(body: ChatRequest) -> dict[str, Any]:
    """Return the fields of a request about functions. A tool that this server cannot run is ignored."""
    tools = []
    for tool in body.tools or () if body.tool_choice != "none" else ():
        if tool.function is not None:
            given = tool.function
            tools.append(function(given.name, given.description, given.parameters, is_strict=given.strict))
        elif tool.custom is not None:
            tools.append(text_function(tool.custom.name, tool.custom.description))
        else:
            body.ignore(f"tools ({tool.type})")
    choice = body.tool_choice
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return tool_fields(tools, must_call=allowed.mode == "required", allowed=[each.name for each in allowed.tools])
    if isinstance(choice, FunctionChoice):
        return tool_fields(tools, must_call=True, allowed=[choice.name])
    return tool_fields(tools, must_call=choice in ("required", "any"))


def _template_options(body: ChatRequest) -> dict[str, Any]:
    """Return the variables of the chat template: how much to reason, in the ways that programs say it."""
    asked = [each for each in (body.thinking, body.reasoning) if isinstance(each, Thinking)]
    thinks = [body.enable_thinking, body.thinking if isinstance(body.thinking, bool) else None]
    thinks += [each.thinks for each in asked]
    efforts = [body.reasoning_effort, *(each.effort for each in asked)]
    found = thinking_options(_first(thinks), _first(efforts))
    return found | (body.chat_template_kwargs or {})


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def message_of(message: Message, field: str) -> dict[str, Any]:
    """Return a message as chat templates take it.

    Args:
        message: the message.
        field: its place in the request.

    Raises:
        RefusedError: a picture cannot be used.
    """
    content: Any = message.content
    if isinstance(content, list):
        content = content_of([_part(part, f"{field}.content.{i}") for i, part in enumerate(content)])
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if message.reasoning is not None:
        found.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        found["tool_calls"] = [_called(call) for call in message.tool_calls]
    return found


def _called(call: MessageCall) -> dict[str, Any]:
    """Return a call of an earlier message as chat templates take it."""
    if call.custom is not None:
        return called(call.id, call.custom.name, {TEXT: call.custom.input})
    assert call.function is not None
    return called(call.id, call.function.name, call.function.arguments)


def _part(part: Part, field: str) -> dict[str, str]:
    if part.image_url is not None:
        return picture_part(part.image_url.url, f"{field}.image_url.url")
    return {"type": "text", "text": part.text or part.refusal or ""}


def _grammar(body: ChatRequest) -> str | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return schema_grammar(None, "response_format")
    return schema_grammar(form.json_schema.schema_, "response_format.json_schema.schema")


def _choice(index: int, whole: Whole) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.text or None, "refusal": None}
    if whole.reasoning:
        message["reasoning"] = whole.reasoning
    if whole.calls:
        message["tool_calls"] = [_call(call, json.dumps(call.arguments, ensure_ascii=False)) for call in whole.calls]
    elif message["content"] is None:
        message["content"] = ""
    return {"index": index, "message": message, "logprobs": _logprobs(whole.tokens), "finish_reason": whole.end.reason}


def _call(call: CallBegun | ToolCall, arguments: str) -> dict[str, Any]:
    """Return a call as a client reads it."""
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id or f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _logprobs(tokens: Sequence[TokenDetail]) -> dict[str, Any] | None:
    """Return the probabilities of some tokens as a client reads them; None where there are none."""
    if not tokens:
        return None

    def shown(chance: TokenChance) -> dict[str, Any]:
        text = chance.text.encode("utf-8", "replace")
        return {"id": chance.token, "token": chance.text, "logprob": chance.logprob, "bytes": list(text)}

    content = [{**shown(each.chosen), "top_logprobs": [shown(chance) for chance in each.likeliest]} for each in tokens]
    return {"content": content, "refusal": None}


class _Chunks(Chunks):
    """A stream of messages."""

    def __init__(self, body: ChatRequest, num_answers: int) -> None:
        super().__init__(body, head("chatcmpl", "chat.completion.chunk", body.model), num_answers)
        self._num_calls = [0] * num_answers

    def begin(self) -> Iterator[bytes]:
        """Yield the beginning of each message."""
        for number in range(len(self._num_calls)):
            yield self.chunk(_delta(number, {"role": "assistant", "content": ""}))

    def choice(self, number: int, event: Event | None) -> dict[str, Any] | None:
        """Return the part of a message for an event."""
        if isinstance(event, Piece):
            return _delta(number, {"content" if event.kind == "text" else "reasoning": event.text}, event.tokens)
        if isinstance(event, CallBegun):
            self._num_calls[number] += 1
            return self._call_delta(number, _call(event, ""))
        if isinstance(event, CallArguments):
            return self._call_delta(number, {"function": {"arguments": event.text}})
        if isinstance(event, End):
            return _delta(number, {}, reason=event.reason)
        return _delta(number, {}) if event is None else None

    def _call_delta(self, number: int, call: dict[str, Any]) -> dict[str, Any]:
        return _delta(number, {"tool_calls": [{"index": self._num_calls[number] - 1, **call}]})


def _delta(
    number: int, delta: dict[str, Any], tokens: Sequence[TokenDetail] = (), reason: str | None = None
) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": _logprobs(tokens), "finish_reason": reason}
