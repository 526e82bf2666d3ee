"""The server answers requests together as it answers each one alone, bit for bit."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from mlx_flash.errors import RefusedError
from mlx_flash.kv.kvpool import PooledCache
from mlx_flash.server import loaded
from mlx_flash.server.batch import BatchOptions, ServedBatch
from mlx_flash.server.events import Begun, End, Event, Piece, Progress
from mlx_flash.server.request import GenerationRequest, Sampling
from served import (
    LONG,
    NUM_TOKENS,
    TEXTS,
    Answer,
    Served,
    ask,
    each_alone,
    events_of,
    every,
    model,
    serving,
    text_of,
    together,
    turn,
)

__all__ = ["model"]


@pytest.fixture(scope="module")
def alone(model: str) -> list[Answer]:
    """Answers of mlx-lm, one after another."""
    return each_alone(model, TEXTS)


@pytest.mark.parametrize(
    "kv", [{}, {"kv_cache": "disk", "kv_ram_gb": 0.02, "context_length": 8192}, {"kv_prefixes": "exact"}]
)
def test_answers_are_those_of_requests_alone(model: str, alone: list[Answer], kv: dict[str, Any]) -> None:
    settings = {"ram_budget_gb": "min", "context_length": 8192, "lend_reserves": False, **kv}
    with serving(model, **settings) as mine:
        assert together(mine, TEXTS) == alone
        streamed = mine.model
        assert streamed.engine.stream.units and streamed.counters.num_passes < 2 * NUM_TOKENS + len(TEXTS)


def test_a_request_that_fails_leaves_the_others_alone(
    model: str, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_prompt = loaded.make_prompt

    def with_a_wrong_token(request: Any, *rest: Any) -> Any:
        prompt = make_prompt(request, *rest)
        if request.messages[-1]["content"] == "wrong":
            return replace(prompt, tokens=[*prompt.tokens, 10**6])
        return prompt

    monkeypatch.setattr(loaded, "make_prompt", with_a_wrong_token)
    with serving(model, ram_budget_gb="min", context_length=8192) as mine, ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(mine.ask, *turn("wrong"), max_tokens=NUM_TOKENS)
        assert together(mine, TEXTS) == alone
        with pytest.raises(RefusedError, match=r"IndexError: .* the embedding has rows"):
            wrong.result()
        assert ask(mine, TEXTS[0]) == alone[0]
        assert all(cache for cache in mine.kept)


def test_a_device_that_is_unplugged_and_comes_back(
    model: str, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests get the error meanwhile, and right answers afterwards."""

    def unplugged(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    with serving(model, ram_budget_gb="min", context_length=8192) as mine, ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            assert ask(mine, TEXTS[0]) == alone[0]
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", unplugged)
                for failed in [pool.submit(ask, mine, text) for text in TEXTS[:3]]:
                    with pytest.raises(RefusedError, match=r"cannot read 'model.*' .* in .*: No such device at offset"):
                        failed.result()
            assert together(mine, TEXTS) == alone


def answered_at(served: Served, text: str, max_tokens: int) -> tuple[Answer, float, float]:
    """Return an answer, and the times of its first and its last token."""
    answer: Answer = []
    times: list[float] = []
    request = GenerationRequest(
        model="default_model",
        messages=turn(text),
        top_logprobs=0,
        sampling=Sampling(temperature=0.0),
        max_tokens=max_tokens,
    )
    for event, at in served.timed_events(request):
        if isinstance(event, Piece) and event.tokens:
            answer.append((event.text, event.tokens[0][0].logprob))
            times.append(at)
    return answer, times[0], times[-1]


@pytest.mark.parametrize("budget", ["min", 2.0])
def test_a_short_request_is_not_starved_by_a_long_prompt(model: str, budget: Any) -> None:
    """It is answered before the prompt that came first is computed, and both answers are those of each alone."""
    long_text, options = LONG * (3 if budget == "min" else 4), BatchOptions(prefill_step_size=64)
    settings = {"ram_budget_gb": budget, "context_length": 4096, "prefill_step_size": 64, "kv_prefixes": "off"}
    with serving(model, options=options, **settings) as mine:
        alone = [answered_at(mine, text, 4)[0] for text in (long_text, "Hi")]
        mine.prompt_cache.trim_to(n_sequences=0)
        with ThreadPoolExecutor(2) as pool:
            before = mine.model.counters.num_tokens_in
            long_one = pool.submit(answered_at, mine, long_text, 4)
            while mine.model.counters.num_tokens_in == before:
                time.sleep(0.001)
            short_one = pool.submit(answered_at, mine, "Hi", 4)
            (long_answer, first, _), (short_answer, _, last) = long_one.result(), short_one.result()
        assert [long_answer, short_answer] == alone
        if budget == 2.0:  # a streamed prompt that is alone takes what memory allows in a pass
            assert last < first


# --- answers to one prompt that are asked for together ----------------------------------------------------------------


N = 4


def requests(text: str, **fields: Any) -> list[GenerationRequest]:
    made = GenerationRequest(model="default_model", messages=turn(text, system="Hi"), max_tokens=6, **fields)
    return [replace(made, sampling=Sampling(seed=seed, temperature=1.0)) for seed in range(N)]


def num_computed(answers: list[list[Event]]) -> int:
    begun = [event for events in answers for event in events if isinstance(event, Begun)]
    return sum(event.num_prompt - event.num_cached for event in begun)


@pytest.mark.parametrize("kv", [{}, {"kv_cache": "disk", "kv_ram_gb": 0.02, "context_length": 8192}])
def test_a_prompt_of_several_answers_is_computed_once(model: str, kv: dict[str, Any]) -> None:
    with serving(model, **kv) as served:
        alone = []
        for request in requests(LONG):
            served.prompt_cache.trim_to(n_sequences=0)
            alone += served.events_together(request)
        served.prompt_cache.trim_to(n_sequences=0)
        answers = served.events_together(*requests(LONG))
        assert [text_of(events) for events in answers] == [text_of(events) for events in alone]
        assert len({text_of(events) for events in answers}) > 1
        num_prompt = next(event.num_prompt for event in answers[0] if isinstance(event, Begun))
        assert num_computed(alone) == N * num_prompt and num_computed(answers) == num_prompt + N - 1


def test_answers_to_a_prompt_are_not_copied_for_each_token(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, fork = list[PooledCache](), PooledCache.copy_to
    monkeypatch.setattr(PooledCache, "copy_to", lambda entry, group: forked.append(entry) or fork(entry, group))
    with serving(model) as served:
        longest = [replace(each, max_tokens=24) for each in requests(LONG * 8)]
        answers = served.events_together(*longest)
        assert min(end.num_prompt for events in answers if isinstance(end := events[-1], End)) > 256
        assert sum(end.num_tokens for events in answers if isinstance(end := events[-1], End)) > 2 * N
        assert len(forked) <= 2 * N * len(served.model.layers)  # once when it begins, and once when it ends


def test_requests_outlive_the_one_that_computes_their_prompt(model: str) -> None:
    with serving(model, options=BatchOptions(prefill_step_size=8)) as served:
        expected = [text_of(events) for events in served.events_together(*requests(LONG))]
        served.prompt_cache.trim_to(n_sequences=0)

        async def leave_early() -> list[list[Event]]:
            leader, *others = served.submit(*requests(LONG))
            async for event in events_of(leader):
                if isinstance(event, Begun):
                    leader.leave()
            return [await every(answer) for answer in others]

        answers = served.run(leave_early())
        assert [text_of(events) for events in answers] == expected[1:]
        assert num_computed(answers) > N - 1
        assert not any(loaded.jobs for loaded in served.room.models)


def test_a_streamed_pass_ends_when_its_only_client_leaves(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[tuple[int, int]] = []
    leaver: list[Any] = []
    note_prompt = ServedBatch.note_prompt

    def leaving(batch: ServedBatch, number: int, done: int, total: int) -> None:
        job = batch._jobs.get(number)
        if leaver and job is not None and job.answer is leaver[0]:
            visited.append((done, total))
            job.answer.leave()
        note_prompt(batch, number, done, total)

    monkeypatch.setattr(ServedBatch, "note_prompt", leaving)
    options = BatchOptions(prefill_step_size=64)
    with serving(model, options=options, ram_budget_gb="min", lend_reserves=False, prefill_step_size=64) as served:
        request, other, *_ = requests(LONG)
        (expected,) = served.events_together(request)
        served.prompt_cache.trim_to(n_sequences=0)
        assert served.model.engine is not None and len(served.model.engine.stream.units) > 2

        async def submit() -> None:
            leaver.extend(served.submit(other))

        served.run(submit())
        while not visited:
            time.sleep(0.01)
        (answer,) = served.events_together(request)
        assert text_of(answer) == text_of(expected) and num_computed([answer]) == num_computed([expected])
    ((done, total),) = visited  # at the first unit
    assert 0 <= done < total


def test_clients_see_how_far_a_streamed_pass_is(model: str) -> None:
    options = BatchOptions(prefill_step_size=64)
    with serving(model, options=options, ram_budget_gb="min", lend_reserves=False, prefill_step_size=64) as served:
        (events,) = served.events_together(*requests(LONG)[:1])
        done = [event.done for event in events if isinstance(event, Progress)]
        assert len(done) > 2 and done == sorted(done) and done[-1] > done[0]
