"""The server answers requests together as it answers each one alone, bit for bit."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from admission_plans import plan
from mlx_flash.errors import RefusedError
from mlx_flash.server import loaded
from mlx_flash.server.batch import BatchOptions
from mlx_flash.server.events import Piece
from mlx_flash.server.request import GenerationRequest, Sampling
from served import (
    LONG,
    NUM_TOKENS,
    TEXTS,
    Answer,
    Served,
    ask,
    each_alone,
    model,
    serving,
    stock_serving,
    together,
    turn,
)

__all__ = ["model", "plan"]


@pytest.fixture(scope="module")
def alone(model: str) -> list[Answer]:
    """Answers of mlx-lm's own server, one after another."""
    with stock_serving(model) as stock:
        return each_alone(stock, TEXTS)


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
            segments, kinds = [*prompt.segments, [10**6]], [*prompt.kinds, "assistant"]
            return replace(prompt, tokens=[*prompt.tokens, 10**6], segments=segments, kinds=kinds)
        return prompt

    monkeypatch.setattr(loaded, "make_prompt", with_a_wrong_token)
    with serving(model, ram_budget_gb="min", context_length=8192) as mine, ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(mine.ask, *turn("wrong"), max_tokens=NUM_TOKENS)
        assert together(mine, TEXTS) == alone
        with pytest.raises(RefusedError, match=r"IndexError: .* the embedding has rows"):
            wrong.result()
        assert ask(mine, TEXTS[0]) == alone[0]
        assert all(cache for cache in mine.kept)


def test_a_chat_template_that_fails_leaves_the_server_alive(model: str, alone: list[Answer]) -> None:
    with serving(model, ram_budget_gb="min", context_length=8192) as mine:
        assert ask(mine, TEXTS[0]) == alone[0]
        tokenizer = next(iter(mine.room.models)).tokenizer._tokenizer
        right = tokenizer.chat_template
        for wrong in ("{{ 1 // 0 }}", "{{ " + "[" * 1000 + "]" * 1000 + " }}", "{{ no.such.value }}"):
            tokenizer.chat_template = wrong
            with pytest.raises(RefusedError):
                ask(mine, TEXTS[1])
        tokenizer.chat_template = right
        assert ask(mine, TEXTS[1]) == alone[1]


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


def test_stock_batches_stay_mlx_lms(model: str, alone: list[Answer]) -> None:
    with serving(model, batching="stock") as mine:
        assert ask(mine, TEXTS[0]) == alone[0]
