"""A rank that dies or hangs ends the others, and is named."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest

import children
from children import HELPERS
from local_ranks import ring
from mlx_flash.ranks import watch
from mlx_flash.ranks.watch import Watch, _Link
from models import LLAMA, save

PROGRAM = HELPERS / "ranks_program.py"
SECONDS = 20.0


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TICK_SECONDS", 0.02)


def wait_for(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Line:
    """Watched ranks 0, 1, ... in a line. The neighbour of rank 0 is the test, as rank 8."""

    def __init__(self, num_ranks: int) -> None:
        pairs = [socket.socketpair() for _ in range(num_ranks)]
        self.end = pairs[0][0]
        self.found: list[list[str]] = [[] for _ in range(num_ranks)]
        self.watches = []
        for rank, (_, left) in enumerate(pairs):
            links = [_Link(left, rank - 1 if rank else 8)]
            links += [_Link(pairs[rank + 1][0], rank + 1)] if rank + 1 < num_ranks else []
            self.watches.append(Watch(rank, links, self.found[rank].append))

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end.close()
        for each in self.watches:
            each.close()


def test_a_death_is_passed_on_by_name() -> None:
    with Line(3) as line:
        line.end.close()
        wait_for(lambda: all(line.found))
        assert all(why[0] == "rank 8 has died" for why in line.found)


def test_a_silent_rank_is_lost() -> None:
    with Line(2) as line:
        wait_for(lambda: all(line.found))
        assert all(why[0].startswith("rank 8 hangs") for why in line.found)


def test_a_rank_that_says_farewell_ends_only_those_that_wait_for_it() -> None:
    with Line(2) as line:
        line.end.sendall(b'{"8": "rank 8 has ended"}\n')
        line.end.close()
        assert [each.reason() for each in line.watches] == ["rank 8 has ended"] * 2
        time.sleep(watch.TICK_SECONDS * (watch.SILENT_TICKS + 5))
        assert not any(line.found)
        with line.watches[1].waiting("rank 1 waits"):
            wait_for(lambda: line.found[1])
        assert line.found[1][0] == "rank 8 has ended; rank 1 waits"


def test_a_farewell_arrives_after_all_that_was_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP drops what it has not sent yet if a connection is closed with a line of the neighbour unread."""
    monkeypatch.setattr(Watch, "_run", lambda self: None)  # the line comes after the thread has ended
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.connect(listener.getsockname())
        link = _Link(listener.accept()[0], 8)
        for _ in range(1000):
            link.send({0: "rank 0 has ended"})
        end.sendall(b"{}\n")
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(Watch(1, [link], lambda why: None).close)
            received = b"".join(iter(lambda: end.recv(4096), b""))
            end.close()
            closing.result()
    assert received.endswith(b'{"1": "rank 1 has ended"}\n')


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "rank 1 has died"), (signal.SIGSTOP, "rank 1 hangs or cannot be reached")]
)
def test_a_lost_rank_ends_the_others(tmp_path: Path, number: signal.Signals, words: str) -> None:
    save(tmp_path / "llama", LLAMA, mx.float32)
    with started(3, tmp_path) as ranks:
        for rank in ranks:
            wait_for(lambda rank=rank: "ready" in rank.out.read_text() or not rank.process.is_alive(), 120)
        assert ranks[1].process.pid is not None and ranks[1].process.is_alive(), ranks[1].errors.read_text()
        os.kill(ranks[1].process.pid, number)
        for rank in (ranks[0], ranks[2]):
            rank.process.join(SECONDS)
            errors = rank.errors.read_text()
            assert rank.process.exitcode and errors.count("error: ") == 1 and words in errors, errors


class Rank(NamedTuple):
    process: BaseProcess
    out: Path
    errors: Path


@contextlib.contextmanager
def started(num_ranks: int, folder: Path) -> Iterator[list[Rank]]:
    """Start ranks as ``mlx.launch`` does, which would end all of them when one has ended."""
    ranks = []
    try:
        for i, address in enumerate(ring(num_ranks, folder)):
            out, errors = (folder / f"{name}-{i}" for name in ("out", "errors"))
            files = (Path(os.devnull), out, errors)
            process = children.start(PROGRAM, folder, "llama", "endless", files=files, env=address)
            ranks.append(Rank(process, out, errors))
            out.touch()
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
