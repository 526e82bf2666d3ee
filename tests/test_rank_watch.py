"""A rank that dies or hangs ends the others, and is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_flash.ranks import watch
from mlx_flash.ranks.watch import Watch, _Link
from models import LLAMA, save

PROGRAM = Path(__file__).with_name("ranks_program.py")
SECONDS = 20.0


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TICK_SECONDS", 0.02)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
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
        for each in self.watches:
            each.close()
        self.end.close()


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


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "rank 1 has died"), (signal.SIGSTOP, "rank 1 hangs or cannot be reached")]
)
def test_a_lost_rank_ends_the_others(tmp_path: Path, number: signal.Signals, words: str) -> None:
    save(tmp_path / "llama", LLAMA, mx.float32)
    ranks = start(3, tmp_path)
    try:
        for rank in ranks:
            assert rank.stdout is not None and json.loads(rank.stdout.readline()) == "ready"
        ranks[1].send_signal(number)
        for rank in (ranks[0], ranks[2]):
            errors = rank.communicate(timeout=SECONDS)[1]
            assert rank.returncode and errors.count("error: ") == 1 and words in errors, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def start(num_ranks: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start ranks as ``mlx.launch`` does, which would end all of them when one has ended."""
    sockets = [socket.socket() for _ in range(num_ranks)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]))
    for one in sockets:
        one.close()
    command = [sys.executable, str(PROGRAM), str(folder), "llama", "endless"]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
