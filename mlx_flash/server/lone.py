"""Requests one after another: with a draft model, or with quantized keys and values, which batches do not have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx

from mlx_flash.compat.batchgenerator import Progress, Response, Waiting
from mlx_flash.errors import RefusedError
from mlx_flash.server.boundary import ends_alone
from mlx_flash.server.rows import Rows

Steps = Callable[..., Iterator[Any]]
"""A generation loop: called with the prompt, and with the options of mlx-lm's."""


class _Sequence:
    """A request that waits, or is computed.

    Args:
        asked: the request as it was inserted.
        options: further ones of the generation loop.
    """

    def __init__(self, asked: Waiting, options: dict[str, Any]) -> None:
        self.uid, self.asked, self.options = asked.uid, asked, options
        self.prompt = [token for segment in asked.segments for token in segment]
        self.cache: list[Any] | None = asked.cache
        self.tokens = list(asked.tokens)
        self.matcher = asked.stop_sequences.matcher()
        self.steps: Any = None
        self.num_done = 0


class LoneRows(Rows):
    """A stand-in for a batch that computes the request that came first.

    Args:
        steps: the generation loop.
        make_cache: makes the prompt caches of a request.
        prefill_step_size: prompt tokens in one forward call.

    Attributes:
        keeps_caches: hand out caches at the end of requests.
    """

    keeps_caches = True

    def __init__(self, steps: Steps, make_cache: Callable[[], list[Any]], prefill_step_size: int) -> None:
        self._steps = steps
        self._make_cache = make_cache
        self._step = prefill_step_size
        self._sequences: deque[_Sequence] = deque()
        self._num_sequences = 0
        self._errors: dict[int, RefusedError] = {}

    def insert_segments(
        self,
        segments: Any,
        max_tokens: Any,
        caches: Any,
        all_tokens: Any,
        samplers: Any,
        logits_processors: Any,
        stop_sequences: Any,
        options: Any = ({},),
    ) -> list[int]:
        """Add a request. Return its number in a list."""
        uid = self._num_sequences
        self._num_sequences += 1
        fields = segments, max_tokens, caches, all_tokens, samplers, logits_processors, stop_sequences
        self._sequences.append(_Sequence(Waiting(uid, *(field[0] for field in fields)), options[0]))
        return [uid]

    def next(self) -> tuple[list[Any], list[Any]]:
        """Compute the next token of the first request. Return the progress of its prompt, and the token."""
        prompts: list[Any] = []
        answers: list[Any] = []
        if self._sequences:
            sequence = self._sequences[0]

            def fail(error: RefusedError) -> None:
                self.remove([sequence.uid])
                self._errors[sequence.uid] = error

            with ends_alone(fail):
                if sequence.steps is None:
                    sequence.steps = self._begin(sequence, prompts)
                answers.append(self._advance(sequence))
        return prompts, answers

    def extract_cache(self, uids: Iterable[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Return no caches: prompts are computed whole."""
        return {}

    def finish(self, uid: int) -> tuple[list[Any], list[int]] | None:
        """End a request before its most tokens. Return its cache; None if it is gone."""
        found = next((sequence for sequence in self._sequences if sequence.uid == uid), None)
        if found is None:
            return None
        return self._end(found)

    def remove(self, uids: Iterable[int]) -> None:
        """Let go of requests."""
        gone = set(uids)
        self._sequences = deque(sequence for sequence in self._sequences if sequence.uid not in gone)

    def close(self) -> None:
        """Let go of all requests."""
        self._sequences.clear()

    def _begin(self, sequence: _Sequence, prompts: list[Any]) -> Iterator[Any]:
        if sequence.cache is None:
            sequence.cache = self._make_cache()

        def report(done: int, total: int) -> None:
            prompts.append(Progress(sequence.uid, (done, total), done == total, done == total))

        return self._steps(
            mx.array(sequence.prompt),
            max_tokens=sequence.asked.max_tokens,
            sampler=sequence.asked.sampler,
            logits_processors=list(sequence.asked.processors),
            prompt_cache=sequence.cache,
            prefill_step_size=self._step,
            prompt_progress_callback=report,
            **sequence.options,
        )

    def _advance(self, sequence: _Sequence) -> Any:
        token, logprobs, *_ = next(sequence.steps)
        sequence.tokens += sequence.prompt if not sequence.num_done else []
        sequence.num_done += 1
        sequence.tokens.append(int(token))
        reason = "length" if sequence.num_done >= sequence.asked.max_tokens else None
        reason = "stop" if sequence.matcher.advance(int(token)) else reason
        if reason is None:
            return Response(sequence.uid, int(token), logprobs, None, None, None)
        cache, tokens = self._end(sequence)
        return Response(sequence.uid, int(token), logprobs, reason, cache, tokens)

    def _end(self, sequence: _Sequence) -> tuple[list[Any], list[int]]:
        """End a request. Return its cache and the tokens in it; no tokens if they are not known."""
        self.remove([sequence.uid])
        sequence.steps.close()
        if not self.keeps_caches:
            return [], []
        cache = sequence.cache or []
        offsets = {getattr(entry, "offset", None) for entry in cache}
        num_tokens = offsets.pop() if len(offsets) == 1 else None
        is_known = num_tokens is not None and num_tokens <= len(sequence.tokens)
        return cache, sequence.tokens[:num_tokens] if is_known else []
