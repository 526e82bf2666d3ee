"""The ranks that compute a model together, and what they tell each other through ``mx.distributed``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TextIO, cast

import mlx.core as mx
import numpy as np

from mlx_flash.compat.randomkeys import random_key, set_random_key
from mlx_flash.errors import PeerError
from mlx_flash.ranks.watch import Watch, watch_neighbours

_watches: list[Watch] = []
"""The watch of this process, once it has peers."""

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
        group: as given.
        rank: the number of this process.
        size: how many there are.
        can_send: two neighbours can exchange something without the others.
        wait_seconds: time spent in exchanges, most of which is waiting for another rank.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.can_send = not _uses_nccl()
        self.wait_seconds = 0.0
        if not _watches:
            _watches.append(watch_neighbours(self.rank, self.size, partial(_gather, group)))
        self._watch = _watches[0]

    def hand_on(self, arrays: Sequence[mx.array], source: int, to: int, what: str) -> list[mx.array]:
        """Return the arrays of one rank on another one. All ranks call it.

        Args:
            arrays: on the rank ``source`` what to send; on others only shapes and types count.
            source: the rank that has them.
            to: the rank that needs them. On others the result is not to be used.
            what: to name in an error.
        """
        if not self.can_send or (to - source) % self.size not in (1, self.size - 1):
            return self.broadcast(arrays, source, what)
        if source == self.rank:
            self.send(arrays, to, what)
        return self.receive(arrays, source, what) if to == self.rank else list(arrays)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank. All ranks call it, with equally many."""
        with self.asking("every other rank", "its numbers"):
            return _gather(self.group, numbers)

    def broadcast(self, arrays: Sequence[mx.array], owner: int, what: str) -> list[mx.array]:
        """Return the arrays of one rank, bit for bit. All ranks call it.

        Args:
            arrays: on the rank ``owner`` what to send; on others only shapes and types count.
            owner: the rank that has them.
            what: to name in an error.
        """
        if owner == self.rank:
            mx.eval(arrays)
        with self.asking(f"rank {owner}", what):
            found = [self._broadcast(array, owner) for array in arrays]
            mx.eval(found)
        return found

    def _broadcast(self, array: mx.array, owner: int) -> mx.array:
        """Add up bytes: the sum of floats would lose the sign of zeros."""
        mine = array.reshape(-1).view(mx.uint8) if owner == self.rank else mx.zeros((array.nbytes,), mx.uint8)
        return mx.distributed.all_sum(mine, group=self.group).view(array.dtype).reshape(array.shape)

    def text(self, text: str) -> str:
        """Return the text of rank 0. All ranks call it."""
        return self.data(text.encode(), 0).decode()

    def data(self, data: bytes, owner: int) -> bytes:
        """Return the bytes of one rank; those of others do not count. All ranks call it."""
        (length,) = self.broadcast([mx.array(len(data), mx.int32)], owner, "the length of a text")
        if not (num_bytes := cast(int, length.item())):
            return b""
        mine = mx.array(np.frombuffer(data, np.uint8)) if owner == self.rank else mx.zeros((num_bytes,), mx.uint8)
        return np.array(self.broadcast([mine], owner, "a text")[0]).tobytes()

    def share_seed(self) -> None:
        """Make all ranks draw the same random numbers, if they do not yet. All ranks call it."""
        key = random_key()
        (shared,) = self.broadcast([key], 0, "the state of the random numbers")
        if any(row[0] for row in self.gather([float(key.tolist() != shared.tolist())])):
            set_random_key(shared)

    def send(self, arrays: Sequence[mx.array], to: int, what: str) -> None:
        """Send arrays to a neighbour."""
        mx.eval(arrays)
        with self.asking(f"rank {to}", what):
            mx.eval([mx.distributed.send(array, to, group=self.group) for array in arrays])

    def receive(self, likes: Sequence[mx.array], source: int, what: str) -> list[mx.array]:
        """Return arrays that a neighbour sent.

        Args:
            likes: arrays of their shapes and types; never evaluated.
            source: the neighbour.
            what: to name in an error.
        """
        with self.asking(f"rank {source}", what):
            found = [mx.distributed.recv(like.shape, like.dtype, source, group=self.group) for like in likes]
            mx.eval(found)
        return found

    @contextmanager
    def asking(self, whom: str, what: str) -> Iterator[None]:
        """Name a rank that is lost. The watch ends the process if one hangs: nothing can interrupt MLX while it waits.

        Raises:
            PeerError: the connection to a rank was lost.
        """
        told, began = f"rank {self.rank} exchanges {what} with {whom}", time.perf_counter()
        try:
            with self._watch.waiting(told):
                yield
        except RuntimeError as error:
            raise PeerError(
                f"{told}: {self._watch.reason() or error}. Hint: see what the other rank printed; start all of them "
                "again."
            ) from error
        finally:
            self.wait_seconds += time.perf_counter() - began


def _gather(group: mx.distributed.Group, numbers: Sequence[float]) -> list[list[float]]:
    found = mx.distributed.all_gather(mx.array([numbers], mx.float32), group=group)
    mx.eval(found)
    return cast(list[list[float]], found.tolist())


def _uses_nccl() -> bool:
    """Return True if the ranks exchange arrays through NCCL, where MLX has sums and no messages."""
    return mx.distributed.is_available("nccl") and mx.distributed.init(backend="nccl").size() > 1
