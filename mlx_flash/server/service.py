"""Requests as clients send them, their limits, and replies: whole ones, and streams."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlx_flash.errors import FlashError, RefusedError
from mlx_flash.logs import log
from mlx_flash.server.events import Answers, End, Event, Failed, Piece, Progress, TokenDetail, ToolCall
from mlx_flash.server.request import GenerationRequest, with_pictures
from mlx_flash.server.room import EngineRoom

T = TypeVar("T")

BEAT_SECONDS = 10.0
"""The longest time without an event in a stream, and before it begins."""

PROGRESS_SECONDS = 0.5
"""The least time between two reports of the same work."""

COMMENT = b":"
"""The beginning of a part that is no event to clients."""


@dataclass
class Whole:
    """A complete answer."""

    end: End
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenDetail] = field(default_factory=list)


async def collect(request: Request, answers: Answers) -> list[Whole]:
    """Return complete answers to a client that waits for all of them."""
    events: defaultdict[int, list[Event]] = defaultdict(list)
    answers.is_whole = True

    async def take() -> None:
        while answers.open:
            number, event = await answers.next()
            if isinstance(event, Failed):
                raise event.error
            events[number].append(event)

    try:
        await while_connected(request.receive, take())
    finally:
        answers.leave()
    return [_whole(events[number]) for number in sorted(events)]


def _whole(events: Sequence[Event]) -> Whole:
    *parts, end = events
    assert isinstance(end, End)
    pieces = [part for part in parts if isinstance(part, Piece)]
    text, reasoning = ("".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("text", "reasoning"))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return Whole(end, text, reasoning, calls, [token for piece in pieces for token in piece.tokens])


class Writer(ABC):
    """The form of a reply in a dialect: whole, or a stream."""

    media_type = "text/event-stream"

    @abstractmethod
    def whole(self, wholes: list[Whole]) -> dict[str, Any]:
        """Return the reply that has complete answers."""

    def begin(self) -> Iterable[bytes]:
        """Return the parts before the first event."""
        return ()

    @abstractmethod
    def write(self, number: int, event: Event) -> Iterable[bytes]:
        """Return the parts for an event."""

    def fail(self, path: str, error: RefusedError) -> bytes:
        """Return the last part of a stream whose request came to a path, and that an error ends."""
        return sent(error_body(path, error))

    @abstractmethod
    def beat(self) -> bytes:
        """Return a part that changes nothing, and that clients count as an event."""


class Asked(NamedTuple):
    """A request of a dialect in the form that all have."""

    requests: Sequence[GenerationRequest]
    writer: Writer
    streams: bool


_json = json.JSONEncoder(ensure_ascii=False).encode


def sent(value: Mapping[str, Any]) -> bytes:
    """Return an event of a stream, which is named after its type if it has one."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {_json(value)}\n\n".encode("utf-8", "replace")


def line(value: Mapping[str, Any]) -> bytes:
    """Return a part of a stream of lines."""
    return f"{_json(value)}\n".encode("utf-8", "replace")


_ANTHROPICS_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(path: str, error: RefusedError) -> dict[str, Any]:
    """Return an error as the clients of a path read it."""
    text = str(error)
    if path.startswith(("/api/", "/v1/messages")) and error.field is not None and error.field not in text:
        text = f"{error.field}: {text}"  # these dialects have no place for it
    if path.startswith("/api/"):
        return {"error": text}
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": _ANTHROPICS_KINDS.get(error.status, "api_error"), "message": text}}
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if error.status == 404 else None
    return {"error": {"message": text, "type": kind, "param": error.field, "code": code}}


