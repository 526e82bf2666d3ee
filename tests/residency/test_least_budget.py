"""The smallest budget holds the whole context that was planned for, however the layers are cut."""

from __future__ import annotations

import gc
import io
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_adapters

import children
from adapters import save_adapter
from machines import make_machine, make_model
from mlx_flash import FlashConfig, generate_step, load_model
from mlx_flash.commands.dispatch import run_command
from mlx_flash.engine import prepare as preparing
from mlx_flash.engine.prepare import prepare
from mlx_flash.layout.parts import CacheSizes
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import PROMISED_CONTEXT, ResidencyPlan
from mlx_flash.residency.planner import make_plan, table_of_budgets
from mlx_flash.residency.sizes import ModelSizes
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, WIDE_LLAMA, make_random_model, same_bits, save, stock
from saved_models import models_fixture
from zoo import configuration

NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
"""Little to compute beside keys and values."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | NARROW | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 128},
    "gemma3": GEMMA3 | NARROW,
    "qwen3_moe": QWEN3_MOE,
    "mamba2": MAMBA2,
    "jamba": configuration("jamba"),
}
"""Plain caches, sliding windows, experts, recurrent states, and recurrent states between attention layers."""

CONTEXTS = (260, 520, 1040)
CUTS = {"whole layers": 0, "parts": 1, "linear layers": 2, "row tiles": None}
CASES = [
    (name, context, cut)
    for i, name in enumerate(MODELS)
    for j, cut in enumerate(CUTS)
    for k, context in enumerate(CONTEXTS)
    if (context == 260 if name in ("mamba2", "jamba") else cut == "row tiles" or k == (i + j) % 3)
]
"""The finest cut, which users get, with all contexts, and every two of model, context and another cut. States do not
grow with the context: one is enough for models with them, longer than a step of their attention's cache."""

directories = models_fixture(MODELS)


