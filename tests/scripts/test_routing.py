"""A routing trace has every routing decision of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import zoo
from benchmark_modules import load_benchmark
from mlx_flash import FlashLLM
from mlx_flash.experts.expertlayers import Experts
from mlx_flash.experts.pooledstacks import Routing
from streamed import streamed_whole
from zoo.weights import VARIANTS, save

RoutingTrace = load_benchmark("routing").RoutingTrace

PROMPT = [5, 17, 300, 3, 3, 42, 64, 99, 128, 7, 21]


@pytest.fixture(scope="module", params=["qwen3_moe", "llama4"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of eight experts, two of them a token; two layers of four, one a token."""
    path = tmp_path_factory.mktemp("model")
    save(path, zoo.configuration(request.param), VARIANTS["fp32"])
    return path


def experts_of(model: FlashLLM) -> Experts:
    assert model.engine is not None and model.engine.experts is not None
    return model.engine.experts


def read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    header, *calls = [json.loads(line) for line in path.read_text().splitlines()]
    return header, calls


@pytest.mark.parametrize("pool_slots", [0, 99])
def test_trace_holds_the_routing(directory: Path, tmp_path: Path, pool_slots: int) -> None:
    file, seen = tmp_path / "trace.jsonl", []

    def note(layer: int, routing: Routing) -> None:
        seen.append((layer, routing.copy()))

    with streamed_whole(directory, pool_slots=pool_slots) as model:
        experts = experts_of(model)
        stacks = experts.stacks
        with RoutingTrace(file, "a model", stacks) as trace:
            experts.listeners += [note, trace]
            cache = make_prompt_cache(model)
            for rows in ([PROMPT], [[12]], [[319]]):
                mx.eval(model(mx.array(rows), cache=cache))
            mx.eval(model(mx.array([PROMPT, PROMPT[::-1]])))
    header, calls = read(file)
    assert header == {
        "format": 1,
        "model": "a model",
        "top_k": stacks[0].top_k,
        "layers": [
            {"name": s.unit.name, "num_experts": s.num_experts, "expert_bytes": s.unit.nbytes // s.num_experts}
            for s in stacks
        ],
    }
    num_layers = len(stacks)
    assert [layer for layer, _ in seen] == list(range(num_layers)) * 4
    assert [(number, layer) for number, _, layer, _ in calls] == [(n, i) for n in range(4) for i in range(num_layers)]
    assert [tokens for _, tokens, layer, _ in calls if layer == 0] == [11, 1, 1, 22]
    for (_, num_tokens, _, chosen), (_, routing) in zip(calls, seen, strict=True):
        counts = np.bincount(routing.reshape(-1))
        assert chosen == [[expert, int(counts[expert])] for expert in np.flatnonzero(counts)]
        assert sum(count for _, count in chosen) == num_tokens * header["top_k"]


def test_passes_of_a_trace(directory: Path, tmp_path: Path) -> None:
    """A call of a layer that was called, or of one before it, begins a pass; also where the pass before it failed.

    An older trace is replaced, and a run that ends with an error has its calls so far.
    """
    with streamed_whole(directory, pool_slots=0) as model:
        stacks = experts_of(model).stacks
    file = tmp_path / "trace"
    for layers, numbers in (((0, 0, 1, 0, 1), [0, 1, 1, 2, 2]), ((0, 0, 0), [0, 1, 2])):
        kept = stacks if 1 in layers else stacks[:1]
        with pytest.raises(KeyboardInterrupt), RoutingTrace(file, "x", kept) as trace:
            for layer in layers:
                trace(layer, np.array([[1, 0]]))
            raise KeyboardInterrupt
        expected = [[n, 1, layer, [[0, 1], [1, 1]]] for n, layer in zip(numbers, layers, strict=True)]
        assert read(file)[1] == expected
