"""Log probabilities of prompts and vectors of texts are those of mlx-lm's own model, bit for bit."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from live import Live, live
from mlx_flash.errors import BudgetError
from mlx_flash.layout.parts import body_of, head_of
from mlx_flash.server.batch import BatchOptions
from models import GEMMA3, MAMBA2, QWEN3_MOE, build, save, stock
from served import model
from vocabularies import write_tokenizer
from zoo import configuration

__all__ = ["model"]

STEP = 32
RANDOM = random.Random(1)
PROMPTS = [[RANDOM.randrange(990) for _ in range(length)] for length in (1, 2, 7, 33, 64, 100, 20, 5)]
SETTINGS: dict[str, dict[str, Any]] = {"streamed": {"ram_budget_gb": "min", "lend_reserves": False}, "in memory": {}}


@pytest.fixture(scope="module", params=SETTINGS)
def served(model: str, request: pytest.FixtureRequest) -> Iterator[Live]:
    options = BatchOptions(prefill_step_size=STEP)
    with live(model, options=options, context_length=8192, **SETTINGS[request.param]) as found:
        yield found


def parts_of(module: Any, whole: nn.Module, tokens: list[int], step: int) -> list[mx.array]:
    """Return what a module of mlx-lm's model returns for each part of a prompt."""
    cache = make_prompt_cache(whole)
    return [module(mx.array([tokens[at : at + step]]), cache=cache) for at in range(0, len(tokens), step)]


def states_of(path: str, tokens: list[int], step: int = STEP) -> list[mx.array]:
    """Return the hidden states of mlx-lm's model after its final norm, a part of the prompt at a time."""
    whole = stock(Path(path))
    return parts_of(getattr(whole, "backbone", None) or cast(Any, whole).model, whole, tokens, step)


def scores_of(path: str, tokens: list[int], step: int = STEP) -> list[float]:
    """Return the log probabilities of all tokens but the first, as mlx_lm.evaluate has them."""
    whole, found = stock(Path(path)), list[float]()
    for logits in parts_of(whole, whole, tokens[:-1], step):
        logprobs = nn.log_softmax(logits.astype(mx.float32))[0]
        targets = mx.array(tokens[len(found) + 1 : len(found) + 1 + len(logprobs)])
        found += cast(list[float], mx.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0].tolist())
    return found


def completed(served: Live, **fields: Any) -> list[dict[str, Any]]:
    status, reply = served.post("/v1/completions", {"temperature": 0, "seed": 1, **fields})
    assert status == 200, reply
    return cast(list[dict[str, Any]], reply["choices"])


def test_echo_has_the_log_probabilities_of_mlx_lm(model: str, served: Live) -> None:
    completed(served, prompt=PROMPTS, max_tokens=1)  # whose caches are kept, and not used
    before = served.model.counters.num_passes
    for _ in range(2):
        choices = completed(served, prompt=PROMPTS, echo=True, logprobs=1, max_tokens=1)
        for tokens, choice in zip(PROMPTS, choices, strict=True):
            found = choice["logprobs"]
            assert len(found["token_logprobs"]) == len(tokens) + 1 and found["token_logprobs"][0] is None
            assert found["token_logprobs"][1:-1] == scores_of(model, tokens)
            pairs = zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True)
            assert found["top_logprobs"][0] is None and all(mine <= max(top.values()) for mine, top in pairs)
    if served.model.plan.read_bytes:  # all prompts and their next tokens in one pass, all heads in another one
        assert served.model.counters.num_passes - before <= 4


def test_echo_changes_no_answer(served: Live) -> None:
    plain = completed(served, prompt="once upon", max_tokens=5, logprobs=3)[0]
    echoed = completed(served, prompt="once upon", max_tokens=5, logprobs=3, echo=True)[0]
    assert echoed["text"] == "once upon" + plain["text"]
    assert echoed["logprobs"]["token_logprobs"][-5:] == plain["logprobs"]["token_logprobs"]
    assert [len(top) for top in echoed["logprobs"]["top_logprobs"][1:]] == [3] * (len(echoed["logprobs"]["tokens"]) - 1)
    assert completed(served, prompt="once upon", max_tokens=5, echo=True)[0]["text"] == echoed["text"]
    (only,) = completed(served, prompt="once upon", max_tokens=0, logprobs=1, echo=True)
    assert only["text"] == "once upon" and only["finish_reason"] == "length"
    assert only["logprobs"]["token_logprobs"] == echoed["logprobs"]["token_logprobs"][:-5]


