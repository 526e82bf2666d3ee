"""Each case in processes of its own, so that a crash is an outcome of that case."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import mlx.core as mx

import children
from local_ranks import RANKS_PROGRAM, lines_of, run_ranks
from zoo.compare import Outcome, compare

FORKS = multiprocessing.get_context("forkserver" if mx.default_device() == mx.cpu else "spawn")
"""Of a server process that has imported mlx-lm and computed nothing. CUDA does not survive a fork."""

REFUSALS = ("StreamedWeightsError", "ConfigError")


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


def outcome_on_ranks(case: Case, timeout: float, num_ranks: int = 2) -> Outcome:
    """Compare one case whose layers take turns between ranks of this machine."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zoo-ranks-") as folder:
        try:
            done = run_ranks(num_ranks, RANKS_PROGRAM, "zoo", folder, case.name, case.variant, timeout=timeout)
            status, reason = _judge(done)
        except TimeoutError as error:
            status, reason = "failed", str(error)
    return Outcome(case.name, case.variant, status, reason, seconds=time.monotonic() - began)


def _judge(done: Sequence[subprocess.CompletedProcess[str]]) -> tuple[str, str]:
    """Return status and reason. What ends one rank ends others with an error that says only that."""
    found: list[dict[str, Any]] = [found for _, _, found in lines_of(done)]
    errors = [each for each in found if each.get("error", "PeerError") != "PeerError"]
    if errors:
        return "refused" if errors[0]["error"] in REFUSALS else "failed", f"{errors[0]['error']}: {errors[0]['text']}"
    if len(found) < len(done) or any(each.returncode for each in done):
        return "failed", f"a rank ended: {' '.join(' '.join(each.stderr[-200:] for each in done).split())}"
    if reasons := [each["cannot"] for each in found if each.get("cannot")]:
        return "cannot", reasons[0]
    is_same = all(each["is_equal"] for each in found) and len({each["digest"] for each in found}) == 1
    return ("ok", "") if is_same else ("failed", "ranks have other logits than stock")


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