def error_reply(path: str, error: RefusedError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply to a request that is refused."""
    return JSONResponse(error_body(path, error), error.status, headers)


async def reply(request: Request, answers: Answers, writer: Writer, *, streams: bool) -> Response:
    """Return the reply that has some answers: whole, or as they grow.

    A stream waits :data:`BEAT_SECONDS` for the first event of each answer, so that the reply to a request that is
    refused at once has the status of its error. Later errors are part of the stream.
    """
    if not streams:
        return JSONResponse(writer.whole(await collect(request, answers)))
    began = time.monotonic()
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await while_connected(request.receive, asyncio.wait_for(answers.begin(), BEAT_SECONDS))
    except BaseException:
        answers.leave()
        raise
    return Stream(request.url.path, answers, writer, began)


class Stream(StreamingResponse):
    """A reply in parts, which ends when its client leaves."""

    def __init__(self, path: str, answers: Answers, writer: Writer, began: float) -> None:
        self._path, self._answers, self._writer, self._sent_at = path, answers, writer, began
        super().__init__(self._parts(), media_type=writer.media_type, headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._wake_for_beat()
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientDisconnect:
            log.info("a client left, or stopped reading, before its answer was complete")
        finally:
            self._timer.cancel()
            self._answers.leave()

    def _wake_for_beat(self) -> None:
        self._answers.wake()
        left = self._sent_at + BEAT_SECONDS - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(left if left > 0 else BEAT_SECONDS, self._wake_for_beat)

    async def _parts(self) -> AsyncIterator[bytes]:
        """Yield the parts, with beats by the clock: a pass may take minutes.

        Of two reports of the same work within a short time, only the first is sent.
        """
        for part in self._writer.begin():
            self._sent_at = time.monotonic()
            yield part
        stage, reported = None, 0.0
        while self._answers.open:
            now = time.monotonic()
            if (found := self._answers.take()) is None:
                if now - self._sent_at < BEAT_SECONDS:
                    await self._answers.wait()
                else:
                    self._sent_at = now
                    yield self._writer.beat()
                continue
            number, event = found
            if isinstance(event, Progress):
                if event.stage == stage and now - reported < PROGRESS_SECONDS:
                    continue
                stage, reported = event.stage, now
            elif isinstance(event, Failed):
                yield self._writer.fail(self._path, event.error)
                return
            for part in self._writer.write(number, event):
                if not part.startswith(COMMENT):
                    self._sent_at = now
                yield part


async def while_connected(receive: Callable[[], Awaitable[object]], work: Awaitable[T]) -> T:
    """Return the result of some work for a client whose request is read completely."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return


MAX_REQUESTS = 128
"""The most answers that are computed or wait."""

MAX_HELD_BYTES = 64 << 20
"""The most bytes of all bodies that are read, or whose requests wait for an answer."""

MAX_TEXT_CHARACTERS = 4_000_000
"""The most text of a request, about a million tokens. The tokenizer works through it before its length is known."""

MAX_IGNORED = 256
"""The most names of fields without effect that the log gets."""

MAX_BODY_BYTES = 32 << 20
"""The longest body."""

MAX_MARKS = 1_000_000
"""The most commas, colons and open brackets of a body. Each may begin a value, and ``{},`` takes 72 bytes in memory."""

MAX_ERRORS = 1000
"""The most wrong fields of a request that are described: a million descriptions take a GB."""

_PRINTABLE = re.compile(r"[A-Za-z0-9_.:()/ -]{1,100}")
"""Names that the log shows as they are; the others are a client's own words."""

CHANGING = re.compile(
    r"adapters|best_of|chat_template|context|documents|ebnf|format|functions|grammar|guided_\w+|json_schema|messages\.images|n|regex"
    r"|response_format|structured_outputs|suffix"
)
"""Fields that would change the answer unseen where a dialect has none of this name: texts, pictures, and forms of
answers, as other servers take them."""

IGNORED: set[str] = set()
"""Fields without effect that the log has."""


def ignore(name: str) -> None:
    """Log a part of a request that has no effect, such as ``messages.cache_control``, the first time."""
    shown = name if _PRINTABLE.fullmatch(name) else "?"
    if shown not in IGNORED and len(IGNORED) < MAX_IGNORED:
        IGNORED.add(shown)
        log.info("%s of a request has no effect here", shown)


Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is reported."""


Needed = Mapping[str | None, Sequence[str]]


class Body(BaseModel):
    """A request of a client. Types are not converted.

    Unknown fields are ignored and logged, except those of :data:`CHANGING`.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)
    needed: ClassVar[Needed] = {}
    """Fields that one of a type has, by its ``type``."""

    @model_validator(mode="after")
    def _is_whole(self) -> Body:
        kind = getattr(self, "type", None)
        for name in self.needed.get(kind, ()):
            if name not in self.model_fields_set or getattr(self, name) is None:
                raise ValueError(f"one {'without a type' if kind is None else f'of type {kind}'} has {name}")
        return self


class Asking(Body):
    """A request that a model answers. `Service.post` puts the model's own name in the place of an unknown one."""

    model: str


Checked = TypeVar("Checked", bound=Body)


