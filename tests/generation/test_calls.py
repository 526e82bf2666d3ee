"""Python calls of a decoded token: on a GPU each takes from the time in which it waits for Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

import mlx_flash
from mlx_flash import FlashLLM, enginethread, load_model
from mlx_flash.engine.call import Lane, make_room, need, token_call
from mlx_flash.engine.prepare import prepare
from models import LLAMA, QWEN3_MOE
from saved_models import models_fixture
from streamed import LARGE_GB, config

PACKAGE = str(Path(mlx_flash.__file__).parent)
MODELS = {"dense": LLAMA, "dense of 10 layers": LLAMA | {"num_hidden_layers": 10}, "mixture": QWEN3_MOE}
MODELS |= {"dense of 20 layers": LLAMA | {"num_hidden_layers": 20}}
MODELS |= {f"{kind} of 24 layers": MODELS[kind] | {"num_hidden_layers": 24} for kind in ("dense", "mixture")}
pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="layers that may wait for a GPU have more calls")
NUM_BEFORE = 10  # tokens, so that what happens once has happened

saved = models_fixture(MODELS)


@cache
def calls_of_a_token(directory: Path, ram_budget_gb: Any) -> tuple[_Calls, int]:
    """Return how often functions of mlx_flash are entered for a token, and the number of streamed units."""
    settings = config(ram_budget_gb=ram_budget_gb, speculation=False, poison_released_slots=False)
    with load_model(directory, settings)[0] as model:
        steps = mlx_flash.generate_step(mx.array([5, 17, 290, 3, 42]), model, max_tokens=2 * NUM_BEFORE)
        for _ in range(NUM_BEFORE):
            next(steps)
        return calls_of_a_step(model, steps), model.plan.streaming.num_units


class _Calls:
    """A profile that counts: up to the call of mlx-lm's model, and in all; and the modules that are entered."""

    def __init__(self, model: FlashLLM) -> None:
        self.before, self.total, self.modules = 0, 0, set[str]()
        self._is_before = True
        self._called = type(model._model).__call__.__code__

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self._is_before &= frame.f_code is not self._called
            is_ours = frame.f_code.co_filename.startswith(PACKAGE)
            self.total += is_ours
            self.before += is_ours and self._is_before
            self.modules |= {frame.f_code.co_filename} if is_ours else set()


def calls_of_a_step(model: FlashLLM, steps: Iterator[Any]) -> _Calls:
    counted = _Calls(model)
    enginethread.run(lambda: sys.setprofile(counted))
    sys.setprofile(counted)
    try:
        next(steps)
    finally:
        sys.setprofile(None)
        enginethread.run(lambda: sys.setprofile(None))
    return counted


@pytest.mark.parametrize(
    ("name", "ram_budget_gb", "most"),
    [("dense", LARGE_GB, 10), ("mixture", LARGE_GB, 10), ("dense", "min", 200), ("mixture", "min", 190)],
)
def test_calls_before_a_model(saved: Callable[[str], Path], name: str, ram_budget_gb: Any, most: int) -> None:
    assert calls_of_a_token(saved(name), ram_budget_gb)[0].before <= most


def test_calls_for_each_unit_and_layer(saved: Callable[[str], Path]) -> None:
    """A unit is acquired, called, evaluated and released, and the next read starts; what a token has once included.

    In the smallest pool a layer of a mixture has four units, two guesses and two experts that are read for each token.
    A layer in memory asks twice for its position, and once adds keys and values.
    """
    found, num_units = calls_of_a_token(saved("dense of 24 layers"), "min")
    assert num_units > 150 and found.total <= 10 * num_units and len(found.modules) <= 23
    found, num_units = calls_of_a_token(saved("mixture of 24 layers"), "min")
    assert num_units >= 4 * 24 and found.total <= 135 * 24 and len(found.modules) <= 27
    few, many = (calls_of_a_token(saved(name), LARGE_GB)[0].total for name in ("dense", "dense of 10 layers"))
    assert (many - few) / 5 <= 12


@cache
def calls_of_a_prompt(directory: Path) -> tuple[int, int]:
    """Return the same for a prompt in memory: up to its first call of mlx-lm's model, and with its first token."""
    with load_model(directory, config(ram_budget_gb=LARGE_GB, speculation=False))[0] as model:
        prompt = mx.array([5, 17, 290, 3, 42])
        for _ in range(2):
            steps = mlx_flash.generate_step(prompt, model, max_tokens=2)
            counted = calls_of_a_step(model, steps)
            steps.close()
        return counted.before, counted.total


def test_calls_of_a_prompt_grow_with_its_layers_alone(saved: Callable[[str], Path]) -> None:
    """Each layer that got its first tokens had all layers added up: milliseconds of a prompt.

    mlx-lm's loop calls the model three times up to the first token: for the prompt, its last token and the next one. A
    GPU has nothing to do before the first call.
    """
    few, many = (calls_of_a_prompt(saved(f"dense of {number} layers")) for number in (10, 20))
    assert (many[1] - few[1]) / 10 <= 50
    assert few[0] <= 150 and (many[0] - few[0]) / 10 <= 6


@pytest.mark.parametrize(("kind", "most"), [("dense", 12_000), ("mixture", 20_000)])
def test_calls_of_loading(saved: Callable[[str], Path], kind: str, most: int) -> None:
    """Each module and each tensor is looked at a few times. Measured speeds decide which plans are tried."""
    directory, num_calls = saved(f"{kind} of 24 layers"), 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    for _ in range(2):  # without what is measured once
        num_calls = 0
        sys.setprofile(count)
        try:
            prepare(directory, config())
        finally:
            sys.setprofile(None)
    assert num_calls <= most


def calls_of_a_check(directory: Path, ram_budget_gb: Any) -> int:
    """Return how often functions of mlx_flash are entered for the question what a token needs, and for its answer."""
    with load_model(directory, config(ram_budget_gb=ram_budget_gb, speculation=False))[0] as model:
        cache = model.make_cache()
        mx.eval(model(mx.array([[5, 17, 290]]), cache=cache))
        lane, counted = Lane(token_call(mx.array([[3]]), cache)), _Calls(model)
        sys.setprofile(counted)
        try:
            make_room(need(model.plan, [lane]))
        finally:
            sys.setprofile(None)
        return counted.total


@pytest.mark.parametrize("ram_budget_gb", ["min", LARGE_GB])
def test_a_pass_is_added_up_by_arithmetic_that_knows_no_layers(
    saved: Callable[[str], Path], ram_budget_gb: Any
) -> None:
    few, many = (calls_of_a_check(saved(f"dense of {number} layers"), ram_budget_gb) for number in (10, 20))
    assert few == many <= 80
