"""Models in Ollama's dialect: facts about them, and their names, as on the command line.

Requests write and delete Modelfiles in the folder of models with names, and download into Hugging Face's cache folder.
No weights are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import re
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from huggingface_hub import try_to_load_from_cache
from pydantic import Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_flash import __version__
from mlx_flash.errors import ConfigError, FlashError, RefusedError
from mlx_flash.layout.download import is_downloaded
from mlx_flash.modelfile.parse import Modelfile, create_model, lines_of, named_models, parse_modelfile, quoted
from mlx_flash.server.body import Checked, Lenient, Many
from mlx_flash.server.catalog import LATEST, Catalog, Source
from mlx_flash.server.embeddings import OllamaRequest, embed_ollama
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.ollama import (
    ChatRequest,
    GenerateRequest,
    Message,
    chat,
    generate,
    tagged,
    time_text,
)
from mlx_flash.server.openai import Name
from mlx_flash.server.replies import Stream, collect, error_reply, line, while_connected
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.room import EngineRoom
from mlx_flash.server.service import Answerer, Service
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.vision.detect import is_installed, loads_with_vlm

_FOR_EVER = timedelta(days=36_500)
"""The time for which a model stays that never leaves. Clients show "for ever" from some decades on."""


_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}
"""Sizes of a model: Ollama's names, and the entries of ``config.json``."""


def folder_of(source: Source) -> Path | None:
    """Return the folder of a model on this machine; None if it is not downloaded."""
    folder = Path(source.base)
    if folder.is_dir():
        return folder
    config = try_to_load_from_cache(source.base, "config.json") if source.base.count("/") == 1 else None
    return Path(config).parent if isinstance(config, str) else None


def listed(source: Source) -> dict[str, Any]:
    """Return a model as the list of models has it."""
    folder = folder_of(source)
    files = [] if folder is None else sorted(_weights(folder))
    states = [(path.name, path.stat()) for path in files]
    modified = max((state.st_mtime for _, state in states), default=float(source.created))
    digest = hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, s in states]).encode()).hexdigest()
    name = tagged(source.name)
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(datetime.fromtimestamp(modified, UTC)),
        "size": sum(state.st_size for _, state in states),
        "digest": digest,
        "details": _details_of(folder, digest),
    }


def _details_of(folder: Path | None, digest: str) -> dict[str, Any]:
    """Return the family and the size of a model, and how its weights are quantized."""
    config = {} if folder is None else _json(folder / "config.json")
    family = str(config.get("model_type", ""))
    bits = _quantization_of(config).get("bits")
    num_parameters = 0 if folder is None else _num_parameters(folder, digest)
    dtype = config.get("dtype") or config.get("torch_dtype")
    level = f"{bits}-bit" if bits else str(dtype or "")
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(num_parameters) if num_parameters else "",
        "quantization_level": level,
    }


@lru_cache(maxsize=256)
def _num_parameters(folder: Path, digest: str) -> int:
    """Return the number of a model's weights; 0 if its files cannot be read.

    Args:
        folder: of the model.
        digest: changes with its files.
    """
    quantization = _quantization_of(_json(folder / "config.json"))
    try:
        tensors = read_checkpoint(folder).tensors
    except (FlashError, OSError):
        return 0
    total = 0
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        own = quantization.get(module)
        bits = own.get("bits") if isinstance(own, dict) else quantization.get("bits")
        if bits and tensor.dtype == "U32":
            total += math.prod(tensor.shape) * 32 // int(bits)
        elif not bits or kind not in ("scales", "biases"):
            total += math.prod(tensor.shape)
    return total


