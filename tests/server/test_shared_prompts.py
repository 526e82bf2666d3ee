"""Answers to one prompt that are asked for together compute it once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from mlx_flash.kv.memory import MemoryRows
from mlx_flash.server.batch import BatchOptions, ServedBatch
from mlx_flash.server.events import Begun, End, Event, Progress
from mlx_flash.server.request import GenerationRequest, Sampling
from served import LONG, events_of, every, model, serving, text_of, turn

__all__ = ["model"]

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
    forked, fork = list[MemoryRows](), MemoryRows.fork
    monkeypatch.setattr(MemoryRows, "fork", lambda rows: forked.append(rows) or fork(rows))
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
