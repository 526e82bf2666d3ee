"""Requests of generation loops, one after another: what mlx-lm's batches do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_flash.compat.batchgenerator import Progress, Response, Waiting
from mlx_flash.errors import RefusedError
from mlx_flash.server.boundary import ends_alone


@dataclass(frozen=True)
class Loop:
    """A generation loop: with a draft model, with quantized keys and values, or with pictures.

    Attributes:
        steps: the loop. It takes the prompt, and the options of mlx-lm's.
        make_cache: makes the prompt cache of a request.
        keeps_caches: hand out caches at the end of requests.
    """

    steps: Callable[..., Iterator[Any]]
    make_cache: Callable[[], list[Any]]
    keeps_caches: bool = True


class LoneRequest:
    """A request that a loop answers, in the place of a group of mlx-lm's.

    Args:
        loop: the loop.
        asked: the request as it was inserted.
        step: prompt tokens in one forward call.
        inputs: further options of the loop.
        fail: takes the error of the request, which has ended.

    Attributes:
        uids: its number.
        num_restored: tokens that came from the prefix cache.
    """

    def __init__(
        self, loop: Loop, asked: Waiting, step: int, inputs: dict[str, Any], fail: Callable[[RefusedError], None]
    ) -> None:
        self.uids, self.num_restored = [asked.uid], 0
        self._loop, self._cache, self._tokens, self._fail = loop, asked.cache, list(asked.tokens), fail
        self._prompt = [token for segment in asked.segments for token in segment]
        self._matcher = asked.stop_sequences.matcher()
        self._num_left, self._progress = asked.max_tokens, list[Any]()
        self._steps: Any = loop.steps(
            mx.array(self._prompt),
            max_tokens=asked.max_tokens,
            sampler=asked.sampler,
            logits_processors=list(asked.processors),
            prompt_cache=asked.cache,
            prefill_step_size=step,
            prompt_progress_callback=self._report,
            **inputs,
        )

    def __len__(self) -> int:
        return int(self._steps is not None)

    @property
    def num_prompts(self) -> int:
        """1 while its prompt is not computed."""
        return len(self) if self._prompt else 0

    def next(self) -> tuple[list[Any], list[Any]]:
        """Compute its next token. Return the progress of its prompt, and the token."""
        answers: list[Any] = []
        with ends_alone(self._end_with):
            answers.append(self._advance())
        progress, self._progress = self._progress, []
        return progress, answers

    def extract_cache(self, uids: Iterable[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """End the loop, which puts its cache right. Return the cache and the tokens in it; none if they are unknown."""
        if self._steps is None or self.uids[0] not in uids:
            return {}
        self._steps.close()
        cache = self._cache if self._loop.keeps_caches else []
        offsets = {getattr(entry, "offset", None) for entry in cache}
        num_tokens = offsets.pop() if len(offsets) == 1 else None
        is_known = num_tokens is not None and num_tokens <= len(self._tokens)
        return {self.uids[0]: (cache, self._tokens[:num_tokens] if is_known else [])}

    def remove(self, uids: Iterable[int]) -> None:
        """Let go of it."""
        if self.uids[0] in uids:
            self._steps = None

    def _report(self, done: int, total: int) -> None:
        self._progress.append(Progress(self.uids[0], (done, total), done == total, done == total))

    def _end_with(self, error: RefusedError) -> None:
        self._steps = None
        self._fail(error)

    def _advance(self) -> Any:
        number, logprobs, *_ = next(self._steps)
        uid, token = self.uids[0], int(number)
        self._tokens += [*self._prompt, token]
        self._prompt, self._num_left = [], self._num_left - 1
        reason = "length" if self._num_left <= 0 else None
        reason = "stop" if self._matcher.advance(token) else reason
        kept = self.extract_cache(self.uids)[uid] if reason else (None, None)
        self._steps = None if reason else self._steps
        return Response(uid, token, logprobs, reason, *kept)
