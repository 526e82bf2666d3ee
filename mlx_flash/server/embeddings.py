"""Texts as vectors: ``/v1/embeddings``."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import RefusedError
from mlx_flash.server.openai import Count, Name, Token, prompts_in
from mlx_flash.server.replies import Whole, collect
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.service import Asking, Many, Service

_NUM_TOGETHER = 64
"""Texts of a request that are sent to the generation thread at a time."""

Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[Many[Token], Field(min_length=1)]
Vector = np.ndarray[Any, np.dtype[np.float32]]


class EmbeddingRequest(Asking):
    """OpenAI's request for the vectors of texts."""

    model: Name = "default_model"
    input: (
        Text
        | Tokens
        | Annotated[Many[Text], Field(min_length=1, max_length=2048)]
        | Annotated[Many[Tokens], Field(min_length=1, max_length=2048)]
    )
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] | None = None


async def embed(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    """Answer a request of OpenAI's for the vectors of texts."""
    wholes = await read_texts(
        service, request, GenerationRequest(model=body.model, work="embed"), prompts_in(body.input)
    )
    data: list[Any] = []
    for i, vector in enumerate(normalized(whole, body.dimensions) for whole in wholes):
        is_text = body.encoding_format == "base64"
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": shown})
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": _usage(wholes)})


async def read_texts(
    service: Service, request: Request, plain: GenerationRequest, texts: Sequence[str | Sequence[int]]
) -> list[Whole]:
    """Return the answers to a request for the vectors of several texts."""
    works = [replace(plain, prompt=text) if isinstance(text, str) else replace(plain, tokens=text) for text in texts]
    wholes: list[Whole] = []
    for start in range(0, len(works), _NUM_TOGETHER):
        wholes += await collect(request, service.submit(*works[start : start + _NUM_TOGETHER]))
    return wholes


def normalized(whole: Whole, dimensions: int | None = None) -> Vector:
    """Return a vector with length 1: its first dimensions, if so many are wanted."""
    vector = np.array(whole.end.vector, np.float32)
    if dimensions is not None and dimensions > len(vector):
        raise RefusedError(f"this model's vectors have {len(vector)} dimensions.", 400, "dimensions")
    vector = vector[:dimensions]
    found: Vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return found


def _usage(wholes: Sequence[Whole]) -> dict[str, int]:
    num_tokens = sum(whole.end.num_prompt for whole in wholes)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
