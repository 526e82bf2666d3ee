"""mlx-lm's own model, in memory, in a process of its own: the memory it takes is none of a budget's."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import trim_prompt_cache

from differential.scripts import (
    BEFORE_STEP,
    Output,
    Script,
    bits,
    carried_out,
    fill,
    is_quantized,
    make_cache,
    stock_generate,
)

TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Told:
    """What mlx-lm computes for a script."""

    outputs: list[Output] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the cache before each call of the model, and in the end
    at_yield: list[int] = field(default_factory=list)  # lengths of the cache when each token is yielded


class Recorder:
    """A model that copies its cache before each call, when an earlier call's cache has become what it stays."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.before: list[list[Any]] = []
        self.after: list[list[Any]] = []
        self.lengths: list[int] = []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if not self.before:
            self.lengths.append(0)
        self.before.append(copied(cache))
        logits: mx.array = self.model(tokens, cache=cache)
        mx.eval(logits)
        self.after.append(copied(cache))
        self.lengths.append(self.lengths[-1] + tokens.shape[1])
        return logits


def copied(cache: list[Any]) -> list[Any]:
    mx.eval([entry.state for entry in cache if not entry.empty()])
    return copy.deepcopy(cache)


@lru_cache(16)
def _model(folder: str) -> Any:
    return mlx_lm_utils.load_model(Path(folder))[0]


@lru_cache(64)
def _filled(folder: str, place: str, num_tokens: int) -> list[Any]:
    cache = make_cache(_model(folder), place)
    fill(_model(folder), cache, num_tokens, BEFORE_STEP)
    return cache


@lru_cache(256)
def _recorded(script: Script) -> tuple[Told, list[list[list[Any]]]]:
    """Return what is told of a script, and for each length of the cache the forms that it has there."""
    recorder, told = Recorder(_model(script.folder)), Told()
    cache = copied(_filled(script.folder, script.place, script.num_before))
    for token, logits in carried_out(script, recorder, cache, stock_generate.generate_step):
        told.outputs.append((int(token), bits(logits)))
        told.at_yield.append(script.num_before + recorder.lengths[-1])
    told.lengths = [script.num_before + length for length in recorder.lengths]
    ends = [*recorder.before[1:], copied(cache)]
    forms = [[recorder.before[0]], *([after, end] for after, end in zip(recorder.after, ends, strict=True))]
    return told, forms


class Answers:
    """The requests that the process answers."""

    @staticmethod
    def told(script: Script) -> Told:
        """Return what mlx-lm computes for a script."""
        return _recorded(script)[0]

    @staticmethod
    @lru_cache(2000)
    def continued(
        script: Script, number: int, quantized: tuple[bool, ...], num_trimmed: int, continuation: Script
    ) -> list[Output]:
        """Continue the cache as it is before a call of a script, some of whose layers may be quantized by then."""
        forms = _recorded(script)[1][number]
        cache = [
            copy.deepcopy(next((form[i] for form in forms if is_quantized(form)[i] == wanted), forms[-1][i]))
            for i, wanted in enumerate(quantized)
        ]
        trim_prompt_cache(cache, num_trimmed)
        found = carried_out(continuation, _model(script.folder), cache, stock_generate.generate_step)
        return [(int(token), bits(logits)) for token, logits in found]

    @staticmethod
    @lru_cache(200)
    def batched(scripts: tuple[Script, ...]) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log probabilities of mlx-lm's own batch."""
        first = scripts[0]
        caches = [copied(_filled(first.folder, first.place, first.num_before)) for _ in scripts]
        found = stock_generate.batch_generate(
            _model(first.folder),
            PLAIN_TOKENIZER,
            [list(script.prompt) for script in scripts],
            caches if first.num_before else None,
            max_tokens=[script.num_tokens for script in scripts],
            return_token_ids=True,
            return_logprobs=True,
            prefill_step_size=first.step,
        )
        return found.token_ids, found.logprobs

    @staticmethod
    def tensors(folder: str) -> int:
        """Return the bytes of a model's weights."""
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


PLAIN_TOKENIZER: Any = SimpleNamespace(eos_token_ids=(), decode=lambda tokens: " ".join(map(str, tokens)))
"""A tokenizer that ends no text."""


class Stock:
    """The process, as tests ask it. It starts with the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the result of a method of :class:`Answers`."""
        if self._process is None:
            path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "differential.stock"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((name, arguments), self._process.stdin)
        self._process.stdin.flush()
        error, value = pickle.load(self._process.stdout)
        if error is not None:
            raise RuntimeError(f"mlx-lm's own model failed in {name}{arguments}:\n{error}")
        return value

    def told(self, script: Script) -> Told:
        """See :meth:`Answers.told`."""
        found: Told = self.ask("told", script)
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def _serve(arguments: Sequence[str] = ()) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            name, given = pickle.load(requests)
        except EOFError:
            return
        try:
            reply = None, getattr(Answers, name)(*given)
        except Exception:
            reply = traceback.format_exc(), None
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    from differential import stock  # classes that are pickled belong to the module

    stock._serve()
