"""The layers of all KV caches of a model: what they hold, which are on disk, and the pages that they share.

Copies of a sequence share memory while they are idle: their layers are parked, as pages that others hold, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from weakref import WeakSet

from mlx_flash.kv.disk import DiskRows
from mlx_flash.kv.memory import Changes
from mlx_flash.kv.pages import MemoryPages, cut, num_tokens, sizes
from mlx_flash.kv.rows import LayerRows


class _Sums(NamedTuple):
    """Sums over layers, and the number of the change and the number of layers that they hold for."""

    held: int = 0
    num_on_disk: int = 0
    when: tuple[int, int] = (0, 0)


class Layers:
    """Every layer of every cache. A layer leaves with the last reference to it.

    Args:
        step: the fewest tokens that are worth sharing.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._layers: WeakSet[LayerRows] = WeakSet()
        self._last_sums = _Sums()

    def __iter__(self) -> Iterator[LayerRows]:
        return iter(self._layers)

    def add(self, rows: LayerRows) -> None:
        """Add a layer."""
        self._layers.add(rows)

    @property
    def on_disk(self) -> dict[LayerRows, DiskRows]:
        """The layers whose rows are on disk."""
        return {rows: disk for rows in self._layers if (disk := rows.disk) is not None}

    @property
    def is_on_disk(self) -> bool:
        """True if the rows of a layer are on disk."""
        return self._sums.num_on_disk > 0

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers and of shared rows in memory."""
        return self._sums.held

    @property
    def _sums(self) -> _Sums:
        """The sums. They are added up again if a layer has changed, or if there are more or fewer of them."""
        when = Changes.last, len(self._layers)
        if when != self._last_sums.when:
            layers = list(self._layers)
            buffers = [rows.memory.buffers for rows in layers]
            held = sum([each.nbytes for each in buffers]) + sum(sizes([each.pages for each in buffers]).values())
            self._last_sums = _Sums(held, sum([rows.disk is not None for rows in layers]), when)
        return self._last_sums

    def next_to_evict(self, last_used: Mapping[int, int], asking: LayerRows | None) -> LayerRows | None:
        """Return the layer to evict next: of the sequence used longest ago, and far from those that were evicted.

        Args:
            last_used: when each list of caches was used; those that are missing never were.
            asking: the layer that new tokens come to; None before a call.
        """
        layers = [rows for rows in self._layers if rows.disk is None and (rows.memory.length or rows is asking)]
        return min(layers, key=lambda r: (last_used.get(r.group, 0), _spread(r.index), r.index), default=None)

    def next_to_park(self, group: int) -> LayerRows | None:
        """Return a layer of another list of caches that frees memory when it is parked, without a copy."""
        others = (rows for rows in self._layers if rows.group != group)
        return next((rows for rows in others if parking_pays(rows, self._step) and not copied_bytes(rows)), None)


def _spread(index: int) -> int:
    """Return a number by which to sort indices so that the first few are far apart: the bits backwards."""
    return int(f"{index:016b}"[::-1], 2)


def park(rows: LayerRows) -> None:
    """Replace the buffers of a layer in memory by pages, shared ones where other layers have the same tokens."""
    rows.memory.park(as_pages(rows))


def as_pages(rows: LayerRows) -> MemoryPages:
    """Return all tokens of a layer in memory as pages."""
    return rows.memory.as_pages(_known_pages(rows))


def parking_pays(rows: LayerRows, step: int) -> bool:
    """Return whether others hold at least ``step`` tokens of a layer's buffers, so that parking it saves memory."""
    return bool(rows.memory.arrays) and num_tokens(_known_pages(rows)) >= step


def copied_bytes(rows: LayerRows) -> int:
    """Return the bytes that a copy of a layer takes: tokens that are in no page yet, or on disk in no page."""
    if (disk := rows.disk) is not None:
        return disk.tail_bytes
    memory = rows.memory
    missing = memory.length - num_tokens(_known_pages(rows))  # a page has one more token than it holds
    return sum(a.nbytes // memory.buffers.capacity * (missing + 1) for a in memory.arrays) if missing else 0


def _known_pages(rows: LayerRows) -> MemoryPages:
    """Return the first tokens of a layer as pages that another, parked layer holds."""
    found = [(length, other) for other, length in rows.lineage.relatives() if other.memory.pages]
    length, other = max(found, key=lambda pair: pair[0], default=(0, rows))
    return cut(other.memory.pages, length)
