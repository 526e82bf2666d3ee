"""Generations with a streamed model."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer

import mlx_flash
from differential.scripts import VOCAB_SIZE, Output, Script, bits, carried_out, cut, offsets, stock_generate
from mlx_flash.generation import speculative_generate_step
from vocabularies import write_tokenizer

WAYS = ("calls", "ours", "text", "stock", "draft")
"""Calls of the model; ``mlx_flash.generate_step`` and ``stream_generate``; mlx-lm's own ``generate_step``;
``speculative_generate_step`` with a draft model, which only guesses where weights are streamed."""


@functools.cache
def tokenizer() -> Any:
    """Return a tokenizer whose text ends with no token of a model."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_tokenizer(Path(folder), VOCAB_SIZE))


def text_step(prompt: mx.array, model: Any, **options: Any) -> Iterator[Any]:
    """Yield tokens and log probabilities of ``mlx_flash.stream_generate``."""
    for response in mlx_flash.stream_generate(model, tokenizer(), prompt, **options):
        yield response.token, response.logprobs


class Falls(logging.Filter):
    """What the engine logs of prompts whose step becomes smaller: output is mlx-lm's own for that step.

    It is no handler: logging takes its lock when one is collected, and in Python 3.11 a signal then leaves it held.
    """

    TEXT = re.compile(r"from token (\d+) of a prompt on .*--prefill-step-size (\d+)")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []  # tokens of a call from which on the step is smaller, and the step

    def filter(self, record: logging.LogRecord) -> bool:
        if found := self.TEXT.search(record.getMessage()):
            self.found.append((int(found[1]), int(found[2])))
        return False

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Listen as long as the block lasts."""
        logger = logging.getLogger("mlx_flash")
        before = logger.level
        logger.addFilter(self)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeFilter(self)
            logger.setLevel(before)


class Run:
    """A script that is carried out with a streamed model, in one of ``WAYS``."""

    def __init__(self, model: Any, script: Script, way: str, cache: list[Any], falls: Falls, draft: Any = None) -> None:
        self.model, self.way, self.cache, self.draft = model, way, cache, draft
        self._script, self._falls, self._first = script, falls.found, len(falls.found)
        self._parts: list[int] = []
        self._found: list[tuple[int, mx.array]] = []
        self.lengths: list[set[int]] = []  # of the layers' caches when a token was handed out

    def generator(self, **options: Any) -> Iterator[Any]:
        """Return a new generator of tokens and logits."""
        if self.way == "ours":
            return carried_out(self._script, self.model, self.cache, mlx_flash.generate_step, **options)
        if self.way == "text":
            return carried_out(self._script, self.model, self.cache, text_step, **options)
        if self.way == "draft":
            return carried_out(self._script, self.model, self.cache, self._draft_step, **options)
        return carried_out(self._script, self._call, self.cache, stock_generate.generate_step, **options)

    def _draft_step(self, prompt: mx.array, model: Any, *, prompt_cache: list[Any], **options: Any) -> Iterator[Any]:
        caches = [*prompt_cache, *make_prompt_cache(self.draft)]
        steps: Any = speculative_generate_step(prompt, model, self.draft, prompt_cache=caches, **options)
        with contextlib.closing(steps):
            for token, logprobs, _ in steps:
                yield token, logprobs

    def _call(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Call the model, and note in which parts it computes the tokens."""
        num_falls, number = len(self._falls), tokens.shape[1]
        logits: mx.array = self.model(tokens, cache=cache)
        self._parts += cut(number, number, self._falls[num_falls:])
        return logits

    def generate(self, limit: int | None = None, **options: Any) -> None:
        """Generate, up to a number of tokens."""
        made: Any = self.generator(**options)
        try:
            self.take(made, limit)
        finally:
            made.close()

    def take(self, made: Iterator[Any], limit: int | None = None) -> None:
        """Take tokens of a generator, up to a number."""
        for token, logits in made:
            mx.eval(logits)  # another thread could not
            self._found.append((int(token), logits))
            self.lengths.append(offsets(self.cache))
            if len(self._found) == limit:
                return

    @property
    def outputs(self) -> list[Output]:
        """Tokens and logits up to now."""
        return [(token, bits(logits)) for token, logits in self._found]

    @property
    def script(self) -> Script:
        """The script, with the parts in which the prompt was computed if some were smaller than the step."""
        script, falls = self._script, self._falls[self._first :]
        if not falls:
            return script
        parts, total = cut(len(script.prompt) - 1, script.step, falls), len(script.prompt) - 1
        if self.way in ("calls", "stock"):
            parts = ()
            for part in self._parts:
                if sum(parts) < total:
                    parts = (*parts, part)
            parts += cut(total - sum(parts), script.step)
        return replace(script, parts=parts)
