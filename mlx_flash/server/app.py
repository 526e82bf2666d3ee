"""The application: the paths of all dialects, the page at ``/``, and what watches over them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from mlx_flash import __version__
from mlx_flash.errors import RefusedError
from mlx_flash.server.access import Access, AccessMiddleware
from mlx_flash.server.anthropic import Conversation, MessagesRequest, answer_messages, count_tokens
from mlx_flash.server.ollama import ollama_routes
from mlx_flash.server.openai import ChatRequest, CompletionRequest, EmbeddingRequest, chat, complete, embed
from mlx_flash.server.replies import error_reply
from mlx_flash.server.responses import KeptResponses, ResponseRequest, respond
from mlx_flash.server.service import Service
from mlx_flash.telemetry import METRICS, find, read

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


def _families(num_requests: int, keys: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the metrics that have a value, of this process."""
    yield GaugeMetricFamily("mlx_flash_requests", "Requests that run or wait", num_requests)
    counts = CounterMetricFamily("mlx_flash_key_requests", "Requests with a key", labels=["key"])
    for each, number in keys.items():
        counts.add_metric([each], number)
    if keys:
        yield counts
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for engine in find():
        facts = read(engine.state) if engine.pid == os.getpid() else {}
        for fact, (name, words) in METRICS.items():
            if fact in facts:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families.setdefault(name, kind(f"mlx_flash_{name}", words, labels=["model", "number"]))
                family.add_metric([str(engine.state["model"]["name"]), str(engine.number)], facts[fact])
    yield from families.values()


def openai_routes(service: Service) -> list[BaseRoute]:
    """Return the paths of OpenAI's dialect."""
    created = int(time.time())

    def shown(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": created, "owned_by": "mlx-flash"}

    async def models(request: Request) -> Response:
        names = await asyncio.to_thread(service.catalog.names)
        return JSONResponse({"object": "list", "data": [shown(name) for name in names]})

    async def model(request: Request) -> Response:
        name = str(request.path_params["name"])
        try:
            await asyncio.to_thread(service.catalog.find, name)
        except RefusedError as error:
            return error_reply(request.url.path, error)
        return JSONResponse(shown(name))

    return [
        *(service.generates(path, ChatRequest, chat) for path in ("/v1/chat/completions", "/chat/completions")),
        service.generates("/v1/completions", CompletionRequest, complete),
        service.generates("/v1/responses", ResponseRequest, partial(respond, KeptResponses())),
        service.post("/v1/embeddings", EmbeddingRequest, embed),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def make_app(service: Service, access: Access) -> Starlette:
    """Return the application."""

    async def health(request: Request) -> Response:
        is_alive = service.room.is_alive
        return JSONResponse({"status": "ok" if is_alive else "unavailable"}, 200 if is_alive else 503)

    async def ready(request: Request) -> Response:
        is_ready = service.room.is_alive and service.room.is_ready
        return JSONResponse({"status": "ready" if is_ready else "loading"}, 200 if is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        collect = partial(_families, service.num_requests, dict(access.num_requests))
        registry: Any = SimpleNamespace(collect=collect)
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    middleware = [Middleware(AccessMiddleware, access=access)]
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", show_metrics),
        *page_routes(service),
        *openai_routes(service),
        *ollama_routes(service),
        service.generates("/v1/messages", MessagesRequest, answer_messages),
        service.post("/v1/messages/count_tokens", Conversation, count_tokens),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


async def _http_error(request: Request, error: Exception) -> Response:
    """Return an error of the application itself: a path or a method that it does not have."""
    assert isinstance(error, HTTPException)
    return error_reply(request.url.path, RefusedError(error.detail, error.status_code), error.headers)
