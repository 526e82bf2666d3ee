"""All KV caches of one model: the rows of each layer, in memory and on disk, and the budget.

Beyond the budget layers go to disk one by one, between two calls: first those of the sequence used longest ago, spread
over the layers. Copies of a layer in memory have buffers of their own, those of a layer on disk share its pages.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from operator import call
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from mlx_flash import enginethread
from mlx_flash.compat.caches import CacheKinds
from mlx_flash.compat.callers import evaluates_only
from mlx_flash.errors import ClosedError, ConfigError
from mlx_flash.forks import finalize
from mlx_flash.kv.disk import DiskRows, KVFiles, RowLayout
from mlx_flash.kv.kvledger import KVLedger, KVOptions, Layers, Way, no_room, queued_bytes
from mlx_flash.kv.owed import owing, own_kind
from mlx_flash.kv.ring import SlotRing
from mlx_flash.layout.reachable import Opaque
from mlx_flash.memory.footprint import release_freed_memory


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Sizes of a pool's caches at one moment, and what they cost so far."""

    memory_bytes: int = 0  # keys and values in memory, slots included
    disk_bytes: int = 0
    reserved_bytes: int = 0  # what MLX counts as active for them
    read_bytes: int = 0
    written_bytes: int = 0
    num_offloaded: int = 0  # layers offloaded to disk
    wait_seconds: float = 0.0


class Adding(NamedTuple):
    """Tokens that a call, or several in lockstep, add to layers of caches.

    Attributes:
        tokens: how many each sequence gets in a layer, and the bytes of one of all sequences, if the layer has none.
        step: how many of them go through the model at a time.
    """

    tokens: Mapping[PooledCache, tuple[int, int]]
    step: int = 1


NOTHING = Adding(MappingProxyType({}))


@dataclass(eq=False)
class CacheGroup(Opaque):
    """A list of caches, and when it was used last; 0 for never."""

    used_at: int = 0


HISTORY = "prefix_history"
"""Attribute of an entry with its history in the prefix cache, and the object that it is anchored to."""


def pass_on(entry: object, successor: object, anchor: object = None) -> None:
    """Note the history of an entry on another one that holds the same tokens.

    The anchor is an object that the other one replaces when sequences are added or removed; None if that cannot be.
    """
    if HISTORY in vars(entry):
        vars(successor)[HISTORY] = (vars(entry)[HISTORY][0], anchor)


def is_anchored(entry: object, anchor: object) -> bool:
    """Return whether the history that is noted on an entry still holds."""
    return HISTORY in vars(entry) and vars(entry)[HISTORY][1] is anchor


