"""Requests in Anthropic's dialect. A field that would change the answer unseen, and is not supported, is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mlx_flash.server.body import Asking, Body, Lenient, Many
from mlx_flash.server.openai.schemas import (
    Count,
    Effort,
    FunctionName,
    ModelName,
    Share,
    StopText,
    Temperature,
    Thinking,
    TopK,
)


class TextBlock(Lenient):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: Any = None


class ImageSource(Lenient):
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


class ImageBlock(Lenient):
    """A picture."""

    type: Literal["image"]
    source: ImageSource
    cache_control: Any = None


class DocumentSource(Lenient):
    """A document: text, or blocks. Other forms are not supported."""

    type: Literal["text", "content"]
    data: str | None = None
    content: str | Many[TextBlock | ImageBlock] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> DocumentSource:
        if (self.data if self.type == "text" else self.content) is None:
            raise ValueError("a source of type text has data, and one of type content has content")
        return self


class DocumentBlock(Lenient):
    """A document."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: Any = None


class SearchBlock(Lenient):
    """A result of a search that the client made."""

    type: Literal["search_result"]
    source: str = ""
    title: str = ""
    content: Many[TextBlock]
    cache_control: Any = None


class ThinkingBlock(Lenient):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Lenient):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None


class ToolReferenceBlock(Lenient):
    """The name of a tool that a search found. This server shows all tools to the model."""

    type: Literal["tool_reference"]
    tool_name: str


class OtherBlock(Lenient):
    """A part of an earlier answer that only Anthropic's servers make or read."""

    type: str


Shown = TextBlock | ImageBlock | DocumentBlock | SearchBlock | ToolReferenceBlock


class ToolResultBlock(Lenient):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Annotated[Shown, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    cache_control: Any = None


Known = Annotated[Shown | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]

_KNOWN = {"text", "image", "document", "search_result", "tool_reference", "thinking", "tool_use", "tool_result"}

Block = Annotated[
    Annotated[Known, Tag("known")] | Annotated[OtherBlock, Tag("other")],
    Discriminator(lambda value: "known" if _type_of(value) in _KNOWN else "other"),
]
"""A part of a message."""


def _type_of(value: Any) -> object:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return found if isinstance(found, str) else None


class Message(Lenient):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    @model_validator(mode="after")
    def _suits_role(self) -> Message:
        own = ("text", "thinking", "tool_use") if self.role == "assistant" else ("thinking", "tool_use")
        for block in self.content if isinstance(self.content, list) else ():
            if self.role == "assistant" and block.type in _KNOWN and block.type not in own:
                raise ValueError(f"a message of the assistant has no {block.type} blocks")
            if self.role != "assistant" and (block.type in own or block.type not in _KNOWN):
                raise ValueError(f"blocks of type {block.type} in a message of the {self.role} are not supported")
        return self


class Tool(Lenient):
    """A function that the model may call, or a tool that this server does not know."""

    type: str | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    defer_loading: Any = None
    input_examples: Any = None
    allowed_callers: Any = None

    @model_validator(mode="after")
    def _has_schema(self) -> Tool:
        if self.type in (None, "custom") and self.input_schema is None:
            raise ValueError("a tool has an input_schema")
        return self


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


class JsonFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer, and how much work it is worth."""

    format: JsonFormat | None = None
    effort: Effort | None = None
    task_budget: Any = None


class Conversation(Asking):
    """A conversation."""

    model: ModelName
    messages: Annotated[Many[Message], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: Any = None
    context_management: Any = None
    container: Any = None
    mcp_servers: Any = None
    betas: Any = None


class CountRequest(Conversation):
    """A request for the number of tokens of a conversation."""


class MessagesRequest(Conversation):
    """A request for the next message of a conversation."""

    max_tokens: Count
    stop_sequences: Annotated[Many[StopText], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
