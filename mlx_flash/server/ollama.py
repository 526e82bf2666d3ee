"""Ollama's dialect: answers, vectors, and facts about models. Requests neither download nor change models.

A field that would change the answer unseen, and is not supported, is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from huggingface_hub import try_to_load_from_cache
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mlx_flash import __version__
from mlx_flash.errors import RefusedError
from mlx_flash.files import read_json_object
from mlx_flash.modelfile.parse import recent_tokens
from mlx_flash.monitor.words import seconds_of
from mlx_flash.server import openai
from mlx_flash.server.catalog import LATEST, Source
from mlx_flash.server.events import End, Event, Piece, Progress, TokenDetail, ToolCall
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.request import (
    GenerationRequest,
    Messages,
    Sampling,
    content_of,
    continues,
    data_url,
    picture_part,
    thinking_options,
    tool_fields,
)
from mlx_flash.server.service import Asked, Asking, Body, Many, Service, Whole, Writer, collect, error_body, line
from mlx_flash.vision.detect import is_installed, loads_with_vlm


def time_text(when: datetime) -> str:
    """Return a time of UTC as replies have it."""
    return when.isoformat().replace("+00:00", "Z")


class Options(openai.SamplingOptions):
    """Settings of an answer. Others have no effect, as with Ollama; of resources, the server's plan decides."""

    repetition_penalty: openai.Divisor | None = Field(default=None, alias="repeat_penalty")
    repeat_last_n: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None


KeepAlive = Annotated[
    float | None, BeforeValidator(lambda value: seconds_of(value) if isinstance(value, str) else value)
]
"""Seconds, or a duration such as ``1h30m``, which becomes seconds."""


class TextRequest(Asking, openai.LogprobFields):
    """Fields of requests for text."""

    model: openai.Name
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: KeepAlive = None
    think: bool | openai.Effort | None = None


class Message(openai.Message):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Many[str] | None = None
    tool_name: str | None = None

    @model_validator(mode="after")
    def _has_names_of_openai(self) -> Message:
        self.name = self.tool_name or self.name
        self.reasoning_content = self.thinking or self.reasoning_content
        return self

    def parts(self, field: str) -> list[dict[str, str]]:
        return _parts(self.content, self.images, f"{field}.")


class ChatRequest(TextRequest):
    """A request for the next message of a conversation. One without messages loads or unloads the model."""

    messages: Many[Message] | None = None
    tools: Annotated[Many[openai.Tool], Field(max_length=512)] | None = None


