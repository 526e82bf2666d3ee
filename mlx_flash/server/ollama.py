"""Ollama's dialect: ``/api/chat`` and ``/api/generate``.

A field that would change the answer unseen, and is not supported, is an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.monitor.words import seconds_of
from mlx_flash.server.body import Asking, Lenient, Many
from mlx_flash.server.catalog import LATEST
from mlx_flash.server.events import End, Event, Failed, Piece, Progress, TokenDetail, ToolCall
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.openai import (
    Effort,
    MessageCall,
    Name,
    NumLikeliest,
    Penalty,
    Seed,
    Share,
    Stop,
    Temperature,
    Tool,
    TopK,
    shown_logprobs,
    shown_tools,
)
from mlx_flash.server.replies import Writer, collect_all, error_body, line, stream
from mlx_flash.server.request import GenerationRequest, Sampling, continues, stop_texts, thinking_options, tool_fields
from mlx_flash.server.requestpictures import content_of, data_url, picture_part
from mlx_flash.server.service import Service


def now() -> str:
    """Return the time as replies have it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def tagged(name: str) -> str:
    """Return a name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def counts_of(end: End, total_ns: int) -> dict[str, Any]:
    """Return numbers of tokens, and durations in nanoseconds.

    Args:
        end: the end of the answer.
        total_ns: time since the request came.
    """
    load, prompt, answer = (
        round(seconds * 1e9) for seconds in (end.load_seconds, end.prompt_seconds, end.answer_seconds)
    )
    return {
        "total_duration": total_ns,
        "load_duration": load,
        "prompt_eval_count": end.num_prompt,
        "prompt_eval_cached_count": end.num_cached,
        "prompt_eval_duration": prompt,
        "eval_count": end.num_tokens,
        "eval_duration": answer,
    }


class Options(Lenient):
    """Settings of an answer. Others have no effect, as with Ollama; of resources, the server's plan decides."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    stop: Stop | None = None
    repeat_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


KeepAlive = Annotated[float | str | None, AfterValidator(lambda value: None if value is None else seconds_of(value))]
"""Seconds, or a duration such as ``1h30m``."""


class Asked(Asking):
    """Fields of requests for text."""

    model: Name
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: KeepAlive = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: NumLikeliest | None = None

    @model_validator(mode="after")
    def _has_logprobs(self) -> Asked:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def streams(self) -> bool:
        """True if the answer is sent in parts, which is the default."""
        return self.stream is not False


class Message(Lenient):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Many[str] | None = None
    tool_calls: Many[MessageCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(Asked):
    """A request for the next message of a conversation. One without messages loads or unloads the model."""

    messages: Many[Message] | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None


class GenerateRequest(Asked):
    """A request to answer a text. One without a text loads or unloads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Literal[""] | None = None
    suffix: str | None = None
    context: Many[int] | None = None
    images: Many[str] | None = None

    @model_validator(mode="after")
    def _has_places(self) -> GenerateRequest:
        if self.images and (self.raw or not self.prompt):
            raise ValueError("images belong to a prompt that is not raw")
        if self.context and (self.raw or self.images):
            raise ValueError("context belongs to a prompt that is not raw, without images")
        return self


class ShowRequest(Lenient):
    """A request for facts about a model. Ollama's own command sends all fields, also those that are empty."""

    model: Name | Literal[""] = ""
    name: Name | Literal[""] = ""

    @model_validator(mode="after")
    def _has_name(self) -> ShowRequest:
        if not self.model and not self.name:
            raise ValueError("model is missing")
        return self


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
            **tool_fields(shown_tools(body.tools, body)),
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
            found["logprobs"] = shown_logprobs(tokens)
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
            yield line(error_body("/api/chat", event.error))

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
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        **(penalties if has_penalties else {"repetition_penalty": 0.0}),
    )


def _grammar(form: str | dict[str, Any] | None) -> str | None:
    if not form and form != {}:
        return None
    return json_grammar(form if isinstance(form, dict) else None, "format")


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
        found["tool_calls"] = [call.shown for call in message.tool_calls]
    return found
