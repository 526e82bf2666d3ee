"""Streams of ``/v1/responses``: events that build a response item by item."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlx_flash.server.events import CallArguments, CallBegun, End, Event, Failed, Piece, ToolCall
from mlx_flash.server.openai.response_items import (
    Function,
    call_item,
    message_item,
    reasoning_item,
    response_of,
    summary_part,
    text_part,
)
from mlx_flash.server.openai.response_schemas import ResponseRequest
from mlx_flash.server.replies import Whole, Writer
from mlx_flash.server.toolchoice import TEXT


class ResponseWriter(Writer):
    """A stream of items: text of one kind in a row is one item, and so is each call.

    Args:
        body: the request.
        head: the fields that the response begins with.
        functions: that the model may call, by the names that it knows.
        keep: called with all items of a complete answer.
    """

    def __init__(
        self,
        body: ResponseRequest,
        head: dict[str, Any],
        functions: Mapping[str, Function],
        keep: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self._body, self._head, self._functions, self._keep = body, head, functions, keep
        self._items: list[dict[str, Any]] = []
        self._number = 0
        self._item: dict[str, Any] | None = None
        self._text = ""

    def begin(self) -> Iterator[bytes]:
        """Yield the events before the first item."""
        yield self._event("response.created", response=response_of(self._body, self._head, None, []))
        yield self.beat()

    def beat(self) -> bytes:
        """Return an event that says that the response is being made."""
        return self._event("response.in_progress", response=response_of(self._body, self._head, None, []))

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        """Yield the parts for an event."""
        if isinstance(event, Piece) and event.text:
            yield from (self._reason if event.kind == "reasoning" else self._say)(event.text)
        elif isinstance(event, CallBegun):
            yield from self._begin_item(call_item(event, self._functions.get(event.name)))
        elif isinstance(event, CallArguments):
            if not self._takes_text:
                self._text += event.text
                yield self._event("response.function_call_arguments.delta", **self._place, delta=event.text)
        elif isinstance(event, ToolCall):
            if self._takes_text:
                self._text = str(event.arguments.get(TEXT, ""))
                yield self._event("response.custom_tool_call_input.delta", **self._place, delta=self._text)
                yield self._event("response.custom_tool_call_input.done", **self._place, input=self._text)
            else:
                done = {"name": event.name, "arguments": self._text}
                yield self._event("response.function_call_arguments.done", **self._place, **done)
            yield from self._end_item("completed")
        elif isinstance(event, End):
            yield from self._end_item("incomplete" if event.reason == "length" else "completed")
            self._keep(self._items)
            ended = response_of(self._body, self._head, event, self._items)
            yield self._event(f"response.{ended['status']}", response=ended)
        elif isinstance(event, Failed):
            error = event.error
            yield self._event("error", code="server_error", message=str(error), param=error.field)

    def response_of(self, whole: Whole) -> dict[str, Any]:
        """Return the response of a complete answer, for clients that want no stream."""
        pieces = [Piece(whole.reasoning, "reasoning"), Piece(whole.text)]
        events: list[Event] = [*pieces]
        for call in whole.calls:
            text = json.dumps(call.arguments, ensure_ascii=False)
            events += [CallBegun(call.name, call.id), CallArguments(text), call]
        for event in (*events, whole.end):
            for _ in self.write(0, event):
                pass
        return response_of(self._body, self._head, whole.end, self._items)

    def _say(self, text: str) -> Iterator[bytes]:
        if self._item is None or self._item["type"] != "message":
            yield from self._begin_item(message_item("", "in_progress"))
            yield self._event("response.content_part.added", **self._place, content_index=0, part=text_part(""))
        self._text += text
        yield self._event("response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=[])

    def _reason(self, text: str) -> Iterator[bytes]:
        if self._item is None or self._item["type"] != "reasoning":
            yield from self._begin_item(reasoning_item(""))
            part = summary_part("")
            yield self._event("response.reasoning_summary_part.added", **self._place, summary_index=0, part=part)
        self._text += text
        yield self._event("response.reasoning_summary_text.delta", **self._place, summary_index=0, delta=text)

    def _begin_item(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_item()
        self._item, self._text = item, ""
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _end_item(self, status: str | None = None) -> Iterator[bytes]:
        """Yield the events that end the last item, if it is open.

        Args:
            status: of the item; None for one that others follow. A call ends with its own: one that is broken is
                incomplete.
        """
        if self._item is None:
            return
        begun, text, name = self._item, self._text, self._item["id"]
        if begun["type"] == "message":
            item = {**message_item(text, status or "completed"), "id": name}
            yield self._event("response.output_text.done", **self._place, content_index=0, text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._place, content_index=0, part=text_part(text))
        elif begun["type"] == "reasoning":
            item, part = {**reasoning_item(text), "id": name}, summary_part(text)
            yield self._event("response.reasoning_summary_text.done", **self._place, summary_index=0, text=text)
            yield self._event("response.reasoning_summary_part.done", **self._place, summary_index=0, part=part)
        else:
            item = {**begun, "status": status or "incomplete", "input" if self._takes_text else "arguments": text}
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
        return {"item_id": self._item["id"], "output_index": len(self._items)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode("utf-8", "replace")
