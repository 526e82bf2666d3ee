"""Counters and sizes of the KV caches of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVStats:
    """Counters since the pool was made.

    Attributes:
        num_evicted: layers evicted to disk.
        num_fetched: uses of a layer on disk.
        num_unpredicted: uses whose read had not been started ahead.
        wait_seconds: time spent waiting for reads.
    """

    num_evicted: int = 0
    num_fetched: int = 0
    num_unpredicted: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Sizes of a pool's caches at one moment, in bytes.

    Attributes:
        memory_bytes, disk_bytes: keys and values in memory, slots included, and on disk.
        reserved_bytes: bytes that MLX counts as active for them.
        read_bytes, written_bytes: disk traffic so far.
        num_evicted: layers evicted to disk so far.
        wait_seconds: time spent waiting for reads.
    """

    memory_bytes: int = 0
    disk_bytes: int = 0
    reserved_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    num_evicted: int = 0
    wait_seconds: float = 0.0
