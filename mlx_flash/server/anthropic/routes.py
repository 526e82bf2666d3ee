"""The paths of Anthropic's dialect."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from mlx_flash.server.anthropic.common import error_body
from mlx_flash.server.anthropic.messages import answer_messages, count_tokens
from mlx_flash.server.anthropic.schemas import CountRequest, MessagesRequest
from mlx_flash.server.service import Service


def anthropic_routes(service: Service) -> list[BaseRoute]:
    """Return the paths of Anthropic's dialect."""
    answers = service.endpoint(MessagesRequest, answer_messages, error_body)
    counts = service.endpoint(CountRequest, count_tokens, error_body)
    return [
        Route("/v1/messages", answers, methods=["POST"]),
        Route("/v1/messages/count_tokens", counts, methods=["POST"]),
    ]