class GenerateRequest(TextRequest):
    """A request to answer a text. One without a text loads or unloads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Literal[""] | None = None
    images: Many[str] | None = None

    @field_validator("images")
    @classmethod
    def _have_places(cls, images: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if images and (info.data.get("raw") or not info.data.get("prompt")):
            raise ValueError("images belong to a prompt that is not raw")
        return images


def chat(body: ChatRequest) -> Asked:
    """Translate a request for the next message of a conversation."""
    if not body.messages:
        return _asked(body, None)
    messages = Messages()
    for i, message in enumerate(body.messages):
        openai.add_message(messages, message, f"messages.{i}")
    tools = tool_fields(openai.shown_tools(body.tools))
    asked = GenerationRequest(model=body.model, messages=messages.found, continues=continues(messages.found), **tools)
    return _asked(body, asked)


def generate(body: GenerateRequest) -> Asked:
    """Translate a request that has a text."""
    asked = None
    if body.prompt and body.raw:
        asked = GenerationRequest(model=body.model, prompt=body.prompt)
    elif body.prompt:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = content_of(_parts(body.prompt, body.images, ""))
        messages: list[dict[str, Any]] = [*system, {"role": "user", "content": content}]
        asked = GenerationRequest(model=body.model, messages=messages)
    return _asked(body, asked)


def _asked(body: TextRequest, asked: GenerationRequest | None) -> Asked:
    """Return a translated request. One without a conversation or a text loads the model, or unloads it."""
    asked = load_request(body.model, body.keep_alive) if asked is None else _with_settings(asked, body)
    return Asked([asked], _Lines(body, asked.work), streams=body.stream is not False)


def load_request(model: str, keep_alive: float | None) -> GenerationRequest:
    """Return a request that loads a model, or unloads it if it is kept for no time."""
    return GenerationRequest(model=model, work="unload" if keep_alive == 0 else "load", keep_alive=keep_alive)


class _Lines(Writer):
    """The reply to a request: lines, or one object."""

    media_type = "application/x-ndjson"

    def __init__(self, body: TextRequest, work: str) -> None:
        self._body, self._work, self._began = body, work, time.perf_counter_ns()

    def whole(self, wholes: list[Whole]) -> dict[str, Any]:
        (whole,) = wholes
        return {**self.part(whole.text, whole.reasoning, whole.calls, whole.tokens), **self.end(whole.end)}

    def part(
        self,
        text: str = "",
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        tokens: Sequence[TokenDetail] = (),
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self._body.model, "created_at": time_text(datetime.now(UTC))}
        thinking = {"thinking": reasoning} if reasoning else {}
        if isinstance(self._body, ChatRequest):
            found["message"] = {"role": "assistant", "content": text, **thinking}
            if calls:
                found["message"]["tool_calls"] = [
                    {"function": {"index": i, "name": call.name, "arguments": call.arguments}}
                    for i, call in enumerate(calls)
                ]
        else:
            found |= {"response": text, **thinking}
        if tokens:
            found["logprobs"] = openai.shown_logprobs(tokens)
        return {**found, "done": False}

    def end(self, end: End) -> dict[str, Any]:
        """Return what the last part has beside the fields of others. Durations are nanoseconds."""
        if self._work != "answer":
            return {"done": True, "done_reason": self._work}
        reason = "length" if end.reason == "length" else "stop"
        seconds = {"load": end.load_seconds, "prompt_eval": end.prompt_seconds, "eval": end.answer_seconds}
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": time.perf_counter_ns() - self._began,
            **{f"{name}_duration": round(each * 1e9) for name, each in seconds.items()},
            "prompt_eval_count": end.num_prompt,
            "prompt_eval_cached_count": end.num_cached,
            "eval_count": end.num_tokens,
        }

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        if isinstance(event, Progress):
            yield line({**self.part(), "status": event.stage, "completed": event.done, "total": event.total})
        elif isinstance(event, Piece):
            texts = ("", event.text) if event.kind == "reasoning" else (event.text, "")
            yield line(self.part(*texts, tokens=event.tokens))
        elif isinstance(event, ToolCall):
            yield line(self.part(calls=[event]))
        elif isinstance(event, End):
            yield line({**self.part(), **self.end(event)})

    def fail(self, path: str, error: RefusedError) -> bytes:
        return line(error_body(path, error))

    def beat(self) -> bytes:
        return line(self.part())


def _with_settings(asked: GenerationRequest, body: TextRequest) -> GenerationRequest:
    options, think = body.options or Options(), body.think
    limit = options.num_predict
    return replace(
        asked,
        template_options=thinking_options(None, think) if isinstance(think, str) else thinking_options(think),
        sampling=_sampling(options),
        max_tokens=limit if limit is not None and limit > 0 else None,
        stop=options.stop or (),
        top_logprobs=body.num_likeliest,
        grammar=_grammar(body.format),
        keep_alive=body.keep_alive,
    )


def _sampling(options: Options) -> Sampling:
    found, recent = openai.sampling_of(options), recent_tokens(options.repeat_last_n)
    if recent == 0:
        return replace(found, repetition_penalty=0.0, presence_penalty=0.0, frequency_penalty=0.0)
    found = replace(found, presence_context_size=recent, frequency_context_size=recent)
    is_default = options.repeat_last_n is None and found.repetition_penalty is None
    return found if is_default else replace(found, repetition_context_size=recent)


def _grammar(form: str | dict[str, Any] | None) -> str | None:
    if not form and form != {}:
        return None
    return json_grammar(form if isinstance(form, dict) else None, "format")


def _parts(text: str | None, images: Sequence[str] | None, field: str) -> list[dict[str, str]]:
    """Return the parts of a message: Ollama's pictures are base64, without a kind, and come before the text."""
    parts = [picture_part(data_url(data), f"{field}images.{i}") for i, data in enumerate(images or ())]
    return [*parts, {"type": "text", "text": text or ""}]


class EmbeddingRequest(Asking):
    """Ollama's request for the vectors of texts, or for that of its older ``prompt``."""

    model: openai.Name
    input: str | Annotated[Many[openai.Text], Field(max_length=2048)] = ""
    prompt: str = ""
    dimensions: openai.Count | None = None
    keep_alive: KeepAlive = None


