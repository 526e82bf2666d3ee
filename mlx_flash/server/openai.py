"""OpenAI's dialect: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``.

A field that would change the answer unseen, and is not supported, is an error.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_flash import __version__
from mlx_flash.errors import RefusedError
from mlx_flash.server.events import End, Event, Piece, Progress, TokenChance, TokenDetail, ToolCall
from mlx_flash.server.grammar import json_grammar
from mlx_flash.server.request import (
    GenerationRequest,
    Messages,
    Sampling,
    function,
    picture_part,
    thinking_options,
    tool_fields,
)
from mlx_flash.server.service import Asked, Asking, Body, Many, Needed, Service, Whole, Writer, collect, ignore, sent

MAX_CHOICES = 16
"""The most answers to one prompt."""

MAX_PROMPTS = 128
"""The most prompts of a request."""


def _several(given: Any) -> Any:
    """Return the texts of a request, which may have one, as text or as tokens."""
    is_one = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int))
    return [given] if is_one else given


Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f]+$")]
ModelName = Annotated[Name, BeforeValidator(lambda name: name or "default_model")]
"""The name of a model; none, or an empty one, is the default model's."""
StopText = Annotated[str, Field(max_length=1000)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[Many[Token], Field(min_length=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Limit = Annotated[Count | None, BeforeValidator(lambda number: None if number == -1 else number)]
"""The most tokens of an answer; -1 is as many as the server allows."""
Penalty = Annotated[float, Field(ge=-100, le=100)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Divisor = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda number: max(0, number))]
Seed = Annotated[int, Field(ge=-1, lt=2**63)]
NumLikeliest = Annotated[int, Field(ge=0, le=20)]
Stop = Annotated[Many[StopText], Field(max_length=64), BeforeValidator(_several)]
Recent = Annotated[int, Field(ge=1, le=1_000_000)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/@+-]{1,256}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SamplingOptions(Body):
    """Settings of an answer that OpenAI's dialect and Ollama's have."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    repetition_penalty: Divisor | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class SamplingFields(Asking, SamplingOptions):
    """Fields of every request for text: OpenAI's, and those that mlx-lm's server adds."""

    model: ModelName = "default_model"
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_context_size: Recent | None = None
    presence_context_size: Recent | None = None
    frequency_context_size: Recent | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=10_000),
        ]
        | None
    ) = None
    max_tokens: Limit = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Form | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class ImageUrl(Body):
    """The place of a picture. How finely it is looked at, the model's processor decides."""

    url: str


class Part(Body):
    """A part of a message, in chats and in responses. Sounds and files are not supported."""

    needed: ClassVar[Needed] = {"image_url": ("image_url",), "input_image": ("image_url",)}

    type: Literal[
        "text", "refusal", "image_url",
        "input_text", "output_text", "summary_text", "reasoning_text", "input_image",
    ]  # fmt: skip
    text: str = ""
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


def parts_in(content: str | Sequence[Part] | None, field: str) -> list[dict[str, str]]:
    """Return texts and pictures of a message. ``field`` is its place in the request."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    found = []
    for i, part in enumerate(content):
        if isinstance(part.image_url, ImageUrl):
            found.append(picture_part(part.image_url.url, f"{field}.{i}.image_url.url"))
        elif part.image_url is not None:
            found.append(picture_part(part.image_url, f"{field}.{i}.image_url"))
        else:
            found.append({"type": "text", "text": part.text or part.refusal or ""})
    return found


class Called(Body):
    """The function of a call, and its arguments."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(Body):
    """A call that the model asked for in an earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Part] | None = None
    name: str | None = None
    tool_calls: Many[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def parts(self, field: str) -> list[dict[str, str]]:
        """Return its texts and pictures, as :func:`parts_in` does. ``field`` is its place in the request."""
        return parts_in(self.content, f"{field}.content")


class Function(Body):
    """The description of a function, or its name."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A function that the model may call, or a tool that this server cannot run."""

    needed: ClassVar[Needed] = {"function": ("function",)}

    type: str = "function"
    function: Function | None = None


class ToolChoice(Body):
    """A function that the answer has to call. Chats have it in a part of its own, responses here."""

    type: Literal["function", "custom"]
    name: FunctionName | None = None
    function: Function | None = None


AnyToolChoice = Literal["none", "auto", "required", "any"] | ToolChoice


def chosen_tools(choice: AnyToolChoice | None, tools: list[dict[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a `GenerationRequest` about functions."""
    if isinstance(choice, ToolChoice):
        name = (choice.function or choice).name or ""
        return tool_fields(tools, must_call=True, name=names.get(name, name))
    return tool_fields([] if choice == "none" else tools, must_call=choice in ("required", "any"))


class JsonSchema(Body):
    """A schema of the answer."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Form(JsonSchema):
    """The form of the answer. Chats have a schema in a part of its own, the other dialects and llama.cpp here."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def grammar_of(form: Form | None, field: str) -> str | None:
    """Return the rule that an answer follows; None for any text."""
    if form is None:
        return None
    place = f"{field}.schema" if form.json_schema is None else f"{field}.json_schema.schema"
    schema = (form.json_schema or form).schema_
    if form.type == "text" and schema is None:
        return None
    if form.type != "json_object" and (form.type == "text") != (schema is None):
        raise RefusedError(f"{place} is there if, and only if, the type is json_schema.", 400, place)
    return json_grammar(schema, place)


class Thinking(Body):
    """The choice to reason first, as several programs write it. The chat template decides how long."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    enabled: bool | None = None
    effort: Effort | None = None

    @property
    def thinks(self) -> bool | None:
        """True to reason first, False not to; None lets the template choose."""
        return self.enabled if self.type is None else self.type != "disabled"


class LogprobFields(Body):
    """The wish for probabilities of tokens, in chats and in Ollama's dialect."""

    logprobs: bool | None = None
    top_logprobs: NumLikeliest | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number and not info.data.get("logprobs"):
            raise ValueError("top_logprobs needs logprobs")
        return number

    @property
    def num_likeliest(self) -> int | None:
        """The number of likeliest tokens that each token comes with; None for no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatRequest(SamplingFields, LogprobFields):
    """A request for the next message of a conversation."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Limit = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Thinking | None = None
    thinking: Thinking | bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[Many[Literal["text"]], Field(min_length=1)] | None = None


class CompletionRequest(SamplingFields):
    """A request to go on with some texts."""

    prompt: Annotated[Many[str | Tokens], Field(min_length=1, max_length=MAX_PROMPTS), BeforeValidator(_several)]
    max_tokens: Limit | Literal[0] = None
    logprobs: NumLikeliest | None = None
    echo: bool | None = None


class Chunks(Writer):
    """A reply: a whole one, or a stream of chunks, each with a part of one answer. Usage counts each prompt once."""

    def __init__(self, body: SamplingFields, num_answers: int, num_prompts: int = 1) -> None:
        self._wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._is_chat = isinstance(body, ChatRequest)
        kind = f"chat.completion{'.chunk' if body.stream else ''}" if self._is_chat else "text_completion"
        self._head = {  # the reply and all parts of its stream begin with it
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"mlx-flash-{__version__}",
        }
        self._num_prompts, self._num_calls = num_prompts, [0] * num_answers
        self._ends: dict[int, End] = {}

    def whole(self, wholes: list[Whole]) -> dict[str, Any]:
        choices = [
            self._choice(i, self._message(whole), whole.tokens, whole.end.reason) for i, whole in enumerate(wholes)
        ]
        return {**self._head, "choices": choices, "usage": usage_of([each.end for each in wholes], self._num_prompts)}

    def _message(self, whole: Whole) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": whole.text}
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        if whole.reasoning:
            message["reasoning"] = whole.reasoning
        if whole.calls:
            message |= {"tool_calls": [_call(call) for call in whole.calls], "content": whole.text or None}
        return {"message": message}

    def begin(self) -> Iterator[bytes]:
        for number in range(len(self._num_calls) if self._is_chat else 0):
            yield self._chunk(self._choice(number, {"delta": {"role": "assistant", "content": ""}}))

    def write(self, number: int, event: Event) -> Iterator[bytes]:
        """Yield the parts for an event. A comment shows how far the work before the next token is."""
        if isinstance(event, Progress):
            yield f": {event.stage} {event.done}/{event.total}\n\n".encode()
        elif isinstance(event, Piece):
            name = "content" if event.kind == "text" else "reasoning"
            yield self._chunk(self._choice(number, self._part(**{name: event.text}), event.tokens))
        elif isinstance(event, ToolCall):
            call = {"index": self._num_calls[number], **_call(event)}
            self._num_calls[number] += 1
            yield self._chunk(self._choice(number, self._part(tool_calls=[call])))
        elif isinstance(event, End):
            yield self._chunk(self._choice(number, self._part(), reason=event.reason))
            self._ends[number] = event
            if len(self._ends) == len(self._num_calls):
                yield from self._close()

    def beat(self) -> bytes:
        return self._chunk(self._choice(0, self._part()))

    def _part(self, **delta: Any) -> dict[str, Any]:
        return {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}

    def _choice(
        self, number: int, part: dict[str, Any], tokens: Sequence[TokenDetail] = (), reason: str | None = None
    ) -> dict[str, Any]:
        details: dict[str, Any] | None = None
        if tokens:
            details = {"content": shown_logprobs(tokens), "refusal": None} if self._is_chat else _text_logprobs(tokens)
        return {"index": number, **part, "logprobs": details, "finish_reason": reason}

    def _chunk(self, *choices: dict[str, Any]) -> bytes:
        return sent({**self._head, **({"usage": None} if self._wants_usage else {}), "choices": choices})

    def _close(self) -> Iterator[bytes]:
        if self._wants_usage:
            ends = [self._ends[number] for number in sorted(self._ends)]
            yield sent({**self._head, "choices": [], "usage": usage_of(ends, self._num_prompts)})
        yield b"data: [DONE]\n\n"


def sampling_of(body: Body) -> Sampling:
    """Return how the tokens of an answer are chosen: by the fields of a request that have the same names."""
    given = {each.name: value for each in fields(Sampling) if (value := getattr(body, each.name, None)) is not None}
    bias = tuple((int(token), value) for token, value in given.get("logit_bias", {}).items())
    return Sampling(**{**given, "logit_bias": bias})


def usage_of(ends: list[End], num_prompts: int = 1) -> dict[str, Any]:
    """Return the numbers of tokens of a reply."""
    each = len(ends) // num_prompts
    prompts = ends[::each]
    num_prompt, num_tokens = sum(end.num_prompt for end in prompts), sum(end.num_tokens for end in ends)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.num_cached for end in prompts)},
    }


def chat(body: ChatRequest) -> Asked:
    """Translate a request for the next message of a conversation."""
    messages = Messages()
    for i, message in enumerate(body.messages):
        add_message(messages, message, f"messages.{i}")
    asked = GenerationRequest(
        model=body.model,
        messages=messages.found,
        **chosen_tools(body.tool_choice, shown_tools(body.tools), {}),
        template_options=_template_options(body),
        sampling=sampling_of(body),
        num_choices=body.n or 1,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=body.stop or (),
        top_logprobs=body.num_likeliest,
        grammar=grammar_of(body.response_format, "response_format"),
        one_call=body.parallel_tool_calls is False,
        continues=bool(body.continue_final_message),
    )
    return Asked([asked], Chunks(body, asked.num_choices), streams=bool(body.stream))


def shown_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Return the functions of a request as chat templates take them. A tool that this server cannot run is ignored."""
    found = []
    for tool in tools or ():
        if tool.function is not None:
            given = tool.function
            found.append(function(given.name, given.description, given.parameters))
        else:
            ignore(f"tools ({tool.type})")
    return found


def _template_options(body: ChatRequest) -> dict[str, Any]:
    """Return the variables of the chat template: how much to reason, in the ways that programs say it."""
    asked = [each for each in (body.thinking, body.reasoning) if isinstance(each, Thinking)]
    thinks = [body.enable_thinking, body.thinking if isinstance(body.thinking, bool) else None]
    thinks = [each for each in (*thinks, *(each.thinks for each in asked)) if each is not None]
    efforts = [each for each in (body.reasoning_effort, *(each.effort for each in asked)) if each is not None]
    return thinking_options(next(iter(thinks), None), next(iter(efforts), None)) | (body.chat_template_kwargs or {})


def add_message(found: Messages, message: Message, field: str) -> None:
    """Add a message to a conversation."""
    parts = message.parts(field)
    if message.role == "tool":
        found.add_result(message.tool_call_id, parts, name=message.name)
        return
    added = found.begin().add(message.role, parts)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    more = {"name": message.name, "reasoning_content": reasoning}
    added |= {name: value for name, value in more.items() if value is not None}
    for call in message.tool_calls or ():
        found.add_call(call.id, call.function.name, call.function.arguments)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id or f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def shown_logprobs(tokens: Sequence[TokenDetail]) -> list[dict[str, Any]]:
    """Return the probabilities of some tokens as a client reads them."""

    def shown(chance: TokenChance) -> dict[str, Any]:
        text = chance.text.encode("utf-8", "replace")
        return {"id": chance.token, "token": chance.text, "logprob": chance.logprob, "bytes": list(text)}

    return [{**shown(chosen), "top_logprobs": [shown(chance) for chance in likeliest]} for chosen, *likeliest in tokens]


def _text_logprobs(tokens: Sequence[TokenDetail]) -> dict[str, Any]:
    return {
        "tokens": [chosen.text for chosen, *_ in tokens],
        "token_logprobs": [chosen.logprob for chosen, *_ in tokens],
        "top_logprobs": [
            None if chosen.logprob is None else {each.text: each.logprob for each in likeliest}
            for chosen, *likeliest in tokens
        ],
    }


def complete(body: CompletionRequest) -> Asked:
    """Translate a request to go on with some texts."""
    plain = GenerationRequest(
        model=body.model,
        max_tokens=body.max_tokens,
        stop=body.stop or (),
        top_logprobs=body.logprobs,
        echo=bool(body.echo),
        grammar=grammar_of(body.response_format, "response_format"),
        sampling=sampling_of(body),
        num_choices=body.n or 1,
    )
    asked = works_on(plain, body.prompt)
    return Asked(asked, Chunks(body, plain.num_choices * len(asked), len(asked)), streams=bool(body.stream))


def works_on(plain: GenerationRequest, texts: Sequence[str | Sequence[int]]) -> list[GenerationRequest]:
    """Return a request for each of some prompts, which are texts or tokens."""
    return [replace(plain, prompt=text) if isinstance(text, str) else replace(plain, tokens=text) for text in texts]


_NUM_TOGETHER = 64
"""Texts of a request that are sent to the generation thread at a time."""

Text = Annotated[str, Field(min_length=1)]
Vector = np.ndarray[Any, np.dtype[np.float32]]


class EmbeddingRequest(Asking):
    """OpenAI's request for the vectors of texts."""

    model: Name = "default_model"
    input: Annotated[Many[Text | Tokens], Field(min_length=1, max_length=2048), BeforeValidator(_several)]
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] | None = None


async def embed(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    """Answer a request of OpenAI's for the vectors of texts."""
    wholes = await read_texts(service, request, GenerationRequest(model=body.model, work="embed"), body.input)
    data: list[Any] = []
    for i, vector in enumerate(normalized(whole, body.dimensions) for whole in wholes):
        is_text = body.encoding_format == "base64"
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": shown})
    usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(whole.end.num_prompt for whole in wholes))
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage})


async def read_texts(
    service: Service, request: Request, plain: GenerationRequest, texts: Sequence[str | Sequence[int]]
) -> list[Whole]:
    """Return the answers to a request for the vectors of several texts."""
    works = works_on(plain, texts)
    wholes: list[Whole] = []
    for start in range(0, len(works), _NUM_TOGETHER):
        wholes += await collect(request, service.submit(*works[start : start + _NUM_TOGETHER]))
    return wholes


def normalized(whole: Whole, dimensions: int | None = None) -> Vector:
    """Return a vector with length 1: its first dimensions, if so many are wanted."""
    vector = np.array(whole.end.vector, np.float32)
    if dimensions is not None and dimensions > len(vector):
        raise RefusedError(f"this model's vectors have {len(vector)} dimensions.", 400, "dimensions")
    vector = vector[:dimensions]
    found: Vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return found
