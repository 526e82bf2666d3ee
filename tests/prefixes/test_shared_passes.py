"""Prompts that the prefix cache knows, in passes that several sequences share."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_flash
from mlx_flash import FlashLLM
from mlx_flash.engine.sharing import Sharing, waiting_bytes
from mlx_flash.generation.sequence import Chooser, GeneratedSequence, compute
from mlx_flash.prefixes.folder import clear_prefixes
from mlx_flash.prefixes.prefixcache import prefix_directory
from models import GEMMA3, MAMBA2, NARROW_LLAMA, same_bits, save, stock
from prefix_runs import PROMPT, STEP, generated, loaded, restored
from zoo import configuration

PROMPTS = [PROMPT, PROMPT[::-1]]
PROMPT_LENGTH = len(PROMPT)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), NARROW_LLAMA | {"num_hidden_layers": 2})


def sequences_of(model: FlashLLM) -> list[GeneratedSequence]:
    return [
        GeneratedSequence(model, model.make_cache(), [prompt], Chooser(None, None, []), step=STEP, max_tokens=1)
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("mode", ["exact", "longest"])
def test_each_sequence_knows_what_was_restored(llama: Path, mode: str) -> None:
    """The server tells its clients."""
    with loaded(llama, mode) as model:
        for prompt in PROMPTS:
            generated(model, prompt, num=1)
    with loaded(llama, mode) as model:
        sequences = sequences_of(model)
        while not all(sequence.is_ready for sequence in sequences):
            compute([sequence for sequence in sequences if not sequence.is_ready])
        for sequence in sequences:
            sequence.choose()
        found = [sequence.num_restored for sequence in sequences]
        assert sum(found) == restored(model) and found[0] == found[1] > STEP


def test_an_interrupted_pass_keeps_what_was_restored_before_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(llama) as model:
        for prompt in PROMPTS:
            generated(model, prompt, num=1)
    with loaded(llama) as model:
        rows = [sequence.begin() for sequence in sequences_of(model)]
        model.start()
        passes, failed = model._life.passes, []

        def run(*args: object) -> list[object]:
            failed.append(before(*args))
            raise KeyboardInterrupt

        before = passes.group.run
        monkeypatch.setattr(passes.group, "run", run)
        with pytest.raises(KeyboardInterrupt):
            model.advance(rows)
        assert failed and rows[0].num_restored == rows[1].num_restored > STEP
        monkeypatch.undo()
        while not all(row.is_done for row in rows):
            model.advance(rows)
        assert rows[0].num_restored == rows[1].num_restored > STEP
        assert all(isinstance(row.outputs[0], mx.array) for row in rows)


def streamed(folder: Path, mode: str, **settings: Any) -> FlashLLM:
    """A model that reads its weights in each pass, and has room for all parts of a prompt in one."""
    model = loaded(folder, mode, prefill_step_size=STEP, **settings)
    model.start()
    model.plan = replace(model.plan, budget_bytes=10**11)
    return model


def computed(model: FlashLLM, prompt: list[int], num: int = 3) -> list[tuple[int, mx.array]]:
    """As a program would, by this project's own loop."""
    steps = mlx_flash.generate_step(mx.array(prompt), model, max_tokens=num, prefill_step_size=STEP)
    found = [(int(token), logprobs) for token, logprobs in steps]
    mx.eval([logprobs for _, logprobs in found])
    return found


def same(left: list[tuple[int, mx.array]], right: list[tuple[int, mx.array]]) -> bool:
    tokens = [token for token, _ in left] == [token for token, _ in right]
    return tokens and same_bits([each for _, each in left], [each for _, each in right])


@pytest.mark.parametrize("kv_cache", ["preallocated", "stock", "disk"])
@pytest.mark.parametrize("mode", ["exact", "longest"])
def test_parts_of_a_prompt_share_a_pass(llama: Path, mode: str, kv_cache: str) -> None:
    """What is kept is what one part after another would have left, and is found again in either way."""
    expected = generated(stock(llama), num=3)
    for first, second in ((computed, generated), (generated, computed)):
        clear_prefixes(prefix_directory())
        with streamed(llama, mode, kv_cache=kv_cache) as model:
            assert model.plan.read_bytes and same(first(model, PROMPT, num=3), expected)
            num_passes = model.counters.num_passes
            assert model.prefixes is not None and model.prefixes.counters.num_computed >= len(PROMPT) - 1
            assert num_passes == 3 if first is computed else num_passes >= 3 + 3
        with streamed(llama, mode, kv_cache=kv_cache) as model:
            found = second(model, PROMPT, num=3)
            whole = (len(PROMPT) - 1) if mode == "exact" else len(PROMPT) // 256 * 256
            assert restored(model) == whole and (mode == "longest" or same(found, expected))


