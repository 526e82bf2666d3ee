"""A forward call of a model, its arguments read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_flash.compat.caches import entries_of, refuses_single_tokens
from mlx_flash.kv.checkpoints import Checkpoints


@dataclass(slots=True, eq=False)  # frozen, one takes five times as long to make, for each token
class ForwardCall:
    """The arguments of one call, and what they say about it. It does not change.

    Attributes:
        arguments: as the caller gave them; mlx-lm's models take the tokens first, then the prompt cache.
        keywords: as the caller gave them.
        num_tokens: new tokens, over all sequences; 1 if the first argument is no array.
        tokens: the first argument, if it is an array ``(sequences, length)``.
        cache: mlx-lm's prompt cache, one entry a layer, if there is one.
        is_plain: tokens and a prompt cache, and nothing else.
        wants_logits: False where the caller drops the result.
        checkpoints: of the prompt cache before each part of the call, if the parts are guesses; None if none is.
        segment_left: tokens of each sequence that come after it in its segment of the prompt, such as a system prompt.
        runs: what computes it in place of the whole model: the model without its head, or the head alone; None for the
            model.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    num_tokens: int
    tokens: mx.array | None
    cache: Sequence[Any] | None
    is_plain: bool
    wants_logits: bool = True
    checkpoints: Checkpoints | None = None
    segment_left: int = 0
    runs: Callable[..., Any] | None = None

    @property
    def wants_output(self) -> bool:
        """False where the caller drops what the call returns: it only adds to the prompt cache."""
        return self.wants_logits or self.runs is not None

    @property
    def is_bare(self) -> bool:
        """True if it has tokens, and nothing else."""
        others = (*self.arguments[1:], *self.keywords.values())
        return self.tokens is not None and all(value is None for value in others)

    @property
    def is_head(self) -> bool:
        """True if it computes the head alone, for tokens that another call has added."""
        return self.runs is not None and self.cache is None

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return 1 if self.tokens is None else len(self.tokens)

    @property
    def length(self) -> int:
        """New tokens of each sequence."""
        num_sequences = 1 if self.tokens is None else len(self.tokens)  # asked for each token: one call of Python
        return self.num_tokens // num_sequences

    def part(self, start: int, stop: int | None = None) -> ForwardCall:
        """Return the same call with some of each sequence's new tokens; it needs ``tokens``."""
        assert self.tokens is not None
        num_later = 0 if stop is None else max(0, self.tokens.shape[1] - stop)
        return self.with_tokens(self.tokens[:, start:stop], num_later)

    def with_tokens(self, tokens: mx.array, num_later: int = 0) -> ForwardCall:
        """Return the same call with other new tokens, ``(sequences, length)``, before so many more of its segment."""
        return ForwardCall(  # dataclasses.replace() would take three times as long, for each part of a prompt
            (tokens, *self.arguments[1:]),
            self.keywords,
            tokens.size,
            tokens,
            self.cache,
            self.is_plain,
            self.wants_logits,
            self.checkpoints,
            self.segment_left + num_later,
            self.runs,
        )

    def comes_before(self, after: ForwardCall) -> bool:
        """Return whether it and the part of a prompt after it may be cut at other tokens."""
        is_alike = self.wants_logits == after.wants_logits and (self.runs is None) == (after.runs is None)
        return is_alike and self.segment_left == after.segment_left + after.length

    def parts(self, step: int) -> list[ForwardCall]:
        """Return calls with at most ``step`` new tokens of each sequence, one after another.

        Windows of padded prompts take no single tokens, so the last part of a call with some may have one more.
        """
        assert self.tokens is not None
        length = self.tokens.shape[1]
        if length <= step:
            return [self]
        starts = [*range(0, length, step)]
        if length % step == 1 and len(starts) > 1 and any(map(refuses_single_tokens, entries_of(self.cache or ()))):
            del starts[-1]
        return [self.part(start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]

    def step_within(self, limit: int) -> int | None:
        """Return how many new tokens of each sequence make at most ``limit``; None where a call is not to be cut.

        Of several sequences it is a power of two: calls of usual lengths are cut at its multiples, one after another.
        """
        if not self.is_plain or self.tokens is None:
            return None
        step = max(1, limit // max(1, self.batch_size))
        if step >= self.length:
            return None
        return step if self.batch_size == 1 else 1 << (step.bit_length() - 1)


def token_call(tokens: mx.array, cache: Sequence[Any], *, wants_logits: bool = True) -> ForwardCall:
    """Return the call of a model with tokens, ``(sequences, length)``, and a prompt cache."""
    return ForwardCall(
        (tokens,), {"cache": cache}, tokens.size, tokens, cache, is_plain=True, wants_logits=wants_logits
    )


def parse_call(arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, wants_logits: bool = True) -> ForwardCall:
    """Return the call that was made with these arguments."""
    first = arguments[0] if arguments else None
    tokens = first if isinstance(first, mx.array) else None
    is_positional = keywords.get("cache") is None and len(arguments) > 1
    cache = arguments[1] if is_positional else keywords.get("cache")
    cache = cache if isinstance(cache, list | tuple) else None
    has_others = len(arguments) > 1 + is_positional or any(
        value is not None and key != "cache" for key, value in keywords.items()
    )
    is_two_dimensional = tokens is not None and tokens.ndim == 2
    return ForwardCall(
        arguments,
        keywords,
        num_tokens=1 if tokens is None else tokens.size,
        tokens=tokens if is_two_dimensional else None,
        cache=cache,
        is_plain=is_two_dimensional and cache is not None and not has_others,
        wants_logits=wants_logits,
    )
