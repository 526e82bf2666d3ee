"""What each rank runs for the tests of ranks: shared layers against stock mlx-lm.

Its arguments are what to compare (:data:`KINDS`), a folder, cases with commas between them, and an option. Prints a
line of JSON for each case: rank, case, and what was found, which is an error at the end.
"""

from __future__ import annotations

import atexit
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import LlamaModel

import mlx_flash
import shared_passes
from local_ranks import join
from mlx_flash import FlashLLM, ranks
from mlx_flash.compat.generation import stock_generate_step
from mlx_flash.engine import passes, prepare
from mlx_flash.errors import BudgetError, ConfigError, FlashError
from mlx_flash.layout.units import layers_of
from mlx_flash.residency.plan import Streaming
from mlx_flash.streaming.stream import unit_states
from models import PREFILL_AND_DECODE, run, same_bits, stock
from shared_passes import PROMPT, PROMPTS, STEP, alone, solo, together
from streamed import carried_out, config, streamed_whole

GROUP = join()
Found = dict[str, Any]

SUMS_ONLY = "-sums"
"""At the end of a case: ranks exchange sums only, as with NCCL."""

OWN_FILES = "-files"
"""After the name of a model: the rank's folder is the one of its number, and has a part of the shards."""

RUNS = ("unlike", "uses again", "llama runs", "llama runs-sums")
"""Cases in which each rank has a run of layers. In the others ranks take turns."""


@contextmanager
def only_sums() -> Iterator[None]:
    """While it lasts, ranks have no messages."""
    with (
        patch.object(ranks, "_uses_nccl", lambda: True),
        patch.object(mx.distributed, "send", None),
        patch.object(mx.distributed, "recv", None),
    ):
        yield


def share_layers(layers: Sequence[int], ranks: Sequence[Any], *, has_runs: bool) -> list[int]:
    if len(layers) < len(ranks):
        raise ConfigError(f"{len(ranks)} ranks share a model of {len(layers)} layers, and each needs one.")
    return [i * len(ranks) // len(layers) if has_runs else i % len(ranks) for i in range(len(layers))]


def say(*words: Any) -> None:
    print(json.dumps([GROUP.rank(), *words]), flush=True)


# A whole model on each rank


def room_for_two_tokens(need: Any, *args: Any, **options: Any) -> Any:
    """Refuse what other ranks have room for."""
    if need.lanes[0].tokens.num_at_once > 2:
        raise BudgetError("there is room for two tokens", 0)
    return need


def tokens_of(step: Any, model: Any) -> list[int]:
    return [token for token, _ in step(mx.array([1, 5, 9, 30, 2, 7]), model, max_tokens=4)]


def compare_model(root: Path, name: str, fault: str) -> Found:
    """Return whether all logits and tokens are stock's, which units were read, the bytes of a token in each cache of
    keys and values, and what is published of all ranks.
    """
    whole = root / name.removesuffix(SUMS_ONLY).removesuffix(OWN_FILES)
    directory = whole / f"rank-{GROUP.rank()}" if name.endswith(OWN_FILES) else whole
    model = stock(whole)
    expected, tokens = run(model, PREFILL_AND_DECODE), tokens_of(stock_generate_step, model)
    mx.synchronize(generation_stream)  # it computes a token ahead, and the ranks would exchange two things at once
    more = {"prefill_step_size": 8} if fault == "less room" and GROUP.rank() == 0 else {}
    pool_slots = 0 if "moe" in name else None
    with streamed_whole(directory, pool_slots=pool_slots, group=GROUP, telemetry=True, **more) as streamed:
        if fault == "dies" and GROUP.rank() == 1:
            sys.exit(3)
        if fault == "less room" and GROUP.rank() == 1:
            passes.make_room = room_for_two_tokens
        if fault == "endless":
            ranks.TICK_SECONDS, ranks.PATIENCE_SECONDS = 0.2, 2.0
            print(json.dumps("ready"), flush=True)
            while True:
                run(streamed, PREFILL_AND_DECODE)
        other = [[3, 3, 3]] if fault == "other tokens" and GROUP.rank() == 1 else PREFILL_AND_DECODE
        told_step = streamed.plan.prefill_step_size
        assert fault != "less room" or told_step == 8, told_step
        got = expected if fault == "less room" else run(streamed, other)  # parts change last bits
        is_equal = same_bits(got, expected) and tokens == tokens_of(mlx_flash.generate_step, streamed)
        assert streamed.engine is not None and streamed._life.engine is not None
        rows, told = streamed.plan.cache.rows, streamed._life.engine._publisher._collect()["ranks"]
        units = [unit.name for unit in streamed.engine.stream.units]
    is_equal = is_equal and same_bits(run(model, PREFILL_AND_DECODE), expected)
    assert streamed.name == f"test (rank {GROUP.rank()} of {GROUP.size()})"  # what flash-monitor shows
    return {"is_equal": is_equal, "units": units, "rows": rows, "told": told}


# Calls that share passes


def are_solo(got: Sequence[Sequence[mx.array]], directory: Path, prompts: Sequence[Sequence[int]]) -> bool:
    """Return whether these are the first logits of stock mlx-lm, one prompt after another."""
    return all(same_bits(each, solo(directory, p)[: len(each)]) for each, p in zip(got, prompts, strict=True))


def parts_are_equal(model: FlashLLM, expected: Sequence[tuple[int, mx.array]]) -> bool:
    """Return whether a prompt in parts, and a token after it, have the log probabilities of mlx-lm."""
    got = list(mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=2, prefill_step_size=STEP))
    return same_bits([logprobs for _, logprobs in got], [logprobs for _, logprobs in expected])


