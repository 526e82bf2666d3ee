"""The server as its dialects see it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import FlashError, RefusedError
from mlx_flash.server.answer import Answer
from mlx_flash.server.body import Asking, Bodies, Checked, read_body
from mlx_flash.server.catalog import Catalog
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.replies import ClientLeftError
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.requestpictures import with_all_pictures
from mlx_flash.server.room import EngineRoom
from mlx_flash.server.toolchoice import without_broken_calls

MAX_REQUESTS = 128
"""The most answers that are computed or wait."""

MAX_IGNORED_NAMES = 256
"""The most names of fields without effect that are counted apart."""

IGNORED_HEADER = "x-mlx-flash-ignored"
"""The header of a reply that lists the fields of its request that had no effect."""

_log = logging.getLogger("mlx_flash")

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[RefusedError], Any]


class Service:
    """The generation thread, and limits of what it is asked for.

    Args:
        room: the generation thread.
        is_strict: refuse unknown fields of requests.

    Attributes:
        room: as given.
        num_requests: requests that are answered or wait.
        ignored: requests by names of fields that had no effect on their answers.
    """

    def __init__(self, room: EngineRoom, *, is_strict: bool = False) -> None:
        self.room = room
        self.num_requests = 0
        self.ignored: Counter[str] = Counter()
        self._is_strict = is_strict
        self._bodies = Bodies()

    @property
    def catalog(self) -> Catalog:
        """The models that requests can name."""
        return self.room.catalog

    def loaded(self) -> list[LoadedModel]:
        """Return the models in memory, to look at what does not change."""
        return list(self.room.models)

    def submit(self, *requests: GenerationRequest) -> list[Answer]:
        """Send the requests of a body to the generation thread. Their answers end by themselves, or by ``leave()``.

        Raises:
            RefusedError: there are too many already, a picture cannot be used, or the thread has ended.
        """
        if self.room.num_answers + len(requests) > MAX_REQUESTS:
            raise RefusedError(f"{MAX_REQUESTS} answers wait already. Hint: ask again later.", 503)
        requests = tuple(map(without_broken_calls, requests))
        return self.room.submit(*with_all_pictures(requests, self.catalog.image_folder))

    def endpoint(
        self, kind: type[Checked], answer: Callable[[Service, Request, Checked], Awaitable[Response]], errors: ErrorBody
    ) -> Endpoint:
        """Return what answers requests of some kind.

        Args:
            kind: of their bodies.
            answer: makes the reply to a checked body.
            errors: makes the body of an error, in the form of the dialect.
        """

        async def reply(request: Request) -> Response:
            try:
                with self._one_more(), self._bodies.one_more() as count:
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
                return JSONResponse(errors(found), found.status)
            except (ClientLeftError, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it

        return reply

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
    def _one_more(self) -> Iterator[None]:
        if self.num_requests >= MAX_REQUESTS:
            raise RefusedError(f"{MAX_REQUESTS} requests wait already. Hint: ask again later.", 503)
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
