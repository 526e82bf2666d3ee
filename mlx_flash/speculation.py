"""Guesses of the tokens that come next, which one pass over the weights checks, and how many are worth computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import inf
from struct import pack
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx

from mlx_flash.compat.caches import entries_of
from mlx_flash.kv.owed import Debt, Owed
from mlx_flash.kv.views import PutBack, checkpoint
from mlx_flash.layout.parts import OwnHead
from mlx_flash.layout.reachable import arrays_in

LEAST_GAIN = 1.05
"""A smaller gain in speed is within the error of the measurements."""

_KEEPS = 0.8
"""Weight of earlier measurements in the measured times, against the newest one."""

_FORGETS = 0.98
"""Weight that earlier guesses keep at each new one, so that the estimate follows the text."""

_WAITS = 0.05
"""A pass that waits longer for weights, as a part of its time, tells how long reading takes."""


class Worth(NamedTuple):
    """The number of tokens to guess, and the tokens a second that are expected then."""

    number: int
    speed: float


def worth_guessing(
    acceptance: float,
    pass_seconds: float,
    row_seconds: float,
    limit: int,
    guess_seconds: float = 0.0,
    *,
    num_others: int = 0,
) -> Worth:
    """Return how many tokens to guess, ``limit`` at most, so that the most tokens a second are expected.

    A pass checks each guessed token in a row of its own. It yields the tokens that were right, and one more. While the
    weights are read, in ``pass_seconds``, rows are computed. ``acceptance`` is the probability that a guessed token is
    right, given that those before it are. ``num_others`` are rows that other texts compute in the same pass; each
    yields a token.
    """
    expected, right = 1.0 + num_others, 1.0
    plain = expected / max(pass_seconds, expected * row_seconds, 1e-9)
    best, most = 0, LEAST_GAIN * plain
    all_further = acceptance / (1 - acceptance) if acceptance < 1 else inf
    for number in range(1, limit + 1):
        right *= acceptance
        expected += right
        seconds = max(pass_seconds, (number + 1 + num_others) * row_seconds, 1e-9)
        if expected + right * all_further < most * seconds:  # nor do more guesses, which take no less time
            break
        speed = expected / seconds
        if guess_seconds:
            speed = 1 / (1 / speed + number * guess_seconds / expected)
        if speed > most:
            best, most = number, speed
    return Worth(best, most if best else plain)


@dataclass(slots=True)
class Times:
    """Measured times of a model's passes."""

    pass_seconds: float  # time to read the weights once
    row_seconds: float  # time to compute a row of one token

    def note(self, num_rows: int, seconds: float, waited_seconds: float, reading_seconds: float) -> None:
        """Note the time of a pass with rows of one token, its wait for weights, and its time with reads in flight.

        Its time is not that of reading: with many rows it takes as long as they do, and more of them would look free.
        """
        row = (seconds - waited_seconds) / num_rows
        self.row_seconds += (1 - _KEEPS) * (row - self.row_seconds)
        if waited_seconds > _WAITS * seconds:
            self.pass_seconds += (1 - _KEEPS) * (min(seconds, reading_seconds) - self.pass_seconds)
        else:  # it was computing that took so long
            self.pass_seconds = min(self.pass_seconds, seconds)


MAX_GUESSES = 31
"""The most tokens that are guessed at a time."""


class Source(Protocol):
    """A source of guesses. ``guess_seconds`` is the time to guess a token, ``expected`` the share of right guesses of
    each quality before any is known. One that ``reads`` gets the model's hidden states.
    """

    guess_seconds: float
    expected: Mapping[int, float]
    reads: bool = False

    def add(self, token: int) -> None:
        """Add the next token of the text."""

    def look(self) -> int:
        """Return the quality of a guess now. Guesses of one quality are about as often right; 0 stands for none."""

    def guess(self, number: int) -> Sequence[int]:
        """Return the next tokens, if :meth:`look` has found any."""

    def end(self) -> None:
        """Leave a prompt cache of the caller's with the text and nothing else, if the source has one."""
        return

    def leave(self) -> None:
        """Have a prompt cache of the caller's say the text, and compute what it lacks when somebody looks."""
        return

    def note_seconds(self, seconds: float) -> None:
        self.guess_seconds += (1 - _KEEPS if self.guess_seconds else 1) * (seconds - self.guess_seconds)


