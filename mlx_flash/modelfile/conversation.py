"""A conversation with a model, as a Modelfile describes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import Modelfile, Parameters

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

DEFAULT_MAX_TOKENS = 512
DEFAULT_REPEAT_LAST_N = 64
"""Ollama's."""

_ALL = 2**31 - 1


class Conversation:
    """Turns of user and assistant; what the prompt cache holds already is not worked through again.

    Args:
        model: streamed or not.
        tokenizer: mlx-lm's wrapper.
        modelfile: messages to begin with, sampling, and texts that end an answer.
        max_tokens: the most tokens of an answer, -1 for no limit; None takes the Modelfile's.

    Attributes:
        messages: so far, as the chat template takes them.
        finish_reason: why the last answer ended: ``"stop"`` or ``"length"``.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, modelfile: Modelfile, max_tokens: int | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._parameters = modelfile.parameters
        self._stop = modelfile.stop
        self._max_tokens = max_tokens
        self._cache = make_prompt_cache(model)
        self._cached: list[int] = []
        self.messages = first_messages(modelfile)
        self.finish_reason: str | None = None

    def answer(self, text: str) -> Iterator[str]:
        """Says something to the model and gives its answer as it comes.

        Raises:
            ConfigError: the conversation has no tokens.
        """
        self.messages.append({"role": "user", "content": text})
        prompt = self._encode()
        rest = self._trim(prompt)
        said = ""
        for piece in cut_at(self._generate(prompt, rest), self._stop):
            said += piece
            yield piece
        self.messages.append({"role": "assistant", "content": said})

    def _encode(self) -> list[int]:
        if self._tokenizer.has_chat_template:
            tokens: list[int] = self._tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)
        else:
            tokens = self._tokenizer.encode("\n".join(message["content"] for message in self.messages))
        if not tokens:
            raise ConfigError("the conversation has no tokens. Hint: does the chat template use 'messages'?")
        return tokens

    def _trim(self, prompt: list[int]) -> list[int]:
        """Makes the cache hold a beginning of the prompt, the longest that it can; returns what is left to do."""
        common = 0
        for old, new in zip(self._cached, prompt[:-1], strict=False):
            if old != new:
                break
            common += 1
        surplus = len(self._cached) - common
        if surplus and can_trim_prompt_cache(self._cache):
            trim_prompt_cache(self._cache, surplus)
        elif surplus:
            self._cache, common = make_prompt_cache(self._model), 0
        self._cached = prompt[:common]
        return prompt[common:]

    def _generate(self, prompt: list[int], rest: list[int]) -> Iterator[str]:
        parameters = self._parameters
        if parameters.seed is not None:
            mx.random.seed(parameters.seed)
        given = parameters.max_tokens(len(prompt)) if self._max_tokens is None else self._max_tokens
        options = sampling(parameters)
        if rest != prompt:
            before = prompt[: len(prompt) - len(rest)]
            options["logits_processors"] = [_seeing(before, process) for process in options["logits_processors"]]
        responses = stream_generate(
            self._model,
            self._tokenizer,
            rest,
            max_tokens=DEFAULT_MAX_TOKENS if given is None else given,
            prompt_cache=self._cache,
            **options,
        )
        self._cached += rest
        try:
            for response in responses:
                self.finish_reason = response.finish_reason
                self._cached.append(response.token)
                yield response.text
        finally:
            responses.close()
            self._agree_with_cache()

    def _agree_with_cache(self) -> None:
        """mlx-lm may or may not have worked through the last token. A cache that does not say is not used again."""
        offsets = [offset for entry in self._cache if isinstance(offset := getattr(entry, "offset", None), int)]
        if len(offsets) == len(self._cache):
            self._cached = self._cached[: max(offsets, default=0)]
        else:
            self._cache, self._cached = make_prompt_cache(self._model), []


def _seeing(before: list[int], process: LogitsProcessor) -> LogitsProcessor:
    """A logits processor that also sees the tokens that were in the cache already."""
    seen = mx.array(before)
    return lambda tokens, logits: process(mx.concatenate([seen, tokens]), logits)


def first_messages(modelfile: Modelfile) -> list[dict[str, str]]:
    """What every conversation begins with."""
    system = [] if modelfile.system is None else [{"role": "system", "content": modelfile.system}]
    return system + [{"role": message.role, "content": message.content} for message in modelfile.messages]


def sampling(parameters: Parameters) -> dict[str, Any]:
    """Sampler and logits processors for ``mlx_lm.stream_generate``."""
    sampler = make_sampler(
        temp=parameters.temperature or 0.0,
        top_p=parameters.top_p or 0.0,
        min_p=parameters.min_p or 0.0,
        top_k=parameters.top_k or 0,
    )
    last = DEFAULT_REPEAT_LAST_N if parameters.repeat_last_n is None else parameters.repeat_last_n
    penalty = parameters.repeat_penalty if last else None
    processors = make_logits_processors(
        repetition_penalty=penalty, repetition_context_size=_ALL if last == -1 else last
    )
    return {"sampler": sampler, "logits_processors": processors}


def cut_at(pieces: Iterator[str], stop: Sequence[str]) -> Iterator[str]:
    """The text up to the first of some texts that end it. What may become one of them is held back."""
    held = ""
    for piece in pieces:
        held += piece
        ends = [at for text in stop if (at := held.find(text)) >= 0]
        if ends:
            yield held[: min(ends)]
            return
        keep = max((n for text in stop for n in range(1, len(text)) if held.endswith(text[:n])), default=0)
        ready = held[: len(held) - keep]
        if ready:
            yield ready
        held = held[len(held) - keep :]
    if held:
        yield held
