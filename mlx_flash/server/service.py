"""The server as its dialects see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import FlashError, RefusedError
from mlx_flash.server.answer import Answer
from mlx_flash.server.body import Bodies, Checked, read_body
from mlx_flash.server.catalog import Catalog
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.replies import ClientLeftError
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.requestpictures import with_all_pictures
from mlx_flash.server.room import EngineRoom

MAX_REQUESTS = 128
"""The most answers that are computed or wait."""

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorBody = Callable[[RefusedError], Any]


class Service:
    """The generation thread, and limits of what it is asked for.

    Args:
        room: the generation thread.

    Attributes:
        room: as given.
        num_requests: requests that are answered or wait.
    """

    def __init__(self, room: EngineRoom) -> None:
        self.room = room
        self.num_requests = 0
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
                    return await answer(self, request, await read_body(request, kind, count))
            except FlashError as error:
                found = error if isinstance(error, RefusedError) else RefusedError(str(error), 400)
                return JSONResponse(errors(found), found.status)
            except (ClientLeftError, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it

        return reply

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self.num_requests >= MAX_REQUESTS:
            raise RefusedError(f"{MAX_REQUESTS} requests wait already. Hint: ask again later.", 503)
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