def test_vectors_are_the_last_hidden_states_of_mlx_lm(model: str, served: Live) -> None:
    before = served.model.counters.num_passes
    status, reply = served.post("/v1/embeddings", {"input": PROMPTS, "encoding_format": "base64"})
    assert status == 200, reply
    if served.model.plan.read_bytes:
        assert served.model.counters.num_passes == before + 1
    assert reply["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    for tokens, each in zip(PROMPTS, reply["data"], strict=True):
        expected = np.array(states_of(model, tokens)[-1][0, -1].astype(mx.float32))
        found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        assert np.array_equal(found, expected / np.linalg.norm(expected))
    text = "a sentence"
    tokens = list(next(iter(served.room.models)).tokenizer.encode(text))
    expected = states_of(model, tokens)[-1][0, -1].astype(mx.float32)
    assert served.post("/api/embeddings", {"model": model, "prompt": text}) == (200, {"embedding": expected.tolist()})
    status, reply = served.post("/api/embed", {"model": model, "input": [text, "b"], "dimensions": 8})
    short = np.array(expected)[:8]
    assert (
        np.allclose(reply["embeddings"][0], short / np.linalg.norm(short), atol=1e-7) and len(reply["embeddings"]) == 2
    )
    assert served.post("/v1/embeddings", {"input": text, "dimensions": 10**6})[0] == 400


def test_the_prefix_cache_answers_no_reading(model: str, tmp_path: Path) -> None:
    options, tokens = BatchOptions(prefill_step_size=256, prompt_cache_size=0), PROMPTS[5] * 6
    settings = {"kv_prefixes": "exact", "kv_directory": str(tmp_path), "context_length": 4096}
    with live(model, options=options, ram_budget_gb="min", **settings) as served:

        def num_cached() -> int:
            body = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
            return int(served.post("/v1/completions", body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"])

        while not num_cached():
            pass
        step = served.model.logits_step(256)
        (choice,) = completed(served, prompt=tokens, echo=True, logprobs=1, max_tokens=1)
        assert choice["logprobs"]["token_logprobs"][1:-1] == scores_of(model, tokens, step)


def test_vectors_beside_an_answer_leave_its_bits(served: Live) -> None:
    def ask() -> list[dict[str, Any]]:
        return completed(served, prompt="tell me", max_tokens=20, logprobs=1)

    alone = ask()
    with ThreadPoolExecutor(4) as pool:
        answer = pool.submit(ask)
        others = [pool.submit(served.post, "/v1/embeddings", {"input": PROMPTS[3:]}) for _ in range(3)]
        assert answer.result() == alone
        assert all(other.result()[0] == 200 for other in others)


@pytest.mark.parametrize("config", [GEMMA3, MAMBA2, QWEN3_MOE], ids=["windows", "states", "experts"])
def test_readings_of_other_caches_and_of_experts(tmp_path: Path, config: dict[str, Any]) -> None:
    path = str(write_tokenizer(save(tmp_path, config), 990))
    with live(path, options=BatchOptions(prefill_step_size=STEP), ram_budget_gb="min") as served:
        plan, prompts = served.model.plan, PROMPTS[3:6]
        choices = completed(served, prompt=prompts, echo=True, logprobs=1, max_tokens=1)
        status, reply = served.post("/v1/embeddings", {"input": prompts})
        assert status == 200 and plan.read_bytes
        for tokens, choice, each in zip(prompts, choices, reply["data"], strict=True):
            scores = scores_of(path, tokens, served.model.logits_step(STEP))
            assert choice["logprobs"]["token_logprobs"][1:-1] == scores
            expected = np.array(states_of(path, tokens, min(STEP, plan.prefill_step_size))[-1][0, -1])
            assert each["embedding"] == (expected / np.linalg.norm(expected)).tolist()


def test_a_request_without_room_for_logits_fails_alone(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    apply_head = served.model.apply_head

    def without_room(heads: Any) -> list[Any]:
        return [BudgetError("no room", 1), *apply_head(heads)[1:]]

    monkeypatch.setattr(type(served.model), "apply_head", lambda model, heads: without_room(heads))
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt": PROMPTS[4]}
    status, reply = served.post("/v1/completions", fields)
    assert status == 500 and "no room" in reply["error"]["message"]
    monkeypatch.undo()
    assert served.post("/v1/completions", fields)[0] == 200


def test_what_cannot_be_read_is_refused(model: str, tmp_path: Path) -> None:
    path = tmp_path / "encoder"
    shutil.copytree(model, path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}'
    )
    with live(str(path)) as served:
        status, reply = served.post("/v1/embeddings", {"input": "a"})
        assert status == 400 and "hidden states of all tokens" in reply["error"]["message"]
        assert served.post("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 1})[0] == 200
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with live(model, str(path)) as served:
        status, reply = served.post("/v1/embeddings", {"model": str(path), "input": "a"})
        assert status == 400 and "Model type bert not supported" in reply["error"]["message"]
    with live(model, options=BatchOptions(kv_bits=8)) as served:
        status, reply = served.post("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1})
        assert status == 400 and "quantized keys" in reply["error"]["message"]


@pytest.mark.parametrize("name", ["gemma3", "mamba", "gptj", "plamo2", "minimax", "gpt_oss", "granite", "cohere2"])
def test_body_and_head_are_the_model(name: str) -> None:
    whole = build(configuration(name))
    body, tokens = body_of(whole), mx.array([[5, 9, 200, 3, 17]])
    expected = whole(tokens, cache=make_prompt_cache(whole))
    states = cast(Any, body)(tokens, cache=make_prompt_cache(whole))
    kind = type(body)
    assert mx.array_equal(head_of(whole, body)(states), expected)
    assert type(body) is kind and body_of(build(configuration("phixtral"))) is None