async def embed(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    """Answer a request of Ollama's. One without text loads the model, or unloads it."""
    began = time.perf_counter_ns()
    given = body.prompt or body.input
    texts = [given] if isinstance(given, str) else given
    if not given:
        await collect(request, service.submit(load_request(body.model, body.keep_alive)))
        texts = []
    plain = GenerationRequest(model=body.model, work="embed", keep_alive=body.keep_alive)
    wholes = await openai.read_texts(service, request, plain, texts)
    if request.url.path.endswith("/embeddings"):  # of the length that the model gives it, as in Ollama
        return JSONResponse({"embedding": [*wholes[0].end.vector] if wholes else []})
    vectors = [openai.normalized(whole, body.dimensions).tolist() for whole in wholes]
    found: dict[str, Any] = {"model": body.model, "embeddings": vectors}
    found["total_duration"] = time.perf_counter_ns() - began
    found["load_duration"] = round(sum(whole.end.load_seconds for whole in wholes) * 1e9)
    return JSONResponse({**found, "prompt_eval_count": sum(whole.end.num_prompt for whole in wholes)})


_FOR_EVER = timedelta(days=36_500)
"""The time for which a model stays that never leaves. Clients show "for ever" from some decades on."""

_MOST_BYTES = 64 << 20
"""The longest file of settings of a model."""


_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}
"""Sizes of a model: Ollama's names, and the entries of ``config.json``."""


def folder_of(source: Source) -> Path:
    """Return the folder of a model on this machine; one that does not exist if it is not downloaded."""
    is_repository = source.base.count("/") == 1 and not Path(source.base).is_dir()
    config = try_to_load_from_cache(source.base, "config.json") if is_repository else None
    return Path(config).parent if isinstance(config, str) else Path(source.base)


def listed(source: Source) -> dict[str, Any]:
    """Return a model as the list of models has it."""
    folder = folder_of(source)
    states = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    modified = max((state.st_mtime for _, state in states), default=float(source.created))
    config = read_json_object(folder / "config.json", _MOST_BYTES)
    has_tag = ":" in source.name.rpartition("/")[2]  # as all names of Ollama's have
    name = source.name if has_tag else source.name + LATEST
    family = str(config.get("model_type", ""))
    quantization = config.get("quantization") or config.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    dtype = config.get("dtype") or config.get("torch_dtype") or ""
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(datetime.fromtimestamp(modified, UTC)),
        "size": sum(state.st_size for _, state in states),
        "digest": hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, s in states]).encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": "",
            "quantization_level": f"{bits}-bit" if bits else str(dtype),
        },
    }


def shown(source: Source) -> dict[str, Any]:
    """Return the facts about one model."""
    folder = folder_of(source)
    config = read_json_object(folder / "config.json", _MOST_BYTES)
    template = str(source.tokenizer_settings.get("chat_template") or _template(folder))
    entry = listed(source)
    family = str(config.get("model_type", ""))
    info: dict[str, Any] = {"general.architecture": family, "general.basename": source.name}
    text = {**config, **(config["text_config"] if isinstance(config.get("text_config"), dict) else {})}
    for name, key in _SIZES.items():
        if isinstance(text.get(key), int):
            info[f"{family}.{name}"] = text[key]
    capabilities = ["completion"]
    capabilities += ["tools"] if "tools" in template else []
    if folder.is_dir() and is_installed() and loads_with_vlm(folder, source.vision, prefers=False):
        capabilities.append("vision")
    capabilities += ["thinking"] if "enable_thinking" in template or "reasoning_effort" in template else []
    return {
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


def _template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_json_object(folder / "tokenizer_config.json", _MOST_BYTES).get("chat_template")
    return template if isinstance(template, str) else ""


class NamedRequest(Body):
    """A request about a model. Older clients say ``name`` for ``model``; Ollama's own command sends both."""

    model: openai.Name | Literal[""] = ""
    name: openai.Name | Literal[""] = ""


API_VERSION = "0.13.0"
"""The version of Ollama whose API this is. Clients ask for it, and refuse old ones."""


def ollama_routes(service: Service) -> list[BaseRoute]:
    """Return the paths of Ollama's dialect."""

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
        return JSONResponse(await asyncio.to_thread(lambda: shown(service.catalog.find(body.model or body.name))))

    return [
        service.generates("/api/chat", ChatRequest, chat),
        service.generates("/api/generate", GenerateRequest, generate),
        *(service.post(path, EmbeddingRequest, embed) for path in ("/api/embed", "/api/embeddings")),
        service.post("/api/show", NamedRequest, show),
        Route("/api/tags", tags),
        Route("/api/ps", ps),
        Route("/api/version", version),
    ]
