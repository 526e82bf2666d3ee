"""The ranks that compute a model together, and what they tell each other through ``mx.distributed``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO, cast

import mlx.core as mx

from mlx_flash.errors import PeerError

PATIENCE_SECONDS = 600.0
"""A message that takes longer does not come: a machine hangs, or its cable was pulled."""

_LAUNCHED = "MLX_RANK"
"""Set by ``mlx.launch`` for the processes that it starts."""


def launched_group() -> mx.distributed.Group | None:
    """Return the ranks that ``mlx.launch`` started; None if this process was started alone."""
    if _LAUNCHED not in os.environ:
        return None
    group = mx.distributed.init()
    return group if group.size() > 1 else None


def rank_output(group: mx.distributed.Group, out: TextIO) -> TextIO:
    """Return the stream that a rank prints its results to: they are those of rank 0."""
    return out if group.rank() == 0 else open(os.devnull, "w", encoding="utf-8")


def read_on_rank_0(file: TextIO) -> str:
    """Return the rest of a text file, which only rank 0 has to have."""
    group = launched_group()
    if group is None:
        return file.read()
    return Peers(group).text(file.read() if group.rank() == 0 else "")


class Peers:
    """The ranks of a model.

    Args:
        group: of ``mx.distributed``.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank. All ranks call it, with equally many."""
        with self._asking("every other rank", "its numbers"):
            found = mx.distributed.all_gather(mx.array([numbers], mx.float32), group=self._group)
            mx.eval(found)
        return cast(list[list[float]], found.tolist())

    def broadcast(self, arrays: Sequence[mx.array], owner: int, what: str) -> list[mx.array]:
        """Return the arrays of one rank, bit for bit. All ranks call it.

        Args:
            arrays: on the rank ``owner`` what to send; on others only shapes and types count.
            owner: the rank that has them.
            what: to name in an error.
        """
        if owner == self.rank:
            mx.eval(arrays)
        with self._asking(f"rank {owner}", what):
            found = [self._broadcast(array, owner) for array in arrays]
            mx.eval(found)
        return found

    def _broadcast(self, array: mx.array, owner: int) -> mx.array:
        """Add up bytes: the sum of floats would lose the sign of zeros."""
        mine = array.reshape(-1).view(mx.uint8) if owner == self.rank else mx.zeros((array.nbytes,), mx.uint8)
        return mx.distributed.all_sum(mine, group=self._group).view(array.dtype).reshape(array.shape)

    def text(self, text: str) -> str:
        """Return the text of rank 0. All ranks call it."""
        data = list(text.encode()) if self.rank == 0 else []
        (length,) = self.broadcast([mx.array(len(data), mx.int32)], 0, "a text")
        content = mx.array(data, mx.int32) if data else mx.zeros((cast(int, length.item()),), mx.int32)
        (content,) = self.broadcast([content], 0, "a text")
        return bytes(cast(list[int], content.tolist())).decode()

    def share_seed(self) -> None:
        """Make all ranks draw the same random numbers, if they do not yet. All ranks call it."""
        key = cast(list[mx.array], mx.random.state)[0]
        (shared,) = self.broadcast([key], 0, "the state of the random numbers")
        if any(row[0] for row in self.gather([float(key.tolist() != shared.tolist())])):
            mx.random.seed(cast(int, shared.view(mx.uint64).item()))

    def send(self, arrays: Sequence[mx.array], to: int, what: str) -> None:
        """Send arrays to a neighbour."""
        mx.eval(arrays)
        with self._asking(f"rank {to}", what):
            mx.eval([mx.distributed.send(array, to, group=self._group) for array in arrays])

    def receive(self, likes: Sequence[mx.array], source: int, what: str) -> list[mx.array]:
        """Return arrays that a neighbour sent.

        Args:
            likes: arrays of their shapes and types; never evaluated.
            source: the neighbour.
            what: to name in an error.
        """
        with self._asking(f"rank {source}", what):
            found = [mx.distributed.recv(like.shape, like.dtype, source, group=self._group) for like in likes]
            mx.eval(found)
        return found

    @contextmanager
    def _asking(self, whom: str, what: str) -> Iterator[None]:
        """Name a rank that is lost, and end the process if one hangs: nothing can interrupt MLX while it waits.

        Raises:
            PeerError: the connection to a rank was lost.
        """
        told = f"rank {self.rank} exchanges {what} with {whom}"
        alarm = threading.Timer(PATIENCE_SECONDS, _end, [f"{told}, and had no answer in {PATIENCE_SECONDS:.0f} s"])
        alarm.daemon = True
        alarm.start()
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"{told}: {error}. Hint: see what the other rank printed; start all of them again."
            ) from error
        finally:
            alarm.cancel()


def _end(message: str) -> None:
    print(f"error: {message}. This rank ends.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # nothing else interrupts MLX
