"""A pool of worker processes that survives crashes: the crashing case is named, and a new worker starts."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

import mlx.core as mx

import children
from zoo.compare import Outcome, compare

FORKS = multiprocessing.get_context("forkserver" if mx.default_device() == mx.cpu else "spawn")
"""Of a server process that has imported mlx-lm and computed nothing. CUDA does not survive a fork."""


@dataclass(frozen=True, slots=True)
class Case:
    """A case to compare.

    Attributes:
        name: of the configuration.
        variant: how weights are stored.
        instead: the variant to use if stock mlx-lm cannot run this one.
    """

    name: str
    variant: str
    instead: str | None = None


class Worker:
    """A process that compares one case after another.

    Args:
        target: function that the process runs with its connection.
    """

    def __init__(self, target: Callable[[Connection], None] | None = None) -> None:
        self._target = target or serve
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def run(self, case: Case, timeout: float) -> Outcome:
        """Compare one case. A crash or a timeout is an outcome too, attributed to stock mlx-lm or to streaming."""
        began = time.monotonic()
        connection = self._ready()
        connection.send(case)
        phase = "stock"
        try:
            while connection.poll(max(0, began + timeout - time.monotonic())):
                message = connection.recv()
                if isinstance(message, Outcome):
                    return message
                phase = message
            reason = f"no end after {timeout:g} s"
        except (EOFError, ConnectionResetError):  # the latter if it had not read everything
            reason = f"crash: {self._how_it_ended()}"
        self.stop()
        status = "cannot" if phase == "stock" else "failed"
        return Outcome(case.name, case.variant, status, reason, seconds=time.monotonic() - began)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _ready(self) -> Connection:
        if self._connection is None:
            if FORKS.get_start_method() == "forkserver":
                children.ensure_server()
            self._connection, theirs = FORKS.Pipe()
            self._process = FORKS.Process(target=self._target, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        return self._connection

    def _how_it_ended(self) -> str:
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def serve(connection: Connection) -> None:
    """Serve cases in a worker process, until the connection closes."""
    while True:
        try:
            case: Case = connection.recv()
        except EOFError:
            return
        connection.send(compare(case.name, case.variant, connection.send))


def run(cases: Sequence[Case], jobs: int, timeout: float) -> Iterator[Outcome]:
    """Compare in several processes. Yield each outcome as it comes."""
    workers: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(jobs):
        workers.put(Worker())

    def one(case: Case) -> Outcome:
        worker = workers.get()
        try:
            outcome = worker.run(case, timeout)
            if outcome.status != "ok":
                worker.stop()  # after an error of a kernel, nothing computes in that process any more
            if outcome.status != "cannot" or case.instead is None:
                return outcome
            other = worker.run(Case(case.name, case.instead), timeout)
            return replace(other, note=f"{case.variant} cannot run stock: {outcome.reason}")
        finally:
            workers.put(worker)

    with ThreadPoolExecutor(jobs) as threads:
        for future in as_completed([threads.submit(one, case) for case in cases]):
            yield future.result()
    while not workers.empty():
        workers.get().stop()
