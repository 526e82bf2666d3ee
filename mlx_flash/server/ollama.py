"""Ollama's dialect: ``/api/chat`` and ``/api/generate``.

A field that would change the answer unseen, and is not supported, is an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_flash.monitor.words import seconds_of
from mlx_flash.server.body import Asking, Lenient, Many
from mlx_flash.server.catalog import LATEST
from mlx_flash.server.events import End, Event, Failed, Piece, Progress, TokenDetail, ToolCall
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.openai import (
    Effort,
    Name,
    NumLikeliest,
    Penalty,
    Seed,
    Share,
    Stop,
    Temperature,
    Tool,
    TopK,
    message_of,
    sampling_of,
    shown_logprobs,
    shown_tools,
)
from mlx_flash.server.openai import Message as OpenAIMessage
from mlx_flash.server.replies import Whole, Writer, error_body, line, reply
from mlx_flash.server.request import GenerationRequest, Sampling, continues, stop_texts, thinking_options, tool_fields
from mlx_flash.server.requestpictures import content_of, data_url, picture_part
from mlx_flash.server.service import Service


def time_text(when: datetime) -> str:
    """Return a time of UTC as replies have it."""
    return when.isoformat().replace("+00:00", "Z")


def tagged(name: str) -> str:
    """Return a name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


class Options(Lenient):
    """Settings of an answer. Others have no effect, as with Ollama; of resources, the server's plan decides."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    stop: Stop | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = Field(default=None, alias="repeat_penalty")
    repeat_last_n: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


KeepAlive = Annotated[
    float | None, BeforeValidator(lambda value: seconds_of(value) if isinstance(value, str) else value)
]
"""Seconds, or a duration such as ``1h30m``, which becomes seconds."""


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


class Message(OpenAIMessage):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Many[str] | None = None
    tool_name: str | None = None


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
    writer = _Lines(body)
    asked = load_request(body.model, body.keep_alive) if asked is None else _with_settings(asked, body)
    writer.work = asked.work
    (answer,) = service.submit(asked)
    return await reply(request, [answer], writer, streams=body.stream is not False)


def load_request(model: str, keep_alive: float | None) -> GenerationRequest:
    """Return a request that loads a model, or unloads it if it is kept for no time."""
    return GenerationRequest(model=model, work="unload" if keep_alive == 0 else "load", keep_alive=keep_alive)


class _Lines(Writer):
    """The reply to a request: lines, or one object.

    Args:
        body: the request, which comes now.

    Attributes:
        work: for the generation thread.
    """

    media_type = "application/x-ndjson"
    work: str

    def __init__(self, body: Asked) -> None:
        self._body, self._began = body, time.perf_counter_ns()

    def whole(self, wholes: list[Whole]) -> dict[str, Any]:
        """Return the object that has a complete answer."""
        (whole,) = wholes
        return {**self.part(whole.text, whole.reasoning, whole.calls, whole.tokens), **self.end(whole.end)}

    def part(
        self,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        tokens: Sequence[TokenDetail] = (),
    ) -> dict[str, Any]:
        """Return a part of the answer, or all of it."""
        found: dict[str, Any] = {"model": self._body.model, "created_at": time_text(datetime.now(UTC))}
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
        """Return what the last part has beside the fields of others. Durations are nanoseconds."""
        if self.work != "answer":
            return {"done": True, "done_reason": self.work}
        reason = "length" if end.reason == "length" else "stop"
        context = {"context": end.tokens} if end.tokens else {}
        seconds = {"load": end.load_seconds, "prompt_eval": end.prompt_seconds, "eval": end.answer_seconds}
        return {
            "done": True,
            "done_reason": reason,
            **context,
            "total_duration": time.perf_counter_ns() - self._began,
            **{f"{name}_duration": round(each * 1e9) for name, each in seconds.items()},
            "prompt_eval_count": end.num_prompt,
            "prompt_eval_cached_count": end.num_cached,
            "eval_count": end.num_tokens,
        }

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        """Yield the line for an event."""
        if isinstance(event, Progress):
            yield line({**self.part(), "status": event.stage, "completed": event.done, "total": event.total})
        elif isinstance(event, Piece):
            texts = ("", event.text) if event.kind == "reasoning" else (event.text, "")
            yield line(self.part(*texts, tokens=event.tokens))
        elif isinstance(event, ToolCall):
            yield line(self.part(calls=[event]))
        elif isinstance(event, End):
            yield line({**self.part(), **self.end(event)})
        elif isinstance(event, Failed):
            yield line(error_body("/api/chat", event.error))

    def beat(self) -> bytes:
        """Return a line without text."""
        return line(self.part())


def _with_settings(asked: GenerationRequest, body: Asked) -> GenerationRequest:
    """Return a request for an answer with the settings of Ollama's.

    Raises:
        RefusedError: the schema cannot be used.
    """
    options, think = body.options or Options(), body.think
    limit = options.num_predict
    return replace(
        asked,
        template_options=thinking_options(None, think) if isinstance(think, str) else thinking_options(think),
        sampling=_sampling(options),
        max_tokens=limit if limit is not None and limit > 0 else None,
        stop=stop_texts(options.stop),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(body.format),
        keep_alive=body.keep_alive,
    )


def _sampling(options: Options) -> Sampling:
    found, last = sampling_of(options), options.repeat_last_n
    if last == 0:
        return replace(found, repetition_penalty=0.0, presence_penalty=0.0, frequency_penalty=0.0)
    recent = _ALL if last == -1 else last or _DEFAULT_REPEAT_LAST_N
    found = replace(found, presence_context_size=recent, frequency_context_size=recent)
    is_default = last is None and found.repetition_penalty is None
    return found if is_default else replace(found, repetition_context_size=recent)


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
    found = {**message_of(message, field), "content": _content(message.content, message.images, f"{field}.")}
    if message.tool_name is not None:
        found["name"] = message.tool_name
    if message.thinking:
        found["reasoning_content"] = message.thinking
    return found
