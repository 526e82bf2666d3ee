"""A conversation with a model, as a Modelfile describes it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from jinja2 import TemplateError
from mlx_lm.generate import TextStateMachine
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_flash.errors import ConfigError, FlashError
from mlx_flash.generation import stream_generate
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.parse import DEFAULT_MAX_TOKENS, Modelfile, Parameters, check_text, recent_tokens

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Sampler = Callable[[mx.array], mx.array]
Progress = Callable[[int, int], None]
Listener = Callable[[Any], None]

_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of templates: their own refusals, and those of any expression."""


class Conversation:
    """Turns of user and assistant, over one prompt cache: tokens that it holds are not computed again.

    Args:
        model: streamed or not.
        tokenizer: mlx-lm's wrapper.
        modelfile: first messages, sampling, and texts that end an answer.
        max_kv_size: tokens that a rotating KV cache holds; None drops none.
        xtc: further arguments of ``mlx_lm.sample_utils.make_sampler``.
        processors: returns further logits processors of the answer to a prompt.

    Attributes:
        modelfile: may be replaced between two answers; :meth:`set_system` changes its system prompt.
        messages: the turns so far, as the chat template takes them. Those with pictures have ``images``, their files.
        pictures: files for the next message.
        finish_reason: ``"stop"`` or ``"length"``, of the last answer.
        num_new_tokens: prompt tokens of the last answer that the cache did not hold.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        modelfile: Modelfile,
        max_kv_size: int | None = None,
        xtc: Mapping[str, Any] = MappingProxyType({}),
        processors: Callable[[list[int]], list[LogitsProcessor]] = lambda prompt: [],
    ) -> None:
        self.modelfile = modelfile
        self._max_kv_size = max_kv_size
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids] if xtc.get("xtc_probability") else []
        self._xtc = {**xtc, "xtc_special_tokens": special} if special else {}
        self._processors = processors
        self.model: Any = model
        self._tokenizer = tokenizer
        self._cache, self._cached = self._new_cache(), list[int]()
        self.messages: list[dict[str, Any]] = first_messages(modelfile)
        self.pictures: list[str] = []
        self.finish_reason: str | None = None
        self.num_new_tokens = 0

    def clear(self) -> None:
        """Forget everything but the messages that the Modelfile begins with."""
        self.messages = first_messages(self.modelfile)

    def resume(self, messages: list[dict[str, Any]]) -> None:
        """Go on with messages of another conversation, and with its system prompt."""
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        self.messages, self.modelfile = messages, replace(self.modelfile, system=system)

    def set_system(self, text: str | None) -> None:
        """Change the system prompt of this conversation; None removes it."""
        first, self.modelfile = first_messages(self.modelfile)[:1], replace(self.modelfile, system=text)
        if first and first[0]["role"] == "system" and self.messages[:1] == first:
            del self.messages[0]
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    @property
    def num_cached(self) -> int:
        """The number of tokens in the KV cache."""
        return len(self._cached)

    def answer(
        self,
        text: str,
        on_progress: Progress | None = None,
        on_response: Listener | None = None,
    ) -> Generator[str, None, None]:
        """Yield the model's answer to a message, piece by piece.

        Closing the iterator keeps the answer so far. An answer that ends before its first piece leaves no trace.

        Args:
            text: the user's message.
            on_progress: called with the prompt tokens done and to do. What it raises ends the answer.
            on_response: called with each response of ``mlx_lm.stream_generate``. What it raises ends the answer.
        """
        pictures, self.pictures, said = self.pictures, [], ""
        self.messages.append({"role": "user", "content": text, **({"images": pictures} if pictures else {})})
        try:
            prompt = self._encode()
            rest = self._trim(prompt)
            self.num_new_tokens = len(rest)
            pieces = self._generate(prompt, rest, on_progress, on_response)
            for piece in cut_at(pieces, self.modelfile.stop):
                said += piece
                yield piece
            self.messages.append({"role": "assistant", "content": said})
        except BaseException as error:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                self.messages.pop()
                self.pictures = [] if isinstance(error, FlashError) else pictures
            raise

    def _encode(self) -> list[int]:
        self._check_messages()
        if any("images" in message for message in self.messages):
            raise ConfigError("the conversation has pictures, and the model is loaded as text alone. Hint: --vision")
        if self._tokenizer.has_chat_template:
            with template_explained():
                tokens: list[int] = self._tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)
        else:
            tokens = self._tokenizer.encode("\n".join(message["content"] for message in self.messages))
        if not tokens and not any(message["content"] for message in self.messages):
            raise ConfigError("the prompt is empty. Hint: give it in quotes, or on standard input.")
        if not tokens:
            raise ConfigError("the conversation has no tokens. Hint: does the chat template use 'messages'?")
        return tokens

    def _check_messages(self) -> None:
        for message in self.messages:
            check_text(message["content"], f"the message of the {message['role']}")

    def _trim(self, prompt: list[int]) -> list[int]:
        """Trim the cache to the longest prefix of the prompt that it can hold. Return the tokens left to compute."""
        common = num_common(self._cached, prompt[:-1])
        surplus = len(self._cached) - common
        if surplus and can_trim_prompt_cache(self._cache):
            trim_prompt_cache(self._cache, surplus)
        elif surplus:
            self._cache, common = self._new_cache(), 0
        self._cached = prompt[:common]
        return prompt[common:]

    def _new_cache(self) -> list[Any]:
        cache: list[Any] = make_prompt_cache(self.model, self._max_kv_size)
        return cache

    def _generate(
        self,
        prompt: list[int],
        rest: list[int],
        on_progress: Progress | None,
        on_response: Listener | None,
    ) -> Iterator[str]:
        parameters = self.modelfile.parameters
        if parameters.seed is not None:
            mx.random.seed(parameters.seed)
        given = parameters.max_tokens(len(prompt))
        options = sampling(parameters, **self._xtc)
        options["logits_processors"] += self._processors(prompt)
        options["max_tokens"] = DEFAULT_MAX_TOKENS if given is None else given
        if isinstance(self.model, FlashLLM):
            options["prefill_step_size"] = self.model.plan.prefill_step_size
        if rest != prompt:
            before = prompt[: len(prompt) - len(rest)]
            options["logits_processors"] = [_seeing(before, process) for process in options["logits_processors"]]
        responses = self._respond(rest, on_progress, options)
        self._cached += rest
        try:
            for response in responses:
                self.finish_reason = response.finish_reason
                self._cached.append(response.token)
                yield response.text
                if on_response is not None:
                    on_response(response)
        finally:
            responses.close()
            self._agree_with_cache()

    def _respond(
        self, rest: list[int], on_progress: Progress | None, options: dict[str, Any]
    ) -> Generator[Any, None, None]:
        """Return the responses of ``stream_generate`` to tokens that the cache does not hold."""
        progress = {} if on_progress is None else {"prompt_progress_callback": on_progress}
        options |= {"prompt_cache": self._cache, **progress}
        responses: Generator[Any, None, None] = stream_generate(self.model, self._tokenizer, rest, **options)
        return responses

    def _agree_with_cache(self) -> None:
        """Drop tokens that mlx-lm has not computed from the record. A cache without an offset is replaced."""
        offsets = [offset for entry in self._cache if isinstance(offset := getattr(entry, "offset", None), int)]
        if len(offsets) == len(self._cache):
            self._cached = self._cached[: max(offsets, default=0)]
        else:
            self._cache, self._cached = self._new_cache(), []


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


@contextmanager
def template_explained() -> Iterator[None]:
    """Raise a ConfigError where a chat template, a program that comes with the model, refuses its messages or fails."""
    try:
        yield
    except _TEMPLATE_ERRORS as error:
        name = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        raise ConfigError(
            f"the chat template refuses the messages: {name}{error}. "
            "Hint: some templates take no system prompt, or want turns of user and assistant to alternate."
        ) from error


def _seeing(before: list[int], process: LogitsProcessor) -> LogitsProcessor:
    """Return a logits processor that also sees the tokens that the cache held before."""
    seen = mx.array(before)
    return lambda tokens, logits: process(mx.concatenate([seen, tokens]), logits)


def first_messages(modelfile: Modelfile) -> list[dict[str, str]]:
    """Return the messages that every conversation begins with."""
    system = [] if modelfile.system is None else [{"role": "system", "content": modelfile.system}]
    return system + [{"role": message.role, "content": message.content} for message in modelfile.messages]


def sampling(parameters: Parameters, **xtc: Any) -> dict[str, Any]:
    """Return sampler and logits processors for ``mlx_lm.stream_generate``."""
    sampler = make_sampler(
        temp=parameters.temperature or 0.0,
        top_p=parameters.top_p or 0.0,
        min_p=parameters.min_p or 0.0,
        top_k=parameters.top_k or 0,
        **xtc,
    )
    if parameters.temperature and parameters.top_k:
        sampler = _below_vocabulary(sampler, parameters.top_k)
    recent = recent_tokens(parameters.repeat_last_n)
    penalty = parameters.repeat_penalty if recent else None
    processors = make_logits_processors(repetition_penalty=penalty, repetition_context_size=recent)
    return {"sampler": sampler, "logits_processors": processors}


def _below_vocabulary(sampler: Sampler, top_k: int) -> Sampler:
    """Return a sampler that refuses a ``top_k`` before mlx-lm does, whose error takes MLX's random state with it."""

    def choose(logprobs: mx.array) -> mx.array:
        if top_k >= (num_tokens := logprobs.shape[-1]):
            raise ConfigError(f"top_k is {top_k}, and the model has {num_tokens} tokens. Hint: 0 keeps all of them.")
        return sampler(logprobs)

    return choose


class StopTexts:
    """Finds the first text that ends an answer, in text that comes in pieces, as mlx-lm finds marks.

    Args:
        texts: the texts. Empty ones are none.

    Attributes:
        found: the text that was found; None before.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        ends: dict[str, list[Any]] = {text: [] for text in texts}
        self._state = TextStateMachine({"": [(text, text) for text in texts], **ends}).make_state("")
        self.found: str | None = None

    def add(self, text: str) -> str:
        """Return the text that is surely part of the answer. What may begin a stop text is held back."""
        if self.found:
            return ""
        self._state, segments = TextStateMachine.split(self._state, text)
        self.found = self._state[0] or None
        return str(segments[0][1])

    def end(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return "" if self.found else str(TextStateMachine.flush(self._state)[1])


def cut_at(pieces: Iterator[str], stop: Sequence[str]) -> Iterator[str]:
    """Yield text up to the first stop text. Text that may become a stop text is held back."""
    texts = StopTexts(stop)
    for piece in pieces:
        if text := texts.add(piece):
            yield text
        if texts.found:
            return
    if text := texts.end():
        yield text
