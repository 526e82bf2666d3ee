"""The application: the paths of all dialects, and what watches over them."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlx_flash.errors import RefusedError
from mlx_flash.server import metrics
from mlx_flash.server.access import Access, AccessMiddleware
from mlx_flash.server.anthropic.routes import anthropic_routes
from mlx_flash.server.ollama.routes import ollama_routes
from mlx_flash.server.openai.routes import openai_routes
from mlx_flash.server.page import page_routes
from mlx_flash.server.service import Service
from mlx_flash.server.shapes import error_reply


def make_app(service: Service, access: Access) -> Starlette:
    """Return the application.

    Args:
        service: the generation thread.
        access: who may ask.
    """

    async def health(request: Request) -> Response:
        is_alive = service.room.is_alive
        return JSONResponse({"status": "ok" if is_alive else "unavailable"}, 200 if is_alive else 503)

    async def ready(request: Request) -> Response:
        is_ready = service.room.is_alive and service.room.is_ready
        return JSONResponse({"status": "ready" if is_ready else "loading"}, 200 if is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        text = await asyncio.to_thread(metrics.metrics, service.num_requests, dict(service.ignored))
        return Response(text, media_type=metrics.CONTENT_TYPE)

    middleware = [Middleware(AccessMiddleware, access=access)]
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        )
    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", show_metrics),
        *page_routes(service),
        *openai_routes(service),
        *ollama_routes(service, may_manage=not access.is_open),
        *anthropic_routes(service),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


async def _http_error(request: Request, error: Exception) -> Response:
    """Return an error of the application itself: a path or a method that it does not have."""
    assert isinstance(error, HTTPException)
    return error_reply(request.url.path, RefusedError(error.detail, error.status_code), error.headers)
