"""``/v1/responses``, without state: each request brings its whole conversation."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import RefusedError
from mlx_flash.server.grammars import schema_grammar
from mlx_flash.server.openai.chat import arguments_of
from mlx_flash.server.openai.response_items import response_of
from mlx_flash.server.openai.response_schemas import FunctionChoice, InputPart, ResponseRequest
from mlx_flash.server.openai.response_stream import ResponseWriter
from mlx_flash.server.replies import collect_all, stream
from mlx_flash.server.request import GenerationRequest, Sampling
from mlx_flash.server.requestpictures import content_of, picture_part
from mlx_flash.server.service import Service
from mlx_flash.server.toolchoice import called, tool_fields


async def respond(service: Service, request: Request, body: ResponseRequest) -> Response:
    """Answer a request for the next items of a conversation."""
    answers = service.submit(_generation_request(body))
    if not body.stream:
        (whole,) = await collect_all(request, answers)
        return JSONResponse(response_of(body, _head(), whole))
    return await stream(request, answers, ResponseWriter(body, _head()))


def _generation_request(body: ResponseRequest) -> GenerationRequest:
    tools = [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in body.tools or ()
    ]
    name = body.tool_choice.name if isinstance(body.tool_choice, FunctionChoice) else None
    return GenerationRequest(
        model=body.model,
        messages=_messages(body),
        **tool_fields(
            [] if body.tool_choice == "none" else tools,
            must_call=body.tool_choice == "required" or name is not None,
            name=name,
        ),
        sampling=Sampling(temperature=body.temperature, top_p=body.top_p),
        max_tokens=body.max_output_tokens,
        grammar=_grammar(body),
        one_call=body.parallel_tool_calls is False,
    )


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return the conversation as chat templates take it."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        field = f"input.{number}"
        if item.type == "function_call":
            call = called(item.call_id, item.name or "", arguments_of(item.arguments or "", f"{field}.arguments"))
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "content": item.output or "", "tool_call_id": item.call_id})
        elif item.type == "message":
            if item.role is None:
                raise RefusedError(f"{field}.role is missing.", 400, f"{field}.role")
            content: Any = item.content or ""
            if not isinstance(content, str):
                content = content_of([_part(part, f"{field}.content.{i}") for i, part in enumerate(content)])
            messages.append({"role": "system" if item.role == "developer" else item.role, "content": content})
    if not messages:
        raise RefusedError("input has no messages.", 400, "input")
    return messages


def _part(part: InputPart, field: str) -> dict[str, str]:
    if part.image_url is not None:
        return picture_part(part.image_url, f"{field}.image_url")
    return {"type": "text", "text": part.text}


def _grammar(body: ResponseRequest) -> str | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema" and form.schema_ is None:
        raise RefusedError("text.format.schema is missing.", 400, "text.format.schema")
    return schema_grammar(form.schema_, "text.format.schema")


def _head() -> dict[str, Any]:
    return {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": time.time()}
