"""The prefix cache, interrupted at any point: what it restores is right, and nothing stays locked or queued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from interrupt_points import Tracer, interrupted_in, sample, total_points
from interrupted_prefixes import KINDS, MODES, program
from interrupting import Victim, outcomes
from mlx_flash import load_model
from models import LLAMA, MAMBA2, save
from models import stock as stock_model
from streamed import config
from threads import threads_of_models

FOLDERS = ("kv", "prefixes")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_prefix_cache_is_right(kind: str, mode: str, tmp_path: Path) -> None:
    run_all = program(kind, mode, tmp_path)
    total = total_points(run_all, FOLDERS)
    where = [interrupted_in(run_all, number, FOLDERS) for number in sample(total, 4)]
    print(f"{kind}, {mode}: {sum(map(bool, where))} interrupts at {len(set(where))} places, of {total} points")
    assert not threads_of_models()


@pytest.mark.parametrize("name", ["dense", "recurrent"])
def test_interrupted_model_gives_stock_logits(name: str, tmp_path: Path) -> None:
    """Interrupts in caches on disk and in the prefix cache, while a model uses them."""
    folder = save(
        tmp_path / "model", {"dense": LLAMA, "recurrent": MAMBA2}[name] | {"num_hidden_layers": 2}, mx.float32
    )
    settings = config(kv_cache="disk", kv_prefixes="exact", kv_directory=tmp_path / "kv")
    with load_model(folder, settings)[0] as model:
        model.start()
        model.plan = replace(model.plan, budget_bytes=10**11, prefill_step_size=2048)
        victim = Victim(model, stock_model(folder))
        for change in ("decode", "prompt", "generation"):
            count = Tracer(None, FOLDERS)
            outcomes(victim, change, lambda work, count=count: count.strike(work))  # type: ignore[misc]
            for number in sample(count.count, 3):
                tracer = Tracer(number, FOLDERS)
                found = outcomes(victim, change, tracer.strike)
                assert set(found) <= {"right", "refused"}, (change, tracer.where)
                assert "refused" not in found or name == "recurrent"
