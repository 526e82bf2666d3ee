"""The page at ``/``, and the facts that it shows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_flash import __version__
from mlx_flash.facts import read
from mlx_flash.server.service import Service
from mlx_flash.telemetry import find

_FILE = Path(__file__).with_name("page.html")


def page_routes(service: Service) -> list[BaseRoute]:
    """Return the paths of the page."""
    text = _FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(text),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(request: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    async def facts(request: Request) -> Response:
        engines = await asyncio.to_thread(_engines)
        return JSONResponse({"version": __version__, "requests": service.num_requests, "engines": engines})

    return [Route("/", page), Route("/facts", facts)]


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


def _policy(text: str) -> str:
    """Return a policy that lets the page run its own script and style, talk to its own server, and nothing else."""

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
