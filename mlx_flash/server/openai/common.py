"""Parts of OpenAI's dialect that several of its requests share."""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from mlx_flash import __version__
from mlx_flash.errors import RefusedError
from mlx_flash.server.events import End, Event, Failed, Progress
from mlx_flash.server.openai.schemas import SamplingFields
from mlx_flash.server.replies import Writer
from mlx_flash.server.request import Sampling

FINGERPRINT = f"mlx-flash-{__version__}"


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if error.status == 404 else None
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": code}}


def sent(value: Mapping[str, Any]) -> bytes:
    """Return a part of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return the fields that a reply and all parts of its stream begin with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


class Chunks(Writer):
    """A stream of chunks, each with a part of one answer.

    Args:
        body: the request.
        head: the fields that all chunks begin with.
        num_answers: of the stream.
        num_prompts: several answers to one prompt count it once.
    """

    def __init__(self, body: SamplingFields, head: dict[str, Any], num_answers: int, num_prompts: int = 1) -> None:
        self._wants_usage = wants_usage(body)
        self._head = {**head, "usage": None} if self._wants_usage else head
        self._num_answers, self._num_prompts = num_answers, num_prompts
        self._ends: dict[int, End] = {}

    @abstractmethod
    def choice(self, number: int, event: Event | None) -> dict[str, Any] | None:
        """Return the part of an answer for an event, an empty one for None; None for events that have no part."""

    def write(self, number: int, event: Event) -> Iterable[bytes]:
        """Yield the parts for an event. A comment shows how far the work before the next token is."""
        if isinstance(event, Progress):
            yield f": {event.stage} {event.done}/{event.total}\n\n".encode()
        elif isinstance(event, Failed):
            yield sent(error_body(event.error))
        elif (choice := self.choice(number, event)) is not None:
            yield self.chunk(choice)
        if isinstance(event, End):
            self._ends[number] = event
            if len(self._ends) == self._num_answers:
                yield from self._close()

    def beat(self) -> bytes:
        """Return a chunk whose choice has nothing new."""
        return self.chunk(self.choice(0, None) or {})

    def chunk(self, *choices: dict[str, Any]) -> bytes:
        """Return a chunk."""
        return sent({**self._head, "choices": choices})

    def _close(self) -> Iterator[bytes]:
        if self._wants_usage:
            ends = [self._ends[number] for number in sorted(self._ends)]
            yield sent({**self._head, "choices": [], "usage": usage_of(ends, self._num_prompts)})
        yield b"data: [DONE]\n\n"


def sampling_of(body: SamplingFields, choice: int) -> Sampling:
    """Return how the tokens of an answer are chosen.

    Args:
        body: the request.
        choice: number of the answer, if several are asked for.
    """
    names = (field.name for field in fields(Sampling))
    given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    given["logit_bias"] = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    return Sampling(**{**given, "top_k": None if body.top_k is None else max(0, body.top_k), "choice": choice})


def wants_usage(body: SamplingFields) -> bool:
    """Return whether a stream ends with the number of tokens."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def usage_of(ends: list[End], num_prompts: int = 1) -> dict[str, Any]:
    """Return the numbers of tokens of a reply.

    Args:
        ends: the ends of all answers.
        num_prompts: prompts; several answers to one prompt count it once.
    """
    each = len(ends) // num_prompts
    prompts = ends[::each]
    num_prompt, num_tokens = sum(end.num_prompt for end in prompts), sum(end.num_tokens for end in ends)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.num_cached for end in prompts)},
    }
