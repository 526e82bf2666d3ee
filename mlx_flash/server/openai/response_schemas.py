"""Requests of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlx_flash.server.body import Body, Lenient, Many
from mlx_flash.server.openai.schemas import FunctionName, Hints, Limit, ModelName, Share, Temperature, Thinking


class InputPart(Lenient):
    """A part of a message. Files are not supported."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text", "input_image"]
    text: str = ""
    refusal: str | None = None
    image_url: str | None = None

    @model_validator(mode="after")
    def _has_picture(self) -> InputPart:
        if (self.type == "input_image") != (self.image_url is not None):
            raise ValueError("a part of type input_image has an image_url, and no other part has one")
        return self


class InputItem(Lenient):
    """A message, a call of the model, or the result of one. Items of other types have no effect."""

    type: Annotated[str, Field(max_length=100)] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[InputPart] | None = None
    summary: Many[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Many[InputPart] | None = None
    tools: Annotated[Many[ResponseTool], Field(max_length=512)] | None = None


class OneTool(Lenient):
    """A function that the model may call, or a tool that this server cannot run."""

    type: Annotated[str, Field(max_length=100)]
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None

    @model_validator(mode="after")
    def _has_name(self) -> OneTool:
        if self.name is None and self.type in ("function", "custom", "namespace"):
            raise ValueError(f"a tool of type {self.type} has a name")
        return self


class ResponseTool(OneTool):
    """A tool, or several in a namespace."""

    tools: Annotated[Many[OneTool], Field(max_length=512)] | None = None


class FunctionChoice(Body):
    """A function that the answer has to call."""

    type: Literal["function", "custom"]
    name: FunctionName


class AllowedChoice(Body):
    """A choice among some functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Many[FunctionChoice], Field(max_length=512)]


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Any = None


class ResponseRequest(Hints):
    """A request for the next items of a conversation."""

    model: ModelName = "default_model"
    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Limit = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    tools: Annotated[Many[ResponseTool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Thinking | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: Literal[False] | None = None
    conversation: None = None  # only previous_response_id is kept
    prompt: None = None  # a template that OpenAI keeps
    include: Any = None
    client_metadata: Any = None
    stream_options: Any = None
    max_tool_calls: Any = None
    top_logprobs: Any = None
