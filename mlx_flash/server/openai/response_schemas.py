"""Requests of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlx_flash.server.body import Body, Many
from mlx_flash.server.openai.schemas import Count, FunctionName, Ignored, Name, Share, Temperature


class InputPart(Body, extra="ignore"):
    """A part of a message. Files are not supported."""

    type: Literal["input_text", "output_text", "text", "input_image"]
    text: str = ""
    image_url: str | None = None

    @model_validator(mode="after")
    def _has_picture(self) -> InputPart:
        if (self.type == "input_image") != (self.image_url is not None):
            raise ValueError("a part of type input_image has an image_url, and no other part has one")
        return self


class InputItem(Body, extra="ignore"):
    """A message, a call of the model, or the result of one."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """A function that the answer has to call."""

    type: Literal["function"]
    name: FunctionName


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
    verbosity: Literal["medium"] | None = None


class ResponseRequest(Ignored):
    """A request for the next items of a conversation."""

    model: Name = "default_model"
    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    tools: Annotated[Many[ResponseTool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
