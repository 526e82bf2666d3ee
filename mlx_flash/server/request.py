"""A request as the generation thread gets it from any dialect: plain data.

Pictures are data URLs: nothing is read from files or fetched. What is checked here needs no library of pictures: how a
picture is given, and its length.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from mlx_flash.errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The choice of tokens. None takes the default of the model, or mlx-lm's."""

    temperature: float | None = None  # 0 takes the likeliest token
    top_p: float | None = None  # keep the likeliest tokens of this share; 0 and 1 keep all
    top_k: int | None = None  # keep so many of the likeliest tokens; 0 keeps all
    min_p: float | None = None  # keep tokens of this share of the likeliest one's probability
    xtc_probability: float | None = None
    xtc_threshold: float | None = None  # of leaving out the likeliest tokens
    repetition_penalty: float | None = None  # divisor of the logits of recent tokens; 0 for none
    presence_penalty: float | None = None  # subtracted from the logits of recent tokens
    frequency_penalty: float | None = None  # subtracted as often as a recent token occurs
    repetition_context_size: int | None = None  # number of recent tokens
    presence_context_size: int | None = None
    frequency_context_size: int | None = None
    logit_bias: Sequence[tuple[int, float]] = ()  # (token, number added to its logit) pairs
    seed: int | None = None  # of the request's own random numbers; None takes the model's default, and -1 draws one
    choice: int = 0  # number of the answer, where a request has several: it is added to the seed
    drawn_seed: int = 0  # the seed where neither the request nor the model names one

    def given(self, *names: str) -> dict[str, Any]:
        """Return fields that are set, of all or some."""
        values = {name: getattr(self, name) for name in names or (each.name for each in fields(Sampling))}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def named_seed(self) -> int | None:
        """The seed of an answer, if its request or the model names one: it has the same tokens each time."""
        return None if self.seed is None or self.seed < 0 else (self.seed + self.choice) % 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults(Sampling):
    """The settings of requests that leave them out."""

    max_tokens: int = 4096  # the most tokens of an answer
    stop: Sequence[str] = ()  # texts that end an answer, beside those of the request
    template_options: Mapping[str, Any] | None = None  # variables of the chat template, below those of the request


