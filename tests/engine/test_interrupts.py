"""What an interrupt cuts in two is undone, or refuses: never another bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.models.mamba2 import Mamba2Block

from expert_pools import with_pool
from interrupt_points import Operation, Tracer
from mlx_flash import CacheError, FlashLLM, WriteError, enginethread, generate_step, load_model
from mlx_flash.engine import passes
from mlx_flash.engine.call import parse_call
from mlx_flash.engine.passes import Undo
from mlx_flash.kv.checkpoints import trim_all_to
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, computed, guessed, run, same_bits, save, stock
from saved_models import model_fixture
from streamed import config, streamed_on_disk, streamed_whole

PROMPT = [5, 17, 290, 3, 42, 64]
STEP = 2
LAST = 9
CHUNKS = [PROMPT[start : start + STEP] for start in range(0, len(PROMPT), STEP)]
SMALL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}


class Victim:
    """A streamed model whose changes are interrupted, and what mlx-lm's own model computes.

    Args:
        model: the streamed model.
        plain: mlx-lm's, with the same weights.
    """

    def __init__(self, model: FlashLLM, plain: Any) -> None:
        self.model = model
        self._plain = plain
        self._known: dict[tuple[tuple[int, ...], ...], mx.array] = {}

    def expected(self, chunks: Sequence[Sequence[int]]) -> mx.array:
        """Return mlx-lm's logits of the last chunk."""
        key = tuple(map(tuple, chunks))
        if key not in self._known:
            self._known[key] = run(self._plain, chunks)[-1]
        return self._known[key]

    def is_right(self) -> bool:
        """Return whether a fresh prompt cache gives mlx-lm's logits."""
        return same_bits(run(self.model, [PROMPT[:STEP], [LAST]])[-1:], [self.expected([PROMPT[:STEP], [LAST]])])

    def goes_on(self, cache: list[Any], chunks: Sequence[Sequence[int]]) -> str:
        """Return how an interrupted cache goes on: ``right`` after some of the chunks, ``refused`` or ``wrong``."""
        try:
            found = self.model(mx.array([[LAST]]), cache=cache)
            mx.eval(found)
        except CacheError:
            return "refused"
        parts = (chunks[:count] for count in range(len(chunks) + 1))
        return "right" if any(same_bits([found], [self.expected([*part, [LAST]])]) for part in parts) else "wrong"

    def filled(self, chunks: Sequence[Sequence[int]] = CHUNKS) -> list[Any]:
        """Return a prompt cache with the prompt in it."""
        cache = make_prompt_cache(self.model)
        for chunk in chunks:
            mx.eval(self.model(mx.array([chunk]), cache=cache))
        return cache


Change = tuple[list[list[Any]], list[list[int]], Operation]
"""The caches that change, the calls that they have in the end, and what is interrupted."""


def decode(victim: Victim) -> Change:
    """A pass of one token."""
    cache = victim.filled()
    return [cache], [*CHUNKS, [7]], lambda: victim.model(mx.array([[7]]), cache=cache)


def prompt(victim: Victim) -> Change:
    """A prompt whose parts share a pass."""
    cache = make_prompt_cache(victim.model)
    return [cache], [*CHUNKS, [7]], lambda: computed(victim.model, mx.array([[*PROMPT, 7]]), cache, STEP)


def guesses(victim: Victim) -> Change:
    """A token and two guesses, one of which is kept."""
    cache = victim.filled()
    return [cache], [*CHUNKS, [7], [8], [8]], lambda: guessed(victim.model, [7, 8, 8], cache).keep(2)


def sharing(victim: Victim) -> Change:
    """Two sequences that share a pass."""
    caches = [victim.filled(), victim.filled()]
    rows = [victim.model.row(mx.array([[7]]), cache, STEP) for cache in caches]
    return caches, [*CHUNKS, [7]], lambda: victim.model.advance(rows)


def lending(victim: Victim) -> Change:
    """Memory that is lent and recalled around a pass."""
    cache = victim.filled()
    assert victim.model.engine is not None
    lent = victim.model.engine.lending

    def change() -> None:
        enginethread.run(lambda: lent.lend(400_000))
        victim.model(mx.array([[7]]), cache=cache)
        enginethread.run(lambda: lent.recall(200_000))
        enginethread.run(lambda: lent.recall(400_000))

    return [cache], [*CHUNKS, [7]], change


def generation(victim: Victim) -> Change:
    """A text of three tokens, with a prompt cache of the caller's."""
    before = [*CHUNKS[:-1], *([token] for token in CHUNKS[-1])]  # mlx-lm computes the last token of a prompt alone
    text: list[int] = []
    while len(text) < 3:
        logits = victim.expected([*before, *([token] for token in text)])
        text.append(int(logits[0, -1].argmax().item()))
    cache = victim.filled(CHUNKS[:-1])

    def change() -> None:
        steps = generate_step(mx.array(CHUNKS[-1]), victim.model, prompt_cache=cache, max_tokens=-1)
        try:
            for expected, (token, _) in zip(text, steps, strict=False):  # which takes no token beyond the text
                assert token == expected
        finally:
            steps.close()  # type: ignore[attr-defined]

    return [cache], [*before, *([token] for token in text)], change