class Guesses:
    """The guesses of one text, and how many of them were right.

    Before each pass the source is asked that promises the most tokens a second. One of them may be a ``reader`` of
    hidden states.
    """

    def __init__(self, *sources: Source, most: int = MAX_GUESSES) -> None:
        self._most = most
        self._sources = [Judged(source) for source in sources]
        self._asked = self._sources[0]
        self.reader: Any = next((source for source in sources if source.reads), None)

    def add(self, token: int) -> None:
        for each in self._sources:
            each.source.add(token)
            if each.unchecked is not None:
                each.check(token)

    def look(self, limit: int) -> bool:
        """Return whether there is a guess, if at most so many tokens may be guessed."""
        has_room = min(limit, self._most) > 0
        for each in self._sources:
            each.quality = each.source.look() if has_room else 0
        return any(each.quality for each in self._sources)

    def take(self, times: Times, limit: int, num_others: int = 0) -> Sequence[int]:
        """Return tokens that are worth computing, after :meth:`look`. Of others note the first one, if that is free.

        ``num_others`` are calls of other sequences in the same pass.
        """
        limit = min(limit, self._most)
        able = [each for each in self._sources if each.quality]
        worths = [each.worth(times, limit, num_others) for each in able]
        best = max(range(len(able)), key=lambda i: worths[i].speed)
        self._asked = able[best]
        for i, each in enumerate(able):
            if i != best or not worths[i].number:
                each.pass_over()
        return self._asked.source.guess(worths[best].number) if worths[best].number else []

    def note(self, num_tried: int, num_right: int) -> None:
        """Note how many of the tokens that were taken last were right."""
        self._asked.note(num_tried, num_right)


class Judged:
    """A source, and the shares of right guesses, by their quality."""

    def __init__(self, source: Source) -> None:
        self.source, self.quality = source, 0
        self.unchecked: int | None = None
        self._right, self._tried = dict[int, float](), dict[int, float]()

    def note(self, num_tried: int, num_right: int) -> None:
        """Note a guess. A token after a wrong one says nothing, and does not count as tried."""
        quality, num_counted = self.quality, min(num_tried, num_right + 1)
        self._right[quality] = self._right.get(quality, 0.0) * _FORGETS + num_right
        self._tried[quality] = self._tried.get(quality, 0.0) * _FORGETS + num_counted

    @property
    def acceptance(self) -> float:
        """The share at the present quality. Before any guess is known it is the expected one, or one half."""
        before = 2 * self.source.expected.get(self.quality, 0.5)
        return (before + self._right.get(self.quality, 0.0)) / (2 + self._tried.get(self.quality, 0.0))

    def check(self, token: int) -> None:
        """Note whether the guess that was passed over is the token."""
        self.note(1, int(token == self.unchecked))
        self.unchecked = None

    def worth(self, times: Times, limit: int, num_others: int) -> Worth:
        read, row, guess = times.pass_seconds, times.row_seconds, self.source.guess_seconds
        return worth_guessing(self.acceptance, read, row, limit, guess, num_others=num_others)

    def pass_over(self) -> None:
        """Note the first guess, to compare it with the text; where that takes time, trust older guesses less."""
        if self.source.guess_seconds:
            self.note(0, 0)
        else:
            self.unchecked = self.source.guess(1)[0]


MAX_MATCH = 4
"""Longest match that is compared: longer ones count as equal."""

_WIDTH = 4
"""Bytes of a token."""

_EXPECTED = {1: 0.1, 2: 0.3, 3: 0.5, 4: 0.8}
"""The share of right guesses after matches of each length, found on answers of a trained model (docs/benchmarks.md)."""


