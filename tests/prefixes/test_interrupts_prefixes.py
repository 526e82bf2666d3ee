"""The prefix cache, interrupted at any point: what it restores is right, and nothing stays locked or queued."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from interrupt_points import Tracer, interrupted_in, sample, total_points
from interrupted_prefixes import KINDS, MODES, program
from interrupting import Victim, every_interrupt, outcomes
from mlx_flash import CacheError, load_model
from mlx_flash.engine import cachedcalls
from mlx_flash.engine.passes import Passes
from mlx_flash.engine.row import Row
from mlx_flash.prefixes import prefixcache
from mlx_flash.prefixes.prefixcache import PrefixCache, fill
from models import GEMMA3, LLAMA, MAMBA2, same_bits, save
from models import stock as stock_model
from streamed import config

FOLDERS = ("kv", "prefixes")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_prefix_cache_is_right(kind: str, mode: str, tmp_path: Path) -> None:
    run_all = program(kind, mode, tmp_path)
    total = total_points(run_all, FOLDERS)
    where = [interrupted_in(run_all, number, FOLDERS) for number in sample(total, 4)]
    print(f"{kind}, {mode}: {sum(map(bool, where))} interrupts at {len(set(where))} places, of {total} points")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mlx-flash-")]


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


@pytest.mark.parametrize("name", ["dense", "windows", "recurrent"])
def test_interrupts_while_the_longest_prefix_is_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row goes on, or its cache refuses: never a token twice, or too few."""
    store = prefixcache.PrefixStore
    monkeypatch.setattr(prefixcache, "PrefixStore", lambda *a, **b: store(*a, **{**b, "page_tokens": 4}))
    kinds = {"dense": LLAMA, "windows": GEMMA3 | {"sliding_window_pattern": 2}, "recurrent": MAMBA2}
    folder = save(tmp_path / "model", kinds[name] | {"num_hidden_layers": 2}, mx.float32)
    prompt, rows, found = mx.array([[5, 17, 290, 3, 42, 64, 8, 9, 10, 11, 12]]), list[Row](), Counter[str]()
    functions = [Passes._take_cached, Passes.recover, Row.skip, Row.undo, PrefixCache.restore]
    functions += [Passes._run, cachedcalls.begin_parts, cachedcalls.end_parts, PrefixCache.begin]
    functions += [PrefixCache.look, PrefixCache._restore, PrefixCache._fill, fill, PrefixCache.end]
    with load_model(folder, config(kv_prefixes="longest", prefill_step_size=4))[0] as model:
        model.start()
        model.plan = replace(model.plan, budget_bytes=10**11, prefill_step_size=4)

        def prepare() -> None:
            rows[:] = [model.row(prompt, make_prompt_cache(model), 4)]

        def finish() -> mx.array:
            while not rows[0].is_done:
                model.advance(rows)
            if rows[0].error is not None:
                raise rows[0].error
            mx.eval(logits := rows[0].outputs[-1])
            return logits

        prepare()
        expected = finish()
        for where in every_interrupt(functions, prepare, lambda: model.advance(rows), 13):
            try:
                same = same_bits([finish()], [expected])
                assert same and entries_length(rows[0]) in (None, 11), where
                found["right"] += 1
            except CacheError:
                found["refused"] += 1
        prepare()
        assert same_bits([finish()], [expected]) and rows[0].num_restored == 8
    assert found["right"] > 25 and (found["refused"] == 0 or name != "dense")


def entries_length(row: Row) -> int | None:
    """Return the number of tokens in the cache of a row; None where no layer counts them."""
    lengths = {entry.offset for entry in row.whole.cache or () if hasattr(entry, "offset")}
    assert len(lengths) < 2
    return next(iter(lengths), None)
