"""Conversations that the server keeps."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from kv_settings import rows_of
from mlx_flash import enginethread
from mlx_flash.engine.engine import Lending
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.kv.kvpool import DiskKVCache, KVPool, make_caches
from mlx_flash.prefixes.prefixcache import History, RowLeaf, prefix_directory
from mlx_flash.server.batch import BatchOptions
from mlx_flash.server.events import Begun
from mlx_flash.server.request import GenerationRequest
from noting import noted
from served import LONG, Answer, Served, serving, stock_answer, turn
from served import model as model  # a fixture

QUESTIONS = ("Tell me of the sea", "And of the sky, please", "Who are you?")


@pytest.fixture(scope="module")
def expected(model: str) -> list[Answer]:
    """mlx-lm's answers: to the questions, in a second turn, to a request of its own, in another second turn."""
    answers = [stock_answer(model, *turn(text)) for text in QUESTIONS]
    first = [*turn(QUESTIONS[0]), said(answers[0])]
    turns = turn("Why?", *first), turn("And now?"), turn(LONG, *first)
    return answers + [stock_answer(model, *each) for each in turns]


def said(answer: Answer) -> dict[str, str]:
    return {"role": "assistant", "content": "".join(text for text, _ in answer)}


def lengths(served: Served) -> list[int]:
    return sorted(cache[0].offset for cache in served.kept)


def test_kept_conversations_are_shortened_and_continued(model: str, expected: list[Answer]) -> None:
    settings = {"ram_budget_gb": "min", "context_length": 16384, "kv_prefixes": "off"}
    with serving(model, **settings) as mine:  # mlx-lm's batches keep mlx-lm's caches
        answers = [mine.ask(*turn(text)) for text in QUESTIONS]
        assert len(lengths(mine)) == 3 and {type(entry) for cache in mine.kept for entry in cache} == {DiskKVCache}
        token_bytes = 4 * 2 * 2 * 16 * 2  # four layers of keys and values of two heads of 16 numbers
        assert mine.pool.memory_bytes < (sum(lengths(mine)) + 20) * token_bytes  # no room for more tokens
        answers.append(mine.ask(*turn("Why?", *turn(QUESTIONS[0]), said(answers[0]))))
        answers.append(mine.ask(*turn("And now?"), seed=3))
        assert answers == expected[:5]
        assert mine.pool.note().disk_bytes == mine.pool.note().num_offloaded == 0


@pytest.mark.parametrize("prefixes", ["off", "exact"])
@pytest.mark.parametrize("budget", [1.0, "min"])
def test_the_second_turn_computes_its_new_words_only(model: str, prefixes: str, budget: float | str) -> None:
    with serving(model, context_length=4096, kv_prefixes=prefixes, ram_budget_gb=budget) as mine:
        first = mine.ask(*turn(QUESTIONS[0]))
        (length,) = lengths(mine)
        messages = turn("Why?", *turn(QUESTIONS[0]), said(first))
        request = GenerationRequest(model="default_model", messages=messages, max_tokens=5)
        (begun,) = (event for event in mine.events(request) if isinstance(event, Begun))
        assert begun.num_cached > length - 20 and begun.num_prompt - begun.num_cached < 50


def test_memory_for_kept_conversations_comes_from_the_engine_thread(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the budget takes lent memory back there, too."""
    with serving(model, context_length=4096) as mine:
        mine.ask(*turn(QUESTIONS[0]))
        found = noted(monkeypatch, Lending, "recall", lambda *_: enginethread.check())
        mine.ask(*turn(QUESTIONS[1]))
        assert mine.kept
    assert found and all(found)


def test_no_caches_are_kept_without_room_for_them(model: str) -> None:
    options = BatchOptions(prefill_step_size=1024, prompt_cache_bytes=0)
    with serving(model, options=options, context_length=4096) as mine:
        mine.ask(*turn(QUESTIONS[0]))
        assert not mine.kept


@pytest.fixture
def _nothing_remembered() -> Iterator[None]:
    yield
    shutil.rmtree(prefix_directory(), ignore_errors=True)


@pytest.mark.usefixtures("_nothing_remembered")
def test_another_process_finds_the_prefix_of_the_next_turn(model: str, expected: list[Answer]) -> None:
    messages = turn(LONG, *turn(QUESTIONS[0]), said(expected[0]))
    with serving(model, context_length=4096, kv_prefixes="exact") as mine:
        assert [mine.ask(*turn(QUESTIONS[0])), mine.ask(*messages)] == [expected[0], expected[5]]
    with serving(model, context_length=4096, kv_prefixes="exact") as later:
        answer = later.ask(*messages)
        restored = later.model.prefixes.counters.num_restored
    with serving(model, context_length=4096) as plain:  # the calls that are the same: those of the system prompt
        assert restored and answer == plain.ask(*messages)


# --- without a server ------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> KVPool:
    return KVPool(KVOptions(step=16))


def test_a_new_sequence_is_not_mistaken_for_a_former_one(pool: KVPool) -> None:
    """Its history is known as long as it was always alone."""

    def batch(seed: int, history: History | None) -> Any:
        entry = make_caches([KVCache()], pool.options, pool)[0]
        entry.update_and_fetch(*[rows_of(seed + i, 20, mx.float16) for i in range(2)])
        if history is not None:
            RowLeaf(entry).note(history)
        return DiskKVCache.merge([entry])

    def history_of(entry: Any) -> History | None:
        return RowLeaf(entry).history

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
