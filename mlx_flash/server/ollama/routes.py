"""The paths of Ollama's dialect."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_flash import __version__
from mlx_flash.errors import RefusedError
from mlx_flash.server.body import Checked
from mlx_flash.server.embeddings import OllamaRequest, embed_ollama
from mlx_flash.server.ollama.answers import chat, generate
from mlx_flash.server.ollama.common import error_body
from mlx_flash.server.ollama.management import (
    CopyRequest,
    CreateRequest,
    Management,
    NamedRequest,
)
from mlx_flash.server.ollama.schemas import ChatRequest, GenerateRequest, ShowRequest
from mlx_flash.server.ollama.shown import listed, running, shown
from mlx_flash.server.service import Endpoint, Service

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is. Clients ask for it, and refuse old ones."""


def ollama_routes(service: Service, *, may_manage: bool) -> list[BaseRoute]:
    """Return the paths of Ollama's dialect.

    Args:
        service: the server.
        may_manage: requests may change which models this machine has.
    """

    async def tags(request: Request) -> Response:
        def found() -> list[dict[str, Any]]:
            models = []
            for name in service.catalog.names():
                with contextlib.suppress(RefusedError):  # a Modelfile with an error
                    models.append(listed(service.catalog.find(name)))
            return models

        return JSONResponse({"models": await asyncio.to_thread(found)})

    async def ps(request: Request) -> Response:
        def found() -> list[dict[str, Any]]:
            now = time.monotonic()
            models = []
            for loaded in service.loaded():
                plan, expires = loaded.model.plan, loaded.expires
                size = plan.model_bytes - plan.read_bytes
                left = None if expires is None else expires - now
                models.append(running(loaded.source, size, plan.context_length, left))
            return models

        return JSONResponse({"models": await asyncio.to_thread(found)})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": API_VERSION, "mlx_flash": __version__})

    async def show(service: Service, request: Request, body: ShowRequest) -> Response:
        name = body.model or body.name
        return JSONResponse(await asyncio.to_thread(lambda: shown(service.catalog.find(name))))

    async def missing(request: Request) -> Response:
        error = RefusedError(f"this server has no {request.url.path}.", 501)
        if "/blobs/" in request.url.path and request.method == "HEAD":
            error = RefusedError("there are no blobs here.", 404)
        return JSONResponse(error_body(error), error.status)

    def managed(kind: type[Checked], answer: Callable[[Service, Request, Checked], Awaitable[Response]]) -> Endpoint:
        async def refused(service: Service, request: Request, body: Checked) -> Response:
            raise RefusedError("models are not managed with --no-auth. Hint: give the server an API key.", 403)

        return service.endpoint(kind, answer if may_manage else refused, error_body)

    models = Management(service)

    embeds = service.endpoint(OllamaRequest, embed_ollama, error_body)
    return [
        Route("/api/chat", service.endpoint(ChatRequest, chat, error_body), methods=["POST"]),
        Route("/api/generate", service.endpoint(GenerateRequest, generate, error_body), methods=["POST"]),
        Route("/api/embed", embeds, methods=["POST"]),
        Route("/api/embeddings", embeds, methods=["POST"]),
        Route("/api/show", service.endpoint(ShowRequest, show, error_body), methods=["POST"]),
        Route("/api/tags", tags),
        Route("/api/ps", ps),
        Route("/api/version", version),
        Route("/api/pull", managed(NamedRequest, models.pull), methods=["POST"]),
        Route("/api/create", managed(CreateRequest, models.create), methods=["POST"]),
        Route("/api/copy", managed(CopyRequest, models.copy), methods=["POST"]),
        Route("/api/delete", managed(NamedRequest, models.delete), methods=["DELETE"]),
        Route("/api/push", missing, methods=["POST"]),
        Route("/api/blobs/{digest:path}", missing, methods=["HEAD", "POST"]),
    ]