def _quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("quantization") or config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def _short(number: int) -> str:
    """Return a number in the form of Ollama: ``1.5B`` or ``268.10M``."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def shown(source: Source) -> dict[str, Any]:
    """Return the facts about one model."""
    folder = folder_of(source)
    config = {} if folder is None else _json(folder / "config.json")
    template = str(source.tokenizer_settings.get("chat_template") or _template(folder))
    lines = [*lines_of(_modelfile_of(source))]
    parameters = [each.removeprefix("PARAMETER ") for each in lines if each.startswith("PARAMETER ")]
    entry = listed(source)
    family = str(config.get("model_type", ""))
    info: dict[str, Any] = {"general.architecture": family, "general.basename": source.name}
    text = {**config, **(config["text_config"] if isinstance(config.get("text_config"), dict) else {})}
    if folder is not None:
        info["general.parameter_count"] = _num_parameters(folder, entry["digest"])
    for name, key in _SIZES.items():
        if isinstance(text.get(key), int):
            info[f"{family}.{name}"] = text[key]
    capabilities = ["completion"]
    capabilities += ["tools"] if "tools" in template else []
    if folder is not None and is_installed() and loads_with_vlm(folder, source.vision, prefers=False):
        capabilities.append("vision")
    capabilities += ["thinking"] if "enable_thinking" in template or "reasoning_effort" in template else []
    licenses = [] if folder is None else sorted(path for path in folder.glob("LICENSE*") if path.is_file())
    return {
        "license": "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in licenses),
        "modelfile": "\n".join(lines),
        "parameters": "\n".join(parameters),
        "template": template,
        "details": entry["details"],
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": entry["modified_at"],
    }


def running(loaded: LoadedModel) -> dict[str, Any]:
    """Return a model in memory."""
    plan, expires = loaded.model.plan, loaded.expires
    left = _FOR_EVER if expires is None else timedelta(seconds=max(0.0, expires - time.monotonic()))
    found = {
        **listed(loaded.source),
        "expires_at": time_text(datetime.now(UTC) + min(left, _FOR_EVER)),
        "size_vram": plan.model_bytes - plan.read_bytes,
        "context_length": plan.context_length,
    }
    del found["modified_at"]
    return found


def _weights(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())


def _template(folder: Path | None) -> str:
    if folder is None:
        return ""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else ""


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none. Loading the model tells what is wrong."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_HUGGING_FACE = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/")
_SUCCESS = {"status": "success"}

Status = Mapping[str, Any]
"""A line of progress."""

Text = Annotated[str, Field(max_length=1 << 20)]


class NamedRequest(Lenient):
    """A request about a model. Older clients say ``name`` for ``model``; Ollama's own command sends all fields."""

    model: Name | Literal[""] = ""
    name: Name | Literal[""] = ""
    stream: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> NamedRequest:
        if not self.model and not self.name:
            raise ValueError("model is missing")
        return self

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


async def pull(service: Service, request: Request, body: NamedRequest) -> Response:
    """Download a model that is not on this machine."""
    modelfile = await asyncio.to_thread(_settings_of, service.catalog, body.asked)
    return await _reply(request, body, _downloaded(modelfile.base, service))


async def create(service: Service, request: Request, body: CreateRequest) -> Response:
    """Write a Modelfile with a name. Its model is downloaded first where it is missing."""
    name = _free_name(body.asked, service.catalog)
    modelfile = await asyncio.to_thread(_wished, service.catalog, body)

    async def progress() -> AsyncIterator[Status]:
        async for status in _downloaded(modelfile.base, service):
            yield status
        yield {"status": "writing manifest"}
        create_model(name, modelfile)
        for note in modelfile.notes:
            yield {"status": f"line {note.line}: {note.text}"}

    return await _reply(request, body, progress())


async def copy(service: Service, request: Request, body: CopyRequest) -> Response:
    """Write a Modelfile with the settings of a model."""
    name = _free_name(body.destination, service.catalog)
    source = await asyncio.to_thread(service.catalog.find, body.source)
    create_model(name, _settings_of(service.catalog, source.name))
    return Response()


async def delete(service: Service, request: Request, body: NamedRequest) -> Response:
    """Delete the Modelfile of a name."""
    created, name = named_models(), _free_name(body.asked, service.catalog)
    if name not in created:
        await asyncio.to_thread(service.catalog.find, name)
        raise RefusedError(f"create did not give the name {name}, and weights stay. Hint: mlx-flash rm", 403, "model")
    with contextlib.suppress(RefusedError):  # the Modelfile has an error
        (answer,) = service.submit(GenerationRequest(model=name, work="unload"))
        await collect(answer)
    created[name].unlink(missing_ok=True)
    return Response()


def _free_name(name: str, catalog: Catalog) -> str:
    """Return a name without its tag ``latest`` if requests may change what it means.

    Raises:
        RefusedError: the server was started with it.
    """
    name = name.removesuffix(LATEST)
    if catalog.is_given(name):
        raise RefusedError(f"{name} is a name of the server's command line. Hint: take another one.", 403, "model")
    return name


async def _downloaded(repository: str, service: Service) -> AsyncIterator[Status]:
    """Download a model in a process of its own, which ends when the client leaves. Yield nothing if it is here.

    Raises:
        RefusedError: it cannot be downloaded.
    """
    if Path(repository).is_dir() or await asyncio.to_thread(is_downloaded, repository):
        return
    yield {"status": "pulling manifest"}
    async with service.downloads:
        async for status in _told_by_download(repository, service.room):
            yield status
    yield {"status": "verifying sha256 digest"}