def limit_cuts(num_finer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the planner no finer cuts than some; the smallest budget takes the finest there is."""

    def limited(sizes: ModelSizes) -> ModelSizes:
        trunk = None if sizes.trunk is None else limited(sizes.trunk)
        return replace(sizes, finer=sizes.finer[:num_finer], trunk=trunk)

    def plan(sizes: ModelSizes, config: FlashConfig, machine: Machine) -> ResidencyPlan:
        return make_plan(limited(sizes), config, replace(machine, exact_tiles=num_finer is None))

    monkeypatch.setattr("mlx_flash.engine.prepare.make_plan", plan)


@pytest.mark.parametrize(("name", "context", "cut"), CASES)
def test_smallest_budget_holds_the_planned_context(
    directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, context: int, cut: str
) -> None:
    limit_cuts(CUTS[cut], monkeypatch)
    fill_context(directories(name), FlashConfig(ram_budget_gb="min", context_length=context, prefill_step_size=32))


def fill_context(directory: Path, config: FlashConfig) -> None:
    """Run a prompt and four tokens that fill the planned context."""
    with load_model(directory, replace(config, telemetry=False))[0] as model:
        step, cache, end = model.plan.prefill_step_size, make_prompt_cache(model), model.plan.context_length - 4
        for start in range(0, end, step):
            tokens = [7 * i % 300 for i in range(start, min(start + step, end))]
            model(mx.array([tokens]), cache=cache)
            mx.eval([entry.state for entry in cache])
        for i in range(4):
            mx.eval(model(mx.array([[i]]), cache=cache))


RECURRENT = ("falcon_h1", "jamba", "lfm2", "mamba", "mamba2", "nemotron_h", "qwen3_next", "recurrent_gemma", "rwkv7")
SCANS = ("jamba", "mamba")
"""Those that compute token by token, which takes seconds for a long prompt."""


@pytest.mark.parametrize("name", RECURRENT)
def test_plan_counts_the_states_and_intermediate_arrays_of_recurrent_layers(tmp_path: Path, name: str) -> None:
    step = 128 if name in SCANS else 256
    config = FlashConfig(
        ram_budget_gb="min", context_length=600, prefill_step_size=step, telemetry=False, lend_reserves=False
    )
    with load_model(save(tmp_path, configuration(name)), config)[0] as model:
        model.start()
        cache = make_prompt_cache(model)
        gc.collect()  # arrays of earlier tests
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for _ in range(2):
            model(mx.array([[7 * i % 300 for i in range(step)]]), cache=cache)
            mx.eval([entry.state for entry in cache])
        mx.synchronize()  # a GPU lets go of intermediate results a little later
        kept, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
        assert kept <= model.plan.kv_bytes
        assert peak <= model.plan.kv_bytes + model.plan.activation_bytes


@pytest.mark.parametrize("budget", ["min", 2.0])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_matrices_that_dora_makes_in_each_call_are_planned(
    tmp_path: Path, is_tied: bool, bits: int | None, budget: Any
) -> None:
    base = save(tmp_path / "base", WIDE_LLAMA | {"tie_word_embeddings": is_tied}, bits=bits)
    keys = ["mlp.down_proj", "mlp.up_proj", *(["model.embed_tokens"] if is_tied and not bits else [])]
    adapter = str(save_adapter(tmp_path / "adapter", base, "dora", 6, keys))
    tokens = mx.array([[5, 17, 900, 3]])
    expected = load_adapters(stock(base), adapter)(tokens)
    mx.eval(expected)
    config = FlashConfig(ram_budget_gb=budget, context_length=256, telemetry=False, lend_reserves=False)
    with load_model(base, config, adapter_path=adapter)[0] as model:
        cache = make_prompt_cache(model)
        gc.collect()  # arrays of earlier tests
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        logits = model(tokens, cache=cache)
        mx.eval(logits)
        peak = mx.get_peak_memory() - before
        assert same_bits([logits], [expected])
        assert peak <= model.plan.kv_bytes + model.plan.activations.nbytes(4, 4, all_logits=True)


@pytest.mark.parametrize("name", ["seed_oss", "dora"])
def test_a_table_whose_weights_others_take_is_planned_as_in_memory(tmp_path: Path, name: str) -> None:
    """MLX would read it at the first token, and keep it."""
    kind = LLAMA if name == "dora" else configuration(name)
    base = save(tmp_path / "base", kind | {"tie_word_embeddings": True, "vocab_size": 20_000})
    expected, adapter = stock(base), None
    if name == "dora":
        adapter = str(save_adapter(tmp_path / "adapter", base, "dora", 2, ["model.embed_tokens"]))
        expected = load_adapters(expected, adapter)
    tokens = [token for token, _ in generate_step(mx.arange(4), expected, max_tokens=4)]
    config = FlashConfig(ram_budget_gb="min", context_length=256, telemetry=False, lend_reserves=False)
    with load_model(base, config, adapter_path=adapter)[0] as model:
        table = 20_000 * kind["hidden_size"] * 4
        before = mx.get_active_memory()
        assert [token for token, _ in generate_step(mx.arange(4), model, max_tokens=4)] == tokens
        gc.collect()
        assert mx.get_active_memory() - before < table / 2
        assert model.plan.resident_bytes > table


RECURRENT_PROGRAM = """
import sys
import mlx.core as mx
from mlx_flash import FlashConfig, generate_step, load_model
from mlx_flash.memory.footprint import peak_footprint
model, _ = load_model(sys.argv[1], FlashConfig(ram_budget_gb=float(sys.argv[2])))
tokens = [token for token, _ in generate_step(mx.arange(1100), model, max_tokens=2)]
print(model.plan.budget_bytes, peak_footprint(), model.plan.prefill_step_size)
"""


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="the budget is less than a process that uses a GPU")
def test_states_that_are_copied_for_each_token_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where MLX keeps an array that a later write would otherwise change in place."""
    directory, found = save(tmp_path, configuration("jamba")), []
    for copies in (False, True):
        monkeypatch.setattr("mlx_flash.residency.sizes.has_own_memory", lambda copies=copies: copies)
        found.append(prepare(directory, FlashConfig(ram_budget_gb="min", context_length=64)).plan)
    in_place, copied = (plan.activations.nbytes(64, 64, all_logits=False) for plan in found)
    assert copied - in_place == 64**2 * found[1].cache.largest_scan > 0


def test_what_mlx_records_of_a_loop_over_tokens_is_planned(tmp_path: Path) -> None:
    """A recurrent layer records some 30 operations a token before the first is computed: 0.5 kB each, in no array."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 4000}
    directory = save(tmp_path, configuration("mamba") | shape)
    assert prepare(directory, FlashConfig(ram_budget_gb="min")).layout.trace.nodes_per_token >= 6 * 20
    done = children.run("-c", RECURRENT_PROGRAM, directory, "0.16", forks=False)
    assert done.returncode == 0, done.stderr.decode()
    budget, peak, step = map(int, done.stdout.split())
    assert peak <= budget and step >= 64


COMMANDS = {
    "plan": ("plan", "--model", "MODEL"),
    "generate": ("generate", "--model", "MODEL", "--prompt", "a", "--max-tokens", "2"),
    "doctor": ("doctor", "--model", "MODEL", "--max-tokens", "2"),
    "serve": ("serve", "--model", "MODEL", "--port", "PORT"),
    "run": ("run", "MODEL"),
}


def test_every_command_names_the_same_smallest_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 0.217 in plan, 0.213 in a measured run and 0.161 in generate."""
    monkeypatch.setattr("mlx_flash.residency.machine.footprint", lambda: 400_000_000)  # the process grows
    monkeypatch.setattr(preparing, "footprint", lambda: 100_000_000)
    monkeypatch.setattr("sys.stdin", io.StringIO("a"))
    model = make_random_model(tmp_path / "model", "--layers=4", "--hidden-size=128", "--heads=4", "--kv-heads=2")
    named = {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, command in COMMANDS.items():
        words = [{"MODEL": str(model), "PORT": str(port)}.get(word, word) for word in command]
        assert run_command([*words, "--ram-budget-gb", "0.3"]) == 1
        errors = capsys.readouterr().err
        found = re.search(r"give (\d\.\d+) or more", errors)
        assert found is not None, (name, errors)
        named[name] = found[1]
    assert len(set(named.values())) == 1, named


def test_every_budget_in_the_table_has_the_promised_context() -> None:
    sizes = make_model()
    layers = (1700,) * len(sizes.layers)
    sizes = replace(sizes, cache=CacheSizes(token_bytes=sum(layers), largest_row=1700, rows=layers))
    rows = list(table_of_budgets(sizes, FlashConfig(), make_machine()))
    assert rows and all(context >= PROMISED_CONTEXT for _, context in rows)
