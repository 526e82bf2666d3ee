"""All KV caches of one model: which layers' are in memory, which on disk, and what is read next.

While the caches fit the budget they are in memory. Then one layer after another goes to disk: those of sequences that
have not been used for long first, and spread over the layers, so that others compute while pages are read. Two slots
hold what layers on disk compute from: while one is computed from, the other is filled for the layer that came next
the last time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count

import mlx.core as mx

from mlx_flash.errors import BudgetError, ClosedError, WriteError
from mlx_flash.kv.folder import PrivateFolder, free_bytes
from mlx_flash.kv.layout import RowLayout
from mlx_flash.kv.memory import MemoryRows, commits_lazily
from mlx_flash.kv.options import NUM_SLOTS, SLOT_PADDING, SPILL_TOKENS, KVOptions, round_up, slot_memory
from mlx_flash.kv.pages import DiskRows, LayerFile, PageReader, WriteBehind
from mlx_flash.kv.ring import SlotRing
from mlx_flash.kv.slots import row_bytes
from mlx_flash.kv.stats import KVStats, KVUsage
from mlx_flash.storage.probe import cache_directory
from mlx_flash.streaming.slots import reads_beside


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
                return self.pool.ring.append(disk, new)
            self.memory.append(new)
            return self.memory.fetch()

    def fetch(self) -> list[mx.array]:
        """All tokens. Raises: ReadError."""
        with self.pool.lock:
            disk = self.disk
            return self.memory.fetch() if disk is None else self.pool.ring.fetch(disk)

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
                self.pool.ring.forget(disk, length)

    def drop(self, start: int, stop: int) -> None:
        """Forgets whole pages; the tokens behind them move up."""
        with self.pool.lock:
            disk = self.disk
            if disk is None:
                self.memory.drop(start, stop)
            else:
                disk.drop(start, stop)
                self.pool.ring.forget(disk, start)

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
            found = [] if self.disk is not None else self.memory.fetch()
            self.pool.make_room(other, found)  # which may send this one to disk, or the other
            disk, their_disk = self.disk, other.disk
            if disk is not None:
                self.pool.on_disk[other] = disk.fork()
            elif their_disk is not None:
                self.pool.ring.append(their_disk, found)
            elif self.memory.arrays:
                other.memory = self.memory.fork()
            return other


class KVPool:
    """What the caches of a model share: a budget, files, slots, and the order of layers.

    Args:
        options: the settings.
        count_written: is told, from another thread, how many bytes were written.

    Attributes:
        options: the settings.
        budget_bytes: the most that all caches together may take in memory; None for no limit. May be changed.
        under_way_bytes: what must be left of it once a layer is on disk.
        on_disk: the layers whose rows are on disk.
        ring: what layers on disk are computed from.
        stats: what it did so far.
        usage: what its caches took when :meth:`note` was last called; may be looked at by any thread.
        lock: held while caches change; one forward at a time is the caller's to see to.
    """

    def __init__(self, options: KVOptions, count_written: Callable[[int], None] = lambda _: None) -> None:
        self.options = options
        self._count_written = count_written
        self.budget_bytes = options.budget_bytes
        self.under_way_bytes = 0
        self.on_disk: weakref.WeakKeyDictionary[LayerRows, DiskRows] = weakref.WeakKeyDictionary()
        self.stats = KVStats()
        self.usage = KVUsage()
        self.lock = threading.RLock()
        self.ring = SlotRing(options, self.stats)
        self._layers: weakref.WeakSet[LayerRows] = weakref.WeakSet()
        self._groups = count()
        self._files = count()
        self._used: dict[int, int] = {}
        self._current_group: int | None = None
        self._clock = count(1)
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
        return arrays + self.ring.nbytes

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

    def note(self) -> None:
        """Brings :attr:`usage` up to date."""
        now = self.memory_bytes, self.disk_bytes, self.reserved_bytes, self.read_bytes, self.written_bytes
        self.usage = KVUsage(*now, self.stats.num_spilled, self.stats.wait_seconds)

    def slot_bytes(self, layout: RowLayout, tokens: int) -> int:
        """What a slot takes in memory when it holds so many tokens."""
        if commits_lazily():
            return slot_memory(layout.slot_bytes(round_up(tokens, self.options.step)))
        return layout.slot_bytes(self.options.slot_tokens(tokens))

    def _disk_overhead(self, growing: Container[LayerRows] = (), num_new: int = 0) -> int:
        """What layers on disk take in memory: slots of the largest, and the last tokens of each."""
        if not self.on_disk:
            return self.ring.held
        tails = sum(disk.tail_bytes for disk in self.on_disk.values())
        return max(self._slots_needed(growing, num_new), self.ring.held) + tails

    def _slots_needed(self, growing: Container[LayerRows], num_new: int) -> int:
        """Both slots, for the largest layer on disk."""
        layers = [(disk, num_new if rows in growing else 0) for rows, disk in self.on_disk.items()]
        return NUM_SLOTS * max((self.slot_bytes(disk.layout, disk.length + more) for disk, more in layers), default=0)

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
        budget, num_new = self.budget_bytes, new[0].shape[2] if new else 0
        if budget is None or (new and not self._grows(rows, new, num_new)):
            return
        while (needed := self._needed(rows, new, num_new)) > budget - self.under_way_bytes * bool(self.on_disk):
            victim = self._victim(rows)
            if self.ring.held and not self.on_disk:
                self.ring.release()
            elif victim is not None:
                self._spill(victim, new if victim is rows else ())
            elif self.ring.held > self._slots_needed((rows,), num_new):
                self.ring.release()  # it was larger for a longer context
            else:
                raise self._no_room(needed, rows.length + num_new)

    def admit(
        self, layers: Sequence[LayerRows], num_new: int, step: int, token_bytes: Sequence[int], limit: int
    ) -> int:
        """Makes ready for a call, in which layers may go to disk to stay within a limit.

        Args:
            layers: whose caches it is called with.
            num_new: new tokens.
            step: how many of them go through the model at a time.
            token_bytes: of a token in each cache; not looked at where there are tokens already.
            limit: the most that all caches together may take in memory, what is under way included.

        Returns:
            How many bytes are missing: 0 when the call can begin.

        Raises:
            WriteError: there is no room on the disk.
        """
        sizes = {r: _token_bytes(r) or nbytes for r, nbytes in zip(layers, token_bytes, strict=True)}
        needed = self._needed_for(sizes, num_new)
        if self.options.budget_bytes is None:
            return max(0, needed - limit)
        self.budget_bytes = limit
        tokens = max((rows.length for rows in layers), default=0) + num_new
        self.under_way_bytes = self.options.under_way_bytes(list(sizes.values()), tokens, step)
        fresh = num_new * sum(nbytes for rows, nbytes in sizes.items() if rows in self.on_disk)
        if self.on_disk:
            needed += self.under_way_bytes
        if needed > limit:
            least = self._least(sizes, num_new) + self.under_way_bytes
            if least > limit:
                return min(least, needed) - limit
            fresh += needed - limit
        if fresh:
            self._check_disk(fresh)
        return 0

    def _needed_for(self, sizes: Mapping[LayerRows, int], num_new: int) -> int:
        """What is in memory when new tokens have come to some layers, given what a token takes in each."""
        within = [(rows, nbytes) for rows, nbytes in sizes.items() if rows not in self.on_disk]
        held = {rows: rows.memory.held_for(num_new, nbytes) for rows, nbytes in within}
        copied = max((rows.memory.held for rows in held if held[rows] > rows.memory.held), default=0)
        others = sum(rows.memory.held for rows in self._layers if rows not in held)
        return others + sum(held.values()) + copied + self._disk_overhead(sizes, num_new)

    def _least(self, sizes: Mapping[LayerRows, int], num_new: int) -> int:
        """What is needed with every layer on disk, when new tokens have come to some."""
        every = {rows: nbytes for rows in self._layers if (nbytes := sizes.get(rows) or _token_bytes(rows))}
        lengths = {rows: rows.length + (num_new if rows in sizes else 0) for rows in every}
        step = self.options.step
        room = {
            rows: round_up(length, step) if commits_lazily() else self.options.slot_tokens(length)
            for rows, length in lengths.items()
        }
        slot = slot_memory(max((room[rows] * nbytes for rows, nbytes in every.items()), default=0) + SLOT_PADDING)
        return NUM_SLOTS * slot + step * sum(every.values())

    def _check_disk(self, needed: int) -> None:
        base = self.options.directory or cache_directory()
        found = free_bytes(base)
        if needed > found:
            raise WriteError(
                f"the KV cache needs {needed / 1e6:.1f} MB more on the disk of {base} for this call, where "
                f"{found / 1e6:.1f} MB are free. Hint: make room there, set another directory, or max_tokens."
            )

    def _no_room(self, needed: int, tokens: int) -> BudgetError:
        return BudgetError(
            f"the KV caches need {needed / 1e6:.1f} MB of memory for {tokens} tokens with every layer on disk: "
            f"{NUM_SLOTS} slots of a layer each, and the last tokens of every layer; their budget is "
            f"{(self.budget_bytes or 0) / 1e6:.1f} MB. Hint: raise it, or set max_tokens.",
            needed,
        )

    def _grows(self, rows: LayerRows, new: Sequence[mx.array], num_new: int) -> bool:
        """Whether new tokens of a layer take more memory."""
        if rows not in self.on_disk:
            return rows.memory.held_after(new) != rows.memory.held
        step = self.options.step
        return round_up(rows.length, step) != round_up(rows.length + num_new, step)

    def _needed(self, rows: LayerRows, new: Sequence[mx.array], num_new: int) -> int:
        is_on_disk = rows in self.on_disk
        others = sum(layer.memory.held for layer in self._layers if layer is not rows)
        mine = 0 if is_on_disk else rows.memory.held_after(new) + rows.memory.moved_after(new)
        return others + mine + self._disk_overhead((rows,), num_new)

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
            self._reader = PageReader(
                (), direct=o.direct, read_size=o.read_size, queue_depth=o.queue_depth, in_place=reads_beside()
            )
            self._writer = WriteBehind(self._count_written)
        path = self._folder.path / f"layer-{next(self._files)}.kv"
        return LayerFile(path, layout, self._reader, self._writer, self.options.direct)

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
            self.ring.release()
            self.on_disk.clear()
            if self._writer is not None:
                self._writer.close()
            if self._reader is not None:
                self._reader.close()
            if self._folder is not None:
                self._folder.close()


def _token_bytes(rows: LayerRows) -> int:
    layout = rows.layout
    return 0 if layout is None else layout.token_bytes


def _spread(index: int) -> int:
    """A number by which indices are in an order where the first few are far apart: the bits backwards."""
    return int(f"{index:016b}"[::-1], 2)
