"""Servers in processes of their own, which benchmarks and stress tests send requests to."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LIMIT_ROOM = 1.05
"""Size of the kernel limit that a server runs in, in budgets."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        port: its port.
        log: the file with its output.
        command: the command that was started. It is the server's process, or the parent of it.
        process: the server's own process.
    """

    port: int
    log: Path
    command: subprocess.Popen[bytes]
    process: psutil.Process

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process has had; 0 where the system does not tell it, and after its end."""
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
            return int(found[1]) * 1024 if found else 0
        return 0

    def is_healthy(self) -> bool:
        """Return whether the server says that it works."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            return answer.status == 200 and json.loads(answer.read()) == {"status": "ok"}
        finally:
            connection.close()

    def end(self, seconds: float = 60) -> int:
        """End the server as a user does, who waits at most so long. Return the command's exit status."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.terminate()
        return self.command.wait(seconds)


@contextlib.contextmanager
def serving(words: Sequence[object], log: Path, under: Sequence[str] = ()) -> Iterator[Server]:
    """Run a server until the block ends. One that `Server.end` did not end is killed.

    Args:
        words: the module and its arguments, without a port.
        log: the file for its output.
        under: the words of a command that runs the server in a child process, such as ``small_machine``.

    Raises:
        SystemExit: the server ended before it answered; with the last line that it wrote.
    """
    module, *arguments = [str(word) for word in words]
    port = free_port()
    command = [*under, sys.executable, "-m", module, *arguments, "--port", str(port)]
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        )
    own = psutil.Process(started.pid)
    try:
        own = _wait(started, module, port, log)
        yield Server(port, log, started, own)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            own.kill()  # a command around it ends then, and cleans up
        started.wait()


def free_port() -> int:
    """Return a port of this machine that nobody listens to now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _wait(started: subprocess.Popen[bytes], module: str, port: int, log: Path) -> psutil.Process:
    """Wait until a server accepts connections. Return its own process."""
    while True:
        if started.poll() is not None:
            raise SystemExit(f"the server ended: {(log.read_text().strip().splitlines() or ['no message'])[-1]}")
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        time.sleep(0.1)
    parent = psutil.Process(started.pid)
    family = [parent, *parent.children(recursive=True)]
    return next(process for process in family if process.cmdline()[1:3] == ["-m", module])
