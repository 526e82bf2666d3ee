from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import children

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}


@contextmanager
def served(command: Sequence[object], port: int, log: Path, *, forks: bool = True) -> Iterator[BaseProcess]:
    """Start a server, and kill it afterwards."""
    process = children.start(*command, files=(Path(os.devnull), log, log), forks=forks)
    try:
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            assert process.is_alive(), log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
