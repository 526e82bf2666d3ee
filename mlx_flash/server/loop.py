"""The loop of the generation thread: take in requests, admit those that fit, compute a pass, and begin again.

On several ranks all of them run it alike: rank 0 shares what only it sees before each round.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial

from mlx_flash.engine.engine import Progress as LoadProgress
from mlx_flash.errors import BudgetError, PeerError, RefusedError
from mlx_flash.server.answer import Answer
from mlx_flash.server.boundary import ends_alone
from mlx_flash.server.catalog import Catalog
from mlx_flash.server.events import Failed, Progress
from mlx_flash.server.inbox import Inbox
from mlx_flash.server.job import Job
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.models import Models
from mlx_flash.server.ranks import News, Ranks
from mlx_flash.server.request import GenerationRequest

RANKS_SECONDS = 60.0
"""Other ranks hear from rank 0 at least so often: they give it up after some minutes."""

_log = logging.getLogger("mlx_flash")


class Loop:
    """Requests, in the order of their arrival, and the models that answer them.

    Args:
        catalog: the models that requests can name.
        models: those in memory.
        inbox: what comes from clients; of another rank than 0 it stays empty.
        ranks: those that answer together; None for this process alone.
    """

    def __init__(self, catalog: Catalog, models: Models, inbox: Inbox, ranks: Ranks | None) -> None:
        self._catalog = catalog
        self._models = models
        self._inbox = inbox
        self._ranks = ranks
        self._waiting: deque[Job] = deque()

    def load_default(self, progress: LoadProgress) -> LoadedModel | None:
        """Load the default model, if there is one.

        Args:
            progress: called with (bytes read, bytes to read).

        Raises:
            FlashError: it cannot be loaded.
        """
        source = self._catalog.default
        return None if source is None else self._models.load(source, progress)

    def run(self) -> None:
        """Answer requests until the server stops."""
        stops = False
        while not stops:
            stops = self.step()
        error = RefusedError("the server stops.", 503)
        for model in self._models:
            model.drop_all(error)
        while self._waiting:
            self._waiting.popleft().fail(error)

    def step(self) -> bool:
        """Go one round. Return whether the server stops."""
        news = self._news()
        for number, text in news.requests:
            self._take_in(number, text)
        for number in news.left:
            self._leave(number)
        with ends_alone(lambda error: None):  # it is logged; the model has left the room
            self._models.unload_named(news.expired)
        if news.stops:
            return True
        while self._waiting and self._admit(self._waiting[0]):
            self._waiting.popleft()
        for model in self._models:
            if model.jobs:
                with ends_alone(partial(self._fail_all, model)):
                    model.advance()
                if not model.jobs:
                    self._models.note_end(model)
        return False

    def _news(self) -> News:
        """Return what has come. Wait for it if there is nothing to compute."""
        ranks = self._ranks
        if ranks is not None and not ranks.is_first:
            return ranks.share(News())
        is_idle = not self._waiting and not any(model.jobs for model in self._models)
        seconds = self._models.next_expiry if is_idle else 0.0
        self._inbox.wait(
            seconds if ranks is None else min(RANKS_SECONDS, RANKS_SECONDS if seconds is None else seconds)
        )
        news = self._inbox.news(self._models.expired())
        return news if ranks is None else ranks.share(news)

    def _take_in(self, number: int, text: str) -> None:
        """Queue a request. Refuse it if its model is unknown, or has never room for it."""
        answer = self._inbox.answer(number)
        with ends_alone(partial(_refuse, answer)):
            request = GenerationRequest.from_json(text)
            job = Job(number, request, self._catalog.find(request.model, request.adapter), answer)
            model = self._models.get(job.source)
            if model is not None and request.has_prompt:
                model.prepare(job)
            self._waiting.append(job)

    def _admit(self, job: Job) -> bool:
        """Begin with a request if there is room now. Return False if it has to wait for others."""
        is_settled = True
        with ends_alone(job.fail):
            if job.request.work == "unload":
                self._unload(job)
                return True
            model = self._models.get(job.source) or self._load(job)
            if model is None:
                is_settled = False
            else:
                if job.prompt is None and job.request.has_prompt:
                    model.prepare(job)
                if job.request.work not in ("answer", "embed"):
                    self._models.note_use(model, job.request.keep_alive)
                    job.end_without_answer()
                    return True
                is_settled = model.admits(job)
                if is_settled:
                    model.begin(job)
                    self._models.note_use(model, job.request.keep_alive)
        return is_settled

    def _load(self, job: Job) -> LoadedModel | None:
        """Load the model of a request, and report progress to all that wait for it, or come meanwhile."""
        began = time.perf_counter()

        def report(done: int, total: int) -> None:
            if self._ranks is None:  # other ranks take requests between passes only
                for number, text in self._inbox.take_requests():
                    self._take_in(number, text)
            for other in self._waiting:
                if other.source.name == job.source.name:
                    other.send(Progress("loading", done, total))

        report(0, 0)
        model = self._models.load(job.source, report)
        job.load_seconds = time.perf_counter() - began
        return model

    def _unload(self, job: Job) -> None:
        """Unload the model of a request after its other requests, if it is in memory."""
        model = self._models.get(job.source)
        if model is not None:
            self._models.note_use(model, 0.0)
        job.end_without_answer()

    def _leave(self, number: int) -> None:
        """End a request whose client left."""
        self._waiting = deque(job for job in self._waiting if job.number != number)
        for model in self._models:
            for job in [job for job in model.jobs.values() if job.number == number]:
                with ends_alone(partial(self._fail_all, model)):
                    model.drop(job)
                self._models.note_end(model)

    def _fail_all(self, model: LoadedModel, error: RefusedError) -> None:
        """End all requests of a model after a pass that failed.

        Raises:
            PeerError: other ranks may not have failed: they cannot go on together.
        """
        model.drop_all(error)
        if self._ranks is not None and not isinstance(error.__cause__, BudgetError | RefusedError):
            raise PeerError(f"a pass failed on this rank: {error}") from error


def _refuse(answer: Answer | None, error: RefusedError) -> None:
    if answer is not None:
        answer.put(Failed(error))
