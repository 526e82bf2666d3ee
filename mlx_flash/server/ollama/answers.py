"""``/api/chat`` and ``/api/generate``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.server.events import End, Event, Failed, Piece, Progress, TokenDetail, ToolCall
from mlx_flash.server.grammars import schema_grammar
from mlx_flash.server.ollama.common import counts_of, error_body, line, logprob_of, now
from mlx_flash.server.ollama.schemas import Asked, ChatRequest, GenerateRequest, Message, Options
from mlx_flash.server.replies import Writer, collect_all, stream
from mlx_flash.server.request import GenerationRequest, Sampling, continues, stop_texts, thinking_options
from mlx_flash.server.requestpictures import content_of, data_url, picture_part
from mlx_flash.server.service import Service
from mlx_flash.server.toolchoice import called

_DEFAULT_REPEAT_LAST_N = 64
_ALL = 1_000_000


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer a request for the next message of a conversation."""
    asked = None
    if body.messages:
        messages = [_message(message, f"messages.{i}") for i, message in enumerate(body.messages)]
        asked = GenerationRequest(
            model=body.model,
            messages=messages,
            continues=continues(messages),
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
        )
    return await _answer(service, request, body, asked)


async def generate(service: Service, request: Request, body: GenerateRequest) -> Response:
    """Answer a request that has a text."""
    asked = None
    if body.prompt and (body.raw or body.suffix):
        asked = GenerationRequest(model=body.model, prompt=body.prompt, suffix=body.suffix or None)
    elif body.prompt:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = _content(body.prompt, body.images, "")
        messages: list[dict[str, Any]] = [*system, {"role": "user", "content": content}]
        asked = GenerationRequest(
            model=body.model, messages=messages, context=body.context or (), tells_tokens=not body.images
        )
    return await _answer(service, request, body, asked)


async def _answer(service: Service, request: Request, body: Asked, asked: GenerationRequest | None) -> Response:
    """Answer a request.

    Args:
        asked: the conversation or the text; None loads the model, or unloads it.
    """
    began = time.perf_counter_ns()
    keep_alive = None if body.keep_alive is None else float(body.keep_alive)
    if asked is None:
        work = GenerationRequest(model=body.model, work="unload" if keep_alive == 0 else "load", keep_alive=keep_alive)
    else:
        work = replace(_with_settings(asked, body), model=body.model, keep_alive=keep_alive)
    (answer,) = service.submit(work)
    form = _Form(body, began, work)
    if body.streams:
        return await stream(request, [answer], _Lines(form))
    (whole,) = await collect_all(request, [answer])
    parts = form.part(whole.text, whole.reasoning, whole.calls, whole.tokens)
    return JSONResponse({**parts, **form.end(whole.end)})


class _Form:
    """The form of replies to a request.

    Args:
        body: the request.
        began: its time, by ``time.perf_counter_ns()``.
        work: the same for the generation thread.
    """

    def __init__(self, body: Asked, began: int, work: GenerationRequest) -> None:
        self._body, self._began, self._work = body, began, work

    def part(
        self,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        tokens: Sequence[TokenDetail] = (),
    ) -> dict[str, Any]:
        """Return a part of the answer, or all of it."""
        found: dict[str, Any] = {"model": self._body.model, "created_at": now()}
        thinking = {"thinking": reasoning} if reasoning else {}
        if isinstance(self._body, ChatRequest):
            found["message"] = {"role": "assistant", "content": text, **thinking}
            if calls:
                found["message"]["tool_calls"] = [
                    {"function": {"index": i, "name": call.name, "arguments": call.arguments}}
                    for i, call in enumerate(calls)
                ]
        else:
            found |= {"response": text, **thinking}
        if tokens:
            found["logprobs"] = [logprob_of(token) for token in tokens]
        return {**found, "done": False}

    def end(self, end: End) -> dict[str, Any]:
        """Return what the last part has beside the fields of others."""
        if self._work.work != "answer":
            return {"done": True, "done_reason": self._work.work}
        reason = "length" if end.reason == "length" else "stop"
        context = {"context": end.tokens} if end.tokens else {}
        return {"done": True, "done_reason": reason, **context, **counts_of(end, time.perf_counter_ns() - self._began)}


class _Lines(Writer):
    """A stream of lines."""

    media_type = "application/x-ndjson"

    def __init__(self, form: _Form) -> None:
        self._form = form

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        """Yield the line for an event."""
        form = self._form
        if isinstance(event, Progress):
            yield line({**form.part(), "status": event.stage, "completed": event.done, "total": event.total})
        elif isinstance(event, Piece):
            reasons = event.kind == "reasoning"
            yield line(form.part("" if reasons else event.text, event.text if reasons else "", (), event.tokens))
        elif isinstance(event, ToolCall):
            yield line(form.part(calls=[event]))
        elif isinstance(event, End):
            yield line({**form.part(), **form.end(event)})
        elif isinstance(event, Failed):
            yield line(error_body(event.error))

    def beat(self) -> bytes:
        """Return a line without text."""
        return line(self._form.part())


def _with_settings(asked: GenerationRequest, body: Asked) -> GenerationRequest:
    """Return a request for an answer with the settings of Ollama's.

    Raises:
        RefusedError: the schema cannot be used.
    """
    options = body.options or Options()
    limit = options.num_predict
    return replace(
        asked,
        template_options=thinking_options(None, body.think)
        if isinstance(body.think, str)
        else thinking_options(body.think),
        sampling=_sampling(options),
        max_tokens=limit if limit is not None and limit > 0 else None,
        stop=stop_texts(options.stop),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(body.format),
    )


def _sampling(options: Options) -> Sampling:
    last = _DEFAULT_REPEAT_LAST_N if options.repeat_last_n is None else options.repeat_last_n
    recent = _ALL if last == -1 else last or 1
    has_penalties = last != 0
    penalties: Mapping[str, Any] = {
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty or 0.0,
        "frequency_penalty": options.frequency_penalty or 0.0,
        "presence_context_size": recent,
        "frequency_context_size": recent,
        "repetition_context_size": None if options.repeat_penalty is None and options.repeat_last_n is None else recent,
    }
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=None if options.top_k is None else max(0, options.top_k),
        min_p=options.min_p,
        seed=options.seed,
        **(penalties if has_penalties else {"repetition_penalty": 0.0}),
    )


def _grammar(form: str | dict[str, Any] | None) -> str | None:
    if not form and form != {}:
        return None
    return schema_grammar(form if isinstance(form, dict) else None, "format")


def _content(text: str | None, images: Sequence[str] | None, field: str) -> str | list[dict[str, str]]:
    """Return the content of a message: Ollama's pictures are base64, without a kind, and come before the text."""
    parts = [picture_part(data_url(data), f"{field}images.{i}") for i, data in enumerate(images or ())]
    return content_of([*parts, {"type": "text", "text": text or ""}])


def _message(message: Message, field: str) -> dict[str, Any]:
    """Return a message as chat templates take it.

    Args:
        message: the message.
        field: its place in the request.
    """
    found: dict[str, Any] = {
        "role": message.role,
        "content": _content(message.content, message.images, f"{field}."),
    }
    given = {
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.thinking or None,
    }
    found |= {name: value for name, value in given.items() if value is not None}
    if message.tool_calls:
        calls = message.tool_calls
        found["tool_calls"] = [called(call.id, call.function.name, call.function.arguments) for call in calls]
    return found
