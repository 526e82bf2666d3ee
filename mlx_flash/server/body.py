"""Bodies of requests: their limits, JSON, and the errors that name a field."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import from_json
from starlette.requests import Request

from mlx_flash.errors import RefusedError

MAX_BODY_BYTES = 32 << 20
"""The longest body."""

MAX_MARKS = 1_000_000
"""The most commas, colons and open brackets of a body. Each may begin a value, and ``{},`` takes 72 bytes in memory."""


MAX_ERRORS = 1000
"""The most wrong fields of a request that are described: a million descriptions take a GB."""

MAX_IGNORED = 32
"""The most names of fields without effect that are listed for a request."""

_PRINTABLE = re.compile(r"[A-Za-z0-9_.:()/ -]{1,100}")
"""Names that logs and headers show as they are; the others are a client's own words."""

HINTS = re.compile(
    "allowed_callers|betas|budget_tokens|cache_control|client_metadata|container|context_management|defer_loading|detail"
    "|display|eager_input_streaming|exclude|generate_summary|include|include_obfuscation|inference_geo|input_examples"
    "|max_tool_calls|mcp_servers|metadata|prediction|prompt_cache_key|prompt_cache_retention|safety_identifier"
    "|service_tier|shift|speed|store|summary|task_budget|truncate|user|verbosity"
)
"""Fields that do not change the answer, in any part of a request."""

CHANGING = re.compile(
    r"chat_template|documents|ebnf|format|functions|grammar|guided_\w+|json_schema|messages\.images|n|regex"
    r"|response_format|structured_outputs"
)
"""Fields that would change the answer unseen where a dialect has none of this name: texts, pictures, and forms of
answers, as other servers take them."""

Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is reported."""


Needed = Mapping[str | None, Sequence[str]]


class Body(BaseModel):
    """A request of a client. Types are not converted.

    Unknown fields are ignored and listed. A strict server ignores :data:`HINTS` alone.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)
    needed: ClassVar[Needed] = {}
    """Fields that one of a type has, by its ``type``."""
    _ignored: dict[str, None] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _is_whole(self) -> Body:
        kind = getattr(self, "type", None)
        for name in self.needed.get(kind, ()):
            if name not in self.model_fields_set or getattr(self, name) is None:
                raise ValueError(f"one {'without a type' if kind is None else f'of type {kind}'} has {name}")
        return self

    @property
    def ignored(self) -> list[str]:
        """Names of fields that have no effect, such as ``messages.cache_control``; each is there once."""
        return list(self._ignored)

    def ignore(self, name: str) -> None:
        """List a part of the request that has no effect."""
        if len(self._ignored) < MAX_IGNORED:
            self._ignored[name if _PRINTABLE.fullmatch(name) else "?"] = None


class Asking(Body):
    """A request that a model answers. `Service.endpoint` puts the model's own name in the place of an unknown one."""

    model: str


class Lenient(Body):
    """A part of a request whose unknown fields are ignored by a strict server too: clients send replies back."""


Checked = TypeVar("Checked", bound=Body)


async def read_body(
    request: Request, kind: type[Checked], count: Callable[[int], None], *, is_strict: bool = False
) -> Checked:
    """Return the checked body of a request. Nothing of it gets into logs.

    Args:
        request: of a client.
        kind: of the body.
        count: called with the length of each part. Raises: RefusedError: there is no room for so many bytes.
        is_strict: refuse unknown fields.

    Raises:
        RefusedError: it is too long, no JSON object, or has a wrong field; or too many bytes wait.
        ClientDisconnect: the client has left.
    """
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
        return checked(parse(body), kind, is_strict=is_strict)
    return await asyncio.to_thread(lambda: checked(parse(body), kind, is_strict=is_strict))


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in a body.

    Raises:
        RefusedError: there is none, or it has too many parts.
    """
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


def checked(value: dict[str, Any], kind: type[Checked], *, is_strict: bool = False) -> Checked:
    """Return a JSON object as a request of some kind, which lists the fields that have no effect.

    Raises:
        RefusedError: a field is wrong, or unknown to a strict server; it names one.
    """
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
    for name, is_harmless in _without_effect(value, found, is_strict=is_strict):
        if not is_harmless:
            raise RefusedError(f"{name}: this field is not known or not supported", 400, name)
        found.ignore(name)
    return found


def _without_effect(value: Any, found: Any, place: str = "", *, is_strict: bool) -> Iterator[tuple[str, bool]]:
    """Yield the names of fields that have no effect, and whether the answer is the same without them.

    Args:
        value: JSON of a request, or of a part of it.
        found: the same, checked.
        place: name of the part, with a dot behind it.
        is_strict: every unknown field may change the answer.
    """
    if isinstance(found, list):
        for part, checked_part in zip(value, found, strict=True):
            if isinstance(checked_part, Body | list):
                yield from _without_effect(part, checked_part, place, is_strict=is_strict)
    elif isinstance(found, Body) and isinstance(value, dict):
        fields = {field.alias or name: name for name, field in type(found).model_fields.items()}
        for name, given in value.items():
            if name in fields:
                yield from _without_effect(given, getattr(found, fields[name]), f"{place}{name}.", is_strict=is_strict)
            elif given is not None:
                is_changing = bool(given) and (given is True or given != 1) and CHANGING.fullmatch(place + name)
                is_known = not is_strict or isinstance(found, Lenient) or HINTS.fullmatch(name)
                yield place + name, bool(is_known and not is_changing)


def _accepted(error: Any) -> tuple[int, bool, int]:
    """Return how much of a value pydantic had accepted as one kind of a union: its depth, its type, items before it."""
    place = error["loc"][-1] if error["loc"] else 0
    return len(error["loc"]), not error["type"].endswith("_type"), place if isinstance(place, int) else 0


_UNIONS = {"str", "list", "dict", "int", "float", "bool", "known"}
"""Names that pydantic puts in the place of a field for the kinds of a union, beside those of classes."""
