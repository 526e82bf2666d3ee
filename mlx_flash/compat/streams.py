"""Streams of MLX that any thread may use, for the arrays of a lazily loaded model.

The streams that MLX makes by itself belong to threads: what one thread recorded, another one cannot evaluate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import mlx.core as mx

from mlx_flash.compat.require import require
from mlx_flash.forks import finalize

require(mx, "new_thread_unsafe_stream")

_idle: list[list[mx.Stream]] = []
"""Streams of models that are gone. MLX keeps a stream, and its system thread, until the process ends."""

os.register_at_fork(after_in_child=_idle.clear)  # a forked child lacks their system threads


class LoadingStreams:
    """The streams of one model. Arrays that are made :meth:`in_force` can be evaluated by one thread after another.

    Each model has its own, since MLX does not serialize threads that evaluate on such a stream at once.

    Attributes:
        has_failed: MLX could not read a file. It takes arrays whose evaluation failed for evaluated ones.
    """

    def __init__(self) -> None:
        self.has_failed = False
        try:
            self._streams = _idle.pop()
        except IndexError:
            devices = [mx.cpu] if mx.default_device() == mx.cpu else [mx.cpu, mx.gpu]  # tensors are loaded on the CPU
            self._streams = [mx.new_thread_unsafe_stream(device) for device in devices]

    def fail(self) -> None:
        """Note that MLX could not read a file, and take its error off the streams: it would come again elsewhere."""
        self.has_failed = True
        for stream in self._streams:
            with suppress(RuntimeError):
                mx.synchronize(stream)

    def belong_to(self, model: Any) -> None:
        """Leave the streams to other models after the end of this one."""
        finalize(model, _idle.append, self._streams)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Make them the default streams of this thread while a block runs.

        Keys of random numbers are computed at the end: this thread goes on with them, the model perhaps in another.
        """
        with ExitStack() as stack:
            for stream in self._streams:  # the last one decides on the default device
                stack.enter_context(mx.stream(stream))
            try:
                yield
            finally:
                mx.eval(mx.random.state)
