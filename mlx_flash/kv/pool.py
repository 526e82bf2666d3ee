"""All KV caches of one model: which layers' are in memory, which on disk, and what is read next.

While the caches fit the budget they are in memory. Then one layer after another goes to disk: those of sequences that
have not been used for long first, and spread over the layers, so that others compute while pages are read. Two slots
hold what layers on disk compute from: while one is computed from, the other is filled for the layer that came next
the last time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import mlx.core as mx

from mlx_flash.errors import BudgetError, ClosedError
from mlx_flash.kv.folder import PrivateFolder
from mlx_flash.kv.layout import RowLayout
from mlx_flash.kv.memory import MemoryRows, commits_lazily
from mlx_flash.kv.options import NUM_SLOTS, KVOptions, round_up
from mlx_flash.kv.pages import DiskRows, LayerFile, PageReader, WriteBehind
from mlx_flash.kv.slots import Slot, row_bytes
from mlx_flash.storage.probe import cache_directory

SPILL_TOKENS = 4096
"""Tokens that are copied at a time when a layer goes to disk."""


@dataclass(slots=True)
class PoolStats:
    """What a pool did so far.

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


class LayerRows:
    """The rows of one layer's cache, wherever they are. Made by :meth:`KVPool.new_group`.

    Attributes:
        memory: the rows while they are in memory; empty while they are on disk.
        group: the number of the list of caches that it belongs to.
        index: its place in that list.
    """

    def __init__(self, pool: KVPool, group: int, index: int) -> None:
        self.memory = MemoryRows(pool.options)
        self.group = group
        self.index = index
        self._pool = pool.itself  # a method: who looks for arrays among attributes is not to find every other cache

    @property
    def pool(self) -> KVPool:
        """What it belongs to."""
        return self._pool()

    @property
    def disk(self) -> DiskRows | None:
        """The rows on disk; None while they are in memory."""
        return self.pool.on_disk.get(self)

    @property
    def length(self) -> int:
        """Tokens."""
        disk = self.disk
        return self.memory.length if disk is None else disk.length

    @property
    def layout(self) -> RowLayout | None:
        """How rows lie; None before the first ones."""
        disk = self.disk
        if disk is not None:
            return disk.layout
        return RowLayout.of(self.memory.arrays, self.pool.options.step) if self.memory.arrays else None

    def append(self, new: Sequence[mx.array]) -> list[mx.array]:
        """Adds tokens, ``(batch, heads, new tokens, width)`` for each array. Returns all tokens.

        Raises:
            BudgetError: there is no room in memory even with every layer on disk.
            WriteError: the disk is full, or fails.
            ReadError: pages could not be read.
        """
        with self.pool.lock:
            self.pool.make_room(self, new)
            disk = self.disk
            if disk is not None:
                return self.pool.append_on_disk(self, disk, new)
            self.memory.append(new)
            return self.memory.fetch()

    def fetch(self) -> list[mx.array]:
        """All tokens. Raises: ReadError."""
        with self.pool.lock:
            disk = self.disk
            return self.memory.fetch() if disk is None else self.pool.fetch_from_disk(self, disk)

    def read(self, start: int, stop: int) -> list[mx.array]:
        """The rows of some tokens; those on disk without taking a slot. Raises: ReadError."""
        with self.pool.lock:
            disk = self.disk
            if disk is None:
                return [array[..., start:stop, :] for array in self.memory.arrays]
            found = zip(disk.read(start, stop), disk.layout.components, strict=True)
            return [
                mx.array(rows).view(c.dtype).reshape(*c.shape, stop - start, c.width)
                if rows.size
                else mx.zeros((*c.shape, stop - start, c.width), c.dtype)
                for rows, c in found
            ]

    def truncate(self, length: int) -> None:
        """Forgets the tokens from ``length`` on. Raises: ReadError."""
        with self.pool.lock:
            disk = self.disk
            if disk is None:
                self.memory.length = length
            else:
                disk.truncate(length)
                self.pool.forget(disk, length)

    def drop(self, start: int, stop: int) -> None:
        """Forgets whole pages; the tokens behind them move up."""
        with self.pool.lock:
            disk = self.disk
            if disk is None:
                self.memory.drop(start, stop)
            else:
                disk.drop(start, stop)
                self.pool.forget(disk, start)

    def set(self, arrays: Sequence[mx.array], length: int) -> None:
        """Takes over arrays in the place of what there is. Raises: BudgetError, WriteError."""
        with self.pool.lock:
            self.pool.on_disk.pop(self, None)
            self.memory.set(arrays, length)
            self.pool.make_room(self, ())

    def fork(self, group: int) -> LayerRows:
        """A copy in another list of caches."""
        with self.pool.lock:
            other = self.pool.new_rows(group, self.index)
            disk = self.disk
            if disk is not None:
                self.pool.on_disk[other] = disk.fork()
            elif self.memory.arrays:
                other.memory = self.memory.fork()
                self.pool.make_room(other, ())
            return other


