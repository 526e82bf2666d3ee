"""Answers in OpenAI's, Anthropic's and Ollama's dialects, whole and in streams."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def events_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON objects of the lines of a stream."""
    found = (line.removeprefix("data: ") for line in lines)
    return [json.loads(line) for line in found if line.startswith("{")]


def text_of(reply: Any) -> str:
    """Return the text of a whole reply, or of the lines or events of a stream, without reasoning and calls."""
    events = reply if isinstance(reply, list) else [reply]
    return "".join(map(_text, events_of(events) if events and isinstance(events[0], str) else events))


def _text(event: dict[str, Any]) -> str:
    kind, delta = event.get("type"), event.get("delta")
    if "choices" in event:
        parts = [choice.get("delta") or choice.get("message") or {} for choice in event["choices"]]
        texts = [choice.get("text") for choice in event["choices"]]
        return "".join(text or part.get("content") or "" for text, part in zip(texts, parts, strict=True))
    if kind == "response.output_text.delta":
        return str(delta)
    if kind == "content_block_delta" and delta is not None:
        return str(delta.get("text", ""))
    if kind == "message":
        return "".join(block.get("text", "") for block in event["content"])
    if "output" in event:
        return "".join(part["text"] for item in event["output"] for part in item.get("content") or ())
    return str(event.get("response") or event.get("message", {}).get("content") or "") if kind is None else ""
