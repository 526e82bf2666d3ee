"""``/v1/responses``: a request brings its whole conversation, or goes on from an earlier response."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_flash.errors import RefusedError
from mlx_flash.server import openai
from mlx_flash.server.events import End, Event, Piece, ToolCall
from mlx_flash.server.request import TEXT, GenerationRequest, Messages, function, text_function, thinking_options
from mlx_flash.server.service import Asked, Asking, Body, Many, Needed, Whole, Writer, ignore, sent

MAX_KEPT_BYTES = 64 << 20
"""The most bytes of all that is kept, as JSON. The least recently used leaves first."""


class KeptResponses:
    """Conversations by the number of their last response, and items by their own, the least recently used one first."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, int]] = {}

    def keep(self, name: str, value: Messages | dict[str, Any]) -> None:
        """Keep a conversation without instructions, or an item, if it is not too long."""
        self._kept[name] = value, len(json.dumps(value.found if isinstance(value, Messages) else value))
        left = sum(nbytes for _, nbytes in self._kept.values()) - MAX_KEPT_BYTES
        while left > 0:
            left -= self._kept.pop(next(iter(self._kept)))[1]

    def find(self, name: str, kind: type, field: str) -> Any:
        """Return the conversation that a response ends, or an item of an earlier one."""
        if not isinstance(self._kept.get(name, (None, 0))[0], kind):
            raise RefusedError(
                f"{name!r} is not kept here: responses without `store: false` and their items are, the last "
                f"{MAX_KEPT_BYTES >> 20} MB of them, until the server ends. Hint: send the whole conversation as "
                "input. Clients do so with `store: false`.",
                404,
                field,
            )
        self._kept[name] = found = self._kept.pop(name)
        return found[0]


class InputItem(Body):
    """A message, a call of the model, the result of one, or the number of an item that is kept. Items of other types
    have no effect."""

    type: Annotated[str, Field(max_length=100)] = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Many[openai.Part] | None = None
    summary: Many[openai.Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Many[openai.Part] | None = None
    tools: Annotated[Many[ResponseTool], Field(max_length=512)] | None = None


class OneTool(Body):
    """A function that the model may call, or a tool that this server cannot run."""

    needed: ClassVar[Needed] = dict.fromkeys(("function", "custom", "namespace"), ("name",))

    type: Annotated[str, Field(max_length=100)]
    name: openai.FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments follow their schema only in calls that are forced
    format: dict[str, Any] | None = None


class ResponseTool(OneTool):
    """A tool, or several in a namespace."""

    tools: Annotated[Many[OneTool], Field(max_length=512)] | None = None


class TextOptions(Body):
    """Options of the text."""

    format: openai.Form | None = None


class ResponseRequest(Asking):
    """A request for the next items of a conversation."""

    model: openai.ModelName = "default_model"
    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    max_output_tokens: openai.Limit = None
    temperature: openai.Temperature | None = None
    top_p: openai.Share | None = None
    stream: bool | None = None
    tools: Annotated[Many[ResponseTool], Field(max_length=512)] | None = None
    tool_choice: openai.AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: openai.Thinking | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: Literal[False] | None = None
    conversation: None = None  # only previous_response_id is kept
    prompt: None = None  # a template that OpenAI keeps


Functions = Mapping[str, tuple[str | None, OneTool]]
"""Functions by the names that the model knows, each with its namespace."""


def flat_name(namespace: str | None, name: str) -> str:
    """Return the one name that the model knows a function by."""
    return name if not namespace else f"{namespace}__{name}"


_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")),
    "metadata": {},
    "parallel_tool_calls": True,
    "store": True,
    "tool_choice": "auto",
    "tools": [],
    "text": {},
}
"""Fields of a request that its response has, too, and their values where the request has none."""