async def _told_by_download(repository: str, room: EngineRoom) -> AsyncIterator[Status]:
    digest = hashlib.sha256(repository.encode()).hexdigest()
    status: Status = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
    words = ("-m", "mlx_flash.layout.download", repository)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=DEVNULL, stdout=PIPE)
    assert process.stdout is not None
    try:
        async for text in process.stdout:
            told = json.loads(text)
            if "error" in told:
                raise RefusedError(told["error"], told["status"])
            if not room.is_alive:
                raise RefusedError("the server stops.", 503)
            yield {**status, **told}
        if code := await process.wait():
            raise RefusedError(f"the process that downloads {repository} ended with status {code}.", 500)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _reply(request: Request, body: NamedRequest, progress: AsyncIterator[Status]) -> Response:
    """Return a reply with all lines, or with the last one, which is ``success``."""

    last: list[Status] = [{"status": "waiting"}]

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for status in progress:
                last[0] = status
                yield line(status)
            yield line(_SUCCESS)
        except FlashError as error:
            yield line({"error": str(error)})

    if body.stream is not False:
        return Stream(lines(), [], "application/x-ndjson", lambda: line(last[0]), time.monotonic())

    async def wait() -> None:
        async for _ in progress:
            pass

    await while_connected(request.receive, wait())
    return JSONResponse(_SUCCESS)


def _modelfile_of(source: Source) -> Modelfile:
    """Return the settings of a model, with absolute folders."""
    folder = Path(source.base)
    base = str(folder.absolute()) if folder.is_dir() else source.base
    adapter = None if source.adapter is None else Path(source.adapter).absolute()
    return replace(source.modelfile or Modelfile(path=folder, base=base), base=base, adapter=adapter)


def _settings_of(catalog: Catalog, name: str) -> Modelfile:
    """Return the settings of a model. One that is not on this machine has its repository alone.

    Raises:
        RefusedError: its Modelfile has an error.
    """
    try:
        return _modelfile_of(catalog.find(name))
    except RefusedError as error:
        if error.status != 404:
            raise
        return Modelfile(path=Path(), base=name.removesuffix(LATEST))


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


API_VERSION = "0.13.0"
"""The version of Ollama whose API this is. Clients ask for it, and refuse old ones."""


def ollama_routes(service: Service, *, may_manage: bool) -> list[BaseRoute]:
    """Return the paths of Ollama's dialect.

    Args:
        service: the server.
        may_manage: requests may change which models this machine has.
    """

    async def tags(request: Request) -> Response:
        def found() -> list[dict[str, Any]]:
            models = []
            for name in service.catalog.names():
                with contextlib.suppress(RefusedError):  # a Modelfile with an error
                    models.append(listed(service.catalog.find(name)))
            return models

        return JSONResponse({"models": await asyncio.to_thread(found)})

    async def ps(request: Request) -> Response:
        models = await asyncio.to_thread(lambda: [*map(running, service.room.models)])
        return JSONResponse({"models": models})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": API_VERSION, "mlx_flash": __version__})

    async def show(service: Service, request: Request, body: NamedRequest) -> Response:
        return JSONResponse(await asyncio.to_thread(lambda: shown(service.catalog.find(body.asked))))

    async def missing(request: Request) -> Response:
        error = RefusedError(f"this server has no {request.url.path}.", 501)
        if "/blobs/" in request.url.path and request.method == "HEAD":
            error = RefusedError("there are no blobs here.", 404)
        return error_reply(request.url.path, error)

    async def refuse(service: Service, request: Request, body: Any) -> Response:
        raise RefusedError("models are not managed with --no-auth. Hint: give the server an API key.", 403)

    def managed(path: str, kind: type[Checked], answer: Answerer[Checked], method: str = "POST") -> Route:
        return service.post(path, kind, answer if may_manage else refuse, method)

    return [
        service.post("/api/chat", ChatRequest, chat),
        service.post("/api/generate", GenerateRequest, generate),
        *(service.post(path, OllamaRequest, embed_ollama) for path in ("/api/embed", "/api/embeddings")),
        service.post("/api/show", NamedRequest, show),
        managed("/api/pull", NamedRequest, pull),
        managed("/api/create", CreateRequest, create),
        managed("/api/copy", CopyRequest, copy),
        managed("/api/delete", NamedRequest, delete, "DELETE"),
        Route("/api/tags", tags),
        Route("/api/ps", ps),
        Route("/api/version", version),
        Route("/api/push", missing, methods=["POST"]),
        Route("/api/blobs/{digest:path}", missing, methods=["HEAD", "POST"]),
    ]