class Lookup(Source):
    """Prompt lookup. Tokens are stored as bytes, so that a search is one call of ``rfind``."""

    guess_seconds = 0.0
    expected: Mapping[int, float] = _EXPECTED

    def __init__(self, tokens: Iterable[int]) -> None:
        self._added = list(tokens)  # the last ones, which join the text when it is searched: often it never is
        self._text = bytearray()
        self._at: int | None = None

    def add(self, token: int) -> None:
        self._added.append(token)

    def look(self) -> int:
        """Return how many of the last tokens came before, in this order; at most ``MAX_MATCH``."""
        self._text += pack(f"<{len(self._added)}i", *self._added)
        self._added = []
        longest = min(MAX_MATCH, len(self._text) // _WIDTH - 1)
        for length in range(longest, 0, -1):
            self._at = self._find(length)
            if self._at is not None:
                return length
        return 0

    def guess(self, limit: int) -> Sequence[int]:
        """Return what followed the match that :meth:`look` found. It goes on in itself where the text ends."""
        text = self._text[self._at : self._at and self._at + limit * _WIDTH]
        found = [int.from_bytes(text[i : i + _WIDTH], "little", signed=True) for i in range(0, len(text), _WIDTH)]
        return [found[i % len(found)] for i in range(limit)]

    def _find(self, length: int) -> int | None:
        """Return the byte after the latest earlier occurrence of the last ``length`` tokens."""
        ending = self._text[-_WIDTH * length :]
        stop = len(self._text) - _WIDTH
        while (at := self._text.rfind(ending, 0, stop)) >= 0:
            if at % _WIDTH == 0:
                return at + len(ending)
            stop = at + len(ending) - 1
        return None


class Draft(Source):
    """A draft model, which guesses its likeliest tokens. It draws no random numbers, since plain decoding draws none.

    Of the prompt it computes ``step`` tokens at a time.
    """

    expected: Mapping[int, float] = {}

    def __init__(self, model: Any, cache: list[Any], tokens: Sequence[int], step: int) -> None:
        self.guess_seconds = 0.0
        self._model = model
        self._cache = cache
        self._step = step
        self._coming = list(tokens)
        self._guessed: list[tuple[int, list[PutBack]]] = []

    def add(self, token: int) -> None:
        self._coming.append(token)

    def look(self) -> int:
        """Return the quality of a guess: all are of one."""
        return 1

    def guess(self, number: int) -> Sequence[int]:
        token = self._catch_up()
        found = [token]
        while len(found) < number:
            self._guessed.append((token, [checkpoint(entry) for entry in entries_of(self._cache)]))
            token = self._next([token])
            found.append(token)
        return found

    def end(self) -> None:
        self._take_back()
        if self._coming:
            self._catch_up()

    def leave(self) -> None:
        self._take_back()
        owed = Owed(self._cache)

        def settle() -> None:
            owed.lift()
            self._catch_up()

        owed.owe(Debt(len(self._coming), settle) if self._coming else None)

    def _take_back(self) -> None:
        """Take back what was guessed wrong; what was right need not be computed again."""
        pairs = zip(self._guessed, self._coming[:-1], strict=False)  # the last token is computed for its logits
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        for _, put_backs in reversed(self._guessed[num_right:]):
            for put_back in put_backs:
                put_back()
        self._guessed.clear()
        del self._coming[:num_right]

    def _catch_up(self) -> int:
        """Add the text that is missing. Return the next token."""
        self._take_back()
        coming, self._coming = self._coming, []
        for start in range(0, len(coming), self._step):
            token = self._next(coming[start : start + self._step])
        return token

    def _next(self, tokens: Sequence[int]) -> int:
        began = time.perf_counter()
        output = self._model(mx.array([tokens]), cache=self._cache)
        token = mx.argmax(output[0, -1])
        mx.eval(token, arrays_in(self._cache))
        if len(tokens) <= 2:  # those that one guess needs
            self.note_seconds(time.perf_counter() - began)
        return cast(int, token.item())


class OwnGuesses(Source):
    """The guesses of a model's head for one text. The head gets each token with the hidden state of the one before it.

    A head that is asked for several tokens goes on from its own hidden states, instead of the model's. Passes hand in
    the hidden states, of prompts with their tokens. The first token that is added ends the prompt. The head's cache has
    room for ``most`` tokens; beyond them it begins anew, and forgets what came before. ``compute`` does some work in
    the engine thread while the head is in memory; else it returns None.
    """

    expected: Mapping[int, float] = {1: 0.6}
    reads = True

    def __init__(self, head: OwnHead, most: int, step: int, compute: Callable[[Callable[[], Any]], Any]) -> None:
        self.guess_seconds = 0.0
        self.most, self._step = most, step
        self._head, self._compute = head, compute
        self._cache: list[Any] = []
        self._length = 0
        self._before: list[mx.array] = []  # hidden states that the head has not got, of the tokens before ...
        self._tokens: list[int] = []  # ... these; the last states may have no token yet
        self._is_prompt = True

    # In passes

    def read(self, tokens: mx.array, states: mx.array) -> None:
        """Take the hidden states of new tokens, ``(1, length, dimensions)``."""
        if self._is_prompt:
            self._tokens += cast("list[list[int]]", tokens.tolist())[0][0 if self._before else 1 :]
        self._before.append(states)
        if len(self._tokens) >= self._step:
            self._catch_up()

    @property
    def missing_bytes(self) -> int:
        """Memory that its cache will take with its first token."""
        return 0 if self._cache else self.most * self._head.row_bytes

    def restart(self) -> None:
        """Forget the text: a pass has failed, or the next tokens are computed, or were, without being read."""
        self._before, self._tokens, self._cache, self._length = [], [], [], 0

    # Between passes

    def add(self, token: int) -> None:
        self._is_prompt = False
        if self._num_ahead > 0:
            self._tokens.append(token)

    def look(self) -> int:
        """Forget the states of wrong guesses. Return the quality of a guess, one for all; 0 where no state is known."""
        del self._before[len(self._before) - self._num_ahead :]
        return int(bool(self._tokens))

    @property
    def _num_ahead(self) -> int:
        """Hidden states without a token after them."""
        return sum(states.shape[1] for states in self._before) - len(self._tokens)

    def guess(self, number: int) -> Sequence[int]:
        return self._compute(partial(self._guess, number)) or [0]

    def _guess(self, number: int) -> list[int]:
        began, num_read = time.perf_counter(), len(self._tokens)
        states = self._catch_up()
        put_backs = [checkpoint(entry) for entry in entries_of(self._cache)]
        found: list[int] = []
        while True:
            token = mx.argmax(self._head.logits(states)[0, -1])
            mx.eval(token, arrays_in(self._cache))
            found.append(cast(int, token.item()))
            if len(found) == number or self._length + len(found) > self.most:
                break
            states = self._head.states(mx.array([found[-1:]]), states, self._cache)
        for put_back in put_backs:
            put_back()
        if num_read <= number + 1:  # else much of the time was for tokens of before
            self.note_seconds((time.perf_counter() - began) / len(found))
        return found

    def _catch_up(self) -> mx.array:
        """Give the head the tokens that it lacks. Return its last hidden state, not evaluated."""
        before = mx.concatenate(self._before, axis=1)
        number = min(len(self._tokens), before.shape[1])
        for start in range(0, number, self._step):
            stop = min(start + self._step, number)
            if not self._cache or self._length + stop - start > self.most:
                self._cache, self._length = self._head.make_cache(self.most), 0
            states = self._head.states(mx.array([self._tokens[start:stop]]), before[:, start:stop], self._cache)
            mx.eval(arrays_in(self._cache))  # of a prompt no more of the layer is computed
            self._length += stop - start
        self._before = [mx.contiguous(before[:, number:])] if number < before.shape[1] else []
        mx.eval(self._before)
        del self._tokens[:number]
        return states[:, -1:]
