"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.server.events import End, Event, Piece, TokenDetail
from mlx_flash.server.openai.common import (
    Chunks,
    head,
    sampling_of,
    usage_of,
)
from mlx_flash.server.openai.schemas import CompletionRequest
from mlx_flash.server.replies import collect_all, stream
from mlx_flash.server.request import GenerationRequest, stop_texts
from mlx_flash.server.service import Service


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer a request to go on with some texts."""
    prompts = _prompts(body)
    answers = service.submit(*_generation_requests(body, prompts))
    if not body.stream:
        wholes = await collect_all(request, answers)
        choices = [_choice(index, whole.text, whole.tokens, 0, whole.end.reason) for index, whole in enumerate(wholes)]
        usage = usage_of([whole.end for whole in wholes], len(prompts))
        return JSONResponse({**head("cmpl", "text_completion", body.model), "choices": choices, "usage": usage})
    return await stream(request, answers, _Chunks(body, len(answers), len(prompts)))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return [*cast("list[str | list[int]]", prompt)]


def _generation_requests(body: CompletionRequest, prompts: Sequence[str | list[int]]) -> list[GenerationRequest]:
    plain = GenerationRequest(
        model=body.model,
        adapter=body.adapters,
        max_tokens=body.max_tokens,
        stop=stop_texts(body.stop),
        top_logprobs=body.logprobs,
        echo=bool(body.echo),
        suffix=body.suffix or None,
    )
    found = []
    for prompt in prompts:
        asked = replace(plain, prompt=prompt) if isinstance(prompt, str) else replace(plain, tokens=prompt)
        found += [replace(asked, sampling=sampling_of(body, choice)) for choice in range(body.n or 1)]
    return found


def _choice(
    index: int, text: str, tokens: Sequence[TokenDetail], offset: int, reason: str | None = None
) -> dict[str, Any]:
    """Return an answer, or a part of one.

    Args:
        index: number of the answer.
        text: its text.
        tokens: their details.
        offset: characters before the text.
        reason: of its end.
    """
    logprobs = None
    if tokens:
        texts = [token.chosen.text for token in tokens]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [token.chosen.logprob for token in tokens],
            "top_logprobs": [
                None if token.chosen.logprob is None else {each.text: each.logprob for each in token.likeliest}
                for token in tokens
            ],
            "text_offset": [offset + sum(map(len, texts[:i])) for i in range(len(texts))],
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class _Chunks(Chunks):
    """A stream of texts."""

    def __init__(self, body: CompletionRequest, num_answers: int, num_prompts: int) -> None:
        super().__init__(body, head("cmpl", "text_completion", body.model), num_answers, num_prompts)
        self._offsets = [0] * num_answers

    def choice(self, number: int, event: Event | None) -> dict[str, Any] | None:
        """Return the part of a text for an event."""
        offset = self._offsets[number]
        if isinstance(event, Piece):
            self._offsets[number] += len(event.text)
            return _choice(number, event.text, event.tokens, offset)
        if isinstance(event, End):
            return _choice(number, "", (), offset, event.reason)
        return _choice(number, "", (), offset) if event is None else None
