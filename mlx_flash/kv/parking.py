"""Sharing of memory between idle copies of a sequence: layers in memory whose rows are parts that others hold, too."""

from __future__ import annotations

from collections.abc import Collection, Container

from mlx_flash.kv.rows import Rows
from mlx_flash.kv.shared import Parts, cut, num_tokens, sizes


class Parking:
    """The parts that layers of a model share.

    Args:
        layers: every layer of every cache.
        step: the fewest tokens that are worth sharing.
    """

    def __init__(self, layers: Collection[Rows], step: int) -> None:
        self._layers = layers
        self._step = step

    def shared_bytes(self, but: Container[Rows] = ()) -> int:
        """Return the bytes of the parts of parked caches, except parts that only the given layers hold."""
        return sum(sizes(rows.memory.parts for rows in self._layers if rows not in but).values())

    def park(self, rows: Rows) -> None:
        """Replace the buffers of a layer in memory by parts, shared ones where other layers have the same tokens."""
        rows.memory.park(self.as_parts(rows))

    def as_parts(self, rows: Rows) -> Parts:
        """Return all tokens of a layer in memory as parts."""
        return rows.memory.as_parts(self._known_parts(rows))

    def copied_bytes(self, rows: Rows) -> int:
        """Return the bytes that a copy of a layer takes: tokens that are in no part yet, or on disk in no page."""
        if (disk := rows.disk) is not None:
            return disk.tail_bytes
        memory = rows.memory
        missing = memory.length - num_tokens(self._known_parts(rows))  # a part has one more token than it holds
        return sum(a.nbytes // memory.buffers.capacity * (missing + 1) for a in memory.arrays) if missing else 0

    def pays(self, rows: Rows) -> bool:
        """Return whether others hold at least a page of a layer's buffers, so that parking it saves memory."""
        return bool(rows.memory.arrays) and num_tokens(self._known_parts(rows)) >= self._step

    def next_without_copy(self, group: int) -> Rows | None:
        """Return a layer of another list of caches that frees memory when it is parked, without a copy."""
        others = (rows for rows in self._layers if rows.group != group)
        return next((rows for rows in others if self.pays(rows) and not self.copied_bytes(rows)), None)

    def _known_parts(self, rows: Rows) -> Parts:
        """Return the first tokens of a layer as parts that another, parked layer holds."""
        found = [(length, other) for other, length in rows.lineage.relatives() if other.memory.parts]
        length, other = max(found, key=lambda pair: pair[0], default=(0, rows))
        return cut(other.memory.parts, length)
