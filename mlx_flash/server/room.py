"""The generation thread, which owns MLX: everything else reaches models through it."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from mlx_flash.errors import FlashError, RefusedError
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.server.answer import Answer
from mlx_flash.server.batchoptions import BatchOptions
from mlx_flash.server.catalog import Catalog
from mlx_flash.server.inbox import Inbox
from mlx_flash.server.loop import Loop
from mlx_flash.server.models import Models
from mlx_flash.server.ranks import Ranks
from mlx_flash.server.request import GenerationRequest
from mlx_flash.workers import wait_for_end_of_thread


class EngineRoom:
    """The generation thread, and the way of requests to it.

    Args:
        catalog: the models that requests can name.
        options: limits of batches.
        keep_alive: seconds that an idle model stays in memory; None for ever.

    Attributes:
        catalog: as given.
        models: those in memory; they belong to the thread.
    """

    models: Models

    def __init__(self, catalog: Catalog, options: BatchOptions | None = None, keep_alive: float | None = None) -> None:
        self.catalog = catalog
        self._options, self._keep_alive = options or BatchOptions(), keep_alive
        self._inbox = Inbox()
        self._plan: Future[ResidencyPlan | None] = Future()
        self._thread = threading.Thread(target=self._run, name="generation")
        self._native_id: int | None = None
        self._is_stopping = self._has_ended_well = False

    def start(self) -> ResidencyPlan | None:
        """Start the thread, and load the default model. Return its plan; None if there is no default model.

        Raises:
            FlashError: the model cannot be loaded. The thread has ended.
        """
        try:
            self._thread.start()
            return self._plan.result()
        except BaseException:  # after a signal the thread would go on, and Python waits for it before it ends
            self.stop()
            if self._thread.ident is not None:  # one that Python counts as ended may still end
                self.join()
            raise

    @property
    def is_alive(self) -> bool:
        """True if requests are answered."""
        return self._thread.is_alive() and not self._is_stopping and not self._inbox.is_closed

    @property
    def is_ready(self) -> bool:
        """True once the default model is in memory."""
        return self._plan.done()

    @property
    def num_answers(self) -> int:
        """Answers that are computed or wait."""
        return self._inbox.num_answers

    def submit(self, *requests: GenerationRequest) -> list[Answer]:
        """Send requests to the thread together. Return their answers, for the event loop that runs now.

        Raises:
            RefusedError: the thread has ended, or is about to.
        """
        if not self.is_alive:
            raise RefusedError("the server stops." if self._is_stopping else "the generation thread died.", 503)
        return self._inbox.submit(*requests)

    def stop(self) -> None:
        """End all requests with an error after the pass under way, and the thread."""
        self._is_stopping = True
        self._inbox.stop()

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
        ranks = Ranks.of_process()
        models = self.models = Models(self._options, ranks, self._keep_alive)
        loop = Loop(self.catalog, models, self._inbox, ranks)
        try:
            try:
                model = loop.load_default(self._check_running)
            except FlashError as error:
                self._plan.set_exception(error)
                return
            self._plan.set_result(None if model is None else model.model.plan)
            del model
            loop.run()
            self._has_ended_well = True
        finally:
            self._inbox.close()
            models.close()
            if not self._plan.done():
                self._plan.set_exception(RefusedError("the generation thread died.", 503))
