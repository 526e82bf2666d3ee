"""The limit of freed buffers that MLX keeps for later arrays. Every back end has a default, the CPU one 32 MiB."""

from __future__ import annotations

import threading

import mlx.core as mx

from mlx_flash.forks import wait_for_finalizers
from mlx_flash.memory.footprint import release_freed_memory

_lock = threading.RLock()  # the collector may end another model while it is held
_held: dict[int, int] = {}
_before = 0


def limit_buffers(owner: object, nbytes: int) -> None:
    """Keep at most so many bytes of freed buffers, or as many as another owner allows. Free what is above.

    Args:
        owner: what the limit is for. It is told apart by identity and not kept alive.
        nbytes: the limit.
    """
    global _before
    with _lock:
        is_first = not _held
        _held[id(owner)] = nbytes
        limit = mx.set_cache_limit(max(_held.values()))
        if is_first:
            _before = limit
    mx.clear_cache()


def free_unused() -> None:
    """Return to the system what MLX and the allocator keep of freed memory."""
    wait_for_finalizers()
    mx.clear_cache()
    release_freed_memory()


def end_limit(owner: object) -> None:
    """Forget the limit of an owner. After the last one on a GPU, MLX has the limit that it had before.

    On the CPU the limit stays, and speed does not depend on it. There MLX waits for all streams before it changes the
    limit, and for that gives each that was never used a system thread: also those of Python threads that have ended.
    """
    with _lock:
        if id(owner) in _held and mx.default_device() == mx.gpu:
            mx.set_cache_limit(max((held for other, held in _held.items() if other != id(owner)), default=_before))
        _held.pop(id(owner), None)
