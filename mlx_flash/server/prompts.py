"""The tokens of a request's prompt, and where mlx-lm's server cuts them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import jinja2
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from mlx_flash.errors import RefusedError
from mlx_flash.server.request import GenerationRequest, joined

_ROLES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
"""The words before messages for models without a chat template, as in mlx-lm's server."""

_THINKING_TAIL = 11
"""The most tokens after the mark with which the prompt begins the model's reasoning."""

_NOT_OPTIONS = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(TokenizerWrapper.apply_chat_template).parameters,
    "messages",
}
"""Arguments of what renders chat templates. ``chat_template`` would let a client run a program of its own."""


Reasoning = Literal["none", "possible", "open", "headers"]
"""The reasoning with which an answer begins: none, some if the model opens it, or what the prompt has opened. Of some
models, every part of an answer has a header that names its kind."""

PIECE_CHARACTERS = 1 << 16
"""Texts that are longer together are counted in pieces before they become tokens."""

_PIECE_SHARE = 0.9
"""Share of the tokens of all pieces that the whole has at least."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt."""

    tokens: list[int]
    state: str = "normal"  # in which it leaves the text
    ends: Mapping[str, int] = field(default_factory=dict)  # worth keeping: of the parts ``"system"`` and ``"user"``

    def after(self, num_cached: int) -> list[list[int]]:
        """Return the parts without the first tokens, which a kept cache has."""
        cuts = [num_cached, *(end for end in self.ends.values() if num_cached < end), len(self.tokens)]
        return [self.tokens[start:stop] for start, stop in pairwise(cuts)]

    def kind_at(self, num_tokens: int) -> str:
        """Return the kind of the part that the last of the first tokens belongs to."""
        return next((kind for kind, end in self.ends.items() if num_tokens <= end), "assistant")


NO_PROMPT = Prompt([])
"""The prompt of a request whose model is not in memory yet, or that has no prompt."""


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def opened(request: GenerationRequest, first: Sequence[Mapping[str, Any]]) -> GenerationRequest:
    """Return a request after the messages that every conversation begins with. Its own system prompt wins."""
    messages = request.messages
    if messages is None or not first:
        return request
    num_system = int(messages[0]["role"] == "system")
    opening = [each for each in first if not (num_system and each["role"] == "system")]
    return replace(request, messages=[*messages[:num_system], *map(dict, opening), *messages[num_system:]])


