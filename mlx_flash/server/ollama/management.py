"""``/api/pull``, ``/api/create``, ``/api/copy`` and ``/api/delete``: models by name, as on the command line.

They write and delete Modelfiles in the folder of models with names, and download into Hugging Face's cache folder. No
weights are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash.errors import ConfigError, FlashError, RefusedError
from mlx_flash.layout.download import is_downloaded
from mlx_flash.modelfile.namedfiles import create_model, named_models, quoted
from mlx_flash.modelfile.parse import Modelfile, parse_modelfile
from mlx_flash.server.body import Lenient, Many
from mlx_flash.server.catalog import LATEST, Catalog
from mlx_flash.server.ollama.common import line
from mlx_flash.server.ollama.schemas import Message, ShowRequest
from mlx_flash.server.openai.schemas import Name
from mlx_flash.server.replies import Stream, collect, while_connected
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.room import EngineRoom
from mlx_flash.server.service import Service

MAX_DOWNLOADS = 4
"""The most downloads at the same time. The others wait."""

_REPEAT_SECONDS = 1.0
"""Seconds after which a line is sent again, so that no client takes the connection for lost."""

_HUGGING_FACE = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/")
_SUCCESS = {"status": "success"}

Status = Mapping[str, Any]
"""A line of progress."""

Text = Annotated[str, Field(max_length=1 << 20)]


class NamedRequest(ShowRequest):
    """A request about a model. Older clients say ``name`` for ``model``."""

    stream: bool | None = None

    @property
    def asked(self) -> str:
        """The name, without the address of Hugging Face."""
        return _HUGGING_FACE.sub("", self.model or self.name)


class CreateRequest(NamedRequest):
    """A request to give a name to a model with settings."""

    base: Name | None = Field(None, alias="from")
    modelfile: Text | None = None
    system: Text | None = None
    template: Text | None = None
    license: Text | Many[Text] | None = None
    parameters: dict[str, Any] | None = None
    messages: Annotated[Many[Message], Field(max_length=1000)] | None = None
    files: dict[str, Any] | None = None
    adapters: dict[str, Any] | None = None
    quantize: str | None = None

    @field_validator("files", "adapters", "quantize")
    @classmethod
    def _is_empty(cls, value: Any) -> Any:
        if value:
            raise ValueError("weights are neither uploaded nor changed here. Hint: name a model with `from`")
        return value


class CopyRequest(Lenient):
    """A request to give a model a second name."""

    source: Name
    destination: Name


class Management:
    """The models of this machine, as requests change them.

    Args:
        service: the server.
    """

    def __init__(self, service: Service) -> None:
        self._catalog, self._room = service.catalog, service.room
        self._downloads = asyncio.Semaphore(MAX_DOWNLOADS)

    async def pull(self, service: Service, request: Request, body: NamedRequest) -> Response:
        """Download a model that is not on this machine."""
        modelfile = await asyncio.to_thread(_settings_of, self._catalog, body.asked)
        return await _reply(request, body, self._downloaded(modelfile.base))

    async def create(self, service: Service, request: Request, body: CreateRequest) -> Response:
        """Write a Modelfile with a name. Its model is downloaded first where it is missing."""
        name = self._free_name(body.asked)
        modelfile = await asyncio.to_thread(_wished, self._catalog, body)

        async def progress() -> AsyncIterator[Status]:
            async for status in self._downloaded(modelfile.base):
                yield status
            yield {"status": "writing manifest"}
            create_model(name, modelfile)
            for note in modelfile.notes:
                yield {"status": f"line {note.line}: {note.text}"}

        return await _reply(request, body, progress())

    async def copy(self, service: Service, request: Request, body: CopyRequest) -> Response:
        """Write a Modelfile with the settings of a model."""
        name = self._free_name(body.destination)
        source = await asyncio.to_thread(self._catalog.find, body.source)
        create_model(name, _settings_of(self._catalog, source.name))
        return Response()

    async def delete(self, service: Service, request: Request, body: NamedRequest) -> Response:
        """Delete the Modelfile of a name."""
        created = named_models()
        name = self._free_name(body.asked)
        if name not in created:
            await asyncio.to_thread(self._catalog.find, name)
            raise RefusedError(
                f"create did not give the name {name}, and weights stay. Hint: mlx-flash rm", 403, "model"
            )
        with contextlib.suppress(RefusedError):  # the Modelfile has an error
            (answer,) = service.submit(GenerationRequest(model=name, work="unload"))
            await collect(answer)
        created[name].unlink(missing_ok=True)
        return Response()

    def _free_name(self, name: str) -> str:
        """Return a name without its tag ``latest`` if requests may change what it means.

        Raises:
            RefusedError: the server was started with it.
        """
        name = name.removesuffix(LATEST)
        if self._catalog.is_given(name):
            raise RefusedError(f"{name} is a name of the server's command line. Hint: take another one.", 403, "model")
        return name

    async def _downloaded(self, repository: str) -> AsyncIterator[Status]:
        """Download a model in a process of its own, which ends when the client leaves. Yield nothing if it is here.

        Raises:
            RefusedError: it cannot be downloaded.
        """
        if Path(repository).is_dir() or await asyncio.to_thread(is_downloaded, repository):
            return
        yield {"status": "pulling manifest"}
        async with self._downloads:
            async for status in _told_by_download(repository, self._room):
                yield status
        yield {"status": "verifying sha256 digest"}


async def _told_by_download(repository: str, room: EngineRoom) -> AsyncIterator[Status]:
    digest = hashlib.sha256(repository.encode()).hexdigest()
    status: Status = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
    words = ("-m", "mlx_flash.layout.download", repository)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=DEVNULL, stdout=PIPE)
    assert process.stdout is not None
    try:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                text = await asyncio.wait_for(process.stdout.readline(), _REPEAT_SECONDS)
                if not text:
                    break
                told = json.loads(text)
                if "error" in told:
                    raise RefusedError(told["error"], told["status"])
                status = {**status, **told}
            if not room.is_alive:
                raise RefusedError("the server stops.", 503)
            yield status
        if code := await process.wait():
            raise RefusedError(f"the process that downloads {repository} ended with status {code}.", 500)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _reply(request: Request, body: NamedRequest, progress: AsyncIterator[Status]) -> Response:
    """Return a reply with all lines, or with the last one, which is ``success``."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for status in progress:
                yield line(status)
            yield line(_SUCCESS)
        except FlashError as error:
            yield line({"error": str(error)})

    if body.stream is not False:
        return Stream(lines(), [], "application/x-ndjson")

    async def wait() -> None:
        async for _ in progress:
            pass

    await while_connected(request.receive, wait())
    return JSONResponse(_SUCCESS)


