"""Several models under one budget, and models of many kinds."""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from live import live
from mlx_flash import FlashConfig
from mlx_flash.config import GB
from mlx_flash.errors import CheckpointError, RefusedError
from mlx_flash.memory.footprint import footprint
from mlx_flash.residency.plan import together_bytes
from mlx_flash.server.batch import BatchOptions
from mlx_flash.server.catalog import Catalog, Source
from mlx_flash.server.events import End, Failed, Progress
from mlx_flash.server.loaded import LoadedModel
from mlx_flash.server.models import Models
from mlx_flash.server.ranks import Ranks
from mlx_flash.server.request import GenerationRequest
from mlx_flash.server.room import EngineRoom
from models import make_random_model
from served import serving
from waiting import eventually
from zoo import configuration

SHAPE = "--layers 6 --hidden-size 512 --intermediate-size 1536 --heads 8 --kv-heads 4 --vocab-size 1000 --dtype float32"
SMALL = "--layers 2 --hidden-size 128 --intermediate-size 128 --heads 2 --kv-heads 1 --vocab-size 1000"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of 80 MB."""
    folder = tmp_path_factory.mktemp("models")
    return [str(make_random_model(folder / name, *SHAPE.split(), "--seed", name)) for name in ("1", "2")]


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(make_random_model(folder / name, *SMALL.split(), "--seed", name)) for name in ("1", "2")]


def budget(mb: float) -> float:
    """Return a budget of so many MB beside this process."""
    return footprint() / GB + mb / 1000


def named(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}


def test_a_model_leaves_for_another_that_then_fits(models: list[str]) -> None:
    """Its memory is free before the plan is made: the second one is not streamed beside what is left of the first."""
    with live(*models, ram_budget_gb=budget(130), context_length=512, prefill_step_size=128) as server:
        answers: list[dict[str, str]] = []
        for _ in range(2):
            answers.append({})
            for model in models:
                status, reply = server.post("/v1/chat/completions", named(model))
                assert status == 200, reply
                answers[-1][model] = reply["choices"][0]["message"]["content"]
                (loaded,) = server.room.models
                assert loaded.source.name == model
                assert loaded.model.plan.read_bytes == 0, loaded.model.plan.parts()
        assert answers[0] == answers[1] and len(set(answers[0].values())) == 2
        assert server.get("/ready")[0] == 200


def test_models_that_fit_together_stay(models: list[str]) -> None:
    with live(*models, ram_budget_gb=budget(500), context_length=512, prefill_step_size=128) as server:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda model: server.post("/v1/chat/completions", named(model)), models * 2))
        assert {status for status, _ in replies} == {200}
        assert len(list(server.room.models)) == 2
        assert len({reply["choices"][0]["message"]["content"] for _, reply in replies}) == 2


def test_a_model_that_cannot_be_loaded_fails_alone(models: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models[1], broken)
    next(broken.glob("*.safetensors")).write_bytes(b"\x10" + b"\0" * 7 + b"{" * 16)
    with live(models[0], str(broken), ram_budget_gb=budget(130), context_length=512, prefill_step_size=128) as server:
        expected = server.say("Hi")
        for _ in range(2):
            status, reply = server.post("/v1/chat/completions", named(str(broken)))
            assert status == 400 and "safetensors" in reply["error"]["message"]
            assert server.say("Hi") == expected
        assert server.get("/health")[0] == 200


def test_requests_for_two_models_wait_for_each_other(models: list[str]) -> None:
    """The budget holds one: they are answered in turn, each as alone."""
    with live(*models, ram_budget_gb=budget(130), context_length=512, prefill_step_size=128) as server:
        alone = {model: server.post("/v1/chat/completions", named(model))[1]["choices"] for model in models}
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda model: server.post("/v1/chat/completions", named(model)), models * 2))
        assert [(status, reply.get("choices", reply)) for status, reply in replies] == [
            (200, alone[model]) for model in models * 2
        ]


def test_a_model_that_cannot_be_closed_ends_alone(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(loaded: LoadedModel) -> None:
        close(loaded)
        failed.append(loaded.source.name)
        raise OSError("the disk is gone")

    close, failed = LoadedModel.close, list[str]()
    with live(models[0], keep_alive=0.2, context_length=512) as server:
        monkeypatch.setattr(LoadedModel, "close", fail)
        server.say("Hi")
        eventually(lambda: failed)
        assert server.say("Hi")
        monkeypatch.undo()


def test_loading_is_told_to_those_who_come_meanwhile(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused at once, too, if there is no such model."""
    with serving(*models, ram_budget_gb=2.0) as served:
        load, others = served.room.models.load, []

        def slow_load(source: Source, progress: Any) -> Any:
            def slow_progress(done: int, total: int) -> None:
                if not others:
                    asked = [GenerationRequest(model=name, prompt="Hi", max_tokens=1) for name in (models[1], "none")]
                    others.extend(pool.submit(served.events, request) for request in asked)
                    deadline = time.monotonic() + 10
                    while not others[1].done():
                        assert time.monotonic() < deadline
                        progress(done, total)
                    (refused,) = others[1].result()
                    assert isinstance(refused, Failed) and refused.error.status == 404
                progress(done, total)

            return load(source, slow_progress)

        monkeypatch.setattr(served.room.models, "load", slow_load)
        with ThreadPoolExecutor(2) as pool:
            ends = [served.events(GenerationRequest(model=models[1], prompt="Hello", max_tokens=1))[-1]]
            events = others[0].result(60)
    assert isinstance(events[0], Progress) and events[0].stage == "loading"
    ends.append(events[-1])
    assert [isinstance(end, End) and end.load_seconds > 0 for end in ends] == [True, False], ends


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 28 MB, whose recurrent states of 0.8 MB are kept whole with each prompt cache."""
    heads = {"linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = tmp_path_factory.mktemp("hybrid") / "config.json"
    config.write_text(
        json.dumps(configuration("qwen3_5") | shape | heads | {"linear_num_key_heads": 8, "head_dim": 64})
    )
    return str(make_random_model(config.parent / "hybrid", "--config", str(config)))


def test_a_hybrid_model_at_the_smallest_budget_answers_chats_in_a_row(hybrid: str) -> None:
    """Kept caches leave before a request that a fresh server answers: they never take what it needs."""
    settings = {"ram_budget_gb": "min", "context_length": 512, "prefill_step_size": 64}
    with serving(hybrid, options=BatchOptions(prompt_cache_size=20, prompt_cache_bytes=1 << 30), **settings) as served:
        plan = served.model.plan
        plan = served.model.plan = replace(plan, budget_bytes=plan.peak_bytes)  # loading a tokenizer may need more
        for number in range(4):
            system = {"role": "system", "content": f"You are number {number}."}
            assert served.ask(system, {"role": "user", "content": "Hi"}, max_tokens=1)
            most = plan.room_bytes - together_bytes(plan, [32], "exact")
            assert served.prompt_cache.nbytes <= most


@pytest.mark.parametrize("kind", ["draft", "kv_bits"])
def test_requests_one_after_another(small_models: list[str], kind: str) -> None:
    """With a draft model the answers are those without; quantized keys and values have answers of their own."""
    config = FlashConfig(ram_budget_gb=2.0, telemetry=False)
    draft = small_models[1] if kind == "draft" else None
    options = BatchOptions(kv_bits=None if draft else 8, quantized_kv_start=0)
    with live(small_models[0], ram_budget_gb=2.0) as server:
        expected = [server.say(text) for text in ("Hi", "Tell me of the sea")]
    with live(Source(name="m", base=small_models[0], config=config, draft=draft), options=options) as server:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(server.say, ("Hi", "Tell me of the sea", "Hi")))
        assert found[0] == found[2]
        if draft is not None:
            assert found[:2] == expected
        assert server.say("Hi") == found[0]  # from a kept cache
        assert server.say("Hi", stop=[found[0][1:3]]) == found[0][:1]


# --- where the generation thread cannot load its model ----------------------------------------------------------------


def new_room() -> EngineRoom:
    config = FlashConfig()
    return EngineRoom(Catalog([Source(name="x", base="x", config=config)], Source(config=config)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("owner", "name"), [(Ranks, "of_process"), (Models, "__init__"), (Models, "load")])
def test_a_thread_that_dies_before_it_has_a_model_is_told(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: 1 / 0)
    room = new_room()
    with pytest.raises(RefusedError, match="the generation thread died"):
        room.start()
    assert not room.is_ready and not room.is_alive and not room.join()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_a_thread_that_loaded_nothing_is_waited_for_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX aborts the process if a thread ends while Python does, and Python joins a thread before it has ended."""
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0

    def load(*_: Any) -> None:
        libc.pthread_setspecific(key, ctypes.c_void_p(200_000))
        raise CheckpointError("no model")

    monkeypatch.setattr(Models, "load", load)
    room = new_room()
    put, get = room._loaded.put, room._loaded.get
    monkeypatch.setattr(room, "_loaded", SimpleNamespace(put=put, get=lambda: room._thread.join() or get()))
    with pytest.raises(CheckpointError, match="no model"):
        room.start()
    assert not Path(f"/proc/self/task/{room._native_id}").exists()
    libc.pthread_key_delete(key)
