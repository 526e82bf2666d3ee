"""The inbox of the generation thread: requests, clients that left, and the end of the server."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from weakref import WeakValueDictionary

from mlx_flash.errors import RefusedError
from mlx_flash.ranks import launched_group
from mlx_flash.server.answer import Answer
from mlx_flash.server.events import Failed
from mlx_flash.server.ranks import News
from mlx_flash.server.request import GenerationRequest

_SEED_BITS = 63


class Inbox:
    """Filled by event loops, emptied by the generation thread.

    Attributes:
        is_closed: the thread has ended, or is ending.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: list[tuple[int, str]] = []
        self._left: list[int] = []
        self._stops = self.is_closed = False
        self._number = 0
        self._has_ranks = launched_group() is not None
        self._answers: WeakValueDictionary[int, Answer] = WeakValueDictionary()

    def submit(self, *requests: GenerationRequest) -> list[Answer]:
        """Send requests, which the thread gets together. Called in the event loop that awaits the answers.

        Raises:
            RefusedError: the thread has ended.
        """
        seeded = [request.with_drawn_seed(secrets.randbits(_SEED_BITS)) for request in requests]
        texts = [request.to_json() if self._has_ranks else request.to_text() for request in seeded]
        with self._changed:
            if self.is_closed:
                raise RefusedError("the generation thread has ended.", 503)
            answers = [self._add(text) for text in texts]
            self._changed.notify()
        return answers

    @property
    def num_answers(self) -> int:
        """Answers that have not ended."""
        return sum(not answer.is_over for answer in self._answers.values())

    def stop(self) -> None:
        """Ask the thread to end after its pass."""
        with self._changed:
            self._stops = True
            self._changed.notify()

    def close(self) -> None:
        """End all answers with an error, at the end of the thread, and take no more requests."""
        with self._changed:
            self.is_closed = True
            answers = list(self._answers.values())
        for answer in answers:
            answer.put(Failed(RefusedError("the server stops.", 503)))

    def wait(self, seconds: float | None) -> None:
        """Wait for news, at most so long; None waits for ever."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._left or self._stops, seconds)

    def news(self, expired: Sequence[str]) -> News:
        """Return what has come since the last call.

        Args:
            expired: names of models whose time in memory is over.
        """
        with self._changed:
            news = News(self._requests, self._left, expired, self._stops)
            self._requests, self._left = [], []
        return news

    def take_requests(self) -> list[tuple[int, str]]:
        """Return the requests that have come since the last call."""
        with self._changed:
            found, self._requests = self._requests, []
        return found

    def answer(self, number: int) -> Answer | None:
        """Return the way to the client of a request; None on other ranks than 0, or if the client is gone."""
        return self._answers.get(number)

    def _add(self, text: str) -> Answer:
        self._number += 1
        number = self._number
        answer = self._answers[number] = Answer(lambda: self._leave(number))
        self._requests.append((number, text))
        return answer

    def _leave(self, number: int) -> None:
        with self._changed:
            self._left.append(number)
            self._changed.notify()
