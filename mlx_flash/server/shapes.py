"""The form of errors that no dialect sees: it follows from the path of the request."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from mlx_flash.errors import RefusedError
from mlx_flash.server.anthropic.common import error_body as anthropic_error
from mlx_flash.server.ollama.common import error_body as ollama_error
from mlx_flash.server.openai.common import error_body as openai_error


def error_reply(path: str, error: RefusedError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error as the clients of a path read it.

    Args:
        path: of the request.
        error: the error.
        headers: of the reply.
    """
    body = openai_error
    if path.startswith("/api/"):
        body = ollama_error
    elif path.startswith("/v1/messages"):
        body = anthropic_error
    return JSONResponse(body(error), error.status, headers)
