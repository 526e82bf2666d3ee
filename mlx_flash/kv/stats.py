"""What the KV caches of a model did and take, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVStats:
    """What they did so far.

    Attributes:
        num_spilled: layers that went to disk.
        num_fetched: times that a layer on disk was computed from.
        num_unpredicted: those for which a read had to be started then.
        wait_seconds: time spent waiting for reads.
    """

    num_spilled: int = 0
    num_fetched: int = 0
    num_unpredicted: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KVUsage:
    """What the caches of a pool took when it was last noted, in bytes.

    Attributes:
        memory_bytes, disk_bytes: where keys and values are; slots count as memory.
        reserved_bytes: what MLX counts as active for the part of them that is in its arrays.
        read_bytes, written_bytes: from and to the disk, so far.
        num_spilled: layers that went to disk so far.
        wait_seconds: time spent waiting for reads.
    """

    memory_bytes: int = 0
    disk_bytes: int = 0
    reserved_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    num_spilled: int = 0
    wait_seconds: float = 0.0
