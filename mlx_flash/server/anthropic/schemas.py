"""Requests in Anthropic's dialect. A field that would change the answer and is not supported is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlx_flash.server.body import Body, Many
from mlx_flash.server.openai.schemas import Count, FunctionName, Name, Share, StopText, Temperature, TopK


class TextBlock(Body, extra="ignore"):
    """A text."""

    type: Literal["text"]
    text: str


class ImageSource(Body):
    """A picture: its data, or an URL."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ImageSource:
        if (self.data if self.type == "base64" else self.url) is None:
            raise ValueError("a source of type base64 has data, and one of type url has an url")
        return self


class ImageBlock(Body, extra="ignore"):
    """A picture."""

    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(Body, extra="ignore"):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Body, extra="ignore"):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body, extra="ignore"):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
"""A part of a message. Documents are not supported."""


class Message(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Many[Block]

    @model_validator(mode="after")
    def _suits_role(self) -> Message:
        allowed = ("text", "image", "tool_result") if self.role == "user" else ("text", "thinking", "tool_use")
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in allowed:
                raise ValueError(f"a message of the {self.role} has no {block.type} blocks")
        return self


class Tool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Any = None
    strict: bool | None = None
    eager_input_streaming: Any = None


class ToolChoice(Body):
    """Permission to call functions, or the duty to call any, or one."""

    type: Literal["auto", "none", "any", "tool"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is there if, and only if, the type is tool")
        return self


class Thinking(Body):
    """The choice to reason first. The chat template decides how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Any = None
    display: Any = None


class JsonFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer, and how much work it is worth."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Conversation(Body):
    """A conversation."""

    model: Name
    messages: Annotated[Many[Message], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _ends_with_user(self) -> Conversation:
        if self.messages[-1].role != "user":
            raise ValueError("the last of the messages must be the user's: answers cannot be continued")
        return self


class CountRequest(Conversation):
    """A request for the number of tokens of a conversation."""


class MessagesRequest(Conversation):
    """A request for the next message of a conversation."""

    max_tokens: Count
    stop_sequences: Annotated[Many[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None

    @model_validator(mode="after")
    def _fits_together(self) -> MessagesRequest:
        has_tools = self.tools and (self.tool_choice is None or self.tool_choice.type != "none")
        if has_tools and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("tools and output_config.format cannot be used together")
        return self