async def read_body(request: Request, kind: type[Checked], count: Callable[[int], None]) -> Checked:
    """Return the checked body of a request. Nothing of it gets into logs."""
    length = request.headers.get("content-length")
    if length is not None and int(length) > MAX_BODY_BYTES:
        raise RefusedError(f"the request is too long: {MAX_BODY_BYTES} bytes are allowed.", 413)
    body = bytearray()
    async for part in request.stream():
        count(len(part))
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(f"the request is too long: {MAX_BODY_BYTES} bytes are allowed.", 413)
    if len(body) < 1 << 16:
        return checked(parse(body), kind)
    return await asyncio.to_thread(lambda: checked(parse(body), kind))


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in a body."""
    num_marks = sum(map(body.count, b",:[{"))
    if num_marks > MAX_MARKS:
        raise RefusedError(
            f"the request has {num_marks} commas, colons and open brackets, {MAX_MARKS} are allowed.", 413
        )
    try:
        value = from_json(bytes(body).removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise RefusedError(f"the request is not JSON: {error}.", 400) from None
    if not isinstance(value, dict):
        raise RefusedError("the request must be a JSON object.", 400)
    return value


def checked(value: dict[str, Any], kind: type[Checked]) -> Checked:
    """Return a JSON object as a request of some kind, and log the fields that have no effect."""
    try:
        found = kind.model_validate(value)
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            raise RefusedError(f"{error.error_count()} fields are wrong.", 400) from None
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(errors, key=_accepted)  # of a union, the kind that fits best
        parts = (str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
        field = ".".join(part for part in parts if part not in _UNIONS and not part[0].isupper())
        raise RefusedError(f"{field or 'the request'}: {first['msg']}", 400, field or None) from None
    for name, given in _without_effect(value, found):
        if given and (given is True or given != 1) and CHANGING.fullmatch(name):
            raise RefusedError(f"{name}: this field is not known or not supported", 400, name)
        ignore(name)
    return found


def _without_effect(value: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of fields that have no effect."""
    if isinstance(found, list) and isinstance(value, list):
        for part, checked_part in zip(value, found, strict=False):  # one prompt becomes a list of one
            if isinstance(checked_part, Body | list):
                yield from _without_effect(part, checked_part, place)
    elif isinstance(found, Body) and isinstance(value, dict):
        fields = {field.alias or name: name for name, field in type(found).model_fields.items()}
        for name, given in value.items():
            if name in fields:
                yield from _without_effect(given, getattr(found, fields[name]), f"{place}{name}.")
            elif given is not None:
                yield place + name, given


def _accepted(error: Any) -> tuple[int, bool, int]:
    """Return how much of a value pydantic had accepted as one kind of a union: its depth, its type, items before it."""
    place = error["loc"][-1] if error["loc"] else 0
    return len(error["loc"]), not error["type"].endswith("_type"), place if isinstance(place, int) else 0


_UNIONS = {"str", "list", "dict", "int", "float", "bool", "known"}
"""Names that pydantic puts in the place of a field for the kinds of a union, beside those of classes."""


Answerer: TypeAlias = Callable[["Service", Request, Checked], Awaitable[Response]]
"""Makes the reply to a checked body."""


class Service:
    """The generation thread, and limits of what it is asked for."""

    def __init__(self, room: EngineRoom) -> None:
        self.room, self.catalog = room, room.catalog
        self.num_requests = 0
        self._num_bytes = 0

    def submit(self, *requests: GenerationRequest) -> Answers:
        """Send the requests of a body to the generation thread. Their answers end by themselves, or by ``leave()``."""
        if self.room.num_answers + sum(each.num_choices for each in requests) > MAX_REQUESTS:
            raise RefusedError(f"{MAX_REQUESTS} answers wait already. Hint: ask again later.", 503)
        found = [with_pictures(each) for each in requests]
        texts = [[each.messages, each.tools, each.prompt] for each in found]
        num_characters = len(json.dumps(texts, ensure_ascii=False))
        if num_characters > MAX_TEXT_CHARACTERS:
            raise RefusedError(
                f"the request has {num_characters} characters of text, {MAX_TEXT_CHARACTERS} are allowed.", 413
            )
        return self.room.submit(*found)

    def post(self, path: str, kind: type[Checked], answer: Answerer[Checked]) -> Route:
        """Return the route of requests with a body."""

        async def reply(request: Request) -> Response:
            try:
                with self._one_more() as count:
                    body = await read_body(request, kind, count)
                    if isinstance(body, Asking) and not self.catalog.is_given(body.model):  # looks for folders
                        body.model = await asyncio.to_thread(self.catalog.known, body.model)
                    return await answer(self, request, body)
            except FlashError as error:
                found = error if isinstance(error, RefusedError) else RefusedError(str(error), 400)
                return error_reply(request.url.path, found)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return Route(path, reply, methods=["POST"])

    def generates(self, path: str, kind: type[Checked], translate: Callable[[Checked], Asked]) -> Route:
        """Return the route of requests for answers, whose dialect translates them and what is generated."""

        async def answer(service: Service, request: Request, body: Checked) -> Response:
            asked = translate(body)
            return await reply(request, self.submit(*asked.requests), asked.writer, streams=asked.streams)

        return self.post(path, kind, answer)

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

        self.num_requests += 1
        try:
            yield count
        finally:
            self.num_requests -= 1
            self._num_bytes -= own
