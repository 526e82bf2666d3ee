"""Requests of a model in memory are in mlx-lm's batches, as in its server."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from queue import Empty
from types import FrameType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

import mlx_flash
from mlx_flash import FlashConfig
from mlx_flash.engine import passes
from mlx_flash.engine.passes import Passes
from mlx_flash.errors import BudgetError
from mlx_flash.loading import load_model
from mlx_flash.residency.plan import together_bytes
from mlx_flash.server import batch, loaded, room
from mlx_flash.server.batch import BatchOptions, ServedBatch
from mlx_flash.server.events import Answers, Begun, End, Event, Failed, Piece, Progress
from mlx_flash.server.request import GenerationRequest, Sampling
from models import make_random_model
from noting import noted
from served import LONG, Served, events_of, every, model, serving, text_of, turn
from zoo import configuration

__all__ = ["model"]

PACKAGE = str(Path(mlx_flash.__file__).parent)
TEXTS = ["Hi", LONG, "Tell me of the sea", "Who are you? " * 9]
ALIKE = ["Tell me a joke", "Sing me a song", "Give me a word", "What do I own"]
NUM_TOKENS = 12


def request(text: str, *, max_tokens: int = NUM_TOKENS, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        model="default_model",
        messages=turn(text, system=text + "!"),
        max_tokens=max_tokens,
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
    )


def alone(served: Served, *asked: GenerationRequest) -> list[str]:
    found = []
    for each in asked:
        served.prompt_cache.trim_to(n_sequences=0)
        found.append(text_of(served.events(each)))
    served.prompt_cache.trim_to(n_sequences=0)
    return found


def expected_of(served: Served, *asked: GenerationRequest) -> list[str]:
    """Return the answers to requests alone, each of which a server computes once."""
    known: dict[str, str] = vars(served).setdefault("known_answers", {})
    for each in asked:
        if repr(each) not in known:
            (known[repr(each)],) = alone(served, each)
    served.prompt_cache.trim_to(n_sequences=0)
    return [known[repr(each)] for each in asked]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of answers that were computed in one array, of each call."""
    return noted(monkeypatch, GenerationBatch, "_step", lambda self: len(self.uids))


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Lengths of prompts, or of parts of them, that were computed in one array, of each call."""
    return noted(monkeypatch, PromptProcessingBatch, "prompt", lambda _, tokens: [*map(len, tokens)] or None)


@pytest.fixture(params=["apart", "together"])
def grouping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Prompts are computed apart, or all in one array, however long they are."""
    monkeypatch.setattr(batch, "padded_length", lambda num: 10**9 if request.param == "apart" else 512)
    return str(request.param)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Served]:
    with serving(model) as running:
        yield running


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}, {"logit_bias": ((7, 50.0),)}])
def test_answers_share_calls(
    served: Served, sizes: list[int], prompts: list[list[int]], sampling: dict[str, Any]
) -> None:
    asked = [request(text, **sampling) for text in TEXTS]
    expected = alone(served, *asked)
    assert {*sizes} == {1} == {*map(len, prompts)}
    sizes.clear()
    before = served.model.counters.num_passes
    answers = served.events_together(*asked)
    assert list(map(text_of, answers)) == expected  # of 4 layers in fp32, which last bits do not change
    assert max(sizes) == 4 and served.model.counters.num_passes - before < 2 * NUM_TOKENS + 2 * len(TEXTS)
    ends = [events[-1] for events in answers]
    assert all(isinstance(end, End) and end.num_tokens == NUM_TOKENS for end in ends)


def test_prompts_share_calls(served: Served, sizes: list[int], prompts: list[list[int]]) -> None:
    asked = [request(text) for text in ALIKE]
    expected = expected_of(served, *asked)
    sizes.clear()
    prompts.clear()
    before = served.model.counters.num_passes
    answers = served.events_together(*asked)
    assert list(map(text_of, answers)) == expected
    assert len(prompts[0]) == 4 and sizes[0] == 4 and served.model.counters.num_passes - before < NUM_TOKENS + 5
    for events in answers:
        (begun,) = [event for event in events if isinstance(event, Begun)]
        progress = [(event.done, event.total) for event in events if isinstance(event, Progress)]
        assert progress[-1] == (begun.num_prompt, begun.num_prompt)
    again = served.events_together(*asked)  # after the tokens that are kept
    assert list(map(text_of, again)) == expected
    assert all(event.num_cached for events in again for event in events if isinstance(event, Begun))
    served.prompt_cache.trim_to(n_sequences=0)


@pytest.fixture
def made(model: str) -> Iterator[ServedBatch]:
    with load_model(model, FlashConfig(ram_budget_gb=1.0, telemetry=False))[0] as loaded_model:
        loaded_model.start()
        found = ServedBatch(loaded_model, BatchOptions(prompt_concurrency=2), {})
        assert found.admit(loaded_model.plan, [200] * 8) == "stock"
        yield found
        found.close()