def response_of(
    body: ResponseRequest, head: dict[str, Any], end: End | None, items: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a response: complete, or one that is being made. Fields of the request are as its client wrote them."""
    is_cut = end is not None and end.reason == "length"
    given = body.model_dump(include={*_DEFAULTS}, by_alias=True, exclude_unset=True, exclude_none=True)
    return {
        **head,
        **_DEFAULTS,
        **given,
        "status": "in_progress" if end is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": body.model,
        "output": items,
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "truncation": "disabled",
        **({} if end is None else {"usage": _usage(end)}),
    }


_INDEXES = {"message": {"content_index": 0}, "reasoning": {"summary_index": 0}}
_LOGPROBS: Mapping[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
_PARTS = {"message": "response.content_part", "reasoning": "response.reasoning_summary_part"}
_TEXTS = {"message": "response.output_text", "reasoning": "response.reasoning_summary_text"}
"""Fields and names of the events of text. Programs show the summary of reasoning: it is the whole."""


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "summary_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text_item(kind: str, text: str, status: str) -> dict[str, Any]:
    """Return an item of text, or of reasoning; one that begins has no parts."""
    parts = [_part(kind, text)] if status != "in_progress" else []
    if kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}] if parts else []
        return {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": parts, "content": content}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant", "status": status, "content": parts}


def _call_item(call: ToolCall, functions: Functions) -> dict[str, Any]:
    """Return an item that asks for a call, without arguments yet."""
    namespace, tool = functions.get(call.name, (None, None))
    takes_text = tool is not None and tool.type == "custom"
    return {
        "id": f"{'ctc' if takes_text else 'fc'}_{uuid.uuid4().hex}",
        "type": "custom_tool_call" if takes_text else "function_call",
        "status": "in_progress",
        "call_id": call.id or f"call_{uuid.uuid4().hex}",
        "name": call.name if tool is None else tool.name,
        **({} if namespace is None else {"namespace": namespace}),
        "input" if takes_text else "arguments": "",
    }


def _usage(end: End) -> dict[str, Any]:
    return {
        "input_tokens": end.num_prompt,
        "input_tokens_details": {"cached_tokens": end.num_cached},
        "output_tokens": end.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.num_prompt + end.num_tokens,
    }


class ResponseWriter(Writer):
    """A stream of items: text of one kind in a row is one item, and so is each call."""

    def __init__(
        self,
        body: ResponseRequest,
        head: dict[str, Any],
        functions: Functions,
        keep: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self._body, self._head, self._functions, self._keep = body, head, functions, keep
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self._item: dict[str, Any] | None = None
        self._text = ""

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=response_of(self._body, self._head, None, []))
        yield self.beat()

    def beat(self) -> bytes:
        return self._event("response.in_progress", response=response_of(self._body, self._head, None, []))

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        if isinstance(event, Piece) and event.text:
            yield from self._write_text("reasoning" if event.kind == "reasoning" else "message", event.text)
        elif isinstance(event, ToolCall):
            yield from self._begin_item(_call_item(event, self._functions))
            if self._takes_text:
                self._text = str(event.arguments.get(TEXT, ""))
                yield self._event("response.custom_tool_call_input.delta", **self._place, delta=self._text)
                yield self._event("response.custom_tool_call_input.done", **self._place, input=self._text)
            else:
                self._text = event.text
                done = {"name": event.name, "arguments": self._text}
                yield self._event("response.function_call_arguments.delta", **self._place, delta=self._text)
                yield self._event("response.function_call_arguments.done", **self._place, **done)
            yield from self._end_item("completed")
        elif isinstance(event, End):
            yield from self._end_item("incomplete" if event.reason == "length" else "completed")
            self._keep(self._items)
            ended = response_of(self._body, self._head, event, self._items)
            yield self._event(f"response.{ended['status']}", response=ended)

    def fail(self, path: str, error: RefusedError) -> bytes:
        return self._event("error", code="server_error", message=str(error), param=error.field)

    def whole(self, wholes: list[Whole]) -> dict[str, Any]:
        (whole,) = wholes
        events: list[Event] = [Piece(whole.reasoning, "reasoning"), Piece(whole.text), *whole.calls, whole.end]
        for event in events:
            for _ in self.write(0, event):
                pass
        return response_of(self._body, self._head, whole.end, self._items)

    def _write_text(self, kind: str, text: str) -> Iterator[bytes]:
        if self._item is None or self._item["type"] != kind:
            yield from self._begin_item(_text_item(kind, "", "in_progress"))
            yield self._event(f"{_PARTS[kind]}.added", **self._place, part=_part(kind, ""))
        self._text += text
        yield self._event(f"{_TEXTS[kind]}.delta", **self._place, delta=text, **_LOGPROBS[kind])

    def _begin_item(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_item()
        self._item, self._text = item, ""
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _end_item(self, status: str = "completed") -> Iterator[bytes]:
        """Yield the events that end the last item, if it is open."""
        if self._item is None:
            return
        item, text, kind = self._item, self._text, self._item["type"]
        if kind in _TEXTS:
            item = {**_text_item(kind, text, status), "id": item["id"]}
            yield self._event(f"{_TEXTS[kind]}.done", **self._place, text=text, **_LOGPROBS[kind])
            yield self._event(f"{_PARTS[kind]}.done", **self._place, part=_part(kind, text))
        else:
            item = {**item, "status": status, "input" if self._takes_text else "arguments": text}
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None

    @property
    def _takes_text(self) -> bool:
        """True while a call is open whose argument is a text."""
        return self._item is not None and self._item["type"] == "custom_tool_call"

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        indexes = _INDEXES.get(self._item["type"], {})
        return {"item_id": self._item["id"], "output_index": len(self._items), **indexes}

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sent(value)


def respond(kept: KeptResponses, body: ResponseRequest) -> Asked:
    """Translate a request for the next items of a conversation."""
    messages, functions = _messages(body, kept), functions_of(body)
    head: dict[str, Any] = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": time.time()}

    def keep(items: list[dict[str, Any]]) -> None:
        if body.store is not False:
            conversation = Messages(messages)
            for i, item in enumerate(items):
                _add(conversation, InputItem.model_validate(item), f"output.{i}", kept)
                kept.keep(item["id"], item)
            kept.keep(head["id"], conversation)

    asked = _generation_request(body, messages.found, functions)
    return Asked([asked], ResponseWriter(body, head, functions, keep), streams=bool(body.stream))


def _generation_request(
    body: ResponseRequest, messages: Sequence[dict[str, Any]], functions: Functions
) -> GenerationRequest:
    opening = [{"role": "system", "content": body.instructions}] if body.instructions else []
    reasoning, text = body.reasoning or openai.Thinking(), body.text or TextOptions()
    names = {tool.name or "": name for name, (_, tool) in functions.items()}
    return GenerationRequest(
        model=body.model,
        messages=[*opening, *messages],
        **openai.chosen_tools(body.tool_choice, [_shown(name, tool) for name, (_, tool) in functions.items()], names),
        template_options=thinking_options(reasoning.thinks, reasoning.effort),
        sampling=openai.sampling_of(body),
        max_tokens=body.max_output_tokens,
        grammar=openai.grammar_of(text.format, "text.format"),
        one_call=body.parallel_tool_calls is False,
    )


def _shown(name: str, tool: OneTool) -> dict[str, Any]:
    if tool.type == "custom":
        return text_function(name, tool.description)
    return function(name, tool.description, tool.parameters)


def functions_of(body: ResponseRequest) -> Functions:
    """Return the functions that the model may call. Other tools are ignored."""
    found = {}
    items = body.input if isinstance(body.input, list) else ()
    more = [tool for item in items if item.type == "additional_tools" for tool in item.tools or ()]
    for tool in (*(body.tools or ()), *more):
        parts: list[tuple[str | None, OneTool]] = [(tool.name, part) for part in tool.tools or ()]
        for namespace, each in parts or [(None, tool)]:
            if each.type in ("function", "custom"):
                found[flat_name(namespace, each.name or "")] = namespace, each
            else:
                ignore(f"tools ({each.type})")
    return found


def _messages(body: ResponseRequest, kept: KeptResponses) -> Messages:
    """Return the conversation without instructions."""
    last = body.previous_response_id
    messages = Messages(None if last is None else kept.find(last, Messages, "previous_response_id"))
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        _add(messages, item, f"input.{number}", kept)
    if not messages.found:
        raise RefusedError("input has no messages.", 400, "input")
    return messages


def _add(messages: Messages, item: InputItem, field: str, kept: KeptResponses) -> None:
    """Add an item to a conversation. What the model wrote in one answer is one message, as templates want it."""
    if item.type == "item_reference":
        item = InputItem.model_validate(kept.find(item.id or "", dict, f"{field}.id"))
    if item.type == "message":
        if item.role is None:
            raise RefusedError(f"{field}.role is missing.", 400, f"{field}.role")
        parts = openai.parts_in(item.content, f"{field}.content")
        if item.role == "assistant":
            messages.add_answer("".join(part.get("text", "") for part in parts))
        else:
            messages.begin().add(item.role, parts)
    elif item.type == "reasoning":
        reasons = item.content if isinstance(item.content, list) else item.summary
        if text := "".join(part.text for part in reasons or ()):
            messages.add_answer(reasoning=text)
    elif item.type in ("function_call", "custom_tool_call"):
        given = {TEXT: item.input or ""} if item.type == "custom_tool_call" else item.arguments or ""
        messages.add_call(item.call_id, flat_name(item.namespace, item.name or ""), given)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        messages.add_result(item.call_id, openai.parts_in(item.output, f"{field}.output"))
    elif item.type != "additional_tools":
        ignore(f"input ({item.type})")
