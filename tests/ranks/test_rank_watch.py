"""A rank that dies or hangs ends the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from children import HELPERS
from local_ranks import started
from models import LLAMA, save

PROGRAM = HELPERS / "ranks_program.py"
SECONDS = 20.0


def wait_for(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "connection to a peer was lost"), (signal.SIGSTOP, "had no answer in 2 s")]
)
def test_a_lost_rank_ends_the_others(tmp_path: Path, number: signal.Signals, words: str) -> None:
    save(tmp_path / "llama", LLAMA, mx.float32)
    with started(3, tmp_path, PROGRAM, tmp_path, "llama", "endless") as ranks:
        for rank in ranks:
            wait_for(lambda rank=rank: "ready" in rank.out.read_text() or not rank.process.is_alive(), 120)
        assert ranks[1].process.pid is not None and ranks[1].process.is_alive(), ranks[1].errors.read_text()
        os.kill(ranks[1].process.pid, number)
        others = ranks[0], ranks[2]
        for rank in others:
            rank.process.join(SECONDS)
        errors = [rank.out.read_text() + rank.errors.read_text() for rank in others]
        assert all(rank.process.exitcode for rank in others), errors
        assert any(words in each for each in errors), errors  # the second one may see that the first one is gone
