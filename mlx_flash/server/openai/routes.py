"""The paths of OpenAI's dialect."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_flash.errors import RefusedError
from mlx_flash.server.embeddings import EmbeddingRequest, RerankRequest, embed, rerank
from mlx_flash.server.openai.chat import chat
from mlx_flash.server.openai.common import error_body
from mlx_flash.server.openai.completions import complete
from mlx_flash.server.openai.kept import KeptResponses
from mlx_flash.server.openai.response_schemas import ResponseRequest
from mlx_flash.server.openai.responses import respond
from mlx_flash.server.openai.schemas import ChatRequest, CompletionRequest
from mlx_flash.server.service import Service


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
            return JSONResponse(error_body(error), error.status)
        return JSONResponse(shown(name))

    chats = service.endpoint(ChatRequest, chat, error_body)
    reranks = service.endpoint(RerankRequest, rerank, error_body)
    return [
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/chat/completions", chats, methods=["POST"]),
        Route("/v1/completions", service.endpoint(CompletionRequest, complete, error_body), methods=["POST"]),
        Route(
            "/v1/responses",
            service.endpoint(ResponseRequest, partial(respond, KeptResponses()), error_body),
            methods=["POST"],
        ),
        Route("/v1/embeddings", service.endpoint(EmbeddingRequest, embed, error_body), methods=["POST"]),
        *(Route(path, reranks, methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]
