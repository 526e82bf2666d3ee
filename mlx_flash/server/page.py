"""The page at ``/``, and the facts that it shows."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mlx_flash import __version__
from mlx_flash.facts import read
from mlx_flash.server.service import Service
from mlx_flash.telemetry import find

_FOLDER = Path(__file__).with_name("web")

_HEADERS = {
    # The page runs and shows its own files, talks to its own server, and makes HTML only of sanitized text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    """The files of the page, each with its headers."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response


def page_routes(service: Service) -> list[BaseRoute]:
    """Return the paths of the page."""
    files = _Files(directory=_FOLDER, follow_symlink=True)  # some installers link files to their cache

    async def page(request: Request) -> Response:
        return await files.get_response("page.html", request.scope)

    async def facts(request: Request) -> Response:
        engines = await asyncio.to_thread(_engines)
        return JSONResponse({"version": __version__, "requests": service.num_requests, "engines": engines})

    return [Route("/", page), Mount("/page", files), Route("/facts", facts)]


def _engines() -> list[dict[str, Any]]:
    """Return the numbers that the engines of this process publish."""
    return [
        {
            "model": str(engine.state["model"]["name"]),
            "number": engine.number,
            "clock": engine.clock,
            "facts": read(engine.state),
        }
        for engine in find()
        if engine.pid == os.getpid()
    ]