CHANGES = (decode, prompt, guesses, sharing, lending, generation)

directory = model_fixture(SMALL)


LITTLE = {"num_hidden_layers": 2, "vocab_size": 300}
KINDS: dict[str, dict[str, Any]] = {
    "dense": LLAMA | LITTLE,
    "on disk": LLAMA | LITTLE,
    "sliding window": GEMMA3 | LITTLE | {"num_hidden_layers": 3},
    "recurrent": MAMBA2 | LITTLE,
    "mixture": QWEN3_MOE | LITTLE,
}


def opened(name: str, folder: Path) -> FlashLLM:
    if name == "on disk":
        return streamed_on_disk(folder, cut=2)
    return with_pool(folder, 6) if name == "mixture" else streamed_whole(folder, tile_rows=10**9)


@pytest.mark.parametrize("name", KINDS)
def test_interrupts_of_passes(tmp_path: Path, name: str) -> None:
    """Some of the instructions in the thread that waits."""
    folder = save(tmp_path / "model", KINDS[name], mx.float32)
    with opened(name, folder) as model:
        model.start()
        model.plan = replace(model.plan, budget_bytes=10**11, prefill_step_size=2048)
        victim = Victim(model, stock(folder))
        for change in CHANGES:
            counted = Tracer(None)
            counted.strike(change(victim)[2])
            for at in range(0, counted.count, max(1, counted.count // 5)):
                caches, chunks, operation = change(victim)
                tracer = Tracer(at)
                if not tracer.strike(operation):
                    continue
                found = {"right" if victim.is_right() else "wrong model"}
                found |= {victim.goes_on(cache, chunks) for cache in caches}
                assert found <= {"right", "refused"}, (change, at, tracer.where)
                assert "refused" not in found or name in ("sliding window", "recurrent")


def test_a_cache_that_cannot_be_put_back_refuses_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model", KINDS["recurrent"], mx.float32)
    with streamed_whole(folder) as model:
        victim = Victim(model, stock(folder))
        cache = victim.filled()
        with monkeypatch.context() as patch:
            patch.setattr(Mamba2Block, "__call__", interrupted(Mamba2Block.__call__, 2))
            with pytest.raises(KeyboardInterrupt):
                model(mx.array([[7]]), cache=cache)
        words = "interrupted or failed .* ArraysCache .*Hint: start again with a fresh prompt cache"
        uses: list[Callable[[], Any]] = [
            lambda: model(mx.array([[7]]), cache=cache),
            lambda: computed(model, mx.array([[7, 8]]), cache),
            lambda: copy.deepcopy(cache)[0][0],
            lambda: save_prompt_cache(str(tmp_path / "cache.safetensors"), cache),
        ]
        for use in uses:
            with pytest.raises(CacheError, match=words):
                use()
        assert victim.is_right()


def test_a_cache_whose_putting_back_was_interrupted_refuses(directory: Path) -> None:
    with load_model(directory, config())[0] as model:
        cache = make_prompt_cache(model)
        computed(model, mx.array([[1, 2, 3, 4]]), cache)
        call = parse_call((mx.array([[5]]), cache), {})
        undo = Undo([call])
        undo()
        assert [entry.offset for entry in cache] == [4] * len(cache)
        cache[-1].trim(2)  # as the prefix cache does, until it has put its rows back
        undo()
        with pytest.raises(CacheError):
            model(mx.array([[5]]), cache=cache)


def test_a_cache_that_cannot_be_put_back_costs_its_own_row_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trim(cache: list[Any], offsets: list[int]) -> None:
        if cache[0] is caches[0][0]:
            raise WriteError("the disk is full")
        trim_all_to(cache, offsets)

    def overflow(*_: Any) -> Any:
        raise ValueError("too large")

    with streamed_whole(directory) as model:
        model.plan = replace(model.plan, budget_bytes=10**11)
        caches = [make_prompt_cache(model) for _ in range(2)]
        for cache in caches:
            computed(model, mx.array([[1, 2, 3]]), cache)
        rows = [model.row(mx.array([[5]]), cache, 2048) for cache in caches]
        with monkeypatch.context() as patch:
            patch.setattr(passes, "trim_all_to", trim)
            caches[0][1].update_and_fetch = overflow
            model.advance(rows)
        assert isinstance(rows[0].error, ValueError) and rows[1].error is None
        assert same_bits([rows[1].outputs[-1]], run(stock(directory), [[1, 2, 3], [5]])[1:])
        with pytest.raises(CacheError, match="cannot be put back"):
            model(mx.array([[5]]), cache=caches[0])


def interrupted(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return a function that is interrupted after a call."""
    calls = iter(range(1, 1 << 30))

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        if next(calls) == number:
            raise KeyboardInterrupt
        return result

    return call
