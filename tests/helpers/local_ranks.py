"""Ranks on this machine, joined as ``mlx.launch`` joins them, in child processes that have imported mlx-lm."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

import children


def ring(num_ranks: int, folder: Path) -> list[dict[str, str]]:
    """Return the environment of each rank. The file with their addresses is written to a folder."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ranks)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    (folder / "hosts.json").write_text(json.dumps(hosts))
    return [{"MLX_HOSTFILE": str(folder / "hosts.json"), "MLX_RANK": str(rank)} for rank in range(num_ranks)]


def join() -> mx.distributed.Group:
    """Join the other ranks, in the program of a rank.

    MLX's threads ask for data over and over while they wait, which takes the processor from the ranks that compute. So
    their sockets wait for a millisecond before they say that there is none.
    """
    group = mx.distributed.init()
    for path in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own file, or a socket without a peer
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    one.getpeername()
                    if one.family == socket.AF_INET:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
                        one.setblocking(True)
    return group


class Rank(NamedTuple):
    """A process, and the files of its standard output and error."""

    process: BaseProcess
    out: Path
    errors: Path


@contextlib.contextmanager
def started(num_ranks: int, folder: Path, *program: object, forks: bool = True) -> Iterator[list[Rank]]:
    """Start ``python PROGRAM`` on some ranks, as ``mlx.launch`` does, which would end all when one has ended.

    A program that is forked has to call its exit functions itself.
    """
    ranks = []
    try:
        for i, address in enumerate(ring(num_ranks, folder)):
            out, errors = folder / f"out-{i}", folder / f"errors-{i}"
            for path in (out, errors):
                path.touch()
            files = Path(os.devnull), out, errors
            ranks.append(Rank(children.start(*program, files=files, env=address, forks=forks), out, errors))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def run_ranks(num_ranks: int, *program: object, timeout: float = 240) -> list[subprocess.CompletedProcess[str]]:
    """Run ``python PROGRAM`` on some ranks."""
    with tempfile.TemporaryDirectory() as folder, started(num_ranks, Path(folder), *program) as ranks:
        deadline = time.monotonic() + timeout
        for rank in ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        texts = [(rank.out.read_text(), rank.errors.read_text()) for rank in ranks]
        codes = [rank.process.exitcode for rank in ranks]
        if None in codes:
            raise TimeoutError(f"no end after {timeout:g} s: {texts}")
        return [subprocess.CompletedProcess(program, code or 0, *text) for code, text in zip(codes, texts, strict=True)]


RANKS_PROGRAM = children.HELPERS / "ranks_program.py"


def lines_of(done: Sequence[subprocess.CompletedProcess[str]]) -> list[list[Any]]:
    """Return the lines of JSON that ranks printed."""
    return [json.loads(line) for each in done for line in each.stdout.splitlines() if line.startswith("[")]