def _settings_of(catalog: Catalog, name: str) -> Modelfile:
    """Return the settings of a model, with absolute folders. One that is not on this machine has its repository alone.

    Raises:
        RefusedError: its Modelfile has an error.
    """
    try:
        source = catalog.find(name)
    except RefusedError as error:
        if error.status != 404:
            raise
        return Modelfile(path=Path(), base=name.removesuffix(LATEST))
    folder = Path(source.base)
    base = str(folder.absolute()) if folder.is_dir() else source.base
    adapter = None if source.adapter is None else Path(source.adapter).absolute()
    return replace(source.modelfile or Modelfile(path=folder, base=base), base=base, adapter=adapter)


def _wished(catalog: Catalog, body: CreateRequest) -> Modelfile:
    """Return what a request asks for: its settings over those of its model.

    Raises:
        ConfigError, RefusedError: it has no model, or a wrong setting.
    """
    given = {key: each if isinstance(each, list) else [each] for key, each in (body.parameters or {}).items()}
    licenses = body.license if isinstance(body.license, list) else [body.license]
    texts = [(f"PARAMETER {key}", str(each)) for key, several in given.items() for each in several]
    texts += [(f"MESSAGE {each.role}", each.content or "") for each in body.messages or ()]
    texts += [("SYSTEM", body.system or ""), ("TEMPLATE", body.template or "")]
    texts += [("LICENSE", text or "") for text in licenses]
    if not all(map(str.isidentifier, given)):
        raise ConfigError("parameters: a name has other characters than letters, digits and _")
    lines = [body.modelfile or f"FROM {body.base or ''}", *(f"{key} {quoted(text)}" for key, text in texts if text)]
    found = parse_modelfile("\n".join(lines), "request", lambda value, folder: body.base or value)
    if found.flash.keys() - {"context_length"}:
        raise ConfigError("FLASH instructions are not taken from requests. Hint: mlx-flash create")
    base = _settings_of(catalog, _HUGGING_FACE.sub("", found.base))
    names = ("adapter", "stop", "system", "template", "messages", "licenses")
    changes = {key: value for key in names if (value := getattr(found, key))}
    numbers: dict[str, Any] = found.parameters.given()
    flash = {**base.flash, **found.flash}
    return replace(base, parameters=replace(base.parameters, **numbers), flash=flash, notes=found.notes, **changes)
