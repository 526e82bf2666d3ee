"""Parts of Anthropic's dialect that several of its requests share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlx_flash.errors import RefusedError
from mlx_flash.server.body import error_text

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return an error as Anthropic's clients read it."""
    return {"type": "error", "error": {"type": _KINDS.get(error.status, "api_error"), "message": error_text(error)}}


def sent(value: Mapping[str, Any]) -> bytes:
    """Return a part of a stream, which is named after its type."""
    return f"event: {value['type']}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode("utf-8", "replace")
