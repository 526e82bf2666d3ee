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
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

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


def run_ranks(
    num_ranks: int, *program: object, env: Mapping[str, str] = {}, timeout: float = 240
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``python PROGRAM`` on some ranks. A program that is forked has to call its exit functions itself."""
    with tempfile.TemporaryDirectory() as folder:
        files, started = [], []
        for rank, address in enumerate(ring(num_ranks, Path(folder))):
            files.append([Path(folder) / f"{name}-{rank}" for name in ("stdin", "stdout", "stderr")])
            started.append(
                children.start(*program, files=[_touched(path) for path in files[-1]], env={**env, **address})
            )
        deadline = time.monotonic() + timeout
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in started if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        texts = [[path.read_text() for path in each[1:]] for each in files]
        assert not late, texts
        codes = [process.exitcode or 0 for process in started]
        return [subprocess.CompletedProcess(program, code, *text) for code, text in zip(codes, texts, strict=True)]


def _touched(path: Path) -> Path:
    path.touch()
    return path
