"""Ranks that watch each other: if one is lost, all of them end within seconds, with a sentence that names it.

Nothing interrupts MLX while it waits for a message, and a rank that computes does not see that another one is gone. So
each rank has a connection of its own to the next one, on which lines go both ways every second. A rank that sends none,
or whose connection closes before its farewell, is lost. What a rank learns it passes on, before it ends its process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

TICK_SECONDS = 1.0
SILENT_TICKS = 10
"""A rank that sends nothing for so long hangs, or cannot be reached."""

FAREWELL_TICKS = 3
"""Time in which messages of a rank that has ended can still arrive."""

PATIENCE_TICKS = 600
"""A message that takes longer does not come, although all ranks are there."""

CONNECT_SECONDS = 20.0

CLOSE_SECONDS = 1.0
"""A rank that ends waits so long for its neighbours to have read its farewell."""

_MAX_LINE = 1 << 16
_MAX_REASON = 300
_TOKEN_BITS = 20
_TOKEN = struct.Struct("!3d")
_COORDINATORS = ("NCCL_HOST_IP", "MLX_JACCL_COORDINATOR", "MLX_IBV_COORDINATOR")
"""The variables in which ``mlx.launch`` gives ranks the address of rank 0."""

Gather = Callable[[Sequence[float]], list[list[float]]]
_log = logging.getLogger("mlx_flash")


class _Link:
    """A connection to a neighbour.

    Args:
        connection: to it.
        rank: its number.

    Attributes:
        rank: its number.
        num_missed: ticks since it sent a line.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.num_missed = 0
        self._connection = connection
        self._received = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, lost: dict[int, str]) -> None:
        with contextlib.suppress(OSError):  # a lost connection is noticed when it is read
            self._connection.send(json.dumps(lost).encode() + b"\n", socket.MSG_DONTWAIT)

    def receive(self) -> dict[int, str]:
        """Return what the neighbour knows of ranks that are gone.

        Raises:
            OSError: the connection is closed.
            ValueError: this is no rank.
        """
        data = self._connection.recv(_MAX_LINE)
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or len(self._received) > _MAX_LINE:
            raise ConnectionError
        self.num_missed = 0
        return {int(rank): str(why) for line in lines for rank, why in json.loads(line).items()}

    def close(self) -> None:
        self._connection.close()

    def finish(self, lost: dict[int, str]) -> None:
        """Send a last line, and tell TCP that no further one comes."""
        self.send(lost)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close_when_read(self, deadline: float) -> None:
        """Close when the neighbour has closed its side: TCP drops unsent lines if received ones are unread then."""
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self._connection.settimeout(left)
                if not self._connection.recv(_MAX_LINE):
                    break
        self._connection.close()


