"""The generation thread: everything else in the server reaches models through it."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from weakref import WeakValueDictionary

from mlx_flash.errors import BudgetError, FlashError, PeerError, RefusedError
from mlx_flash.forks import wait_for_end_of_thread
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.server.batch import BatchOptions, Job, ends_alone
from mlx_flash.server.catalog import Catalog
from mlx_flash.server.events import Answers, Failed, Progress
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.models import Models
from mlx_flash.server.prompts import opened
from mlx_flash.server.ranks import News, Ranks
from mlx_flash.server.request import GenerationRequest

_SEED_BITS = 63

GATHER_SECONDS = 0.001
"""The time that the first request waits for others. Prompts that begin together share passes; one that comes a moment
later has passes of its own, which the others wait for."""

RANKS_SECONDS = 60.0
"""Other ranks hear from rank 0 at least so often: they give it up after some minutes."""


class EngineRoom:
    """The generation thread, and the way of requests to it.

    The thread takes in requests, admits those that fit, computes a pass, and begins again. On several ranks all of them
    do so alike: rank 0 shares what only it sees before each round.
    """

    models: Models

    def __init__(self, catalog: Catalog, options: BatchOptions | None = None, keep_alive: float | None = None) -> None:
        self.catalog = catalog
        self._options, self._keep_alive = options or BatchOptions(), keep_alive
        self._has_loaded = False
        self._loaded: SimpleQueue[ResidencyPlan | FlashError | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="generation")
        self._native_id: int | None = None
        self._is_stopping = self._is_closed = self._has_ended_well = False
        # No condition: an interrupt of the main thread could leave it locked for ever
        self._lock = threading.Lock()  # held while news are added or taken
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._requests: list[GenerationRequest] = []
        self._left: list[int] = []  # numbers of requests whose clients have left
        self._answers: WeakValueDictionary[int, Answers] = WeakValueDictionary()
        self._numbers = count(1)
        self._ranks: Ranks | None = None
        self._waiting: deque[Job] = deque()

    def start(self) -> ResidencyPlan | None:
        """Start the thread, and load the default model. Return its plan; None if there is no default model."""
        try:
            self._thread.start()
            if isinstance(found := self._loaded.get(), FlashError):
                raise found
            return found
        except BaseException:  # after a signal the thread would go on, and Python waits for it before it ends
            self.stop()
            if self._thread.ident is not None:  # one that Python counts as ended may still end
                self.join()
            raise

    @property
    def is_alive(self) -> bool:
        return self._native_id is not None and not self._is_stopping and not self._is_closed

    @property
    def is_ready(self) -> bool:
        """True once the default model is in memory."""
        return self._has_loaded

    @property
    def num_answers(self) -> int:
        return sum(number in answers.open for number, answers in self._answers.items())

    def submit(self, *requests: GenerationRequest) -> Answers:
        """Send requests to the thread together. Return their answers, for the event loop that runs now."""
        if self._ranks is not None:
            self._ranks.check(requests)
        asked = [
            replace(
                each,
                number=next(self._numbers),
                sampling=replace(each.sampling, choice=i, drawn_seed=secrets.randbits(_SEED_BITS)),
            )
            for each in requests
            for i in range(each.num_choices)
        ]
        with self._lock:
            if not self.is_alive:
                raise RefusedError("the server stops." if self._is_stopping else "the generation thread died.", 503)
            answers = Answers([each.number for each in asked], self._leave)
            self._answers.update((each.number, answers) for each in asked)
            self._requests += asked
        self._woken.put(None)
        return answers

    def _leave(self, numbers: Iterable[int]) -> None:
        with self._lock:
            self._left += numbers
        self._woken.put(None)

    def stop(self) -> None:
        """End all requests with an error after the pass under way, and the thread."""
        self._is_stopping = True
        self._woken.put(None)

    def join(self) -> bool:
        """Wait for the end of the thread. Return False if it died."""
        self._thread.join()
        wait_for_end_of_thread(self._native_id)
        return self._has_ended_well

    def _check_running(self, done: int, total: int) -> None:
        """End the loading of the default model if the server stops. A progress callback."""
        if self._is_stopping:
            raise RefusedError("the server stops.", 503)

    def _run(self) -> None:
        self._native_id = threading.get_native_id()
        try:
            self._ranks = Ranks.of_process()
            with closing(Models(self._options, self._ranks, self._keep_alive)) as self.models:
                if self._load_default():
                    self._answer_all()
                    self._has_ended_well = True
        finally:
            with self._lock:
                self._is_closed = True
                answers = list(self._answers.items())
            for number, each in answers:
                each.put(number, Failed(RefusedError("the server stops.", 503)))
            self._loaded.put(RefusedError("the generation thread died.", 503))  # which nobody reads once it has loaded

    def _load_default(self) -> bool:
        """Load the default model, if there is one. Return whether requests can be answered."""
        try:
            default = self.catalog.default
            model = None if default is None else self.models.load(default, self._check_running)
        except FlashError as error:
            self._loaded.put(error)
            return False
        self._has_loaded = True
        self._loaded.put(None if model is None else model.model.plan)
        return True

    def _answer_all(self) -> None:
        """Answer requests until the server stops."""
        stops = False
        while not stops:
            stops = self._step()
        error = RefusedError("the server stops.", 503)
        for model in self.models:
            model.drop_all(error)
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _step(self) -> bool:
        """Go one round. Return whether the server stops."""
        if (news := self._news()) is not None and self._take_news(news):
            return True
        while self._waiting and ends_alone(self._waiting[0].fail, self._admit, self._waiting[0]) is not False:
            self._waiting.popleft()  # it has begun, or failed
        if self._ranks is None and not self._woken.empty():  # more have come meanwhile
            return False
        for model in self.models:
            if model.jobs:
                ends_alone(partial(self._fail_all, model), model.advance)
                if not model.jobs:
                    self.models.note_end(model)
        return False

    def _take_news(self, news: News) -> bool:
        """Take note of what has come. Return whether the server stops."""
        for request in news.requests:
            self._take_in(request)
        for number in news.left:
            self._let_go(number)
        ends_alone(lambda error: None, self.models.unload_named, news.expired)  # it is logged; the model has left
        return news.stops

    def _news(self) -> News | None:
        """Return what has come; None for nothing. Wait for it if there is nothing to compute."""
        ranks = self._ranks
        if ranks is not None and not ranks.is_first:
            return ranks.share(News())
        is_idle = not self._waiting and not any(model.jobs for model in self.models)
        seconds = self.models.next_expiry
        if not is_idle and ranks is None and seconds != 0 and self._woken.empty():
            return None
        seconds = seconds if is_idle else 0.0
        if ranks is not None:
            seconds = RANKS_SECONDS if seconds is None else min(RANKS_SECONDS, seconds)
        with suppress(Empty):
            self._woken.get(timeout=seconds)
            for _ in range(self._options.decode_concurrency):  # not without end: clients may come and leave
                self._woken.get(timeout=GATHER_SECONDS if is_idle else 0.0)
        with self._lock:
            news = News(self._requests, self._left, self.models.expired(), self._is_stopping)
            self._requests, self._left = [], []
        return news if ranks is None else ranks.share(news)

    def _take_in(self, request: GenerationRequest) -> None:
        """Queue a request. Refuse it if its model is unknown, or has never room for it."""
        answer = self._answers.get(request.number)  # None on other ranks than 0, or if the client is gone

        def refuse(error: RefusedError) -> None:
            if answer is not None:
                answer.put(request.number, Failed(error))

        ends_alone(refuse, self._queue, request, answer)

    def _queue(self, request: GenerationRequest, answer: Answers | None) -> None:
        source = self.catalog.find(request.model)
        job = Job(opened(request.completed(source.defaults), source.first_messages), source, answer)
        model = self.models.get(job.source)
        if model is not None and request.has_prompt:
            model.prepare(job)
        self._waiting.append(job)

    def _admit(self, job: Job) -> bool:
        """Begin with a request if there is room now. Return False if it has to wait for others."""
        if job.request.work == "unload":
            if (found := self.models.get(job.source)) is not None:  # after its other requests
                self.models.note_use(found, 0.0)
            job.end()
            return True
        model = self.models.get(job.source) or self._load(job)
        if model is None:
            return False
        if job.request.has_prompt and not job.prompt.tokens:
            model.prepare(job)
        is_computed = job.request.work in ("answer", "embed")
        if is_computed and not model.admits(job):
            return False
        if is_computed:
            model.begin(job)
        self.models.note_use(model, job.request.keep_alive)
        if not is_computed:
            job.end()
        return True

    def _load(self, job: Job) -> LoadedModel | None:
        """Load the model of a request, and report progress to all that wait for it, or come meanwhile."""
        began = time.perf_counter()

        def report(done: int, total: int) -> None:
            if self._ranks is None:  # other ranks take requests between passes only
                with self._lock:
                    found, self._requests = self._requests, []
                for request in found:
                    self._take_in(request)
            for other in self._waiting:
                if other.source.name == job.source.name:
                    other.send(Progress("loading", done, total))

        report(0, 0)
        model = self.models.load(job.source, report)
        job.load_seconds = time.perf_counter() - began
        return model

    def _let_go(self, number: int) -> None:
        self._waiting = deque(job for job in self._waiting if job.number != number)
        for model in self.models:
            for job in [job for job in model.jobs.values() if job.number == number]:
                ends_alone(partial(self._fail_all, model), model.drop, job)
                self.models.note_end(model)

    def _fail_all(self, model: LoadedModel, error: RefusedError) -> None:
        """End all requests of a model after a pass that failed; on several ranks, the others may not have failed."""
        model.drop_all(error)
        if self._ranks is not None and not isinstance(error.__cause__, BudgetError | RefusedError):
            raise PeerError(f"a pass failed on this rank: {error}") from error
