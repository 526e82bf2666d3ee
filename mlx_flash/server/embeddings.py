"""Texts as vectors, and sorted by them: ``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import RefusedError
from mlx_flash.server.openai import Count, Name, Token, head, prompts_in
from mlx_flash.server.replies import Whole, collect
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.service import Asking, Lenient, Many, Service

_NUM_TOGETHER = 64
"""Texts of a request that are sent to the generation thread at a time."""

Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[Many[Token], Field(min_length=1)]
Vector = np.ndarray[Any, np.dtype[np.float32]]

_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n'
    "<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, after which it says yes or no."""

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


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


class Document(Lenient):
    """A text to compare with a query."""

    text: Text


class RerankRequest(Asking):
    """A request to sort texts by their relevance to a query, as Cohere and Jina have it."""

    model: Name = "default_model"
    query: Text
    documents: Annotated[Many[Text | Document], Field(min_length=1, max_length=2048)]
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: str | None = None


async def embed(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    """Answer a request of OpenAI's for the vectors of texts."""
    wholes = await read_texts(service, request, body.model, prompts_in(body.input))
    data: list[Any] = []
    for i, vector in enumerate(normalized(whole, body.dimensions) for whole in wholes):
        is_text = body.encoding_format == "base64"
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": shown})
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": _usage(wholes)})


async def rerank(service: Service, request: Request, body: RerankRequest) -> Response:
    """Answer a request to sort texts. A model for that says yes or no; of others, the vectors are compared."""
    source = await asyncio.to_thread(service.catalog.find, body.model)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    if "rerank" in f"{source.name} {source.base}".lower():
        prompts = [_JUDGE.format(body.instruction or _INSTRUCTION, body.query, text) for text in texts]
        wholes = await read_texts(service, request, body.model, prompts, choices=("no", "yes"))
        scores = [whole.end.vector[1] for whole in wholes]
    else:
        wholes = await read_texts(service, request, body.model, [body.query, *texts])
        query, *vectors = map(normalized, wholes)
        scores = [float(query @ vector) for vector in vectors]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": score} for i, score in enumerate(scores)]
    if body.return_documents:
        results = [{**result, "document": {"text": text}} for result, text in zip(results, texts, strict=True)]
    results.sort(key=lambda result: -result["relevance_score"])
    reply = head("rerank", "list", body.model)
    return JSONResponse({**reply, "results": results[: body.top_n], "usage": _usage(wholes)})


async def read_texts(
    service: Service, request: Request, model: str, texts: Sequence[str | Sequence[int]], **fields: Any
) -> list[Whole]:
    """Return the answers to requests for the vectors of texts."""
    plain = GenerationRequest(model=model, work="embed", **fields)
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