class PooledCache:
    """mlx-lm's cache of one layer, plain or quantized, that a pool counts, and may send to disk.

    In memory it computes as mlx-lm's: a token calls nothing that is defined here. On disk the object has another
    class, of :class:`OnDisk`. That class alone says where the tokens are, so one assignment moves them.

    Passes of other sequences may move it while tokens are owed, so its pool looks at attributes with ``vars()``.

    Attributes:
        pool: the pool that the cache shares with others.
        group: the list of caches that it belongs to.
        index: its place in that list.
        shortened: the capacity of the buffers after :meth:`shorten`, and before. MLX's kernels on CUDA depend on it, so
            copies get it back.
    """

    is_on_disk: ClassVar[bool] = False
    form: ClassVar[tuple[str, ...]] = ()
    """Attributes that follow the offset in ``state``."""
    kind_in_memory: ClassVar[type[PooledCache]]
    kind_on_disk: ClassVar[type[PooledCache]]

    pool: KVPool
    group: CacheGroup
    index: int
    offset: int
    shortened: tuple[int, int]

    def offload(self) -> None:
        """Go to disk: page by page, or with the first tokens if there are none. Idempotent. Raises: WriteError."""
        if self.is_on_disk:
            return
        held, step, arrays = vars(self), self.pool.options.step, buffers_of(self)
        disk = DiskRows(self.pool.files.new_file)
        if arrays:
            disk.begin(RowLayout.of(arrays, step))
            disk.capacity = capacity_of(self)
        while disk.length < held["offset"]:
            page = slice(disk.length, min(disk.length + step, held["offset"]))
            disk.append(disk.layout.to_rows([array[..., page, :] for array in arrays]))
            disk.settle()  # memory is short: nothing waits
        become(self, type(self).kind_on_disk, keys=None, values=None, offset=0, disk=disk)

    def set_state(self, state: Sequence[Any]) -> None:
        """Replace all tokens by those in some arrays. Raises: BudgetError, WriteError."""
        keys, values, offset, *form = state
        for name, value in zip(type(self).form, form, strict=True):
            setattr(self, name, value)
        if keys is None:
            return
        pool = self.pool
        with pool.lock:
            pool.use([self.group])
            mx.eval(keys, values)
            held = {"keys": keys, "values": values, "offset": offset, "shortened": (0, 0), "disk": None}
            become(self, type(self).kind_in_memory, **held)
            if pool.options.always_on_disk:
                self.offload()
            pool.fit(lambda: pool.memory_bytes, offset)

    def drop_room(self, num_new: int) -> None:
        """Have buffers without room for new tokens grow behind the last token.

        mlx-lm's caches keep room that a trim to a multiple of their step left, and grow behind that.
        """
        arrays, length = buffers_of(self), vars(self)["offset"]
        if arrays and length < arrays[0].shape[2] < length + num_new:
            keys, values = pair([array[..., :length, :] for array in arrays])
            vars(self).update(keys=keys, values=values)

    def shorten(self) -> None:
        """Give back the room behind the tokens, until others come."""
        arrays, length, before = buffers_of(self), vars(self)["offset"], capacity_of(self)
        if length and arrays:
            keys, values = pair(resized(arrays, length, length))
            vars(self).update(keys=keys, values=values, shortened=(length, before))

    def copy_to(self, group: CacheGroup) -> Any:
        """Return an evaluated copy for another list, with buffers of its own."""
        held, kind = vars(self), own_kind(type(self))
        copied: dict[str, Any] = {name: held[name] for name in kind.form}
        if self.is_on_disk:
            copied |= {"keys": None, "values": None, "offset": 0, "disk": held["disk"].fork()}
        else:
            keys, values = pair(resized(buffers_of(self), held["offset"], capacity_of(self)))
            copied |= {"keys": keys, "values": values, "offset": held["offset"]}
        other = kind.__new__(kind)
        vars(other).update(copied)
        self.pool.add(other, group, self.index)
        pass_on(self, other)
        return other

    def __copy__(self: C) -> C:
        return copy.deepcopy(self)  # the pool counts it, and its tokens do not change with this one's

    def __deepcopy__(self: C, memo: dict[Any, Any]) -> C:
        key, is_alone = (KVPool, id(self.pool)), not memo  # else the list that it is in was noted first
        if key not in memo:  # caches that are copied together belong to one list
            memo[key] = CacheGroup(), {}
        group, copies = memo[key]
        if self not in copies:
            copies |= self.pool.fork(self, group, is_alone=is_alone)
        return cast(C, copies[self])


C = TypeVar("C", bound=PooledCache)


