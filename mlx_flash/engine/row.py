"""New tokens of one prompt cache on their way through a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx

from mlx_flash import enginethread
from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.engine import Progress
from mlx_flash.engine.lane import Lane
from mlx_flash.kv.owed import Debt, Owed


@dataclass(eq=False, slots=True)
class Row:
    """New tokens of one prompt cache: a call, or the parts of a prompt, on their way through the model.

    Args:
        whole: all of it as one call.
        parts: the calls that it consists of; more than at first, once they are cut.
        owed: what the prompt cache says, if it is watched between two tokens. The first part makes up for a token.
        num_extra: tokens before those that the caller has given: an owed one.
        joins: whether the logits of all parts become one array. Then the one of each part is dropped.

    Attributes:
        report: called with (tokens done, tokens to do), if given, in the thread that waits for the pass; during a pass
            if the row is alone in it. What it raises ends the pass, where the cache can be put back.
        left: the parts that are not computed yet.
        outputs: of the parts whose logits are wanted, or of the only part; or one array with those of all parts.
        error: the reason why it cannot be computed.
        was_sought: whether the prefix cache was asked for the parts that are left.
        num_restored: tokens that came from it.
    """

    whole: ForwardCall
    parts: Sequence[ForwardCall]
    owed: Owed | None = None
    num_extra: int = 0
    joins: bool = False
    report: Progress | None = None
    left: deque[ForwardCall] = field(init=False)
    outputs: list[Any] = field(default_factory=list)
    error: Exception | None = None
    was_sought: bool = False
    num_restored: int = 0

    def __post_init__(self) -> None:
        self.left = deque(self.parts)

    @property
    def is_done(self) -> bool:
        """True if nothing is left to compute."""
        return self.error is not None or not self.left

    def lane(self, num_parts: int = 1) -> Lane:
        """Return the next parts, as the budget sees them."""
        first, num_kept = self.left[0], self.num_joined
        if num_parts == 1:
            return Lane(first, num_kept=num_kept)
        assert first.tokens is not None  # only such calls have parts
        call = first.with_tokens(first.tokens)
        call.num_tokens = sum([part.num_tokens for part in islice(self.left, num_parts)])
        num_kept += call.num_tokens if self.joins else 0
        return Lane(call, first.length, num_kept)

    @property
    def num_joined(self) -> int:
        """Tokens whose logits will be in one array that is not made yet."""
        return 0 if len(self.parts) == 1 or self.outputs or not self.joins else self.whole.num_tokens

    @property
    def length(self) -> int:
        """New tokens of each sequence in the next part; 0 if it cannot be cut."""
        first = self.left[0]
        return first.length if first.is_plain else 0

    def skip(self, number: int) -> None:
        """Let go of so many tokens of each sequence that are left: they were restored."""
        self.num_restored += number
        while number and number >= self.length:
            number -= self.length
            self.left.popleft()
        if number:
            self.left[0] = self.left[0].part(number)

    @property
    def num_done(self) -> int:
        """Tokens of each sequence that are computed."""
        return (self._total - self.num_left) // self.whole.batch_size

    @property
    def _total(self) -> int:
        return self.whole.num_tokens - self.num_extra

    def cut(self) -> int:
        """Cut the tokens that are left into parts of half the length. Return the new tokens of each sequence in one."""
        step, length, joined = self.length, self.length, self._joined_parts()
        while self.length == length and step > 1:  # twice if a single token may not be left over
            step = (step + 1) // 2
            self.left = deque(part for call in joined for part in call.parts(step))
        self.parts, self.was_sought = tuple(self.left), False
        return step

    def _joined_parts(self) -> list[ForwardCall]:
        """Return the parts that are left, joined to calls that may be cut anywhere."""
        whole, start = self.whole.tokens, self.whole.length
        assert whole is not None  # only such calls have parts
        joined: list[tuple[ForwardCall, int, int]] = []  # the last part of each, and where it starts and stops
        after = None
        for part in reversed(self.left):
            start, stop = start - part.length, start
            if after is not None and part.comes_before(after):
                joined[-1] = joined[-1][0], start, joined[-1][2]
            else:
                joined.append((part, start, stop))
            after = part
        return [last.with_tokens(whole[:, start:stop]) for last, start, stop in reversed(joined)]

    def keep(self, number: int) -> None:
        """Keep the first tokens of a row that ends with guesses, and take the others back. Harmless when repeated."""
        enginethread.run(partial(self._keep, number))  # which no interrupt cuts in two

    def _keep(self, number: int) -> None:
        checkpoints = self.parts[0].checkpoints
        assert checkpoints is not None
        if self.owed is not None:
            self.owed.lift()
            self.owed.debt = None
        checkpoints.take_back(number)
        del self.outputs[number:]

    @property
    def num_left(self) -> int:
        """Tokens that are not computed yet."""
        return min(self._total, sum(part.num_tokens for part in self.left))

    def tell(self, more: int, share: float = 1.0) -> None:
        """Report the tokens that are done, and a share of the next ones."""
        if self.report is not None:
            done = min(self._total, self._total - self.num_left + int(share * more))
            enginethread.tell(partial(self.report, done, self._total))

    def finish(self, calls: Sequence[ForwardCall], outcome: list[Any] | Exception) -> None:
        """Take the outputs of the next parts, or the reason why there are none."""
        if isinstance(outcome, Exception):
            self.error = outcome
            return
        for call, output in zip(calls, outcome, strict=True):
            first = self.left.popleft()
            assert first is call
            if self.joins and len(self.parts) > 1:
                self._join(call, output)
            elif call.wants_output or len(self.parts) == 1:
                self.outputs.append(output)
        if self.owed is not None:
            self.owed.debt, self.owed.found = self.guessed(1), self

    def guessed(self, number: int) -> Debt | None:
        """Return what a prompt cache has too much whose caller knows the first tokens; None if it has no guesses."""
        num_more = len(self.outputs) - number
        is_guessed = self.parts[0].checkpoints is not None and num_more > 0
        return Debt(-num_more, partial(self.keep, number)) if is_guessed else None

    def _join(self, call: ForwardCall, logits: mx.array) -> None:
        """Write the logits of a part into the array with those of all parts."""
        length = self.whole.length
        if not self.outputs:
            self.outputs.append(mx.zeros((len(logits), length, *logits.shape[2:]), logits.dtype))
        end = length - self.num_left // self.whole.batch_size
        self.outputs[0][:, end - call.length : end] = logits
        if self.left:  # the array must not refer to the logits of a part any more
            mx.eval(self.outputs)


def teller(lanes: Mapping[Row, Sequence[ForwardCall]]) -> Callable[[float], None]:
    """Return what reports the share of a pass that is done, to the only row in it."""
    if len(lanes) > 1:
        return lambda share: None
    [(row, calls)] = lanes.items()
    return partial(row.tell, sum(call.num_tokens for call in calls))
