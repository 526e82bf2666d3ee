"""Requests in OpenAI's dialect. A field that would change the answer unseen, and is not supported, is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlx_flash.server.body import Asking, Body, Lenient, Many

MAX_CHOICES = 16
"""The most answers to one prompt."""

MAX_PROMPTS = 128
"""The most prompts of a request."""

Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f]+$")]
ModelName = Annotated[Name, BeforeValidator(lambda name: name or "default_model")]
"""The name of a model; none, or an empty one, is the default model's."""
StopText = Annotated[str, Field(max_length=1000)]
"""A text that ends an answer; an empty one is none."""
Token = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Limit = Annotated[Count | None, BeforeValidator(lambda number: None if number == -1 else number)]
"""The most tokens of an answer; -1 is as many as the server allows."""
Penalty = Annotated[float, Field(ge=-100, le=100)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Seed = Annotated[int, Field(ge=-1, lt=2**63)]
NumLikeliest = Annotated[int, Field(ge=0, le=20)]
Stop = StopText | Annotated[Many[StopText], Field(max_length=64)]
Recent = Annotated[int, Field(ge=1, le=1_000_000)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/@+-]{1,256}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Hints(Asking):
    """Known fields without effect on the answer."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class SamplingFields(Hints):
    """Fields of every request for text: OpenAI's, and those that mlx-lm's server adds."""

    model: ModelName = "default_model"
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    repetition_context_size: Recent | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Recent | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Recent | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=10_000),
        ]
        | None
    ) = None
    seed: Seed | None = None
    max_tokens: Limit = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    adapters: str | None = None
    chat_template: None = None  # it would let a client run a program of its own
    draft_model: Literal["default_model"] | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class Message(Lenient):
    """A message of a conversation."""

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
    cache_control: Any = None
    refusal: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_picture(self) -> Part:
        if (self.type == "image_url") != (self.image_url is not None):
            raise ValueError("a part of type image_url has an image_url, and no other part has one")
        return self


class MessageCall(Lenient):
    """A call that the model asked for in an earlier message."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledText | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> MessageCall:
        if (self.function if self.type == "function" else self.custom) is None:
            raise ValueError(f"a call of type {self.type} has a {self.type}")
        return self


class CalledFunction(Lenient):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class CalledText(Lenient):
    """The function of a call that takes one text."""

    name: str
    input: str = ""


class Tool(Body):
    """A function that the model may call, or a tool that this server cannot run."""

    type: str
    function: Function | None = None
    custom: TextFunction | None = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _is_whole(self) -> Tool:
        if self.type in ("function", "custom") and getattr(self, self.type) is None:
            raise ValueError(f"a tool of type {self.type} has a {self.type}")
        return self


class Function(Body):
    """The description of a function."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFunction(Body):
    """The description of a function that takes one text."""

    name: FunctionName
    description: str | None = None
    format: Any = None


class FunctionChoice(Body):
    """A function that the answer has to call."""

    type: Literal["function", "custom"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @property
    def name(self) -> str:
        """Name of the function."""
        found = self.function or self.custom
        return "" if found is None else found.name


class AllowedTools(Body):
    """Functions of which the answer may, or must, call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[Many[FunctionChoice], Field(max_length=512)]


class AllowedChoice(Body):
    """A choice among some functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


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


class Thinking(Body):
    """The choice to reason first, as several programs write it. The chat template decides how long."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    enabled: bool | None = None
    effort: Effort | None = None
    budget_tokens: Any = None
    max_tokens: Any = None
    display: Any = None
    exclude: Any = None
    summary: Any = None
    generate_summary: Any = None

    @property
    def thinks(self) -> bool | None:
        """True to reason first, False not to; None lets the template choose."""
        return self.enabled if self.type is None else self.type != "disabled"


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: NumLikeliest | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None  # of an API before tools, whose replies have another form
    function_call: Literal["none", "auto"] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    reasoning: Thinking | None = None
    thinking: Thinking | bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[Many[Literal["text"]], Field(min_length=1)] | None = None
    verbosity: Any = None
    prediction: Any = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self


class CompletionRequest(SamplingFields):
    """A request to go on with some texts."""

    prompt: (
        str
        | Annotated[Many[Token], Field(min_length=1)]
        | Annotated[Many[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[Many[Annotated[Many[Token], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Limit | Literal[0] = None
    logprobs: NumLikeliest | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: str | None = None