class KVPool:
    """What the caches of a model share: a budget, files, slots, and the order of layers.

    Args:
        options: the settings.

    Attributes:
        options: the settings.
        on_disk: the layers whose rows are on disk.
        stats: what it did so far.
        lock: held while caches change; one forward at a time is the caller's to see to.
    """

    def __init__(self, options: KVOptions) -> None:
        self.options = options
        self.on_disk: weakref.WeakKeyDictionary[LayerRows, DiskRows] = weakref.WeakKeyDictionary()
        self.stats = PoolStats()
        self.lock = threading.RLock()
        self.slots = [Slot() for _ in range(NUM_SLOTS)]
        self._layers: weakref.WeakSet[LayerRows] = weakref.WeakSet()
        self._groups = count()
        self._files = count()
        self._used: dict[int, int] = {}
        self._current_group: int | None = None
        self._clock = count(1)
        self._successor: weakref.WeakKeyDictionary[LayerRows, weakref.ref[LayerRows]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[LayerRows] | None = None
        self._folder: PrivateFolder | None = None
        self._reader: PageReader | None = None
        self._writer: WriteBehind | None = None
        self._closed = False

    def itself(self) -> KVPool:
        """This object."""
        return self

    def new_group(self) -> int:
        """A number for another list of caches."""
        return next(self._groups)

    def new_rows(self, group: int, index: int) -> LayerRows:
        """An empty cache of the layer at ``index`` of a list."""
        rows = LayerRows(self, group, index)
        self._layers.add(rows)
        return rows

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory now: caches, slots, and what is on disk but for its last tokens."""
        return sum(rows.memory.held for rows in self._layers) + self._disk_overhead()

    @property
    def reserved_bytes(self) -> int:
        """Bytes that MLX counts as active for caches in memory and slots; more than they take, where pages are had as
        they are written to."""
        arrays = sum(array.nbytes for rows in self._layers for array in rows.memory.arrays)
        return arrays + sum(slot.nbytes for slot in self.slots)

    @property
    def disk_bytes(self) -> int:
        """Bytes of pages on disk, those that several caches hold counted once."""
        return sum({id(disk.file): disk.file.nbytes for disk in self.on_disk.values()}.values())

    @property
    def read_bytes(self) -> int:
        """Bytes of pages that were read."""
        return self._reader.stats.nbytes if self._reader else 0

    @property
    def written_bytes(self) -> int:
        """Bytes of pages that were written, or wait for it."""
        return self._writer.nbytes if self._writer else 0

    def slot_bytes(self, layout: RowLayout, tokens: int) -> int:
        """What a slot takes in memory when it holds so many tokens."""
        if commits_lazily():
            return layout.slot_bytes(round_up(tokens, self.options.step))
        return layout.slot_bytes(self.options.slot_tokens(tokens))

    def _disk_overhead(self, growing: LayerRows | None = None, num_new: int = 0) -> int:
        """What layers on disk take in memory: slots of the largest, and the last tokens of each."""
        if not self.on_disk:
            return 0
        layers = [(disk, num_new if rows is growing else 0) for rows, disk in self.on_disk.items()]
        slot = max(self.slot_bytes(disk.layout, disk.length + more) for disk, more in layers)
        return NUM_SLOTS * slot + sum(disk.tail_bytes for disk, _ in layers)

    # -- room -----------------------------------------------------------------------------------------------------

    def make_room(self, rows: LayerRows, new: Sequence[mx.array]) -> None:
        """Sends layers to disk until what is in memory, with new tokens of one layer, fits the budget.

        Raises:
            BudgetError: it does not even with every layer on disk.
            WriteError: the disk is full, or fails.
        """
        if self._closed:
            raise ClosedError("the KV caches of this model were closed. Hint: make new ones.")
        if rows.group != self._current_group:
            self._current_group, self._used[rows.group] = rows.group, next(self._clock)
        budget, num_new = self.options.budget_bytes, new[0].shape[2] if new else 0
        if budget is None or (new and not self._grows(rows, new, num_new)):
            return
        while (needed := self._needed(rows, new, num_new)) > budget:
            victim = self._victim(rows)
            if victim is None:
                raise BudgetError(
                    f"the KV caches need {needed / 1e6:.1f} MB of memory for {rows.length + num_new} tokens with every "
                    f"layer on disk: {NUM_SLOTS} slots of a layer each, and the last tokens of every layer; their "
                    f"budget is {budget / 1e6:.1f} MB. Hint: raise it, or set max_tokens.",
                    needed,
                )
            self._spill(victim, new if victim is rows else ())

    def _grows(self, rows: LayerRows, new: Sequence[mx.array], num_new: int) -> bool:
        """Whether new tokens of a layer take more memory."""
        if rows not in self.on_disk:
            return rows.memory.held_after(new) != rows.memory.held
        step = self.options.step
        return round_up(rows.length, step) != round_up(rows.length + num_new, step)

    def _needed(self, rows: LayerRows, new: Sequence[mx.array], num_new: int) -> int:
        is_on_disk = rows in self.on_disk
        others = sum(layer.memory.held for layer in self._layers if layer is not rows)
        mine = 0 if is_on_disk else rows.memory.held_after(new)
        return others + mine + self._disk_overhead(rows, num_new)

    def _victim(self, asking: LayerRows) -> LayerRows | None:
        """The layer to go next: of the sequence used longest ago, and as far from those that went as can be."""
        layers = [r for r in self._layers if r not in self.on_disk and (r.memory.length or r is asking)]
        return min(layers, key=lambda r: (self._used.get(r.group, 0), _spread(r.index), r.index), default=None)

    def _spill(self, rows: LayerRows, new: Sequence[mx.array]) -> None:
        arrays, length = rows.memory.fetch(), rows.memory.length
        disk = DiskRows(self._new_file(RowLayout.of(arrays or new, self.options.step)))
        for start in range(0, length, SPILL_TOKENS):
            part = [mx.contiguous(array[..., start : start + SPILL_TOKENS, :]) for array in arrays]
            mx.eval(part)
            disk.append(row_bytes(part))
        rows.memory = MemoryRows(self.options)
        self.on_disk[rows] = disk
        self.stats.num_spilled += 1

    def _new_file(self, layout: RowLayout) -> LayerFile:
        if self._folder is None:
            self._folder = PrivateFolder(self.options.directory or cache_directory() / "kv-sessions")
        if self._reader is None or self._writer is None:
            o = self.options
            self._reader = PageReader((), direct=o.direct, read_size=o.read_size, queue_depth=o.queue_depth)
            self._writer = WriteBehind()
        path = self._folder.path / f"layer-{next(self._files)}.kv"
        return LayerFile(path, layout, self._reader, self._writer, self.options.direct)

    # -- layers on disk -------------------------------------------------------------------------------------------

    def append_on_disk(self, rows: LayerRows, disk: DiskRows, new: Sequence[mx.array]) -> list[mx.array]:
        """As :meth:`LayerRows.append`, for a layer on disk. Evaluates the new tokens, and with them what was computed
        from the other slot."""
        plain = [mx.contiguous(a.astype(c.dtype)) for a, c in zip(new, disk.layout.components, strict=True)]
        mx.eval(plain)
        fresh = row_bytes(plain)
        end = disk.length + fresh[0].shape[1]
        slot = self._filled_slot(rows, disk, end)
        slot.write(disk.layout, fresh, disk.length)
        try:
            disk.append(fresh)
        except BaseException:
            slot.clear()
            raise
        slot.tokens = end
        return self._hand_out(rows, disk, slot, fresh[0].shape[1])

    def fetch_from_disk(self, rows: LayerRows, disk: DiskRows) -> list[mx.array]:
        """All tokens of a layer on disk. Raises: ReadError."""
        return self._hand_out(rows, disk, self._filled_slot(rows, disk, disk.length), 0)

    def _hand_out(self, rows: LayerRows, disk: DiskRows, slot: Slot, num_new: int) -> list[mx.array]:
        arrays = slot.hand_out(disk.layout, disk.length)
        self.stats.num_fetched += 1
        last = self._last() if self._last is not None else None
        if last is not None:
            self._successor[last] = weakref.ref(rows)
        self._last = weakref.ref(rows)
        self._read_ahead(rows, slot, num_new)
        return arrays

    def _filled_slot(self, rows: LayerRows, disk: DiskRows, end: int) -> Slot:
        """A slot with all tokens of a layer and room up to ``end``, from which nothing is computed."""
        slot = next((slot for slot in self.slots if slot.belongs_to(disk)), None)
        if slot is None:
            slot = min(self.slots, key=lambda slot: slot.used_at)
        if not slot.belongs_to(disk) or slot.capacity < end:
            slot.assign(disk, self.options.slot_tokens(end))
        self.stats.wait_seconds += slot.wait()
        slot.claim()
        if slot.tokens < disk.length:
            self._fill(slot, disk)
        return slot

    def _fill(self, slot: Slot, disk: DiskRows) -> None:
        if slot.tokens < disk.paged_tokens:
            self.stats.num_unpredicted += 1
            self._read(slot, disk, slot.tokens // self.options.step, urgent=True)
            self.stats.wait_seconds += slot.wait()
        slot.write(disk.layout, disk.tail, disk.paged_tokens)
        slot.tokens = disk.length

    def _read(self, slot: Slot, disk: DiskRows, first: int, *, urgent: bool = False) -> None:
        """Starts reading the pages from number ``first`` on."""
        disk.file.flush()
        segments = disk.file.segments(disk.pages, first, slot.capacity)
        ticket = disk.file.reader.submit(segments, slot.memory, urgent=urgent)
        slot.expect(ticket, disk, disk.paged_tokens)

    def _read_ahead(self, rows: LayerRows, busy: Slot, num_new: int) -> None:
        """Starts filling the other slot for the layer that is expected next."""
        link = self._successor.get(rows)
        upcoming = link() if link is not None else None
        disk = self.on_disk.get(upcoming) if upcoming is not None else None
        if disk is None or not disk.pages or any(slot.belongs_to(disk) for slot in self.slots):
            return
        slot = next(slot for slot in self.slots if slot is not busy)
        slot.assign(disk, self.options.slot_tokens(disk.length + num_new))
        self._read(slot, disk, 0)

    def forget(self, disk: DiskRows, length: int) -> None:
        """Notes that a layer's tokens from ``length`` on are others now, or none."""
        for slot in self.slots:
            if slot.belongs_to(disk):
                slot.wait()
                slot.tokens = min(slot.tokens, length)

    def retire(self, rows: LayerRows) -> None:
        """Lets the rows of a layer go that another cache takes the place of."""
        with self.lock:
            self.on_disk.pop(rows, None)
            self._layers.discard(rows)
            rows.memory = MemoryRows(self.options)

    def close(self) -> None:
        """Ends the threads and removes the files; caches of the pool can be used no more. Harmless when repeated."""
        with self.lock:
            self._closed = True
            for slot in self.slots:
                slot.clear()
            self.on_disk.clear()
            if self._writer is not None:
                self._writer.close()
            if self._reader is not None:
                self._reader.close()
            if self._folder is not None:
                self._folder.close()


def _spread(index: int) -> int:
    """A number by which indices are in an order where the first few are far apart: the bits backwards."""
    return int(f"{index:016b}"[::-1], 2)
