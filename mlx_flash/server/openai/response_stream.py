"""Streams of ``/v1/responses``: events that build a response item by item."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mlx_flash.errors import RefusedError
from mlx_flash.server.events import End, Event, Failed, Piece, Progress, ToolCall
from mlx_flash.server.openai.common import comment
from mlx_flash.server.openai.response_items import call_item, message_item, reasoning_item, response_of, text_part
from mlx_flash.server.openai.response_schemas import ResponseRequest
from mlx_flash.server.replies import Whole


class _Writer:
    """Numbers the events, and keeps the items that are complete.

    Attributes:
        items: the complete items.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._number = 0
        self._message: dict[str, Any] | None = None
        self._text = ""
        self._thoughts = ""

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return an event."""
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode("utf-8", "replace")

    def think(self, text: str) -> None:
        """Take a piece of the reasoning, which is sent whole."""
        self._thoughts += text

    def write(self, text: str) -> Iterator[bytes]:
        """Yield the events of a piece of text."""
        yield from self._end_thoughts()
        if self._message is None:
            self._message = message_item(f"msg_{uuid.uuid4().hex}", "", "in_progress")
            yield self.event("response.output_item.added", output_index=len(self.items), item=self._message)
            yield self.event("response.content_part.added", **self._place, part=text_part(""))
        self._text += text
        yield self.event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def call(self, call: ToolCall) -> Iterator[bytes]:
        """Yield the events of a call."""
        yield from self.end("completed")
        item = call_item(call)
        place = {"item_id": item["id"], "output_index": len(self.items)}
        begun = {**item, "arguments": "", "status": "in_progress"}
        arguments = item["arguments"]
        yield self.event("response.output_item.added", output_index=len(self.items), item=begun)
        yield self.event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self.event("response.function_call_arguments.done", **place, name=call.name, arguments=arguments)
        yield self._done(item)

    def end(self, status: str) -> Iterator[bytes]:
        """Yield the events that end an item of text or reasoning, if one has begun."""
        yield from self._end_thoughts()
        if self._message is not None:
            yield self.event("response.output_text.done", **self._place, text=self._text, logprobs=[])
            yield self.event("response.content_part.done", **self._place, part=text_part(self._text))
            item = message_item(self._message["id"], self._text, status)
            self._message, self._text = None, ""
            yield self._done(item)

    @property
    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        return {"item_id": self._message["id"], "output_index": len(self.items), "content_index": 0}

    def _end_thoughts(self) -> Iterator[bytes]:
        if self._thoughts:
            item, self._thoughts = reasoning_item(self._thoughts), ""
            yield self.event("response.output_item.added", output_index=len(self.items), item=item)
            yield self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        done = self.event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        return done


async def stream_of(body: ResponseRequest, head: dict[str, Any], events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Yield the parts of a stream.

    Args:
        body: the request.
        head: the fields that the response begins with.
        events: of the answer.
    """
    writer = _Writer()
    begun = response_of(body, head, None)
    yield writer.event("response.created", response=begun)
    yield writer.event("response.in_progress", response=begun)
    async for each in events:
        if isinstance(each, Progress):
            yield comment(each)
        elif isinstance(each, Piece) and each.kind == "reasoning":
            writer.think(each.text)
        elif isinstance(each, Piece):
            for part in writer.write(each.text):
                yield part
        elif isinstance(each, ToolCall):
            for part in writer.call(each):
                yield part
        elif isinstance(each, End):
            for part in writer.end("incomplete" if each.reason == "length" else "completed"):
                yield part
            ended = {**response_of(body, head, Whole(each)), "output": writer.items}
            yield writer.event(f"response.{ended['status']}", response=ended)
        elif isinstance(each, Failed):
            yield writer.event("error", **_error(each.error))


def _error(error: RefusedError) -> dict[str, Any]:
    return {"code": "server_error", "message": str(error), "param": error.field}
