"""The server as its dialects see it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_flash.errors import FlashError, RefusedError
from mlx_flash.server.body import Asking, Checked, read_body
from mlx_flash.server.events import Answer
from mlx_flash.server.replies import error_reply
from mlx_flash.server.request import GenerationRequest, without_broken_calls
from mlx_flash.server.requestpictures import with_pictures
from mlx_flash.server.room import EngineRoom

MAX_REQUESTS = 128
"""The most answers that are computed or wait."""

MAX_HELD_BYTES = 64 << 20
"""The most bytes of all bodies that are read, or whose requests wait for an answer."""

MAX_TEXT_CHARACTERS = 4_000_000
"""The most text of a request, about a million tokens. The tokenizer works through it before its length is known."""

MAX_DOWNLOADS = 4
"""The most downloads of models at the same time. The others wait."""

MAX_IGNORED_NAMES = 256
"""The most names of fields without effect that are counted apart."""

IGNORED_HEADER = "x-mlx-flash-ignored"
"""The header of a reply that lists the fields of its request that had no effect."""

_log = logging.getLogger("mlx_flash")


Answerer: TypeAlias = Callable[["Service", Request, Checked], Awaitable[Response]]
"""Makes the reply to a checked body."""


class Service:
    """The generation thread, and limits of what it is asked for.

    Args:
        room: the generation thread.
        is_strict: refuse unknown fields of requests.

    Attributes:
        room: as given.
        catalog: the models that requests can name.
        num_requests: requests that are answered or wait.
        ignored: requests by names of fields that had no effect on their answers.
        downloads: limits the downloads of models that run at the same time.
    """

    def __init__(self, room: EngineRoom, *, is_strict: bool = False) -> None:
        self.room, self.catalog = room, room.catalog
        self.num_requests, self.downloads = 0, asyncio.Semaphore(MAX_DOWNLOADS)
        self.ignored: Counter[str] = Counter()
        self._is_strict = is_strict
        self._num_bytes = 0

    def submit(self, *requests: GenerationRequest) -> list[Answer]:
        """Send the requests of a body to the generation thread. Their answers end by themselves, or by ``leave()``.

        Raises:
            RefusedError: there are too many already, a picture cannot be used, or the thread has ended.
        """
        if self.room.num_answers + sum(each.num_choices for each in requests) > MAX_REQUESTS:
            raise RefusedError(f"{MAX_REQUESTS} answers wait already. Hint: ask again later.", 503)
        found = [with_pictures(without_broken_calls(each), self.catalog.image_folder) for each in requests]
        texts = [[each.messages, each.tools, each.prompt, each.suffix] for each in found]
        num_characters = len(json.dumps(texts, ensure_ascii=False))
        if num_characters > MAX_TEXT_CHARACTERS:
            raise RefusedError(
                f"the request has {num_characters} characters of text, {MAX_TEXT_CHARACTERS} are allowed.", 413
            )
        return self.room.submit(*found)

    def post(self, path: str, kind: type[Checked], answer: Answerer[Checked], method: str = "POST") -> Route:
        """Return the route of requests with a body.

        Args:
            path: of their URL.
            kind: of their bodies.
            answer: makes the reply to a checked body.
            method: of HTTP.
        """

        async def reply(request: Request) -> Response:
            try:
                with self._one_more() as count:
                    body = await read_body(request, kind, count, is_strict=self._is_strict)
                    if isinstance(body, Asking):
                        body.model = await self._known(body.model)
                    response = await answer(self, request, body)
                    if body.ignored:
                        self._note_ignored(request.url.path, body.ignored)
                        response.headers[IGNORED_HEADER] = ", ".join(body.ignored)
                    return response
            except FlashError as error:
                found = error if isinstance(error, RefusedError) else RefusedError(str(error), 400)
                return error_reply(request.url.path, found)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return Route(path, reply, methods=[method])

    async def _known(self, name: str) -> str:
        """Return the name of the model that answers requests for a name."""
        if self.catalog.is_given(name):  # most requests: no other thread looks for folders
            return name
        return await asyncio.to_thread(self.catalog.known, name)

    def _note_ignored(self, path: str, names: list[str]) -> None:
        """Count fields without effect, and log each the first time."""
        for name in names:
            name = name if name in self.ignored or len(self.ignored) < MAX_IGNORED_NAMES else "others"
            if name not in self.ignored:
                _log.info("%s: %s has no effect here", path, name)
            self.ignored[name] += 1

    @contextmanager
    def _one_more(self) -> Iterator[Callable[[int], None]]:
        """Give a function that is told the length of each part of a body, which counts until the block ends."""
        own = 0

        def count(nbytes: int) -> None:
            nonlocal own
            if self._num_bytes + nbytes > MAX_HELD_BYTES:
                raise RefusedError(
                    f"{self._num_bytes} bytes of requests wait already, {MAX_HELD_BYTES} are allowed. "
                    "Hint: ask again later.",
                    503,
                )
            own += nbytes
            self._num_bytes += nbytes

        if self.num_requests >= MAX_REQUESTS:
            raise RefusedError(f"{MAX_REQUESTS} requests wait already. Hint: ask again later.", 503)
        self.num_requests += 1
        try:
            yield count
        finally:
            self.num_requests -= 1
            self._num_bytes -= own
