"""Sharing of memory between idle copies of a sequence: layers in memory whose rows are pages that others hold, too."""

from __future__ import annotations

from collections.abc import Collection

from mlx_flash.kv.pages import MemoryPages, cut, num_tokens
from mlx_flash.kv.rows import LayerRows


class Parking:
    """The pages that layers of a model share.

    Args:
        layers: every layer of every cache.
        step: the fewest tokens that are worth sharing.
    """

    def __init__(self, layers: Collection[LayerRows], step: int) -> None:
        self._layers = layers
        self._step = step

    def park(self, rows: LayerRows) -> None:
        """Replace the buffers of a layer in memory by pages, shared ones where other layers have the same tokens."""
        rows.memory.park(self.as_pages(rows))

    def as_pages(self, rows: LayerRows) -> MemoryPages:
        """Return all tokens of a layer in memory as pages."""
        return rows.memory.as_pages(self._known_pages(rows))

    def copied_bytes(self, rows: LayerRows) -> int:
        """Return the bytes that a copy of a layer takes: tokens that are in no page yet, or on disk in no page."""
        if (disk := rows.disk) is not None:
            return disk.tail_bytes
        memory = rows.memory
        missing = memory.length - num_tokens(self._known_pages(rows))  # a page has one more token than it holds
        return sum(a.nbytes // memory.buffers.capacity * (missing + 1) for a in memory.arrays) if missing else 0

    def pays(self, rows: LayerRows) -> bool:
        """Return whether others hold at least a page of a layer's buffers, so that parking it saves memory."""
        return bool(rows.memory.arrays) and num_tokens(self._known_pages(rows)) >= self._step

    def next_without_copy(self, group: int) -> LayerRows | None:
        """Return a layer of another list of caches that frees memory when it is parked, without a copy."""
        others = (rows for rows in self._layers if rows.group != group)
        return next((rows for rows in others if self.pays(rows) and not self.copied_bytes(rows)), None)

    def _known_pages(self, rows: LayerRows) -> MemoryPages:
        """Return the first tokens of a layer as pages that another, parked layer holds."""
        found = [(length, other) for other, length in rows.lineage.relatives() if other.memory.pages]
        length, other = max(found, key=lambda pair: pair[0], default=(0, rows))
        return cut(other.memory.pages, length)