def test_parts_that_are_cached_are_not_computed(llama: Path) -> None:
    """Of two prompts with two common parts."""
    other = [*PROMPT[: 2 * STEP], *reversed(PROMPT[2 * STEP :])]
    with streamed(llama, "exact") as model:
        computed(model, PROMPT)
    with streamed(llama, "exact") as model:
        assert same(computed(model, other), generated(stock(llama), other, num=3)) and restored(model) == 2 * STEP


def test_parts_after_one_that_was_cut_are_found_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget had room for smaller parts only, both times."""
    choose = Sharing.choose

    def cutting(self: Sharing, plan: Any, rows: Any, lending: Any) -> Any:
        if rows[0].length == STEP:
            rows[0].cut()
        return choose(self, plan, rows, lending)

    monkeypatch.setattr(Sharing, "choose", cutting)
    clear_prefixes(prefix_directory())
    for num_restored in (0, len(PROMPT) - 1):
        with streamed(llama, "exact") as model:
            assert len(computed(model, PROMPT)) == 3 and restored(model) == num_restored


WINDOWS = GEMMA3 | {"num_hidden_layers": 3, "sliding_window": 300}
HYBRID = configuration("qwen3_next") | {"num_hidden_layers": 4, "full_attention_interval": 2}


@pytest.mark.parametrize("mode", ["exact", "longest"])
@pytest.mark.parametrize("config", [WINDOWS, MAMBA2, HYBRID], ids=["windows", "states", "hybrid"])
def test_states_are_kept_after_each_part(tmp_path: Path, config: dict[str, Any], mode: str) -> None:
    """They share a pass. Another prompt goes on after two common parts, whichever way either is computed."""
    folder = save(tmp_path / "model", config | {"vocab_size": 1000})
    other = [*PROMPT[: 2 * STEP], *reversed(PROMPT[2 * STEP :])]
    expected = [generated(stock(folder), prompt, num=3) for prompt in (PROMPT, other)]
    for first, second in ((computed, generated), (generated, computed)):
        clear_prefixes(prefix_directory())
        with streamed(folder, mode) as model:
            assert same(first(model, PROMPT, num=3), expected[0])
            assert model.counters.num_passes == 3 if first is computed else model.counters.num_passes > 3
        with streamed(folder, mode) as model:
            assert same(second(model, other, num=3), expected[1]) and restored(model) == 2 * STEP


def test_states_inside_pages_are_not_kept(tmp_path: Path) -> None:
    """Of eleven parts two end where a page does; the window has moved on when the pass ends."""
    folder = save(tmp_path / "model", WINDOWS | {"vocab_size": 1000, "sliding_window": 70})
    settings: dict[str, Any] = {"max_tokens": 3, "prefill_step_size": 64}
    clear_prefixes(prefix_directory())
    with streamed(folder, "longest") as model:
        model.plan = replace(model.plan, prefill_step_size=64)
        first = [int(token) for token, _ in mlx_flash.generate_step(mx.array(PROMPT), model, **settings)]
        assert model.counters.num_passes == 3 and model.prefixes is not None and model.prefixes.store.flush()
        files = [*(prefix_directory() / "pages").iterdir()]
        assert len(files) == 2 * (PROMPT_LENGTH // 256)  # rows and windows of each page
    with streamed(folder, "longest") as model:
        model.plan = replace(model.plan, prefill_step_size=64)
        again = [int(token) for token, _ in mlx_flash.generate_step(mx.array(PROMPT), model, **settings)]
        assert again == first and restored(model) == PROMPT_LENGTH // 256 * 256
        assert model.counters.num_tokens_in == PROMPT_LENGTH - restored(model) + 2


LONG = [(5 * i * i + 3 * i) % 1000 for i in range(1500)]
SYSTEM = 700
"""Tokens of its first segment."""


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are so large that they are kept after 1024 tokens only, and in the last page of each segment."""
    monkeypatch.setattr("mlx_flash.residency.task.kept_every", lambda *_: 1024)


