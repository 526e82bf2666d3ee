"""Conversations that mlx-lm's server computed in batches and keeps: common prefixes are stored once."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from conversations import LONG, SYSTEM, turn
from conversations import model as model  # a fixture
from kv_rows import equal, offload_all, rows_of
from mlx_flash.kv.diskcache import DiskKVCache, make_caches
from mlx_flash.kv.history import History
from mlx_flash.kv.keptcaches import KeptCaches, num_equal
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.options import KVOptions
from mlx_flash.prefixes.leaves import RowLeaf
from mlx_flash.prefixes.prefixcache import prefix_directory
from mlx_flash.server.batchoptions import BatchOptions
from served import Answer, Served, serving, stock_serving

LAYERS = 4
TOKEN_BYTES = 2 * 2 * 32 * 2
"""Bytes of a token in a layer: keys and values of two heads of 32 numbers of 16 bits."""


def copies(tokens: int, num: int = 1) -> int:
    """Return the bytes of so many tokens in every layer, each with one more behind it."""
    return (tokens + num) * TOKEN_BYTES * LAYERS


def served_copies(tokens: int, num: int = 1) -> int:
    """Return the same for the model that is served, whose heads have 16 numbers."""
    return copies(tokens, num) // 2


QUESTIONS = ("Tell me of the sea", "And of the sky, please", "Who are you?")


@pytest.fixture(scope="module")
def expected(model: str) -> list[Answer]:
    """mlx-lm's answers: to the questions, in a second turn, to a request of its own, in another second turn."""
    with stock_serving(model) as stock:
        answers = [stock.ask(*turn(text)) for text in QUESTIONS]
        answers.append(stock.ask(*turn("Why?", *turn(QUESTIONS[0]), said(answers[0]))))
        answers.append(stock.ask(*turn("And now?"), seed=3))
        return [*answers, stock.ask(*turn(LONG, *turn(QUESTIONS[0]), said(answers[0])))]


def said(answer: Answer) -> dict[str, str]:
    return {"role": "assistant", "content": "".join(text for text, _ in answer)}


def lengths(served: Served) -> list[int]:
    return sorted(cache[0].offset for cache in served.kept)


@pytest.mark.parametrize("form", [None, "preallocated"])
def test_kept_conversations_share_their_common_prompt(model: str, expected: list[Answer], form: str | None) -> None:
    with serving(model, kv_cache=form, context_length=16384) as mine:
        answers = [mine.ask(*turn(text)) for text in QUESTIONS]
        pool, common = mine.pool, 640
        assert min(lengths(mine)) > common and len(lengths(mine)) == 3
        rests = sum(length - common for length in lengths(mine))
        assert served_copies(common) < pool.memory_bytes < served_copies(common + rests, 20)  # not three times
        assert 0 <= pool.memory_bytes - mine.prompt_cache.nbytes < served_copies(0, 10)
        assert {type(entry) for cache in mine.kept for entry in cache} == {DiskKVCache}
        answers.append(mine.ask(*turn("Why?", *turn(QUESTIONS[0]), said(answers[0]))))
        assert pool.memory_bytes < served_copies(common + rests + 100, 30)
        answers.append(mine.ask(*turn("And now?"), seed=3))  # not in a batch
        assert answers == expected[:5]
        assert pool.note().disk_bytes == pool.stats.num_offloaded == 0
        mine.ask(*turn("And in a batch again?"))
        rests = sum(length - common for length in lengths(mine))
        assert len(lengths(mine)) == 6 and pool.memory_bytes < served_copies(common + rests, 40)
        mine.ask(*turn("Who are you?", system="A system prompt that nobody else has. " * 20))
        assert pool.memory_bytes < served_copies(common + rests + lengths(mine)[0], 40)


def test_one_conversation_takes_no_additional_memory(model: str, expected: list[Answer]) -> None:
    with serving(model, context_length=4096) as mine:
        first = mine.ask(*turn(QUESTIONS[0]))
        (length,) = lengths(mine)
        assert mine.pool.memory_bytes <= served_copies(length, 4)
        second = mine.ask(*turn("Why?", *turn(QUESTIONS[0]), said(first)))
        assert [first, second] == [expected[0], expected[3]]
        assert mine.pool.memory_bytes <= served_copies(max(lengths(mine)) + 40, 8)


def test_requests_in_one_batch_are_answered_as_by_mlx_lm(model: str, expected: list[Answer]) -> None:
    """Rows computed together, with padding, are shared as far as they are equal."""
    with serving(model, context_length=16384) as mine:
        found: list[Answer] = [[], [], []]

        def ask(i: int) -> None:
            found[i] = mine.ask(*turn(QUESTIONS[i]))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        again = [mine.ask(*turn(text)) for text in QUESTIONS]
        assert [said(answer) for answer in found] == [said(answer) for answer in again] == list(map(said, expected[:3]))


