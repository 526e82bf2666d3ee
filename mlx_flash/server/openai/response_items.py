"""Replies of ``/v1/responses``: a response, and the items of its output."""

from __future__ import annotations

import uuid
from typing import Any

from mlx_flash.server.events import CallBegun, End
from mlx_flash.server.openai.response_schemas import OneTool, ResponseRequest
from mlx_flash.server.toolchoice import function, text_function


def flat_name(namespace: str | None, name: str) -> str:
    """Return the one name that the model knows a function by."""
    return name if not namespace else f"{namespace}__{name}"


class Function:
    """A function of a request.

    Args:
        namespace: that the request has it in; None for none.
        tool: the function.

    Attributes:
        flat_name: as the model knows it.
        takes_text: its argument is a text, not JSON.
    """

    def __init__(self, namespace: str | None, tool: OneTool) -> None:
        self.flat_name = flat_name(namespace, tool.name or "")
        self.takes_text = tool.type == "custom"
        self._namespace, self._tool = namespace, tool

    @property
    def shown(self) -> dict[str, Any]:
        """The description that chat templates get."""
        tool = self._tool
        if self.takes_text:
            return text_function(self.flat_name, tool.description)
        return function(self.flat_name, tool.description, tool.parameters, is_strict=tool.strict)

    @property
    def names(self) -> dict[str, Any]:
        """The names that an item of a call has."""
        namespace = {} if self._namespace is None else {"namespace": self._namespace}
        return {"name": self._tool.name, **namespace}


def response_of(
    body: ResponseRequest, head: dict[str, Any], end: End | None, items: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a response: complete, or one that is being made."""
    is_cut = end is not None and end.reason == "length"
    return {
        **head,
        "status": "in_progress" if end is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        "model": body.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": body.model_dump()["tool_choice"] or "auto",
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "text": {"format": {"type": "text"}}
        | (body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}),
        "truncation": "disabled",
        **({} if end is None else {"usage": _usage(end)}),
    }


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


def call_item(call: CallBegun, called: Function | None) -> dict[str, Any]:
    """Return an item that asks for a call, without arguments yet.

    Args:
        call: the call.
        called: its function; None if the request has none of this name.
    """
    takes_text = called is not None and called.takes_text
    return {
        "id": f"{'ctc' if takes_text else 'fc'}_{uuid.uuid4().hex}",
        "type": "custom_tool_call" if takes_text else "function_call",
        "status": "in_progress",
        "call_id": call.id or f"call_{uuid.uuid4().hex}",
        **({"name": call.name} if called is None else called.names),
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