def insert(made: ServedBatch, *lengths: int, max_tokens: int = 2, **options: Any) -> None:
    for length in lengths:
        made.insert_segments([[[5] * length, [6] * 10]], max_tokens=[max_tokens], **options)


def test_prompts_that_come_later(made: ServedBatch, prompts: list[list[int]]) -> None:
    """Those that are alike share calls. No more than two are computed at once, the others wait."""
    insert(made, 20, 20)
    made.next()
    insert(made, 100, 30, 100)
    answered = set()
    for _ in range(20):
        answered.update(response.uid for response in made.next()[1])
    assert answered == {0, 1, 2, 3, 4}
    assert prompts == [[20, 20], [9, 9], [100, 100], [9, 9], [30], [9]]


def test_an_error_of_a_call_for_several_prompts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them fail, and those that come later do not."""

    def fail(self: Any, tokens: list[list[int]]) -> None:
        raise RuntimeError("no device")

    asked = [request(text) for text in ALIKE]
    expected = expected_of(served, *asked)
    with monkeypatch.context() as broken:
        broken.setattr(PromptProcessingBatch, "prompt", fail)
        answers = served.events_together(*asked)
    assert all("no device" in str(events[-1].error) for events in answers if isinstance(events[-1], Failed))
    assert all(isinstance(events[-1], Failed) for events in answers) and alone(served, *asked) == expected


def limit_rows(monkeypatch: pytest.MonkeyPatch, limits: Iterator[int]) -> None:
    """Let calls have room for so many rows, each for the next number. A call that has none is tried twice."""
    make_room, refused = passes.make_room, list[Any]()

    def checked(need: Any, *args: Any, **options: Any) -> Any:
        (call,) = need.lanes[0].calls
        is_again = bool(refused) and refused.pop() is call
        if is_again or call.batch_size > next(limits):
            refused.extend([] if is_again else [call])
            raise BudgetError("no room", 0)
        return make_room(need, *args, **options)

    monkeypatch.setattr(passes, "make_room", checked)
    monkeypatch.setattr("mlx_flash.engine.lifecycle.tokens_fit", lambda _: False)
    monkeypatch.setattr(Passes, "admit", lambda *_: False)


def test_processors_see_each_token_once_when_prompts_have_no_room_together(
    made: ServedBatch, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars go on with each token."""
    lengths: list[int] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        lengths.append(tokens.size)
        return logits

    limit_rows(monkeypatch, chain([2, 2, 1], repeat(9)))
    insert(made, 10, 10, logits_processors=[[process]])
    for _ in range(8):
        made.next()
    assert prompts == [[10, 10], [9, 9], [10], [10], [9], [9]] and sorted(lengths) == [20, 20, 21, 21, 22, 22]


def test_a_prompt_without_room_fails_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(text) for text in TEXTS]
    expected = expected_of(served, *asked)
    compute = PromptProcessingBatch.prompt

    def fails(self: Any, tokens: list[list[int]]) -> None:
        if max(map(len, tokens), default=0) > 64:
            raise BudgetError("no room", 0)
        compute(self, tokens)

    monkeypatch.setattr(PromptProcessingBatch, "prompt", fails)
    answers = served.events_together(*asked)
    for text, events, known in zip(TEXTS, answers, expected, strict=True):
        assert isinstance(events[-1], Failed) if len(text) >= 40 else text_of(events) == known


def test_the_newest_answers_end_when_memory_gets_short(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(text) for text in ALIKE]
    expected = alone(served, *asked)
    limit_rows(monkeypatch, chain(repeat(4, 5), repeat(2)))
    answers = served.events_together(*asked)
    assert list(map(text_of, answers[:2])) == expected[:2]
    for events in answers[2:]:
        assert isinstance(events[-1], Failed) and "no room" in str(events[-1].error)
        assert any(isinstance(event, Piece) for event in events)
    assert alone(served, *asked[:1]) == expected[:1]


def test_requests_with_a_seed_stay_alone(served: Served, sizes: list[int], prompts: list[list[int]]) -> None:
    asked = [
        request(text, seed=3, temperature=temperature) for text, temperature in zip(TEXTS, (0.0, 0.9) * 2, strict=True)
    ]
    expected = expected_of(served, *asked)
    assert list(map(text_of, served.events_together(*asked))) == expected
    assert {*sizes} == {1} and {*map(len, prompts)} == {1}
    first, *_, other = served.events_together(asked[1], request("Hi"), request("You"), request("Me"))
    assert text_of(first) == expected[1] and max(sizes) == 3 and text_of(other)