def counts(model: Any) -> list[int]:
    """Return passes, units that were read for them, and bytes."""
    while "reading" in unit_states(model.engine.stream, math.inf):
        time.sleep(0.001)
    return [model.counters.num_passes, model.engine.stream.stats.num_acquired, model.engine.reader.stats.nbytes]


def compare(directory: Path, make: Callable[..., FlashLLM] = streamed_whole, **options: Any) -> Found:
    """Compare several sequences, then the parts of a prompt."""
    expected = alone(directory, PROMPT, 2)
    with make(directory, group=GROUP, **options) as model:
        found = [counts(model)]
        is_equal = are_solo(together(model, PROMPTS), directory, PROMPTS)
        found.append(counts(model))
        is_equal = is_equal and parts_are_equal(model, expected)
        found.append(counts(model))
        assert model.engine is not None
        return {"is_equal": is_equal, "counts": found, "num_units": len(model.engine.stream.units)}


def without_units(directory: Path, group: mx.distributed.Group) -> FlashLLM:
    """Return a model that keeps the weights of this rank's layers in memory."""
    prepared = prepare.prepare(directory, config(), group=group)
    return carried_out(prepared, replace(prepared.plan, streaming=Streaming(), budget_bytes=10**10))


def unlike(directory: Path) -> Found:
    """Compare where rank 1 streams nothing, and has room for five calls in a pass."""
    if GROUP.rank() == 0:
        return compare(directory)
    fitting = passes.Passes._fitting

    def fitting_five(one: Any, rows: Sequence[Any], more: Sequence[Any], *, offloads: bool) -> list[int]:
        return fitting(one, rows, more, offloads=offloads)[: max(0, 5 - len(rows))]

    with patch.object(passes.Passes, "_fitting", fitting_five):
        return compare(directory, without_units)


@contextmanager
def failing(layer: Any, entry: Any) -> Iterator[None]:
    """While it lasts, a layer raises an error for the row that has an entry of the cache."""
    own = type(layer.self_attn)

    class Failing(own):  # type: ignore[misc, valid-type]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            if vars(cache) is vars(entry):  # a view, or itself
                raise ValueError("this layer fails")
            return super().__call__(x, mask, cache)

    object.__setattr__(layer.self_attn, "__class__", Failing)
    try:
        yield
    finally:
        object.__setattr__(layer.self_attn, "__class__", own)


def fail(directory: Path) -> Found:
    """Compute rows. One has an error on all ranks, one in a layer of rank 1."""
    with streamed_whole(directory, group=GROUP) as model:
        caches: list[Any] = [make_prompt_cache(model) for _ in PROMPTS]
        rows = [model.row(mx.array([p]), cache, STEP) for p, cache in zip(PROMPTS, caches, strict=True)]
        bad = model.row(mx.array([[3, 100_000, 5]]), make_prompt_cache(model), STEP)
        with failing(layers_of(model._model)[1], caches[3][1]) if GROUP.rank() == 1 else nullcontext():
            model.advance([bad, *rows])
        got, prompts = [rows[i].outputs for i in range(3)], PROMPTS[:3]
        is_equal = are_solo(got, directory, prompts) and are_solo(together(model, prompts), directory, prompts)
        return {
            "is_equal": is_equal,
            "errors": [row.error and type(row.error).__name__ for row in (bad, *rows)],
            "offsets": [entry.offset for entry in caches[3]],
        }


def use_again(directory: Path) -> Found:
    """Compare a model that uses an entry of the cache in two layers of rank 0, which streams them one by one."""

    def forward(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        mask = create_attention_mask(h, cache[0])
        for number, (layer, entry) in enumerate(zip(self.layers, cache, strict=True)):
            h = layer(h, mask, cache=entry)
            if number == 1:
                h = h + cache[0].keys[:, :, : cache[0].offset].mean()
        found: mx.array = self.norm(h)
        return found

    with patch.object(LlamaModel, "__call__", forward):
        steps = stock_generate_step(mx.array(PROMPT), stock(directory), max_tokens=2, prefill_step_size=STEP)
        expected = list(steps)
        with streamed_whole(directory, group=GROUP) as streamed:
            is_equal = all(parts_are_equal(streamed, expected) for _ in range(2))
            return {"is_equal": is_equal, "needs_order": streamed._life.passes._needs_order}


ROWS: dict[str, Callable[[Path], Found]] = {
    "cut": lambda directory: compare(directory, cut=1),
    "unlike": unlike,
    "fails": fail,
    "uses again": use_again,
}
"""What is done with Llama. Other cases begin with the name of a model, which is compared."""


def compare_rows(root: Path, case: str, option: str) -> Found:
    """Return what a case of calls that share passes finds."""
    shared_passes.NUM_TOKENS = 2
    name = "llama" if case in ROWS else case.removesuffix(SUMS_ONLY).split()[0]
    return ROWS.get(case, compare)(root / name)


KINDS: dict[str, Callable[[Path, str, str], Found]] = {
    "models": compare_model,
    "rows": compare_rows,
}


def main(kind: str, root: str, cases: str, option: str = "") -> None:
    for case in cases.split(","):
        prepare.share_layers = partial(share_layers, has_runs=case in RUNS)
        with only_sums() if case.endswith(SUMS_ONLY) else nullcontext():
            try:
                say(case, KINDS[kind](Path(root), case, option))
            except FlashError as error:
                say(case, {"error": type(error).__name__, "text": str(error)})
                sys.exit(1)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        atexit._run_exitfuncs()  # a forked child does not, and would seem to have died