class OnDisk(PooledCache):
    """A cache whose tokens are on disk, or go there with the first ones."""

    is_on_disk = True
    disk: DiskRows

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Position of the next token."""
        return self.disk.length

    @property
    def nbytes(self) -> int:
        """Bytes in memory. Those on disk do not count."""
        return self.disk.tail_bytes

    def empty(self) -> bool:
        """Return whether the cache never held a token."""
        return not self.disk.layout.components

    def trim(self, n: int) -> int:
        """Remove up to ``n`` of the newest tokens. Return how many were removed. Raises: ReadError."""
        n = max(0, min(self.offset, n))
        if n:
            with self.pool.lock:
                self.pool.ring.forget(self.disk, self.offset - n)
                self.disk.truncate(self.offset - n)
        return n

    def append(self, new: Sequence[mx.array], *, fetches: bool = True) -> list[mx.array]:
        """Add tokens, ``(batch, heads, new tokens, width)`` for each array, which take a slot if it ``fetches``.

        Return all then. Raises: WriteError, ReadError.
        """
        pool, disk = self.pool, self.disk
        with pool.lock:
            pool.use([self.group])
            if not disk.layout.components:
                disk.begin(RowLayout.of(new, pool.options.step))
            disk.capacity = pool.options.capacity_after(disk.length, disk.capacity, new[0].shape[2])
            if fetches:
                return pool.ring.append(disk, new)
            disk.append(disk.layout.to_rows(new))
            return []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add tokens, ``(batch, heads, new tokens, width)``. Return all. Raises: WriteError, ReadError."""
        return pair(self.append([keys, values]))

    def read(self, start: int, stop: int) -> list[mx.array]:
        """Return the rows of some tokens, which take no slot. Raises: ReadError."""
        with self.pool.lock:
            return self.disk.layout.to_arrays(self.disk.read(start, stop))

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all tokens, in a slot. Raises: ReadError."""
        with self.pool.lock:
            return pair(self.pool.ring.fetch(self.disk))

    @property
    def keys(self) -> Any:
        """A copy of the keys, a triple if they are quantized."""
        return self._contents()[0]

    @property
    def values(self) -> Any:
        """A copy of the values, as the keys."""
        return self._contents()[1]

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values, offset, and what else mlx-lm's class has there.

        Keys and values are None when mlx-lm asks only in order to evaluate them.
        """
        found = (None, None) if evaluates_only() else self._contents()
        return *found, self.offset, *[getattr(self, name) for name in self.form]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self.set_state(state)

    def _contents(self) -> tuple[Any, Any]:
        """Return arrays that the caller may keep."""
        if self.empty():
            return None, None
        found = tree_map(mx.contiguous, self.keys_and_values())
        mx.eval(found)
        keys, values = found
        return keys, values


def become(entry: PooledCache, kind: type[PooledCache], **held: Any) -> None:
    """Change the class of a cache, which says the same of tokens that are owed, and what it holds."""
    kind = owing(kind) if type(entry) is not own_kind(type(entry)) else kind
    change = partial(vars(entry).update, held), partial(object.__setattr__, entry, "__class__", kind)
    # one step, as in :mod:`mlx_flash.files`: an interrupt leaves none that holds both, or nothing
    any(map(call, change))


def buffers_of(entry: Any) -> list[mx.array]:
    """Return the buffers of a cache in memory, with the room behind its tokens; none of one on disk."""
    held = vars(entry)
    keys, values = held["keys"], held["values"]
    if keys is None:
        return []
    return [keys, values] if isinstance(keys, mx.array) else [*keys, *values]


def capacity_of(entry: PooledCache) -> int:
    """Return the tokens that the buffers of a cache in memory have room for, or had before they were shortened."""
    arrays, (after, before) = buffers_of(entry), vars(entry)["shortened"]
    capacity = int(arrays[0].shape[2]) if arrays else 0
    return before if capacity == after else capacity


