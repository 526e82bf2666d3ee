"""Requests in Ollama's dialect. A field that would change the answer unseen, and is not supported, is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mlx_flash.monitor.words import seconds_of
from mlx_flash.server.body import Asking, Body, Lenient, Many
from mlx_flash.server.openai.schemas import (
    Effort,
    FunctionName,
    Name,
    NumLikeliest,
    Penalty,
    Seed,
    Share,
    Stop,
    Temperature,
    TopK,
)


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


class Asked(Asking):
    """Fields of requests for text."""

    model: Name
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: NumLikeliest | None = None
    truncate: Any = None
    shift: Any = None

    @field_validator("keep_alive")
    @classmethod
    def _is_duration(cls, value: float | str | None) -> float | None:
        return None if value is None else seconds_of(value)

    @model_validator(mode="after")
    def _has_logprobs(self) -> Asked:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def streams(self) -> bool:
        """True if the answer is sent in parts, which is the default."""
        return self.stream is not False


class CalledFunction(Lenient):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class MessageCall(Lenient):
    """A call that the model asked for in an earlier message."""

    id: str | None = None
    function: CalledFunction


class Message(Lenient):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Many[str] | None = None
    tool_calls: Many[MessageCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(Lenient):
    """The description of a function."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Lenient):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: Function


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


class ShowRequest(Body):
    """A request for facts about a model. Ollama's own command sends all fields, also those that are empty."""

    model: Name | Literal[""] = ""
    name: Name | Literal[""] = ""
    system: Any = None
    template: Any = None
    verbose: Any = None
    options: Any = None

    @model_validator(mode="after")
    def _has_name(self) -> ShowRequest:
        if not self.model and not self.name:
            raise ValueError("model is missing")
        return self