def test_a_request_joins_others_that_run(served: Served, sizes: list[int]) -> None:
    long_ones = [request(text, max_tokens=60) for text in TEXTS[2:]]
    late = request("Late", max_tokens=5)
    expected = expected_of(served, *long_ones, late)

    async def collect() -> list[list[Event]]:
        first, second = served.submit(*long_ones)
        events: list[Event] = []
        third: Any = None
        async for event in events_of(first):
            events.append(event)
            if third is None and len(sizes) > 3:
                third = asyncio.ensure_future(every(*served.submit(late)))
        return [events, await every(second), await third]

    answers = served.run(collect())
    assert list(map(text_of, answers)) == expected and max(sizes) == 3


@pytest.mark.parametrize("when", ["waiting", "preparing"])
def test_requests_that_come_shortly_after_each_other_begin_together(
    served: Served, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The second one comes while the thread waits for more, or while it prepares the first one."""
    asked = [request(text) for text in ALIKE[:2]]
    expected = expected_of(served, *asked)
    prompts.clear()
    is_preparing, has_come = threading.Event(), threading.Event()
    prepare = loaded.LoadedModel.prepare

    def prepare_slowly(*given: Any) -> None:
        is_preparing.set()
        assert when == "waiting" or has_come.wait(60)
        prepare(*given)

    monkeypatch.setattr(room, "GATHER_SECONDS", 0.5 if when == "waiting" else 0.0)
    monkeypatch.setattr(loaded.LoadedModel, "prepare", prepare_slowly)

    async def collect() -> list[list[Event]]:
        (first,) = served.submit(asked[0])
        if when == "preparing":
            assert await asyncio.to_thread(is_preparing.wait, 60)
        else:
            await asyncio.sleep(0.05)
        (second,) = served.submit(asked[1])
        has_come.set()
        return list(await asyncio.gather(every(first), every(second)))

    assert list(map(text_of, served.run(collect()))) == expected
    assert {*map(len, prompts)} == {2}


def test_clients_that_come_and_leave_hold_up_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    waited, prepare, num_news, before = served.room._woken, loaded.LoadedModel.prepare, count(), list[int]()

    def get(timeout: float | None) -> None:
        if next(num_news) > 1000:
            raise Empty

    with monkeypatch.context() as patch:
        patch.setattr(served.room, "_woken", SimpleNamespace(get=get, put=waited.put, empty=lambda: True))
        patch.setattr(loaded.LoadedModel, "prepare", lambda *given: (before.append(next(num_news)), prepare(*given)))
        assert text_of(served.events(request(ALIKE[0])))
    assert before[0] < 100


@pytest.mark.usefixtures("grouping")
def test_a_cache_is_kept_for_the_next_turn(served: Served, sizes: list[int]) -> None:
    asked = [request(text) for text in TEXTS]
    (first, *_) = served.events_together(*asked)
    assert max(sizes) == 4
    messages = [*asked[0].messages, {"role": "assistant", "content": text_of(first)}, *turn("And?")[1:]]
    events = served.events(replace(asked[0], messages=messages))
    (begun,) = [event for event in events if isinstance(event, Begun)]
    assert begun.num_cached > 0
    served.prompt_cache.trim_to(n_sequences=0)


def test_groups_that_have_joined_leave_their_caches(made: ServedBatch, sizes: list[int]) -> None:
    insert(made, 300, 100, 300, max_tokens=9)
    alive: list[weakref.ref[Any]] = []
    for _ in range(9):
        made.next()
        alive += [weakref.ref(group) for group in made._groups if all(ref() is not group for ref in alive)]
    assert max(sizes) == 3 and len(alive) == 2 and sum(ref() is not None for ref in alive) <= 1


async def until(answer: Answers, kind: type[Event]) -> None:
    """Leave once an event of a kind has come."""
    async for event in events_of(answer):
        if isinstance(event, kind) and (isinstance(event, Piece) or event.done):
            answer.leave()


@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("name", ["sampler_of", "processors_of"])
def test_each_ends_alone(served: Served, sizes: list[int], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In one array: one that fails after some tokens, one whose client leaves, one with a stop text, and others."""
    make, calls = getattr(loaded, name), []

    def fail(*given: mx.array) -> Any:
        calls.append(given)
        if len(calls) > 4:
            raise ZeroDivisionError("odd")
        return mx.argmax(given[-1], axis=-1) if name == "sampler_of" else given[-1]

    def failing(sampling: Any, *rest: Any) -> Any:
        return make(sampling, *rest) if sampling.top_k != 77 else fail if name == "sampler_of" else [fail]

    asked = [request(text, max_tokens=30) for text in TEXTS]
    expected = expected_of(served, *asked)
    stop = expected[0][12:16]
    monkeypatch.setattr(loaded, name, failing)

    async def collect() -> list[list[Event]]:
        odd = [request("bye", max_tokens=500), request("wrong", top_k=77, max_tokens=40)]
        leaving, *others = served.submit(*odd, replace(asked[0], stop=(stop,)), *asked[1:])
        _, *found = await asyncio.gather(until(leaving, Piece), *map(every, others))
        return found

    wrong, stopped, *right = served.run(collect())
    assert isinstance(wrong[-1], Failed) and "ZeroDivisionError: odd" in str(wrong[-1].error)
    assert len(calls) == 5 and max(sizes) == 6
    assert text_of(stopped) == expected[0][: expected[0].index(stop)]
    assert list(map(text_of, right)) == expected[1:]
    assert alone(served, asked[1]) == [expected[1]] and not next(iter(served.room.models))._batch._groups


@pytest.mark.usefixtures("grouping")
def test_an_answer_that_is_complete_does_not_fail(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's batch asks processors for the token after the last one."""
    make = loaded.processors_of

    def limited(sampling: Any, *rest: Any) -> Any:
        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.size)
            if len(seen) > NUM_TOKENS:
                raise ZeroDivisionError("odd")
            return logits

        seen: list[int] = []
        return [*make(sampling, *rest), process]

    asked = [request(text) for text in TEXTS]
    expected = expected_of(served, *asked)
    monkeypatch.setattr(loaded, "processors_of", limited)
    assert list(map(text_of, served.events_together(*asked))) == expected
    found = next(iter(served.room.models))._batch
    assert not found._errors and not found._groups


@pytest.mark.usefixtures("grouping")
def test_a_client_leaves_while_prompts_are_computed(served: Served) -> None:
    asked = [request(text) for text in ALIKE]
    expected = expected_of(served, *asked)

    async def collect() -> list[list[Event]]:
        first, *others = served.submit(*asked)
        _, *found = await asyncio.gather(until(first, Progress), *map(every, others))
        return found

    assert list(map(text_of, served.run(collect()))) == expected[1:]
    assert not next(iter(served.room.models))._batch._groups


def test_metals_wired_limit_is_put_back(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a second generator of mlx-lm's within the first."""
    limits = [0]
    generate = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(mx, "set_wired_limit", lambda new: limits.append(new) or limits[-2])
    monkeypatch.setattr(generate, "maybe_set_recommended_wired_limit", lambda: mx.set_wired_limit(1000))
    with serving(model):
        assert limits[-1] == 1000
    gc.collect()
    assert limits[-1] == 0


def test_without_room_for_padding_requests_wait(model: str, sizes: list[int]) -> None:
    """One long prompt, whose length the others would be padded to."""
    with serving(model, ram_budget_gb=1.0, context_length=2048) as running:
        plan = running.model.plan
        most = next(n for n in range(1000, 10**6, 500) if together_bytes(plan, [n] * 2, "stock") > plan.room_bytes)
        asked = [request(text, max_tokens=5) for text in TEXTS]
        text, *expected = alone(running, request("Hi", max_tokens=40), *asked[1:])
        long_one = replace(request("Hi", max_tokens=most), stop=(text[len(text) // 3 :],))  # after the others
        answers = running.events_together(long_one, *asked[1:])
        assert together_bytes(plan, [most, 600, 600, 600], "exact") < plan.room_bytes
        assert list(map(text_of, answers[1:])) == expected
        assert {*sizes} <= {1}


@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("name", ["mamba2", "gemma3_text", "qwen3_moe", "qwen3_5"])
def test_caches_of_every_kind(tmp_path: Path, sizes: list[int], name: str) -> None:
    """Recurrent states, windows, both in one model."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(configuration(name)))
    folder = make_random_model(tmp_path / "model", "--config", str(config), "--dtype", "float32")
    with serving(str(folder)) as running:
        asked = [request(text) for text in TEXTS]
        assert alone(running, *asked) == list(map(text_of, running.events_together(*asked))) and max(sizes) == 4


def test_calls_of_a_token(model: str) -> None:
    """Of this package beside mlx-lm's own: in the generation thread, and in the event loop of its clients."""
    num_calls = {"generation": 0, "clients": 0}

    def count(frame: FrameType, event: str, arg: object) -> None:
        name = threading.current_thread().name
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and name in num_calls:
            num_calls[name] += 1

    def counted(served: Served, num_tokens: int) -> dict[str, int]:
        before = {**num_calls}
        text_of(served.events(request("Hi", max_tokens=num_tokens)))
        return {name: number - before[name] for name, number in num_calls.items()}

    threading.setprofile(count)
    try:
        with serving(model) as served:
            _, few, many = (counted(served, num_tokens) for num_tokens in (8, 8, 108))
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert many["generation"] - few["generation"] <= 55 * 100
    assert many["clients"] - few["clients"] <= 8 * 100
