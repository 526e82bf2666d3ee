"""Caches behave as mlx-lm's own, bit for bit, wherever their tokens are."""

from __future__ import annotations

import copy
import gc
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from faulty import Disk
from interrupt_points import Tracer
from kv_settings import bits, equal, little_under_way, offload_all, rows_of
from mlx_flash.errors import BudgetError, ClosedError, ReadError
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import KVPool, make_caches
from mlx_flash.kv.ring import Slot, SlotRing
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.prefixes.prefixcache import RowLeaf
from mlx_flash.storage.prefetcher import RangeReader
from noting import noted

__all__ = ["little_under_way"]


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., KVOptions]:
    return lambda **settings: KVOptions(directory=tmp_path / "kv", **settings)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch.setattr)


def poison(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Slots are full of NaN when they are given to a layer: what was not put there shows."""
    assign = Slot.assign

    def assign_and_fill(self: Slot, rows: Any, capacity: int) -> None:
        assign(self, rows, capacity)
        np.frombuffer(self.memory, np.uint8)[:] = 0xFF

    set_attribute(Slot, "assign", assign_and_fill)


class Against(RuleBasedStateMachine):
    """Three layers of caches and mlx-lm's own, given the same."""

    KINDS = ("float16", "bfloat16", "float32", "quantized")
    FORMS: tuple[dict[str, Any], ...] = (
        {"step": 256},
        {"step": 16},
        {"step": 16, "disk": (0, 1, 2)},
        {"step": 256, "disk": (0, 1, 2)},
        {"step": 64, "disk": (1,)},
        {"step": 32, "disk": (0, 2), "direct": False},
        {"step": 16, "disk": (0, 1)},
    )
    """``disk``: the layers that are on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        poison(self.patch.setattr)
        self.folder = tempfile.TemporaryDirectory()
        self.pool = KVPool(KVOptions())
        self.pending: list[tuple[mx.array, mx.array]] = []
        self.others: list[tuple[list[Any], list[Any]]] = []
        self.seed = 0

    def teardown(self) -> None:
        try:
            assert all(equal(mine, theirs) for mine, theirs in self.pending)
        finally:
            self.patch.undo()
            self.pool.close()
            self.folder.cleanup()

    @initialize(kind=st.sampled_from(KINDS), form=st.sampled_from(FORMS))
    def begin(self, kind: str, form: dict[str, Any]) -> None:
        self.is_quantized = kind == "quantized"
        self.dtype = mx.float16 if self.is_quantized else getattr(mx, kind)
        own = {key: value for key, value in form.items() if key != "disk"}
        self.disk = form.get("disk", ())
        self.pool = KVPool(KVOptions(directory=Path(self.folder.name), **own))
        self.theirs: list[Any] = [QuantizedKVCache(32, 4) if self.is_quantized else KVCache() for _ in range(3)]
        self.mine = make_caches(self.theirs, self.pool.options, self.pool)

    @rule(num_tokens=st.one_of(st.integers(1, 8), st.integers(1, 600)), waits=st.booleans())
    def append(self, num_tokens: int, waits: bool) -> None:
        for index, (mine, theirs) in enumerate(zip(self.mine, self.theirs, strict=True)):
            self.seed += 1
            keys = rows_of(2 * self.seed, num_tokens, self.dtype, 2 + index)
            values = rows_of(2 * self.seed + 1, num_tokens, self.dtype, 2 + index, 64)
            found, expected = mine.update_and_fetch(keys, values), theirs.update_and_fetch(keys, values)
            if waits:
                self.pending += [(total(found), total(expected))]
            else:
                assert equal(found, expected)
            if index in self.disk and not mine.is_on_disk:
                mine.offload()

    @rule(num_tokens=st.integers(1, 700))
    def trim(self, num_tokens: int) -> None:
        trimmed = [[entry.trim(num_tokens) for entry in caches] for caches in (self.mine, self.theirs)]
        assert trimmed[0] == trimmed[1]

    @rule()
    def set_states(self) -> None:
        for mine, theirs in zip(self.mine, self.theirs, strict=True):
            if theirs.keys is not None:
                changed = tree_map(lambda array: array + 1, theirs.keys_and_values())
                mine.state, theirs.state = ((*changed, *entry.state[2:]) for entry in (mine, theirs))
                assert not mine.is_on_disk

    @rule()
    def fetch(self) -> None:
        for mine, theirs in zip(self.mine, self.theirs, strict=True):
            if theirs.keys is not None:
                assert equal(mine.keys_and_values(), theirs.keys_and_values())

    @rule()
    def copy(self) -> None:
        self.others = [*self.others[-3:], (copy.deepcopy(self.mine), copy.deepcopy(self.theirs))]

    @precondition(lambda self: self.others)
    @rule(index=st.integers(0, 3))
    def go_on_with_a_copy(self, index: int) -> None:
        index %= len(self.others)
        (self.mine, self.theirs), self.others[index] = self.others[index], (self.mine, self.theirs)

    @precondition(lambda self: self.others)
    @rule(num_tokens=st.integers(1, 40))
    def append_to_all_in_turns(self, num_tokens: int) -> None:
        """Layer by layer, as nobody does: each layer that is computed is of another sequence than the one before."""
        for index in range(3):
            for mine, theirs in ((self.mine, self.theirs), *self.others):
                self.seed += 1
                rows = rows_of(self.seed, num_tokens, self.dtype, 2 + index)
                wide = rows_of(10_000 + self.seed, num_tokens, self.dtype, 2 + index, 64)
                assert equal(mine[index].update_and_fetch(rows, wide), theirs[index].update_and_fetch(rows, wide))

    @precondition(lambda self: self.others)
    @rule()
    def let_go_of_a_copy(self) -> None:
        self.others.pop(0)

    @precondition(lambda self: self.others)
    @rule()
    def compare_copies(self) -> None:
        for mine, theirs in self.others:
            for ours, stock in zip(mine, theirs, strict=True):
                if stock.keys is not None:
                    assert equal(ours.keys_and_values(), stock.keys_and_values())

    @precondition(lambda self: not self.is_quantized and self.theirs[0].offset)
    @rule()
    def merge_and_extract(self) -> None:
        other, their_other = copy.deepcopy(self.mine[0]), copy.deepcopy(self.theirs[0])
        for entry in (other, their_other):
            entry.trim(3)
        mine = self.mine[0].merge([self.mine[0], other])
        theirs = self.theirs[0].merge([self.theirs[0], their_other])
        assert equal(mine.state[:2], theirs.state[:2])
        self.mine[0] = make_caches([mine.extract(0)], self.pool.options, self.pool)[0]

    @rule()
    def save_and_load(self) -> None:
        path = str(Path(self.folder.name) / "cache.safetensors")
        stock_cache.save_prompt_cache(path, self.mine)
        loaded = stock_cache.load_prompt_cache(path)
        assert [type(entry) for entry in loaded] == [type(entry) for entry in self.theirs]
        self.mine = make_caches(loaded, self.pool.options, self.pool)

    @rule()
    def evaluate(self) -> None:
        mx.eval([entry.state for entry in self.mine])

    @invariant()
    def agree(self) -> None:
        for mine, theirs in zip(getattr(self, "mine", ()), getattr(self, "theirs", ()), strict=True):
            assert mine.offset == theirs.offset
            assert mine.size() == theirs.size()
            assert mine.empty() == theirs.empty()
            assert mine.is_trimmable()

    @invariant()
    def what_is_held_is_counted(self) -> None:
        held = sum(nbytes_in(entry) for entry in self.pool.layers)
        assert self.pool.note().reserved_bytes == held + self.pool.ring.nbytes
        if not self.pool.on_disk:
            assert self.pool.memory_bytes == held + self.pool.ring.nbytes


def total(arrays: Any) -> mx.array:
    """Something that is computed from all bytes, later."""
    sums = [bits(array).astype(mx.int32).sum(axis=-1) for _, array in tree_flatten(arrays)]
    return mx.stack([(part * mx.arange(1, part.shape[-1] + 1)).sum() for part in sums])


TestAgainst = Against.TestCase
TestAgainst.settings = settings(
    max_examples=70, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def filled(options: KVOptions, lengths: tuple[int, ...] = (100,), layers: int = 3) -> tuple[list[Any], list[Any]]:
    theirs: list[Any] = [KVCache() for _ in range(layers)]
    mine = make_caches(theirs, options)
    for seed, length in enumerate(lengths):
        feed(mine, theirs, seed, length)
    return mine, theirs


def feed(mine: list[Any], theirs: list[Any], seed: int, length: int) -> None:
    for index, caches in enumerate(zip(mine, theirs, strict=True)):
        rows = rows_of(100 * seed + index, length, mx.float16), rows_of(100 * seed + index + 50, length, mx.float16)
        found = [cache.update_and_fetch(*rows) for cache in caches]
        assert equal(found[0], found[1])


def test_pending_computations_keep_the_contents_of_a_slot(options: Callable[..., KVOptions]) -> None:
    """A layer stays there, and other tokens come in the place of some, before anything is evaluated."""
    mine, theirs = filled(options(step=16), layers=1)
    offload_all(mine[0].pool)
    pending = []
    for seed in range(4):
        rows = [rows_of(400 + seed + i, 25, mx.float16) for i in (0, 50)]
        assert len({cache.trim(20) for cache in (*mine, *theirs)}) == 1
        pending.append([total(cache.update_and_fetch(*rows)) for cache in (*mine, *theirs)])
    assert all(equal(found, expected) for found, expected in pending)


def test_unaligned_pages_are_read_through_bounce_buffers(
    options: Callable[..., KVOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where a disk must not write beside what is computed from."""
    bounced: list[bool] = []
    for name, is_bounced in (("_read_bounced", True), ("_read_direct", False)):
        read = getattr(RangeReader, name)
        monkeypatch.setattr(
            RangeReader,
            name,
            lambda *args, read=read, is_bounced=is_bounced: (bounced.append(is_bounced), read(*args))[1],
        )
    for way in ("in place", "bounced"):
        monkeypatch.setattr("mlx_flash.kv.disk.way_of_reading", lambda way=way: way)
        mine, theirs = filled(options(), (600,), 4)
        offload_all(mine[0].pool)
        bounced.clear()
        for seed in range(3):
            feed(mine, theirs, seed + 1, 1)
        mine[0].pool.close()  # ends what is read ahead
        assert bounced and any(bounced) == (way == "bounced")
        assert way == "in place" or bounced.count(True) == bounced.count(False)  # each is a direct read to the buffer


def test_a_read_ahead_that_failed_is_repeated(
    options: Callable[..., KVOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a call the first layer is read ahead. The disk fails then, and works again before the next call."""
    mine, theirs = filled(options(step=16), layers=4)
    slots, disk = mine[0].pool.ring.slots, Disk(monkeypatch)
    offload_all(mine[0].pool)
    feed(mine, theirs, 1, 1)
    feed(mine[:3], theirs[:3], 2, 1)
    for slot in slots:
        slot.wait()
    disk.is_broken = True
    feed(mine[3:], theirs[3:], 2, 1)
    [ahead] = [slot for slot in slots if slot._reading is not None]
    with pytest.raises(ReadError):
        ahead._reading[0].wait()
    disk.is_broken = False
    feed(mine, theirs, 3, 1)


def test_the_order_of_layers_is_learned(options: Callable[..., KVOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = filled(options(step=16), (100,), 5)
    pool = mine[0].pool
    offload_all(pool)
    for seed in range(2, 4):
        feed(mine, theirs, seed, 1)
    on_demand = noted(monkeypatch, SlotRing, "_read", lambda *_, urgent=False: urgent or None)
    for seed in range(4, 9):
        feed(mine, theirs, seed, 1)
    assert not on_demand
    feed(mine[::-1], theirs[::-1], 9, 1)  # in another order: reads on demand, the same rows
    assert on_demand


def test_two_layers_on_disk_stay_in_their_slots(options: Callable[..., KVOptions]) -> None:
    mine, theirs = filled(options(step=64), (130,), 2)  # with room for 61 more
    pool = mine[0].pool
    offload_all(pool)
    feed(mine, theirs, 1, 1)
    before = pool.note().read_bytes
    for seed in range(2, 40):
        feed(mine, theirs, seed, 1)
    assert pool.note().read_bytes == before


def test_a_merged_cache_is_read_from_disk_once(
    options: Callable[..., KVOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = filled(options(step=16), (100,), 1)
    offload_all(mine[0].pool)
    fetched = noted(monkeypatch, SlotRing, "fetch", lambda *_: True)
    assert equal(mine[0].merge(mine).state[:2], theirs[0].merge(theirs).state[:2])
    assert len(fetched) == 1


def test_restored_rows_on_disk_are_read_when_they_are_used(options: Callable[..., KVOptions]) -> None:
    """Page by page, each layer was read again for each of its pages."""
    mine, theirs = filled(options(step=16), (40,), 3)
    pool = mine[0].pool
    offload_all(pool)
    for seed in range(8):
        for caches in zip(mine, theirs, strict=True):
            rows = [rows_of(seed + i, 24, mx.float16) for i in range(2)]
            RowLeaf(caches[0]).append(rows)
            caches[1].update_and_fetch(*rows)
    assert pool.note().read_bytes == 0
    feed(mine, theirs, 9, 1)
    for caches in zip(mine, theirs, strict=True):  # whose former tokens are in slots
        rows = [rows_of(i, 24, mx.float16) for i in range(2)]
        assert caches[0].trim(24) == caches[1].trim(24)
        RowLeaf(caches[0]).append(rows)
        caches[1].update_and_fetch(*rows)
    feed(mine[::-1], theirs[::-1], 10, 1)


def test_a_refusal_names_a_smaller_budget_than_the_need(options: Callable[..., KVOptions]) -> None:
    """It named the whole budget, of which reads and writes in flight have a part: 0.5 MB did not fit 0.8 MB."""
    mine, _ = filled(options(step=16, budget_bytes=800_000), (16,), 2)
    mine[0].pool.under_way_bytes = 790_000
    with pytest.raises(BudgetError, match=r"in flight their budget has 0\.0 MB") as error:
        copy.deepcopy(mine)
    assert 10_000 < error.value.minimum_bytes < 800_000


def test_layers_used_longest_ago_are_offloaded_first_and_spread(options: Callable[..., KVOptions]) -> None:
    pool = KVPool(options(step=16))
    old, new = (make_caches([KVCache() for _ in range(8)], pool.options, pool) for _ in range(2))
    for seed, caches in enumerate((old, new)):
        feed(caches, [KVCache() for _ in range(8)], seed, 64)
        pool.use([caches[0].group])
    pool.budget_bytes, victims = 0, list[Any]()
    for number in range(1, 9):
        pool.fit(lambda number=number: len(pool.on_disk) < number, 0)
        victims += pool.on_disk.keys() - {*victims}
    assert victims == [old[i] for i in (0, 4, 2, 6, 1, 5, 3, 7)]


def test_layers_that_come_while_others_are_added_up(options: Callable[..., KVOptions]) -> None:
    """Another thread may make a prompt cache during a pass."""
    pool = KVPool(options())
    caches = [make_caches([KVCache(), KVCache()], pool.options, pool)]
    for entry in pool.layers:
        caches.append([entry, *make_caches([KVCache(), KVCache()], pool.options, pool)])
    assert [entry.index for entry in pool.layers] == [0, 1] * len(caches) == [0, 1] * 3


def test_arrays_in_one_cache_exclude_those_of_others(options: Callable[..., KVOptions]) -> None:
    mine, _ = filled(options(step=16), (40,), 4)
    assert len(arrays_in(mine[0])) == 2
    offload_all(mine[0].pool)
    assert arrays_in(mine) == []


def test_a_closed_pool_raises(options: Callable[..., KVOptions]) -> None:
    mine, theirs = filled(options(step=16), (40,), 2)
    offload_all(mine[0].pool)
    mine[0].pool.close()
    mine[0].pool.close()
    with pytest.raises(ClosedError, match="make new ones"):
        feed(mine, theirs, 1, 1)


def test_nothing_is_read_for_mlx_lm_to_evaluate(
    options: Callable[..., KVOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop evaluates ``state`` after each part of a prompt. Nor do slots move without computations that wait."""

    def model(tokens: mx.array, cache: list[Any]) -> mx.array:
        h = rows_of(1, tokens.shape[1], mx.float16)
        for entry in cache:  # each layer needs the one before
            h = h + entry.update_and_fetch(h, h)[0].mean()
        return h[0].transpose(1, 0, 2).reshape(1, tokens.shape[1], -1)

    cache, _ = filled(options(step=16))
    pool = cache[0].pool
    offload_all(pool)
    used = noted(monkeypatch, SlotRing, "_hand_out", lambda *_: True)
    list(generate_step(mx.arange(300), model, max_tokens=3, prompt_cache=cache, prefill_step_size=128))
    num_calls = 3 + 1 + 3  # parts, the last token alone, and each other one
    assert pool.note().read_bytes and len(used) <= len(cache) * num_calls
    assert [slot.num_moved for slot in pool.ring.slots] == [0, 0]
    assert cache[0].state[0].shape[2] == cache[0].offset  # anybody else gets them


def test_copies_of_layers_on_disk_share_pages(options: Callable[..., KVOptions]) -> None:
    conversations, token_bytes = [filled(options(step=16), (1000,))], 3 * 2 * 2 * 32 * 2
    pool = conversations[0][0][0].pool
    offload_all(pool)
    for length in (1000, 900, 333):
        conversations.append(copy.deepcopy(conversations[0]))
        for entry in itertools.chain(*conversations[-1]):
            entry.trim(entry.offset - length)
    for seed in range(1, 5):
        feed(*conversations[seed - 1], seed, 40)
    usage = pool.note()
    assert usage.disk_bytes == usage.written_bytes
    assert 1000 <= usage.disk_bytes / token_bytes <= 1000 + 4 * 40 + 3 * 16, "and what does not fill a page"
    del conversations[:3], entry
    gc.collect()
    feed(*conversations[0], 9, 16)
    assert pool.note().disk_bytes <= (333 + 40 + 16) * token_bytes


@pytest.mark.parametrize("goes_to_disk", [False, True])
def test_shallow_copies_count_and_go_on_by_themselves(goes_to_disk: bool, options: Callable[..., KVOptions]) -> None:
    first = filled(options(step=16), (40,))
    pool = first[0][0].pool
    if goes_to_disk:
        offload_all(pool)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    alone = copy.copy(first[0][0])  # and no other layer, which copying one by one would copy each time
    assert mx.get_peak_memory() - before < 2 * alone.nbytes or goes_to_disk
    second = [alone, *(copy.copy(entry) for entry in first[0][1:])], copy.deepcopy(first[1])
    assert {*pool.layers} == {*first[0], *second[0]}
    for seed, caches in enumerate([first, second, copy.deepcopy(second)] * 2, 1):
        feed(*caches, seed, 20)


@pytest.mark.parametrize("offloads", [True, False])
def test_an_interrupt_leaves_a_layer_right(offloads: bool, options: Callable[..., KVOptions]) -> None:
    """In memory or on disk, with all tokens or without new ones, and all of its buffers counted."""
    [first, *_], [other, *_] = filled(options(step=16), (40,))
    rows, pool, ends = [rows_of(seed, 30, mx.float16) for seed in (1, 2)], first.pool, set[tuple[bool, int]]()
    expected = other.update_and_fetch(*rows)
    if not offloads:
        offload_all(pool)
    for number in itertools.count():
        layer, strike = copy.copy(first), Tracer(number, ["kv/kvpool.py", "kv/disk.py"])
        append = lambda layer=layer: (layer.update_and_fetch(*rows), layer.trim(35))  # noqa: E731
        is_struck = strike.strike(layer.offload if offloads else append)
        assert pool.note().reserved_bytes == sum(map(nbytes_in, pool.layers)) + pool.ring.nbytes
        length = layer.offset
        ends.add((layer.is_on_disk, length))
        assert equal(layer.keys_and_values(), [part[..., :length, :] for part in expected]), strike.where
        if length == 40:
            assert equal(layer.update_and_fetch(*rows), expected), strike.where
        if not is_struck:
            break
    assert number > 20 and len(ends) > 1
