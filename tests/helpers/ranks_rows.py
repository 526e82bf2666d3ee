"""What each rank of ``test_rank_rows.py`` runs: calls that share passes over a model whose layers are on two ranks.

Prints a line of JSON for each case: rank, case, and what was found.
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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import LlamaModel

import mlx_flash
import shared_passes
from batches import alone
from local_ranks import join
from mlx_flash import FlashLLM, ranks
from mlx_flash.compat.generation import stock_generate_step
from mlx_flash.engine import passes, prepare
from mlx_flash.layout.units import layers_of
from mlx_flash.residency.plan import Streaming
from mlx_flash.streaming.stream import unit_states
from models import same_bits, stock
from shared_passes import PROMPT, PROMPTS, STEP, solo, together
from streamed import config, streamed_whole

GROUP = join()
Case = Callable[[Path], dict[str, Any]]


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


def compare(directory: Path, make: Callable[..., FlashLLM] = streamed_whole, **options: Any) -> dict[str, Any]:
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


def read_once(directory: Path) -> dict[str, Any]:
    """Count what one sequence reads, and four of them."""
    with streamed_whole(directory, group=GROUP) as model:
        found = [counts(model)]
        for number in (1, 4):
            together(model, [[7]] * number)
            found.append(counts(model))
    return {"counts": found}


def without_units(directory: Path, group: mx.distributed.Group) -> FlashLLM:
    """Return a model that keeps the weights of this rank's layers in memory."""
    prepared = prepare.prepare(directory, config(), group=group)
    model = FlashLLM(prepared, config(), "test")
    plan = replace(prepared.plan, streaming=Streaming(), budget_bytes=10**10)
    model._life.carry_out(replace(prepared, plan=plan))
    return model


def unlike(directory: Path) -> dict[str, Any]:
    """Compare where rank 1 streams nothing, and has room for five calls in a pass."""
    if GROUP.rank() == 0:
        return compare(directory)
    fitting = passes._Asked.fitting

    def fitting_five(asked: Any, *, offloads: bool) -> list[int]:
        return fitting(asked, offloads=offloads)[: max(0, 5 - len(asked.rows))]

    with patch.object(passes._Asked, "fitting", fitting_five):
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


def fail(directory: Path) -> dict[str, Any]:
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


def use_again(directory: Path) -> dict[str, Any]:
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


@contextmanager
def only_sums() -> Iterator[None]:
    """While it lasts, ranks have no messages."""
    with (
        patch.object(ranks, "_uses_nccl", lambda: True),
        patch.object(mx.distributed, "send", None),
        patch.object(mx.distributed, "recv", None),
    ):
        yield


CASES: dict[str, Case] = {
    "reads": read_once,
    "cut": lambda directory: compare(directory, cut=1),
    "unlike": unlike,
    "fails": fail,
    "uses again": use_again,
}
RUNS = ("unlike", "uses again", "llama runs", "llama runs sums")
"""Cases in which each rank has a run of layers. In the others ranks take turns."""

SUMS_ONLY = "sums"
"""At the end of a case: ranks exchange sums only, as with NCCL."""


def main(root: str, cases: list[str]) -> None:
    shared_passes.NUM_TOKENS = 2
    for case in cases:
        has_runs = case in RUNS
        prepare.share_layers = lambda layers, ranks, has_runs=has_runs: [
            i * len(ranks) // len(layers) if has_runs else i % len(ranks) for i in range(len(layers))
        ]
        with only_sums() if case.endswith(SUMS_ONLY) else nullcontext():
            found = CASES.get(case, compare)(Path(root) / ("llama" if case in CASES else case.split()[0]))
        print(json.dumps([GROUP.rank(), case, found]), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    finally:
        atexit._run_exitfuncs()  # a forked child does not
