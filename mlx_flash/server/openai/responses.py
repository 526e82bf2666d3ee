"""``/v1/responses``: a request brings its whole conversation, or goes on from an earlier response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import RefusedError
from mlx_flash.server.grammars import schema_grammar
from mlx_flash.server.openai.kept import KeptResponses
from mlx_flash.server.openai.response_items import Function, flat_name
from mlx_flash.server.openai.response_schemas import (
    AllowedChoice,
    FunctionChoice,
    InputItem,
    InputPart,
    OneTool,
    ResponseRequest,
)
from mlx_flash.server.openai.response_stream import ResponseWriter
from mlx_flash.server.replies import collect_all, stream
from mlx_flash.server.request import GenerationRequest, Sampling, thinking_options
from mlx_flash.server.requestpictures import content_of, picture_part
from mlx_flash.server.service import Service
from mlx_flash.server.toolchoice import TEXT, called, tool_fields


async def respond(kept: KeptResponses, service: Service, request: Request, body: ResponseRequest) -> Response:
    """Answer a request for the next items of a conversation."""
    earlier = [] if body.previous_response_id is None else kept.messages(body.previous_response_id)
    messages, functions = _messages(body, earlier), functions_of(body)
    head: dict[str, Any] = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": time.time()}
    answers = service.submit(_generation_request(body, messages, [each.shown for each in functions]))

    def keep(items: list[dict[str, Any]]) -> None:
        if body.store is not False:
            conversation = _Messages(body, messages)
            for i, item in enumerate(items):
                conversation.add(InputItem.model_validate(item), f"output.{i}")
            kept.keep(head["id"], conversation.found)

    writer = ResponseWriter(body, head, {each.flat_name: each for each in functions}, keep)
    if body.stream:
        return await stream(request, answers, writer)
    (whole,) = await collect_all(request, answers)
    return JSONResponse(writer.response_of(whole))


def _generation_request(
    body: ResponseRequest, messages: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]]
) -> GenerationRequest:
    tools, choice = functions if body.tool_choice != "none" else [], body.tool_choice
    if isinstance(choice, AllowedChoice):
        allowed = [each.name for each in choice.tools]
        about_tools = tool_fields(tools, must_call=choice.mode == "required", allowed=allowed)
    elif isinstance(choice, FunctionChoice):
        about_tools = tool_fields(tools, must_call=True, allowed=[choice.name])
    else:
        about_tools = tool_fields(tools, must_call=choice == "required")
    opening = [{"role": "system", "content": body.instructions}] if body.instructions else []
    reasoning = body.reasoning
    return GenerationRequest(
        model=body.model,
        messages=[*opening, *messages],
        **about_tools,
        template_options=None if reasoning is None else thinking_options(reasoning.thinks, reasoning.effort),
        sampling=Sampling(temperature=body.temperature, top_p=body.top_p),
        max_tokens=body.max_output_tokens,
        grammar=_grammar(body),
        one_call=body.parallel_tool_calls is False,
    )


def functions_of(body: ResponseRequest) -> list[Function]:
    """Return the functions that the model may call. Other tools are ignored."""
    found = []
    items = body.input if isinstance(body.input, list) else ()
    more = [tool for item in items if item.type == "additional_tools" for tool in item.tools or ()]
    for tool in (*(body.tools or ()), *more):
        parts: list[tuple[str | None, OneTool]] = [(tool.name, part) for part in tool.tools or ()]
        for namespace, each in parts or [(None, tool)]:
            if each.type in ("function", "custom"):
                found.append(Function(namespace, each))
            else:
                body.ignore(f"tools ({each.type})")
    return found


def _messages(body: ResponseRequest, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation as chat templates take it, without instructions.

    Args:
        body: the request.
        earlier: messages of the response that it goes on from.
    """
    messages = _Messages(body, earlier)
    if isinstance(body.input, str):
        messages.found.append({"role": "user", "content": body.input})
    else:
        for number, item in enumerate(body.input):
            messages.add(item, f"input.{number}")
    if not messages.found:
        raise RefusedError("input has no messages.", 400, "input")
    return messages.found


class _Messages:
    """Items of a conversation as messages: what the model wrote in one answer is one message, as templates want it.

    Args:
        body: the request.
        earlier: messages before them.

    Attributes:
        found: all messages.
    """

    def __init__(self, body: ResponseRequest, earlier: Sequence[dict[str, Any]]) -> None:
        self.found = list(earlier)
        self._num_earlier = len(self.found)
        self._body = body

    def add(self, item: InputItem, field: str) -> None:
        """Add an item.

        Raises:
            RefusedError: a part of it is missing, or cannot be used.
        """
        if item.type == "message":
            if item.role is None:
                raise RefusedError(f"{field}.role is missing.", 400, f"{field}.role")
            content = _content(item.content, f"{field}.content")
            if item.role == "assistant":
                self._answer()["content"] += content if isinstance(content, str) else ""
            else:
                role = "system" if item.role == "developer" else item.role
                self.found.append({"role": role, "content": content})
        elif item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else item.summary
            if text := "".join(part.text for part in parts or ()):
                answer = self._answer()
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text
        elif item.type in ("function_call", "custom_tool_call"):
            given = {TEXT: item.input or ""} if item.type == "custom_tool_call" else item.arguments or ""
            calls = self._answer().setdefault("tool_calls", [])
            calls.append(called(item.call_id, flat_name(item.namespace, item.name or ""), given))
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.output, f"{field}.output")
            pictures = [part for part in content if part["type"] == "image"] if isinstance(content, list) else []
            texts = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            self.found.append({"role": "tool", "content": texts, "tool_call_id": item.call_id})
            if pictures:  # templates show pictures in messages of the user
                self.found.append({"role": "user", "content": pictures})
        elif item.type != "additional_tools":
            self._body.ignore(f"input ({item.type})")

    def _answer(self) -> dict[str, Any]:
        """Return the message of the model that goes on; a new one after other messages."""
        if len(self.found) == self._num_earlier or self.found[-1]["role"] != "assistant":
            self.found.append({"role": "assistant", "content": ""})
        return self.found[-1]


def _content(content: str | Sequence[InputPart] | None, field: str) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    return content_of([_part(part, f"{field}.{i}") for i, part in enumerate(content)])


def _part(part: InputPart, field: str) -> dict[str, str]:
    if part.image_url is not None:
        return picture_part(part.image_url, f"{field}.image_url")
    return {"type": "text", "text": part.text or part.refusal or ""}


def _grammar(body: ResponseRequest) -> str | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema" and form.schema_ is None:
        raise RefusedError("text.format.schema is missing.", 400, "text.format.schema")
    return schema_grammar(form.schema_, "text.format.schema")