def least_tokens(request: GenerationRequest, tokenizer: Any) -> int:
    """Return about the fewest tokens that the texts of a request make; 0 if they are short.

    A tokenizer takes about 240 bytes of memory for each token of a text. Here it gets the texts of all messages in
    pieces. The ends of pieces add a few tokens. Texts that the chat template leaves out count too: only tokenizing the
    finished prompt would tell, and that is what takes the memory.
    """
    text = request.prompt or "\n".join(map(_text_of, request.messages or ()))
    if len(text) <= PIECE_CHARACTERS:
        return 0
    pieces = (text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS))
    return int(_PIECE_SHARE * sum(len(tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces))


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content without pictures, and its tool calls as JSON."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    calls = (json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ())
    return "\n".join((content, *calls))


def make_prompt(request: GenerationRequest, tokenizer: Any, options: Mapping[str, Any], vocab_size: int) -> Prompt:
    """Return the prompt of a request."""
    if request.messages is None:
        found = Prompt(list(tokenizer.encode(request.prompt) if request.tokens is None else request.tokens))
    elif tokenizer.has_chat_template:
        found = _of_messages(request, tokenizer, options)
    else:
        found = Prompt(list(tokenizer.encode(_plain_chat(request.messages))))
    check_tokens(found.tokens, vocab_size, request)
    return found


def check_tokens(tokens: Sequence[int], vocab_size: int, request: GenerationRequest) -> None:
    """Check that a model can read the tokens of a request's prompt. Raises: RefusedError: it cannot."""
    field = "messages" if request.messages is not None else "prompt"
    if not tokens:
        raise RefusedError("the prompt has no tokens.", 400, field)
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RefusedError(f"the prompt has token {wrong}: the model has {vocab_size}.", 400, field)


def _of_messages(request: GenerationRequest, tokenizer: Any, options: Mapping[str, Any]) -> Prompt:
    messages = [dict(message) for message in request.messages or ()]
    options = {**options, **checked_options(request.template_options or {})}

    def render(part: Sequence[dict[str, Any]], *, generates: bool, **more: Any) -> list[int]:
        tools = None if request.tools is None else list(request.tools)
        given = {**options, **more}
        return list(tokenizer.apply_chat_template(list(part), tools=tools, add_generation_prompt=generates, **given))

    more = {"continue_final_message": True} if request.continues else {}
    try:
        tokens = render(messages, generates=not more, **more)
    except jinja2.TemplateError as error:  # templates refuse conversations with it, too
        messages = folded(messages)
        try:
            tokens = render(messages, generates=not more, **more)
        except jinja2.TemplateError:
            raise RefusedError(f"the model's chat template refuses the messages: {error}", 400, "messages") from error
    state = state_of(tokenizer, tokens)
    if messages[-1].get("role") not in ("user", "tool"):
        return Prompt(tokens, state)
    num_system = next(i for i, message in enumerate(messages) if message["role"] != "system")
    system_end, ends = 0, dict[str, int]()
    if num_system:
        opening = render([*messages[:num_system], {"role": "user", "content": ""}], generates=False)
        common = num_common(opening, tokens)
        if 0 < common < min(len(opening), len(tokens)):
            system_end = ends["system"] = common
    tail = len(tokens)
    if tokenizer.has_thinking:
        begins = tokenizer.rfind_think_start(tokens, start=tail - _THINKING_TAIL)
        tail = begins if begins >= 0 else tail
    if system_end < tail < len(tokens):
        ends["user"] = tail
    return Prompt(tokens, state, ends)


def folded(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation for templates that want one system message at most, and user and assistant in turn.

    Later messages of the system become the user's, and messages in a row with one role become one message.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        is_first = all(other["role"] == "system" for other in found)
        role = "user" if message["role"] == "system" and not is_first else message["role"]
        if found and found[-1]["role"] == role and role in ("system", "user"):
            found[-1]["content"] = joined(found[-1]["content"], message["content"], "\n\n")
        else:
            found.append({**message, "role": role})
    return found


def state_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the state in which a prompt leaves the text: some end with the mark that begins the reasoning."""
    if tokenizer.response_initial_state:
        return str(tokenizer.response_initial_state)
    is_thinking = tokenizer.has_thinking and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
    return "reasoning" if is_thinking else "normal"


def reasoning_of(request: GenerationRequest, prompt: Prompt, tokenizer: Any) -> Reasoning:
    """Return the reasoning with which the answer to a prompt begins: the chat template may have opened or closed it."""
    if request.messages is None:
        return "none"
    if prompt.state != "normal":
        return "open" if prompt.state == "reasoning" else "headers"
    if not tokenizer.has_thinking:
        return "none"
    tail = prompt.tokens[-_THINKING_TAIL:]
    end = tokenizer.rfind_think_end(tail)
    is_closed = end >= 0 and not tokenizer.decode(tail[end + len(tokenizer.think_end_tokens) :]).strip()
    return "none" if is_closed else "possible"


def checked_options(options: Mapping[str, Any], taken: Collection[str] = ()) -> Mapping[str, Any]:
    """Return a request's variables of the chat template. They may not be arguments of what renders it."""
    for name in options:
        if name in _NOT_OPTIONS or name in taken or not name.isidentifier():
            raise RefusedError(
                f"chat_template_kwargs.{name} is not taken from requests.", 400, f"chat_template_kwargs.{name}"
            )
    return options


def _plain_chat(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as text, for models without a chat template."""
    lines = "".join(f"{_ROLES.get(message['role'], '')}{message.get('content') or ''}\n" for message in messages)
    return f"{lines}{_ROLES['assistant']}".rstrip()