@pytest.mark.usefixtures("rarely")
@pytest.mark.parametrize("room", [10**11, None])
def test_large_windows_are_kept_where_turns_go_on(tmp_path: Path, room: int | None) -> None:
    """Whether the parts share a pass or not, another prompt goes on where the common segment ends."""
    folder = save(tmp_path / "model", WINDOWS | {"vocab_size": 1000})
    clear_prefixes(prefix_directory())

    def run(prompt: list[int]) -> tuple[int, int]:
        with streamed(folder, "longest") as model:
            model.plan = replace(model.plan, budget_bytes=room or model.plan.budget_bytes)
            if room is None:  # one part after another
                model._life.passes.group._needs_order = True
            segments = [prompt[:SYSTEM], prompt[SYSTEM:]]
            chooser = Chooser(None, None, [])
            sequence = GeneratedSequence(model, model.make_cache(), segments, chooser, step=STEP, max_tokens=1)
            while not sequence.is_ready:
                compute([sequence])
                sequence.end_part()
            assert model.prefixes is not None and model.prefixes.store.flush()
            return restored(model), len([*(prefix_directory() / "pages").iterdir()])

    num_pages, num_windows = len(LONG) // 256, 3  # after 512 tokens, 1024 and 1280
    assert run(LONG) == (0, num_pages + num_windows)
    assert run([*LONG[:SYSTEM], *reversed(LONG[SYSTEM:])])[0] == SYSTEM // 256 * 256
    assert run(LONG)[0] == len(LONG) // 256 * 256


@pytest.mark.usefixtures("rarely")
@pytest.mark.parametrize("config", [MAMBA2, HYBRID], ids=["states", "hybrid"])
def test_large_states_are_kept_before_the_last_part_of_a_segment(tmp_path: Path, config: dict[str, Any]) -> None:
    """They are known at the ends of parts only, here after 512 of 800 tokens."""
    folder = save(tmp_path / "model", config | {"vocab_size": 1000})
    clear_prefixes(prefix_directory())
    for found in (0, 512):
        with streamed(folder, "longest") as model:
            model.plan = replace(model.plan, prefill_step_size=512)
            steps = mlx_flash.generate_step(mx.array(LONG[:800]), model, max_tokens=2, prefill_step_size=512)
            assert len([*steps]) == 2 and restored(model) == found


@pytest.mark.usefixtures("rarely")
def test_only_windows_that_are_kept_are_counted(tmp_path: Path) -> None:
    """In the part after the one in which their page ends."""
    folder = save(tmp_path / "model", WINDOWS | {"vocab_size": 1000})
    with streamed(folder, "longest") as model:
        for ends, expected in (([], [1024, 1280]), ([SYSTEM], [512, 1024, 1280])):
            row = model.row(mx.array([LONG]), model.make_cache(), STEP, ends=ends)
            waiting = [waiting_bytes(plan, [row.left]) for plan in (model.plan, replace(model.plan, kept_every=0))]
            more = [known - unknown for known, unknown in zip(*waiting, strict=True)]
            counted = [before != after for before, after in pairwise([0, *more])]
            bounds = [*accumulate(part.num_tokens for part in row.left)]
            found = [bound // 256 * 256 for bound, is_counted in zip(bounds, counted, strict=False) if is_counted]
            assert found == expected


@pytest.mark.parametrize(("mode", "step", "share"), [("exact", 64, 1), ("longest", 64, 1 / 4), ("longest", STEP, 1)])
def test_states_that_wait_are_counted(tmp_path: Path, mode: str, step: int, share: float) -> None:
    """A window's arrays have as many tokens more as came with the part."""
    folder = save(tmp_path / "model", WINDOWS | {"vocab_size": 1000})
    with streamed(folder, mode) as model, streamed(folder, "off") as other:
        row = sum(each for each, _ in model.plan.cache.windows)
        ledgers = model.plan.ledger, other.plan.ledger
        for context in (step, 4 * STEP):
            kept = row * min(context, 300 + step)
            for is_first in (True, False):
                known, unknown = (ledger.part_waiting(step, 1, context, is_first=is_first) for ledger in ledgers)
                assert known - unknown == (kept if is_first else kept * share) > 0