class Watch:
    """A thread that watches the neighbours of a rank.

    Args:
        rank: of this process.
        links: the connections to neighbours.
        end: called with the sentence when a rank is lost; ends the process.
    """

    def __init__(self, rank: int, links: Sequence[_Link], end: Callable[[str], None]) -> None:
        self._rank = rank
        self._links = list(links)
        self._end = end
        self._ended: dict[int, str] = {}
        self._waiting: tuple[str, int] | None = None
        self._num_ticks = 0
        self._pid = os.getpid()
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="mlx-flash-ranks", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @contextlib.contextmanager
    def waiting(self, told: str) -> Iterator[None]:
        """End the process if what the caller waits for cannot come.

        Args:
            told: what this rank waits for, as the start of a sentence.
        """
        self._waiting = told, self._num_ticks
        try:
            yield
        finally:
            self._waiting = None

    def reason(self) -> str:
        """Return why a connection of MLX's was lost, if that is known. Does not return if a rank died."""
        for _ in range(20):
            if self._ended:
                return "; ".join(self._ended.values())
            time.sleep(0.1)
        return ""

    def _run(self) -> None:
        following = time.monotonic()
        while not self._is_closed:
            waited: list[_Link | socket.socket] = [*self._links, self._woken]
            ready, _, _ = select.select(waited, [], [], max(0.0, following - time.monotonic()))
            for link in [link for link in self._links if link in ready]:
                self._read(link)
            if time.monotonic() >= following:
                self._tick()
                following = time.monotonic() + TICK_SECONDS

    def _read(self, link: _Link) -> None:
        try:
            self._learn(link.receive())
        except (OSError, ValueError):
            self._links.remove(link)
            link.close()
            if link.rank not in self._ended:
                self._lose(f"rank {link.rank} has died")

    def _learn(self, gone: dict[int, str]) -> None:
        if lost := gone.pop(-1, ""):
            self._lose(lost)
        if gone.keys() - self._ended.keys():
            self._ended |= gone
            self._send(self._ended)

    def _tick(self) -> None:
        self._num_ticks += 1
        self._send(self._ended)
        for link in self._links:  # ticks are counted, not seconds: this process may have been stopped itself
            link.num_missed += 1
            if link.num_missed > SILENT_TICKS and link.rank not in self._ended:
                self._lose(f"rank {link.rank} hangs or cannot be reached: it has sent nothing for {SILENT_TICKS} s")
        waiting = self._waiting
        if waiting is None:
            return
        told, num_ticks = waiting[0], self._num_ticks - waiting[1]
        if self._ended and num_ticks > FAREWELL_TICKS:
            self._lose(f"{'; '.join(self._ended.values())}; {told}")
        if num_ticks > PATIENCE_TICKS:
            self._lose(f"{told}, and had no answer in {PATIENCE_TICKS} s")

    def _lose(self, why: str) -> None:
        self._send({-1: why})
        self._end(why)

    def _send(self, gone: dict[int, str]) -> None:
        for link in self._links:
            link.send(gone)

    def close(self) -> None:
        """Tell the others that this rank ends, and why if it failed. A forked child does nothing."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._wake.close()
        self._thread.join()
        error = getattr(sys, "last_value", None)
        cause = f" ({type(error).__name__}: {error})"[:_MAX_REASON] if error else ""
        for link in self._links:
            link.finish({**self._ended, self._rank: f"rank {self._rank} has ended{cause}"})
        self._woken.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for link in self._links:
            link.close_when_read(deadline)


def watch_neighbours(rank: int, size: int, gather: Gather) -> Watch:
    """Connect the ranks in a ring, and watch the neighbours. All ranks call it.

    Args:
        rank: of this process.
        size: how many there are.
        gather: returns the numbers of every rank.
    """
    token = [float(secrets.randbits(_TOKEN_BITS)) for _ in range(3)]
    with socket.socket() as listener:
        places = gather([*_listen(listener, rank), *token])
        right, left = (rank + 1) % size, (rank - 1) % size
        made = [(right, _connect(places[right])), (left, _accept(listener, token))]
    for other, connection in made:
        if connection is None:
            _log.warning("rank %d has no connection to rank %d: it will not see it hang", rank, other)
    links = [_Link(connection, other) for other, connection in made if connection is not None]
    return Watch(rank, links, partial(_end_process, rank))


def _listen(listener: socket.socket, rank: int) -> list[float]:
    """Wait for connections at this rank's address. Return it, four bytes and a port."""
    try:
        listener.bind((_own_address(rank), 0))
        listener.listen()
    except OSError as error:
        _log.warning("rank %d cannot be watched: %s", rank, error)
        return [0.0] * 5
    host, port = listener.getsockname()
    return [*map(float, socket.inet_aton(host)), float(port)]


def _own_address(rank: int) -> str:
    """Return the address at which other ranks reach this machine."""
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        return str(json.loads(Path(hostfile).read_text())[rank][0]).rsplit(":", 1)[0]
    for name in _COORDINATORS:
        if name in os.environ:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((os.environ[name].split(":")[0], 9))  # sends nothing, but chooses a way there
                return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def _connect(place: Sequence[float]) -> socket.socket | None:
    """Return a connection to a rank; None if it cannot be reached.

    Args:
        place: its address, its port and its token.
    """
    host = socket.inet_ntoa(bytes(map(int, place[:4])))
    try:
        connection = socket.create_connection((host, int(place[4])), CONNECT_SECONDS)
        connection.sendall(_TOKEN.pack(*place[5:]))
    except OSError:
        return None
    connection.settimeout(None)
    return connection


def _accept(listener: socket.socket, token: Sequence[float]) -> socket.socket | None:
    """Return the connection of the rank that knows the token; None if there is none in time."""
    deadline = time.monotonic() + CONNECT_SECONDS
    with contextlib.suppress(OSError):
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            connection, _ = listener.accept()
            connection.settimeout(left)
            if connection.recv(_TOKEN.size, socket.MSG_WAITALL) == _TOKEN.pack(*token):
                connection.settimeout(None)
                return connection
            connection.close()
    return None


def _end_process(rank: int, why: str) -> None:
    """End this process: nothing else interrupts MLX."""
    hint = "Hint: see what that rank printed; start all of them again."
    print(f"error: {why}. This rank, {rank}, ends too. {hint}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