_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""The nearest levels of effort that chat templates know."""


def thinking_options(thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Return the variables of chat templates that say how much to reason."""
    found: dict[str, Any] = {}
    if thinks is None and effort is not None:
        thinks = effort != "none"
    if thinks is not None:
        found["enable_thinking"] = thinks
    if effort not in (None, "none"):
        found["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return found


def continues(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether a conversation ends with text of the assistant, from which an answer may go on."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer to generate, or several.

    Exactly one of ``messages``, ``prompt`` and ``tokens`` is set, unless a model is loaded or unloaded.
    """

    model: str  # name of the model, as the client gave it
    number: int = 0  # of the answer, in the order of arrival
    work: Literal["answer", "embed", "count", "load", "unload"] = "answer"
    messages: Sequence[dict[str, Any]] | None = None  # as templates take them: arguments of calls are objects
    pictures: Sequence[str] = ()  # base64, in the order of the ``{"type": "image"}`` parts of messages
    prompt: str | None = None  # text that the model goes on with
    echo: bool = False  # begin the answer with the prompt, and its log probabilities if those are wanted
    tokens: Sequence[int] | None = None  # the same as numbers
    tools: Sequence[dict[str, Any]] | None = None  # JSON descriptions of functions, for the chat template
    template_options: dict[str, Any] | None = None  # further variables of the chat template
    sampling: Sampling = Sampling()  # the choice of tokens
    num_choices: int = 1  # answers that are wanted, each with random numbers of its own
    max_tokens: int | None = None  # the most tokens of the answer; None takes the model's default
    stop: Sequence[str] = ()  # texts that end the answer. They are not part of it
    top_logprobs: int | None = None  # log probabilities of each token and so many likeliest ones; None for none
    grammar: str | None = None  # a rule of llguidance's that an answer follows unless it is a call
    must_call: Sequence[str] = ()  # names of functions, one of which the answer has to call; none if it may be text
    one_call: bool = False  # end the answer after the first tool call
    continues: bool = False  # the answer goes on from the last message, which is the assistant's
    keep_alive: float | None = None  # seconds; None takes the server's default, a negative number means for ever

    def completed(self, defaults: Defaults) -> GenerationRequest:
        """Return the request with the settings of its model where it has none of its own."""
        return replace(
            self,
            sampling=replace(defaults, **self.sampling.given()),
            max_tokens=defaults.max_tokens if self.max_tokens is None else self.max_tokens,
            stop=(*self.stop, *defaults.stop),
        )

    @property
    def has_prompt(self) -> bool:
        """True if it has a prompt: requests that load or unload a model have none."""
        return self.work in ("answer", "embed", "count")

    @property
    def is_read(self) -> bool:
        """True if the hidden states of the prompt are wanted."""
        return self.work == "embed" or (self.echo and self.top_logprobs is not None)

    @property
    def has_form(self) -> bool:
        """True if the answer may not be any text."""
        return self.grammar is not None or bool(self.must_call)


TEXT = "input"
"""The argument of functions that take one text."""


def content_of(parts: Sequence[dict[str, str]], between: str = "") -> str | list[dict[str, str]]:
    """Return the content of a message: text alone if it has no picture."""
    if all(part["type"] == "text" for part in parts):
        return between.join(part["text"] for part in parts)
    return list(parts)


def joined(first: Any, second: Any, between: str) -> Any:
    """Return the contents of two messages as one: text, or parts if one has pictures."""
    if isinstance(first, str) and isinstance(second, str):
        return between.join(text for text in (first, second) if text)
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second) if each]
    return [part for each in parts for part in each]


class Messages:
    """A conversation as chat templates take it, from the parts of a request in their order.

    Parts of one role in a row are one message until :meth:`begin`, with ``between`` between their texts. Results of
    calls are messages of their own.
    """

    def __init__(self, earlier: Messages | None = None, between: str = "") -> None:
        self.found: list[dict[str, Any]] = [] if earlier is None else [*earlier.found]
        self._between = between
        self.names: dict[str | None, str] = {}  # of functions that were called, by the numbers of the calls
        self._broken: set[str | None] = set() if earlier is None else {*earlier._broken}
        self._is_new = True

    def begin(self) -> Messages:
        self._is_new = True
        return self

    def add(self, role: str, parts: Sequence[dict[str, str]]) -> dict[str, Any]:
        message = self._last("system" if role == "developer" else role)
        message["content"] = joined(message["content"], content_of(parts, self._between), self._between)
        return message

    def add_answer(self, text: str = "", reasoning: str = "") -> None:
        message = self._last("assistant")
        message["content"] += text
        if reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning

    def add_call(self, number: str | None, name: str, arguments: str | dict[str, Any]) -> None:
        """Add a call of the model's. One whose arguments are no JSON object is text: templates want objects."""
        try:
            value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            value = None
        message = self._last("assistant")
        if isinstance(value, dict):
            self.names[number] = name
            function = {"name": name, "arguments": value}
            message.setdefault("tool_calls", []).append({"id": number, "type": "function", "function": function})
        else:
            self._broken.add(number)
            text = f'{{"name": "{name}", "arguments": {arguments}'
            message["content"] = joined(message["content"], text, "\n")

    def add_result(self, number: str | None, parts: Sequence[dict[str, str]], **more: str | None) -> None:
        """Add the result of a call. Its pictures follow in a message of the user, where templates show them.

        The result of a call that is text is the user's.
        """
        texts = self._between.join(part["text"] for part in parts if part["type"] == "text")
        message: dict[str, Any] = {"role": "user", "content": texts}
        if number not in self._broken:
            fields = {"role": "tool", "tool_call_id": number, **more}
            message |= {name: value for name, value in fields.items() if value is not None}
        self.found.append(message)
        self._is_new = False
        if pictures := [part for part in parts if part["type"] == "image"]:
            self.add("user", pictures)

    def _last(self, role: str) -> dict[str, Any]:
        if self._is_new or self.found[-1]["role"] != role:
            self.found.append({"role": role, "content": ""})
        self._is_new = False
        return self.found[-1]


def text_function(name: str, description: str | None) -> dict[str, Any]:
    """Return a function that takes one text, in OpenAI's form: what others call a custom tool."""
    schema = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}
    return function(name, description, schema)


def function(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the description of a function in OpenAI's form, which chat templates know."""
    found: dict[str, Any] = {"name": name}
    if description is not None:
        found["description"] = description
    if parameters is not None:
        found["parameters"] = parameters
    return {"type": "function", "function": found}


def tool_fields(tools: Sequence[dict[str, Any]], *, must_call: bool = False, name: str | None = None) -> dict[str, Any]:
    """Return the fields of a `GenerationRequest` about functions."""
    names = [tool["function"]["name"] for tool in tools]
    if must_call and (name not in names if name is not None else not names):
        raise RefusedError(
            f"tool_choice names {'a function' if name is None else repr(name)}, and tools has "
            f"{', '.join(map(repr, names)) or 'no functions'}.",
            400,
            "tool_choice",
        )
    must = [name] if name is not None else names
    return {"tools": tools or None, "must_call": must if must_call else []}


MAX_PICTURES = 16
"""The most pictures of a request."""

MAX_PICTURE_BYTES = 20 << 20
"""The most bytes of all pictures of a request."""

_MAX_HEAD = 200
"""The most characters before the data in a data URL. Matching takes 70 bytes for each."""

_DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(;[\w-]+=[\w-]+)*;base64,", re.IGNORECASE)


def picture_part(source: str, field: str) -> dict[str, str]:
    """Return a picture as a part of a message, for :func:`with_pictures`."""
    return {"type": "image", "source": source, "field": field}


def data_url(data: str) -> str:
    """Return base64 text as a data URL."""
    return f"data:;base64,{data}"


def with_pictures(request: GenerationRequest) -> GenerationRequest:
    """Return a request with its pictures taken out of its messages, where their places stay marked."""
    sources: list[dict[str, str]] = []
    messages = []
    for message in request.messages or ():
        content = message.get("content")
        if isinstance(content, list):
            own = [part for part in content if part["type"] == "image"]
            if message["role"] != "user":
                raise RefusedError("pictures belong to messages of the user.", 400, own[0]["field"])
            sources += own
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
            message = {**message, "content": content}
        messages.append(message)
    if len(sources) > MAX_PICTURES:
        raise RefusedError(f"the request has {len(sources)} pictures, {MAX_PICTURES} are allowed.", 400, "messages")
    found: list[str] = []
    total = 0
    for part in sources:
        if (head := _DATA_URL.match(part["source"], 0, _MAX_HEAD)) is None:
            words = "a picture is a data URL, data:image/TYPE;base64,...: this server fetches nothing."
            raise RefusedError(words, 400, part["field"])
        found.append(part["source"][head.end() :])
        total += len(found[-1]) * 3 // 4
        if total > MAX_PICTURE_BYTES:
            raise RefusedError(
                f"the pictures of the request have {total} bytes up to this one, {MAX_PICTURE_BYTES} are allowed.",
                413,
                part["field"],
            )
        try:
            base64.b64decode(found[-1], validate=True)
        except ValueError:
            raise RefusedError("the data of the picture is not base64.", 400, part["field"]) from None
    return replace(request, messages=messages, pictures=tuple(found)) if found else request


def decoded(pictures: Sequence[str]) -> Iterator[bytes]:
    """Yield the files of pictures of a request."""
    return (base64.b64decode(text) for text in pictures)