def test_more_conversations_are_kept_in_the_same_memory(model: str) -> None:
    room = 2 * served_copies(700) + served_copies(1024)  # one is being computed
    options = BatchOptions(prefill_step_size=1024, prompt_cache_bytes=room)
    with serving(model, options=options, context_length=16384) as mine:
        for text in (*QUESTIONS, "A fourth?", "A fifth?", "A sixth?"):
            mine.ask(*turn(text))
        assert len(mine.kept) == 6
        for text in QUESTIONS:
            mine.ask(*turn(text, system=text + SYSTEM))
        assert len(mine.kept) < 6  # these have nothing in common


@pytest.fixture
def _nothing_remembered() -> Iterator[None]:
    yield
    shutil.rmtree(prefix_directory(), ignore_errors=True)


@pytest.mark.usefixtures("_nothing_remembered")
@pytest.mark.parametrize("mode", ["longest", "exact"])
def test_another_process_finds_the_prefix_of_the_next_turn(model: str, expected: list[Answer], mode: str) -> None:
    messages = turn(LONG, *turn(QUESTIONS[0]), said(expected[0]))
    with serving(model, context_length=4096, kv_prefixes=mode) as mine:
        assert [mine.ask(*turn(QUESTIONS[0])), mine.ask(*messages)] == [expected[0], expected[5]]
        length = max(lengths(mine))
    with serving(model, context_length=4096, kv_prefixes=mode) as later:
        answer = later.ask(*messages)
        restored = later.model.prefixes.counters.num_restored
    if mode == "longest":  # all pages; those in which the system prompt ends and the rest begins, in part
        assert restored > (length // 256 - 1) * 256 and said(answer) == said(expected[5])
    else:  # the calls that are the same, those of the system prompt
        with serving(model, context_length=4096) as plain:
            assert restored and answer == plain.ask(*messages)


# --- without a server ------------------------------------------------------------------------------------------------


def extracted(*lengths: tuple[int, int]) -> list[Any]:
    """A cache as a batch gives it back, of rows that are named by numbers."""
    caches = []
    for layer in range(LAYERS):
        pieces = [
            [rows_of(100 * seed + layer + i, 2000, mx.float16)[..., :n, :] for seed, n in lengths] for i in (0, 9)
        ]
        rows = [mx.concatenate(arrays, axis=2) for arrays in pieces]
        batch = BatchKVCache([0])
        batch.update_and_fetch(*rows)
        caches.append(batch.extract(0))
    return caches


@pytest.fixture
def pool() -> KVPool:
    return KVPool(KVOptions(step=16, budget_bytes=0))


def test_released_caches_free_their_rows(pool: KVPool) -> None:
    """A short beginning that is shared does not keep the long rest of a conversation that ended."""
    kept, one, two = KeptCaches(), extracted((1, 100), (2, 900)), extracted((1, 100), (3, 50))
    still: tuple[Any, ...] = ()
    for cache, seed in ((one, 2), (two, 3)):
        still = kept.take(cache, [1] * 100 + [seed] * (cache[0].offset - 100), pool), *still
    assert pool.memory_bytes == copies(1050, 3)
    assert kept.shared_bytes == copies(100)
    still = ()
    assert kept.shared_bytes == 0  # somebody has them, but they are not kept
    three = extracted((1, 100), (2, 300), (4, 10))
    kept.take(three, [1] * 100 + [2] * 300 + [4] * 10, pool)
    assert pool.memory_bytes == copies(1060, 5)
    one.clear()
    assert pool.memory_bytes == copies(100 + 50 + 300 + 10, 4)
    three.clear()
    assert pool.memory_bytes == copies(150, 2)
    for entry, expected in zip(two, extracted((1, 100), (3, 50)), strict=True):
        assert equal(entry.keys_and_values(), expected.keys_and_values())
    assert pool.stats.num_offloaded == 0


def test_only_bitwise_equal_rows_are_shared(pool: KVPool) -> None:
    kept, one, two, three = KeptCaches(), *(extracted((1, 2000)) for _ in range(3))
    two[1].values[..., 1500, 3] += 0.5
    three[2].keys = three[2].keys * 0.0
    negative = [KVCache() for _ in range(LAYERS)]
    for entry, other in zip(negative, three, strict=True):
        entry.state = other.keys, other.values, other.offset
    negative[2].keys = -three[2].keys
    assert mx.array_equal(negative[2].keys, three[2].keys)
    for cache in (one, two, three, negative):
        expected = [mx.array(array) for entry in cache for array in entry.keys_and_values()]
        kept.take(cache, [7] * 2000, pool)
        found = [array for entry in cache for array in entry.keys_and_values()]
        assert equal(found, expected)
    layer = 2001 * TOKEN_BYTES
    # the second: all but the end of one layer; the third and the fourth: all but one layer
    assert pool.memory_bytes == copies(2000) + (500 + 2) * TOKEN_BYTES + 2 * layer
    other = extracted((1, 2000))
    kept.take(other, [8] * 2000, pool)  # nobody looks where tokens differ
    assert pool.memory_bytes == 2 * copies(2000) + (500 + 2) * TOKEN_BYTES + 2 * layer


@pytest.mark.parametrize("on_disk", [False, True])
def test_kept_conversations_beside_active_ones(on_disk: bool, pool: KVPool) -> None:
    """Some were computed in caches of the pool, one after another, perhaps on disk."""
    alone: list[Any] = make_caches([KVCache() for _ in range(LAYERS)], pool.options, pool)
    pool.budget_bytes = 10_000_000
    for entry, rows in zip(alone, extracted((1, 300)), strict=True):
        entry.rows.append(rows.keys_and_values())
    if on_disk:
        offload_all(pool)
        pool.budget_bytes = pool.memory_bytes
    kept, one, two = KeptCaches(), extracted((1, 300), (2, 20)), extracted((1, 300), (3, 20))
    kept.take(alone, [1] * 300, pool)
    before = pool.memory_bytes
    for cache, seed in ((one, 2), (two, 3)):
        kept.take(cache, [1] * 300 + [seed] * 20, pool)
    assert pool.stats.num_offloaded == (LAYERS if on_disk else 0)
    assert pool.memory_bytes == (before + copies(340, 3) if on_disk else copies(340, 3))
    copied = copy.deepcopy(one)
    assert pool.stats.num_offloaded == (LAYERS if on_disk else 0)  # there was room for what is there
    pool.budget_bytes = 400_000
    for entry, like in zip(copied, extracted((1, 300), (2, 20), (4, 30)), strict=True):
        rest = [array[..., 320:, :] for array in like.keys_and_values()]
        assert equal(entry.update_and_fetch(*rest), like.keys_and_values())
    assert pool.stats.num_offloaded > (LAYERS if on_disk else 0)
    for cache, *pieces in ((alone, (1, 300)), (one, (1, 300), (2, 20)), (two, (1, 300), (3, 20))):
        for entry, like in zip(cache, extracted(*pieces), strict=True):
            assert equal(entry.keys_and_values(), like.keys_and_values())


def test_rows_of_different_types_are_not_equal(pool: KVPool) -> None:
    cache = extracted((1, 40))
    KeptCaches().take(cache, [1] * 40, pool)
    arrays = list(cache[0].keys_and_values())
    assert num_equal(cache[0].rows, arrays, 40) == 40
    assert num_equal(cache[0].rows, [a.astype(mx.bfloat16) for a in arrays], 40) == 0
    assert num_equal(cache[0].rows, [mx.concatenate([a, a], axis=1) for a in arrays], 40) == 0


def test_a_new_sequence_is_not_mistaken_for_a_former_one(pool: KVPool) -> None:
    """Its history is known as long as it was always alone."""

    def batch(seed: int, history: History | None) -> Any:
        entry = DiskKVCache(rows=pool.new_rows(pool.new_group(), 0))
        entry.rows.append([rows_of(seed + i, 20, mx.float16) for i in range(2)])
        if history is not None:
            RowLeaf(entry).note(history)
        return DiskKVCache.merge([entry])

    def history_of(entry: Any) -> History | None:
        return RowLeaf(entry).history

    pool.budget_bytes = None
    history = History()
    alone = batch(1, history)
    assert history_of(alone) is history_of(alone.extract(0)) is history
    alone = copy.deepcopy(alone)  # as mlx-lm does on the way from a prompt to its answer
    alone.filter([0])
    assert history_of(alone) is history_of(alone.extract(0)) is history
    alone.extend(batch(2, None))
    assert history_of(alone) is history_of(alone.extract(0)) is history_of(alone.extract(1)) is None
    for left in (0, 1):
        rest = copy.deepcopy(alone)
        rest.filter([left])
        rest.filter([0])
        assert history_of(rest) is history_of(rest.extract(0)) is None
    kept = [batch(3, history).extract(0)]
    KeptCaches().take(kept, [1] * 20, pool)
    assert history_of(kept[0]) is history_of(copy.deepcopy(kept)[0]) is history
