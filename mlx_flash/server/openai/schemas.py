"""Requests in OpenAI's dialect. A field that would change the answer and is not supported is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlx_flash.server.body import Body, Many

MAX_CHOICES = 16
"""The most answers to one prompt."""

Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f]+$")]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
NumLikeliest = Annotated[int, Field(ge=0, le=20)]
Stop = StopText | Annotated[Many[StopText], Field(max_length=16)]
Recent = Annotated[int, Field(ge=1, le=1_000_000)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Ignored(Body):
    """Fields without effect on the answer."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class SamplingFields(Ignored):
    """Fields of every request for text: OpenAI's, and those that mlx-lm's server adds."""

    model: Name = "default_model"
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    repetition_context_size: Recent | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Recent = 20
    frequency_penalty: Penalty | None = None
    frequency_context_size: Recent = 20
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=10_000),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Any = None


class Message(Body, extra="ignore"):
    """A message of a conversation. Fields of replies that clients send back are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    name: str | None = None
    tool_calls: Many[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ImageUrl(Body):
    """The place of a picture. How finely it is looked at, the model's processor decides."""

    url: str
    detail: Any = None


class Part(Body):
    """A part of a message. Sounds and files are not supported."""

    type: Literal["text", "refusal", "image_url"]
    text: str = ""
    refusal: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_picture(self) -> Part:
        if (self.type == "image_url") != (self.image_url is not None):
            raise ValueError("a part of type image_url has an image_url, and no other part has one")
        return self


class MessageCall(Body, extra="ignore"):
    """A call that the model asked for in an earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledFunction(Body, extra="ignore"):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class Function(Body):
    """The description of a function."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """A function that the answer has to call."""

    type: Literal["function"]
    function: NamedFunction


class NamedFunction(Body):
    """The name of a function."""

    name: FunctionName


class JsonSchema(Body):
    """A schema of the answer."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is there if, and only if, the type is json_schema")
        return self


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLikeliest | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    modalities: Annotated[Many[Literal["text"]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.tools and self.tool_choice != "none" and self.response_format and self.response_format.type != "text":
            raise ValueError("tools and response_format cannot be used together")
        return self


class CompletionRequest(SamplingFields):
    """A request to go on with some texts."""

    prompt: (
        str
        | Annotated[Many[Token], Field(min_length=1)]
        | Annotated[Many[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[Many[Annotated[Many[Token], Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: NumLikeliest | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
