"""Bodies of requests: their limits, JSON, and the errors that name a field."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from mlx_flash.errors import RefusedError

MAX_BODY_BYTES = 32 << 20
"""The longest body."""

MAX_TEXT_CHARACTERS = 4_000_000
"""The most text of a request, about a million tokens. The tokenizer works through it before its length is known."""


class Body(BaseModel):
    """A request of a client. Types are not converted, and a field that is not known is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


Checked = TypeVar("Checked", bound=Body)


async def read_body(request: Request, kind: type[Checked]) -> Checked:
    """Return the checked body of a request. Nothing of it gets into logs.

    Raises:
        RefusedError: it is too long, no JSON object, or has a wrong field.
        ClientDisconnect: the client has left.
    """
    length = request.headers.get("content-length")
    if length is not None and int(length) > MAX_BODY_BYTES:
        raise RefusedError(f"the request is too long: {MAX_BODY_BYTES} bytes are allowed.", 413)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(f"the request is too long: {MAX_BODY_BYTES} bytes are allowed.", 413)
    if len(body) < 1 << 16:
        return checked(parse(bytes(body)), kind)
    return await asyncio.to_thread(lambda: checked(parse(bytes(body)), kind))


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body.

    Raises:
        RefusedError: there is none, or it has too much text.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        num_characters = _text_length(value)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the request is not JSON ({type(error).__name__}).", 400) from None
    if _SURROGATE.search(body) and not _is_text(value):
        raise RefusedError("the request has half of a surrogate pair, such as \\ud83e alone, which is no text.", 400)
    if not isinstance(value, dict):
        raise RefusedError("the request must be a JSON object.", 400)
    if num_characters > MAX_TEXT_CHARACTERS:
        raise RefusedError(
            f"the request has {num_characters} characters of text, {MAX_TEXT_CHARACTERS} are allowed.", 413
        )
    return value


def checked(value: dict[str, Any], kind: type[Checked]) -> Checked:
    """Return a JSON object as a request of some kind.

    Raises:
        RefusedError: a field is wrong; it names one.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(errors, key=lambda found: len(found["loc"]))  # of a union, the kind that fits best
        field = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
        field = ".".join(part for part in field.split(".") if part not in _UNIONS)
        known = first["type"] != "extra_forbidden"
        message = first["msg"] if known else "this field is not known or not supported"
        raise RefusedError(f"{field or 'the request'}: {message}", 400, field or None) from None


def message_of(error: RefusedError) -> str:
    """Return the message of an error, with its field. For dialects whose errors have no place for the field."""
    message = str(error)
    return message if error.field is None or error.field in message else f"{error.field}: {message}"


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _text_length(value: Any) -> int:
    """Return the number of characters in a JSON value, and of its parts."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + _text_length(part) for name, part in value.items()) + len(value)
    return sum(map(_text_length, value)) + len(value) if isinstance(value, list) else 0


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_UNIONS = {"str", "list", "dict", "int", "float", "bool"}
"""Names that pydantic puts in the place of a field for the kinds of a union; they are no fields."""
