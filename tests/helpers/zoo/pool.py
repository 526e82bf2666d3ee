"""Each case in processes of its own, so that a crash is an outcome of that case."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import mlx.core as mx

import children
from zoo.compare import Outcome, compare

FORKS = multiprocessing.get_context("forkserver" if mx.default_device() == mx.cpu else "spawn")
"""Of a server process that has imported mlx-lm and computed nothing. CUDA does not survive a fork."""


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration and a variant to compare, and the variant to use if stock mlx-lm cannot run that."""

    name: str
    variant: str
    instead: str | None = None


def _compare(case: Case, connection: Connection) -> None:
    connection.send(compare(case.name, case.variant, connection.send))


def outcome_of(case: Case, timeout: float, target: Callable[[Case, Connection], None] = _compare) -> Outcome:
    """Compare one case. A crash or a timeout is an outcome too, attributed to stock or to streaming.

    ``target``, which the process runs, sends a phase as it begins, and the outcome.
    """
    began = time.monotonic()
    if FORKS.get_start_method() == "forkserver":
        children.ensure_server()
    connection, theirs = FORKS.Pipe()
    process = FORKS.Process(target=target, args=(case, theirs), daemon=True)
    process.start()
    theirs.close()
    phase = "stock"
    try:
        while connection.poll(max(0, began + timeout - time.monotonic())):
            message = connection.recv()
            if isinstance(message, Outcome):
                return message
            phase = message
        reason = f"no end after {timeout:g} s"
    except (EOFError, ConnectionResetError):  # the latter if it had not read everything
        process.join()
        code = process.exitcode or 0
        reason = f"crash: {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"
    finally:
        connection.close()
        process.kill()
        process.join()
    status = "cannot" if phase == "stock" else "failed"
    return Outcome(case.name, case.variant, status, reason, seconds=time.monotonic() - began)


def run(
    cases: Sequence[Case], jobs: int, timeout: float, run_one: Callable[[Case, float], Outcome] = outcome_of
) -> Iterator[Outcome]:
    """Compare in several processes. Yield each outcome as it comes."""

    def one(case: Case) -> Outcome:
        outcome = run_one(case, timeout)
        if outcome.status != "cannot" or case.instead is None:
            return outcome
        other = run_one(Case(case.name, case.instead), timeout)
        return replace(other, note=f"{case.variant} cannot run stock: {outcome.reason}")

    with ThreadPoolExecutor(jobs) as threads:
        for future in as_completed([threads.submit(one, case) for case in cases]):
            yield future.result()
