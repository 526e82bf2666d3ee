"""The rows of one layer's cache: where they are, and what else begins with them."""

from __future__ import annotations

from mlx_flash.kv.disk import NOTHING_PLANNED, DiskRows
from mlx_flash.kv.layout import RowLayout
from mlx_flash.kv.ledger import Layer
from mlx_flash.kv.lineage import Lineage
from mlx_flash.kv.memory import Changes, MemoryRows
from mlx_flash.kv.opened import Stored
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.pages import Page, cut
from mlx_flash.memory.pagecache import round_up


class Rows:
    """The rows of one layer, in memory or on disk.

    Args:
        options: the settings.
        group: number of the list of caches that the layer belongs to.
        index: its place in that list.

    Attributes:
        store: the rows, in memory or on disk. What cannot change in one step is replaced as a whole, so that an
            interrupt leaves the old rows or the new ones: see :meth:`replace`.
        options, group, index: as given.
        lineage: the layers with the same first tokens.
        stored: the first tokens in files of the prefix cache, while the rows are in memory. They go to disk without a
            copy, as far as these files are still there.
        planned: the pages that the prefix cache wants of the call under way, by first token. It takes those that are
            written to drafts as they are.
    """

    def __init__(self, options: KVOptions, group: int, index: int) -> None:
        self.store: MemoryRows | DiskRows = MemoryRows(options)
        self.group = group
        self.index = index
        self.lineage = Lineage(self)
        self.stored: tuple[Page[Stored], ...] = ()
        self.planned = NOTHING_PLANNED
        self.options = options
        self._no_rows = MemoryRows(options)

    def replace(self, store: MemoryRows | DiskRows) -> None:
        """Hold other rows from now on."""
        Changes.note()
        self.store = store

    def cut(self, length: int) -> None:
        """Record that the tokens from ``length`` on were changed or removed."""
        self.lineage.cut(length)
        self.stored = cut(self.stored, length)

    @property
    def memory(self) -> MemoryRows:
        """The rows while they are in memory; empty while they are on disk."""
        return self.store if isinstance(self.store, MemoryRows) else self._no_rows

    @property
    def disk(self) -> DiskRows | None:
        """The rows on disk; None while they are in memory."""
        return self.store if isinstance(self.store, DiskRows) else None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.store.length

    @property
    def num_forgotten(self) -> int:
        """Number of tokens that were dropped."""
        return self.store.num_forgotten

    @property
    def layout(self) -> RowLayout | None:
        """Layout of the rows; None before the first ones."""
        if (disk := self.disk) is not None:
            return disk.layout
        examples = self.memory.examples
        return RowLayout.of(examples, self.options.step) if examples else None

    @property
    def in_numbers(self) -> Layer:
        """The layer as the ledger sees it."""
        if (disk := self.disk) is not None:
            return Layer(disk.layout.widths, disk.length, is_on_disk=True)
        buffers = self.memory.buffers
        pages = tuple([(id(page.where), page.where.nbytes) for page in buffers.pages])
        return Layer(buffers.widths, self.memory.length, buffers.capacity, pages)

    def grows(self, num_new: int) -> bool:
        """Return whether so many new tokens take more memory. Called for each token."""
        if (disk := self.disk) is None:
            return self.memory.takes_more(num_new)
        return round_up(disk.length, self.options.step) != round_up(disk.length + num_new, self.options.step)

    @property
    def is_parked(self) -> bool:
        """True when the rows are in memory only as pages that copies may share."""
        return bool(self.memory.pages)
