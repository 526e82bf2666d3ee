from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import children

ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}


@contextmanager
def served(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Start a server, and end it afterwards."""
    process = children.start(*command, files=(Path(os.devnull), log, log))
    try:
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            assert process.is_alive(), log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.join()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