def pair(arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    """Return keys and values: an array each, a triple each if they are quantized, None each if there are none."""
    if not arrays:
        return None, None
    half = len(arrays) // 2
    return (arrays[0], arrays[1]) if half == 1 else (tuple(arrays[:half]), tuple(arrays[half:]))


def resized(arrays: Sequence[mx.array], length: int, capacity: int) -> list[mx.array]:
    """Return copies of the first rows of buffers, with room for so many; they are evaluated."""
    half, found = length // 2, list[mx.array]()  # MLX would not copy one part alone
    for array in arrays:
        room = mx.zeros((*array.shape[:2], capacity - length, array.shape[3]), array.dtype)
        found.append(mx.concatenate([array[..., :half, :], array[..., half:length, :], room], axis=2))
    mx.eval(found)
    return found


def _spread(index: int) -> int:
    """Return a number by which to sort indices so that the first few are far apart: the bits backwards."""
    return int(f"{index:016b}"[::-1], 2)


class KVPool(Opaque):
    """The caches of a model, their budget, and the order in which they are used.

    Args:
        options: how the caches are stored.
        count_written: called from another thread with the number of bytes.
        passes: held during each pass of the model. Copies wait for it.
    """

    def __init__(
        self,
        options: KVOptions,
        count_written: Callable[[int], None] = lambda _: None,
        passes: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.options = options
        self.budget_bytes = options.budget_bytes  # the most memory of all caches together; may be changed
        self.under_way_bytes = 0  # the part of it that is kept free: for reads and writes, or to offload a layer
        self.usage = KVUsage()  # at the last :meth:`note`; any thread may read it
        self._by_id: weakref.WeakValueDictionary[int, PooledCache] = weakref.WeakValueDictionary()
        self.ring = SlotRing(options)
        self.files = KVFiles(options, count_written)
        self.lock = threading.RLock()  # held while caches change; callers run one forward pass at a time
        self._passes = passes or nullcontext()
        self._clock = count(1)
        self.is_closed = False
        if options.always_on_disk:  # nobody closes these pools
            finalize(self, enginethread.leave, self.files.close)

    def add(self, entry: PooledCache, group: CacheGroup, index: int) -> None:
        """Count a cache from now on, the one at ``index`` of a list."""
        vars(entry).update(pool=self, group=group, index=index, step=self.options.step, shortened=(0, 0))
        self._by_id[id(entry)] = entry

    @property
    def layers(self) -> list[PooledCache]:
        """All caches. One leaves with the last reference to it. Any thread may add some."""
        return [entry for reference in self._by_id.valuerefs() if (entry := reference()) is not None]

    @property
    def on_disk(self) -> dict[PooledCache, DiskRows]:
        """The caches on disk, and their rows."""
        return {entry: vars(entry)["disk"] for entry in self.layers if entry.is_on_disk}

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory now: caches, slots, and the last tokens of layers on disk."""
        return self.ledger().now

    @property
    def limit(self) -> float:
        """The most memory of all caches together, without reads and writes in flight."""
        return inf if self.budget_bytes is None else self.budget_bytes - self.under_way_bytes

    def ledger(self, adding: Adding = NOTHING) -> KVLedger:
        """Return the layers of all caches in numbers, and the tokens that a call adds to some."""
        alike, tokens_of, none = Counter[Any](), adding.tokens.get, (0, 0)
        for reference in self._by_id.valuerefs():  # for each pass: no function is called for a layer
            if (entry := reference()) is None:
                continue
            held, (num_new, token_bytes) = vars(entry), tokens_of(entry, none)
            length, capacity, keys = held["offset"], 0, held["keys"]
            if is_on_disk := entry.is_on_disk:
                disk = held["disk"]
                length = disk.length
                if disk.layout.components:
                    capacity, token_bytes = self.options.step, disk.layout.token_bytes
            elif keys is not None:
                is_plain, values = keys.__class__ is mx.array, held["values"]
                capacity = (keys if is_plain else keys[0]).shape[2]
                nbytes = keys.nbytes + values.nbytes if is_plain else sum([each.nbytes for each in (*keys, *values)])
                token_bytes = nbytes // max(capacity, 1)
            alike[token_bytes, length, capacity, is_on_disk, num_new] += 1
        layers = [Layers(*each)._replace(number=number) for each, number in alike.items()]
        slots_held = self.ring.nbytes if self.files.num_layers else 0  # if nothing was on disk, no slot has memory
        return KVLedger(self.options, layers, adding.step, slots_held, len(self.ring.slots), self.under_way_bytes)

    def note(self) -> KVUsage:
        """Bring :attr:`usage` up to date, and return it."""
        ledger, files = self.ledger(), self.files
        disks = self.on_disk.values() if files.num_layers else ()
        self.usage = KVUsage(
            memory_bytes=ledger.now,
            disk_bytes=sum([file.nbytes for file in {disk.file for disk in disks if disk.layout.components}]),
            reserved_bytes=ledger.active,
            read_bytes=files.read_bytes,
            written_bytes=files.writer.nbytes,
            num_offloaded=files.num_layers,
            wait_seconds=self.ring.wait_seconds,
        )
        return self.usage

    def admit(self, adding: Adding, limit: int, way: Way | None = None) -> int:
        """Prepare a call, or several in lockstep: decide which layers are on disk while it runs.

        ``limit`` is the most memory of all caches together, reads and writes in flight included; ``way`` is how they
        stay within it, if that is known. Return the bytes that are missing: 0 when the call can begin. Raises:
        WriteError: there is no room on the disk; BudgetError: layers on disk take more than the ledger says.
        """
        options = self.options
        self.use(dict.fromkeys([entry.group for entry in adding.tokens]))  # a generator is entered for each layer
        way = way or self.way(self.ledger(adding), limit)
        if way.missing:
            return way.missing
        if options.budget_bytes is not None:
            self.budget_bytes, self.under_way_bytes = limit, way.under_way_bytes
        if way.num_slots:
            self.ring.resize(way.num_slots)
            self.files.writer.limit_bytes = queued_bytes(way.num_slots)
            with self.lock:
                tokens = max([entry.offset + num_new for entry, (num_new, _) in adding.tokens.items()], default=0)
                self.fit(lambda: self.ledger(adding).peak, tokens, adding.tokens)
        in_parts = max([num_new for num_new, _ in adding.tokens.values()], default=0) > adding.step
        self.ring.is_tight = in_parts
        for entry, (num_new, _) in adding.tokens.items():  # for each token: no function is called for a layer
            if entry.is_on_disk:
                vars(entry)["disk"].coming = num_new
            elif not in_parts and not vars(entry)["offset"] % options.step:
                entry.drop_room(num_new)
        return 0

    def way(self, ledger: KVLedger, limit: int) -> Way:
        """Return how a call stays within a limit. Raises: WriteError: there is no room on the disk."""
        way = ledger.way(limit)
        if way.disk_bytes:
            self.files.check_room(way.disk_bytes)
        return way

    def fork(self, layer: PooledCache, group: CacheGroup, *, is_alone: bool) -> dict[PooledCache, PooledCache]:
        """Return copies: of a layer, and unless it ``is_alone`` of all others of its list. Those on disk share pages.

        These are copied together for another ``group``, between two passes: those of a list that is computed would
        differ in length. Raises: BudgetError, WriteError.
        """
        with self._passes, self.lock:
            if self.is_closed:
                raise _closed()
            group.used_at = group.used_at or next(self._clock)
            copies = dict[PooledCache, PooledCache]()
            for entry in [layer] if is_alone else [entry for entry in self.layers if entry.group is layer.group]:
                self.fit(partial(_with_copy, self, entry), entry.offset)  # this may send the layer to disk
                copies[entry] = entry.copy_to(group)
            return copies

    def use(self, groups: Iterable[CacheGroup]) -> None:
        """Note that lists of caches are used now. Raises: ClosedError."""
        if self.is_closed:
            raise _closed()
        for group in groups:
            group.used_at = next(self._clock)

    def fit(self, needed: Callable[[], int], tokens: int, coming: Container[PooledCache] = ()) -> None:
        """Offload layers until a need of so many tokens is within the limit. Raises: BudgetError, WriteError.

        The order is that of the last use of their sequences, and far from each other in the model. Layers without
        tokens go if some are ``coming``.
        """
        while (nbytes := needed()) > self.limit:
            layers = [
                entry
                for entry in self.layers
                if not entry.is_on_disk and (vars(entry)["keys"] is not None or entry in coming)
            ]
            if self.ring.nbytes and not (layers and self.on_disk):
                self.ring.release()  # it is not needed, or was larger for a longer context
            elif layers:
                min(layers, key=lambda entry: (entry.group.used_at, _spread(entry.index), entry.index)).offload()
                release_freed_memory()
            elif len(self.ring.slots) > 1:
                self.ring.resize(1)
            else:
                raise no_room(nbytes, tokens, self.limit)

    def close(self) -> None:
        """End the threads and remove the files. Caches on disk cannot be used any more. Idempotent."""
        with self.lock:
            self.is_closed = True
            self.ring.release()
            self.files.close()


def _with_copy(pool: KVPool, entry: PooledCache) -> int:
    """Return the bytes in memory with a copy of a cache."""
    if entry.is_on_disk:
        return pool.memory_bytes + int(vars(entry)["disk"].tail_bytes)
    tokens = capacity_of(entry)
    return pool.memory_bytes + sum([array[..., :1, :].nbytes * tokens for array in buffers_of(entry)])


def _closed() -> ClosedError:
    return ClosedError("the KV caches of this model were closed. Hint: make new ones.")


class DiskKVCache(PooledCache, KVCache):  # type: ignore[misc]
    """One layer's ``KVCache`` of mlx-lm whose tokens may be on disk.

    A streamed model makes its own. One that is constructed puts all full pages on disk, and is used in any loop that
    takes mlx-lm's caches::

        from mlx_flash import DiskKVCache
        from mlx_lm import generate, load

        model, tokenizer = load("mlx-community/Qwen3-4B-4bit")
        cache = [DiskKVCache() for _ in model.layers]
        generate(model, tokenizer, "A long prompt", prompt_cache=cache)

    Memory holds the last tokens of each layer, and two slots that all layers constructed with the same arguments share.
    Attention reads a layer's tokens from a slot while the other one is filled for the next layer. Forward calls of
    models whose layers share slots must run one after another. The files are removed with the last of these caches.

    The class has mlx-lm's name, because ``save_prompt_cache`` writes the name and ``load_prompt_cache`` looks it up:
    mlx-lm loads a saved cache without mlx-flash.

    Args:
        layer_idx: without effect: each cache names its own files.
        directory: the folder for files, which is created; None for the cache folder.
        max_tokens: only None, for every token: mlx-lm's ``RotatingKVCache`` keeps the last ones, in memory.
        cache_dir: another name of the folder.

    Raises:
        ConfigError: ``max_tokens`` is given.
    """

    def __init__(
        self,
        layer_idx: int | None = None,
        directory: str | Path | None = None,
        max_tokens: int | None = None,
        *,
        cache_dir: str | Path | None = None,
    ) -> None:
        if max_tokens is not None:
            raise ConfigError(
                f"max_tokens is {max_tokens}: a DiskKVCache keeps every token. "
                "Hint: mlx_lm.models.cache.RotatingKVCache(max_size) keeps the last ones."
            )
        directory = cache_dir if directory is None else directory
        self.__class__ = DiskKVCache  # of one that is made anew, too
        super().__init__()
        _pool_of(None if directory is None else Path(directory).expanduser()).add(self, CacheGroup(), 0)
        self.offload()

    state = KVCache.state.setter(PooledCache.set_state)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """Return a cache of quantized keys and values in the same pool. This one must not be used afterwards.

        The next call makes room for it, when this one is dropped.
        """
        cache = self.as_stock().to_quantized(group_size, bits)
        mx.eval(cache.keys, cache.values)
        pass_on(self, cache)
        return _pooled(cache, self.pool, self.group, self.index)

    def as_stock(self) -> KVCache:
        """Return mlx-lm's own cache with the same contents, all in memory."""
        cache = KVCache()
        cache.state = self.state
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """Return mlx-lm's cache of a batch, in memory."""
        kind = BatchKVCache if len(caches) > 1 else LoneKVCache
        if all(cache.size() == 0 for cache in caches):  # of each layer of each sequence that begins
            batch = kind([0] * len(caches))
        else:
            batch = kind.merge([cache.as_stock() if isinstance(cache, _OnDisk) else cache for cache in caches])
        if len(caches) == 1:
            pass_on(caches[0], batch, batch.left_padding)
        return batch


class LoneKVCache(BatchKVCache):  # type: ignore[misc]
    """mlx-lm's ``BatchKVCache`` of one sequence, which keeps its history. It computes the same.

    The history stays when mlx-lm moves the sequence from one batch to another, and goes to the extracted cache. It ends
    when other sequences are added.
    """

    def filter(self, batch_indices: Any) -> None:
        is_known = is_anchored(self, self.left_padding)  # then there is one sequence, and it is kept
        super().filter(batch_indices)
        if is_known:
            pass_on(self, self, self.left_padding)

    def extract(self, idx: int) -> KVCache:
        cache = super().extract(idx)
        if is_anchored(self, self.left_padding):
            pass_on(self, cache)
        return cache


LoneKVCache.__name__ = BatchKVCache.__name__


class DiskQuantizedKVCache(PooledCache, QuantizedKVCache):  # type: ignore[misc]
    """mlx-lm's ``QuantizedKVCache`` whose tokens may be on disk."""

    form = ("group_size", "bits")
    state = QuantizedKVCache.state.setter(PooledCache.set_state)

    def append_quantized(self, new: Sequence[mx.array]) -> None:
        """Add quantized tokens, ``(batch, heads, new tokens, width)`` for each buffer."""
        arrays = buffers_of(self) or [array[..., :0, :] for array in new]
        start, end = self.offset, self.offset + new[0].shape[2]
        if end > arrays[0].shape[2]:
            arrays = resized(arrays, start, self.pool.options.capacity_after(start, 0, end - start))
        for array, rows in zip(arrays, new, strict=True):
            array[..., start:end, :] = rows
        self.keys, self.values = pair(arrays)
        self.offset = end


class _OnDisk(OnDisk, DiskKVCache):
    pass


class _QuantizedOnDisk(OnDisk, DiskQuantizedKVCache):
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Quantize and add tokens, ``(batch, heads, new tokens, width)``. Return all, as triples."""
        new = [
            part for rows in (keys, values) for part in mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        ]
        return pair(self.append(new))


for _stock, _kind, _on_disk in (
    (KVCache, DiskKVCache, _OnDisk),
    (QuantizedKVCache, DiskQuantizedKVCache, _QuantizedOnDisk),
):
    # mlx-lm's functions for saving write down the name of the class, and those for loading look it up among mlx-lm's.
    _on_disk.__name__ = _kind.__name__ = _stock.__name__
    _kind.kind_in_memory, _kind.kind_on_disk = _kind, _on_disk


CacheKinds.buffers += (DiskKVCache, DiskQuantizedKVCache, LoneKVCache)

_pools: weakref.WeakValueDictionary[Path | None, KVPool] = weakref.WeakValueDictionary()
"""The pool of all caches that were constructed with the same folder."""


def _pool_of(directory: Path | None) -> KVPool:
    pool = _pools.get(directory)
    if pool is None:
        pool = _pools[directory] = KVPool(KVOptions(directory=directory, always_on_disk=True))
    return pool


def _pooled(entry: Any, pool: KVPool, group: CacheGroup, index: int) -> Any:
    """Have a pool count a cache of mlx-lm's, the one at ``index`` of a list, from now on."""
    entry.__class__ = DiskKVCache if type(entry) is KVCache else DiskQuantizedKVCache
    pool.add(entry, group, index)
    if pool.options.always_on_disk:
        entry.offload()
    return entry


def make_caches(model_caches: Sequence[Any], options: KVOptions, pool: KVPool | None = None) -> list[Any]:
    """Return a new list of a model's caches with the plain ones replaced, and what is in them.

    These are entries whose class is exactly ``KVCache`` or ``QuantizedKVCache``. Others, lists of caches among them,
    are the same objects as before. The pool may be shared with other caches of the same model; None makes a new one.
    """
    pool = pool or KVPool(options)
    group = CacheGroup()
    caches = list[Any](model_caches)
    for index, entry in enumerate(model_caches):
        if type(entry) in CacheKinds.plain:
            plain = KVCache()
        elif type(entry) is QuantizedKVCache:
            plain = QuantizedKVCache(entry.group_size, entry.bits)
        else:
            continue
        caches[index] = _pooled(plain, pool, group, index)
        if entry.keys is not None:
            caches[index].state = entry.state
    return caches
