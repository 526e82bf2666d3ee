"""Parts of the soak test of the server: clients in threads, samples of the server, a tiny model."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from servers import LIMIT_ROOM, Server, serving  # noqa: E402

__all__ = ["LIMIT_ROOM", "Clients", "Sample", "Server", "make_model", "serving", "wait_for_no_client"]

SHAPE = "--layers=2 --hidden-size=64 --intermediate-size=128 --heads=4 --kv-heads=2 --vocab-size=300 --dtype=float32"


def make_model(path: Path) -> Path:
    """Make a tiny model."""
    make = [sys.executable, ROOT / "scripts" / "make_random_model.py", path, *SHAPE.split()]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return path


# --- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """The server at a moment, and the requests until then."""

    seconds: float
    requests: int
    right: int
    failed: int
    resident_bytes: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: {self.requests} requests, {self.right} right, {self.failed} failed, resident "
            f"{self.resident_bytes / 1e6:.1f} MB, {self.descriptors} descriptors, {self.threads} threads"
        )


def growth(samples: list[Sample]) -> float:
    """Return the slope of a line through the last three quarters of the samples, in kB a request."""
    late = samples[len(samples) // 4 :]
    if len({sample.requests for sample in late}) < 2:
        return 0.0
    requests, resident = [sample.requests for sample in late], [sample.resident_bytes for sample in late]
    return statistics.linear_regression(requests, resident).slope / 1e3


def wait_for_no_client(process: psutil.Process, seconds: float = 60) -> None:
    """Wait until the server has closed its end of every connection, at most so long.

    A client has its answer, and may have gone, before the server closes its end.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp")):
            return
        time.sleep(0.02)


# --- clients ---------------------------------------------------------------------------------------------------------


class Clients:
    """Clients of one server, each in a thread, and their record.

    Args:
        server: the server.
        act: does one thing to the server, with the number of the request and its dice. Returns its name, which begins
            with "right" or "failed" where there is something to check.
        number: of clients.
        args: the options of ``soak.py``.
    """

    def __init__(
        self,
        server: Server,
        act: Callable[[int, random.Random], str],
        number: int,
        args: argparse.Namespace,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._server, self._act, self._args = server, act, args
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._work) for _ in range(number)]

    def run(self) -> list[Sample]:
        """Send all requests. Return samples of the server meanwhile, and one when it is idle again."""
        samples = []
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        while not self._wait(self._args.interval):
            samples.append(self.sample())
            print(samples[-1], flush=True)
        return [*samples, self.idle_sample()]

    def sample(self) -> Sample:
        """Return the state of the server's process now."""
        process = self._server.process
        with self._lock, process.oneshot():
            right, failed = (
                sum(count for act, count in self.counts.items() if act.startswith(word)) for word in ("right", "failed")
            )
            seconds, memory = time.monotonic() - self._began, process.memory_info().rss
            threads = process.num_threads()
            return Sample(seconds, self.counts.total(), right, failed, memory, process.num_fds(), threads)

    def idle_sample(self) -> Sample:
        """Return the state of the server without clients: the least of some seconds.

        The server opens a file for a moment each time that it tells its state.
        """
        wait_for_no_client(self._server.process)
        samples = []
        for _ in range(20):
            time.sleep(0.1)
            samples.append(self.sample())
        return min(samples, key=lambda sample: (sample.descriptors, sample.threads))

    def write(self, path: Path | None, samples: list[Sample], **numbers: Any) -> None:
        """Write all numbers, if a file was named."""
        if path is not None:
            found = {"settings": {**vars(self._args), "json": None}, "counts": self.counts, **numbers}
            found |= {"kb_a_request": growth(samples), "samples": [asdict(sample) for sample in samples]}
            path.write_text(json.dumps(found, indent=1) + "\n")

    def summary(self, samples: list[Sample]) -> str:
        """Return what became of the requests, and of the server from the first to the last sample."""
        before, after = samples[0], samples[-1]
        return (
            f"{after.requests} requests in {after.seconds:.0f} s: {dict(sorted(self.counts.items()))}; descriptors "
            f"{before.descriptors} -> {after.descriptors}, threads {before.threads} -> {after.threads}, resident "
            f"{before.resident_bytes / 1e6:.1f} -> {after.resident_bytes / 1e6:.1f} MB ({growth(samples):+.3f} kB a "
            "request)"
        )

    def _wait(self, seconds: float) -> bool:
        """Wait until all clients have ended, at most so long. Return whether they have."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while time.monotonic() - self._began < self._args.seconds:
            with self._lock:
                number = next(self._numbers)
            dice = random.Random(f"{self._args.seed} {number}")
            try:
                result = self._act(number, dice)
            except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
                result = f"failed: {error!r}"
            if result.startswith("failed"):
                print(f"request {number}: {result}", file=sys.stderr, flush=True)
            with self._lock:
                self.counts[result] += 1
            if self._args.pause:
                time.sleep(dice.expovariate(1 / self._args.pause))
