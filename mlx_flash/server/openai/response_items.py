"""Replies of ``/v1/responses``: a response, and the items of its output."""

from __future__ import annotations

import json
import uuid
from typing import Any

from mlx_flash.server.events import CallBegun, End, ToolCall
from mlx_flash.server.openai.response_schemas import ResponseRequest
from mlx_flash.server.replies import Whole


def response_of(body: ResponseRequest, head: dict[str, Any], whole: Whole | None) -> dict[str, Any]:
    """Return a response: complete, or one that is being made."""
    is_cut = whole is not None and whole.end.reason == "length"
    return {
        **head,
        "status": "in_progress" if whole is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        "model": body.model,
        "output": [] if whole is None else items_of(whole),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": body.model_dump()["tool_choice"] or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "text": {"format": {"type": "text"}}
        | (body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}),
        "truncation": "disabled",
        **({} if whole is None else {"usage": _usage(whole.end)}),
    }


def items_of(whole: Whole) -> list[dict[str, Any]]:
    """Return the items of a complete answer."""
    status = "incomplete" if whole.end.reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if whole.reasoning:
        items.append(reasoning_item(whole.reasoning))
    if whole.text or not whole.calls:
        items.append(message_item(whole.text, status))
    return items + [
        {**call_item(call), "status": "completed", "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        for call in whole.calls
    ]


def reasoning_item(text: str) -> dict[str, Any]:
    """Return an item of reasoning; without text, one that begins. Programs show the summary: it is the whole."""
    summary, content = ([summary_part(text)], [{"type": "reasoning_text", "text": text}]) if text else ([], [])
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": summary, "content": content}


def summary_part(text: str) -> dict[str, Any]:
    """Return the summary of an item of reasoning."""
    return {"type": "summary_text", "text": text}


def message_item(text: str, status: str) -> dict[str, Any]:
    """Return an item of text."""
    content = [text_part(text)] if status != "in_progress" else []
    name = f"msg_{uuid.uuid4().hex}"
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    """Return a part of an item of text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: CallBegun | ToolCall) -> dict[str, Any]:
    """Return an item that asks for a call, without arguments yet."""
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "in_progress",
        "call_id": call.id or f"call_{uuid.uuid4().hex}",
        "name": call.name,
        "arguments": "",
    }


def _usage(end: End) -> dict[str, Any]:
    return {
        "input_tokens": end.num_prompt,
        "input_tokens_details": {"cached_tokens": end.num_cached},
        "output_tokens": end.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.num_prompt + end.num_tokens,
    }
