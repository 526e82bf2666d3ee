"""The table of facts names what engines publish, and reads it from any state."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_pools import with_pool
from mlx_flash import FlashConfig, FlashLLM, load_model
from mlx_flash import telemetry as facts
from mlx_flash.telemetry import Json, find
from models import LLAMA, make_random_model, run, save
from monitored import runtime as runtime  # a fixture: engines of other programs publish elsewhere

RARE = {"writes.day_limit_bytes", "passes.began"}
"""Facts that are None until something is known, limited, or under way."""


def published(loaded: FlashLLM) -> Json:
    with loaded as model:
        run(model, [[1, 2, 3], [4]])
        deadline = time.monotonic() + 10
        while not (found := [each.state for each in find() if each.state["passes"]["num_passes"] == 2]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found[0]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    folder = tmp_path_factory.mktemp("facts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        dense = save(folder / "dense", LLAMA)
        options = ["--architecture=qwen3_moe", "--experts=8", "--experts-per-token=2", "--dtype=float32"]
        mixture = make_random_model(folder / "mixture", "--layers=2", "--hidden-size=64", *options)
        prefixes = FlashConfig(ram_budget_gb=1, context_length=512, kv_prefixes="exact", kv_directory=folder)
        return [
            published(load_model(dense, prefixes)[0]),
            published(with_pool(mixture, pool_slots=3, telemetry=True)),
        ]


def test_every_fact_is_published(states: list[Json]) -> None:
    found = set().union(*(facts.read(state) for state in states))
    assert facts.FACTS.keys() - found <= RARE
    assert not any(name.startswith("experts.") for name in facts.read(states[0]))


def test_every_published_number_is_a_fact(states: list[Json]) -> None:
    for state in states:
        sections = {name: fields for name, fields in state.items() if isinstance(fields, dict)}
        numbers = {f"{name}.{key}" for name, fields in sections.items() for key in fields if is_number(fields[key])}
        assert numbers <= facts.FACTS.keys()


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def test_a_metric_has_the_published_value(states: list[Json]) -> None:
    found = {fact.metric: (fact, value) for fact, value in facts.metrics(states[1])}
    assert found["generated_tokens_total"] == (
        ("tokens", "counter", "Tokens generated", "generated_tokens_total"),
        1.0,
    )
    assert found["routed_experts_total"][1] == states[1]["experts"]["num_routed"] > 0
    assert "routed_experts_total" not in {fact.metric for fact, _ in facts.metrics(states[0])}
    for name, (fact, _) in found.items():
        assert fact.kind in ("gauge", "counter") and name.endswith("_total") == (fact.kind == "counter")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(state=st.dictionaries(st.sampled_from(["passes", "read", "memory"]), JSON, max_size=3), value=JSON)
def test_any_state_gives_finite_numbers(state: Json, value: object) -> None:
    found = facts.read({**state, "kv": {"disk_bytes": value}})
    assert all(math.isfinite(number) and number >= 0 for number in found.values())
    assert facts.Facts()["kv.disk_bytes"] == 0.0
