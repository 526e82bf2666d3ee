"""Guessed tokens change how many passes a text takes, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

import mlx_flash
from mlx_flash import BudgetError, DiskKVCache, FlashLLM, ReadError, load_model
from mlx_flash.compat.generation import stock_speculative_generate_step
from mlx_flash.engine.call import Row
from mlx_flash.engine.prepare import prepare
from mlx_flash.generation import speculative_generate_step
from mlx_flash.layout.parts import body_of
from mlx_flash.memory.footprint import footprint
from mlx_flash.residency.planner import make_plan
from mlx_flash.speculation import (
    LEAST_GAIN,
    MAX_MATCH,
    Guesses,
    Judged,
    Lookup,
    Times,
    worth_guessing,
)
from models import LLAMA, build, computed, guessed, same_bits, save, stock
from oracle import Oracle, with_room
from oracle import free_rows as free_rows  # a fixture
from own_heads import ALONE, NAMES, config_of, save_with_head, streamed_with_head
from saved_models import model_fixture
from shared_passes import MODELS, STEP, Directories, Tokens, alone, check_equal
from shared_passes import directories as directories  # a fixture
from streamed import LARGE_GB, config, failing_once, streamed_whole
from zoo import configuration

PROMPT = [5, 17, 290, 3, 42, 64, 99, 5, 17, 290, 3, 42]
NUM_TOKENS = 20


def by_mlx_lm(directory: Path, max_tokens: int = NUM_TOKENS, **options: Any) -> Tokens:
    return alone(directory, PROMPT, max_tokens, **options)


def streamed(model: FlashLLM, max_tokens: int = NUM_TOKENS, **options: Any) -> Tokens:
    mx.random.seed(3)
    return list(mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=max_tokens, **options))


def by_oracle(monkeypatch: pytest.MonkeyPatch, expected: Tokens) -> None:
    """Make the generation loop ask an oracle."""
    monkeypatch.setattr("mlx_flash.generation.batches.Lookup", lambda prompt: Oracle([token for token, _ in expected]))


def test_a_repeating_text_takes_less_than_half_the_passes(directories: Directories, free_rows: None) -> None:
    expected = by_mlx_lm(directories("mamba2"))  # which says the same two tokens over and over
    with streamed_whole(directories("mamba2")) as model:
        check_equal(streamed(with_room(model)), expected)
        assert model.counters.num_passes < NUM_TOKENS / 2


def test_a_cache_on_disk_and_a_switch_refuse_with_the_reason(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = by_mlx_lm(directories("llama"))
    by_oracle(monkeypatch, expected)
    caplog.set_level("INFO", "mlx_flash")
    with streamed_whole(directories("llama")) as model:
        caches = [DiskKVCache(directory=directories("llama") / "kv") for _ in model.layers]
        check_equal(streamed(with_room(model), prompt_cache=caches), expected)
        assert model.counters.num_guessed == 0
    with streamed_whole(directories("llama"), speculation=False) as model:
        check_equal(streamed(with_room(model)), expected)
        assert model.counters.num_guessed == 0
    told = [record.message for record in caplog.records if "no tokens are guessed" in record.message]
    assert [line.partition(": ")[2] for line in told] == ["keys and values are on disk", "speculation is switched off"]


@pytest.mark.parametrize("name", ["gemma3", "mamba2", "qwen3_next"])
def test_a_failed_read_puts_every_cache_back(directories: Directories, free_rows: None, name: str) -> None:
    """Also those that cannot be trimmed: a window and recurrent states."""
    with streamed_whole(directories(name)) as model:
        cache, plain = (make_prompt_cache(with_room(model)) for _ in range(2))
        for each in (cache, plain):
            computed(model, mx.array([PROMPT]), each)
        with failing_once(model), pytest.raises(ReadError, match="unplugged"):
            guessed(model, [1, 2, 3], cache)
        assert same_bits(*(guessed(model, [1, 2, 3], each).outputs for each in (cache, plain)))


def test_rows_that_do_not_fit_are_not_computed(directories: Directories) -> None:
    with streamed_whole(directories("llama")) as model:
        cache = make_prompt_cache(with_room(model))
        computed(model, mx.array([PROMPT]), cache)
        rows = guessed(model, [1, 2, 3], cache)
        assert len(rows.outputs) == 3
        rows.keep(1)
        model.plan = replace(model.plan, activations=replace(model.plan.activations, logits_per_token=10**9))
        model.plan = replace(model.plan, budget_bytes=model.plan.budget_bytes + 6 * 10**9)  # one row needs 5
        rows = guessed(model, [2, 3, 4], cache)
        assert len(rows.outputs) == 1
        assert {entry.offset for entry in cache} == {len(PROMPT) + 2}


draft_directory = model_fixture({**LLAMA, "num_hidden_layers": 4})
"""A draft model that is right now and then: the first layers of the Llama."""


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_model_changes_nothing_but_the_passes(directories: Directories, free_rows: None, name: str) -> None:
    """A model that drafts for itself is always right, whatever cache it has."""
    expected = by_mlx_lm(directories(name))
    with streamed_whole(directories(name)) as model:
        steps = speculative_generate_step(
            mx.array(PROMPT), with_room(model), stock(directories(name)), num_draft_tokens=3, max_tokens=NUM_TOKENS
        )
        found = list(steps)
        check_equal([(token, logprobs) for token, logprobs, _ in found], expected)
        counters = model.counters
        assert counters.num_guessed == counters.num_right == NUM_TOKENS - counters.num_passes
        assert counters.num_passes == 1 + -(-(NUM_TOKENS - 1) // 4)
        assert sum(is_drafted for *_, is_drafted in found) == counters.num_right


def test_guesses_that_are_no_tokens_of_the_model(
    directories: Directories, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model may have more: their rows of the embedding are memory of others."""
    expected = by_mlx_lm(directories("llama"))
    tokens = [token for token, _ in expected]
    size = expected[0][1].shape[-1]
    monkeypatch.setattr(
        "mlx_flash.generation.batches.Lookup",
        lambda prompt: Oracle([*tokens[:3], size, *tokens[4:9], 10**6, *tokens[10:]]),
    )
    with streamed_whole(directories("llama")) as model:
        check_equal(streamed(with_room(model)), expected)
        assert model.counters.num_right > 5


def test_a_model_in_memory_is_left_to_mlx_lm(directories: Directories) -> None:
    draft, plain = stock(directories("llama")), stock(directories("llama"))
    options: dict[str, Any] = {"num_draft_tokens": 2, "max_tokens": NUM_TOKENS}
    expected = list(stock_speculative_generate_step(mx.array(PROMPT), plain, draft, **options))
    with load_model(directories("llama"), config(ram_budget_gb=LARGE_GB))[0] as model:
        found = list(speculative_generate_step(mx.array(PROMPT), model, draft, **options))
    check_equal([each[:2] for each in found], [each[:2] for each in expected])
    assert [each[2] for each in found] == [each[2] for each in expected] and any(each[2] for each in found)


def test_a_draft_model_whose_guesses_had_no_room_gets_the_text(
    directories: Directories, draft_directory: Path, free_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, refused = FlashLLM.advance, list[Row]()

    def without_room(model: FlashLLM, rows: Sequence[Row]) -> None:
        if not refused and rows[0].whole.checkpoints is not None:
            rows[0].error = BudgetError("no room for guesses", 1)
            refused.append(rows[0])
        else:
            advance(model, rows)

    monkeypatch.setattr(FlashLLM, "advance", without_room)
    draft = stock(draft_directory)
    with streamed_whole(directories("llama")) as model:
        caches = make_prompt_cache(with_room(model)) + make_prompt_cache(draft)
        options: Any = {"num_draft_tokens": 3, "max_tokens": 5, "prompt_cache": caches}
        steps = speculative_generate_step(mx.array(PROMPT), model, draft, **options)
        assert [is_drafted for *_, is_drafted in steps] == [False] * 5 and refused
        assert {entry.offset for entry in caches} == {len(PROMPT) + 5}


# --- where guesses come from, and how many are worth computing --------------------------------------------------------


shares = st.floats(0, 1)
seconds = st.floats(1e-6, 1e3)
limits = st.integers(0, 20)


def speed(number: int, acceptance: float, reading: float, row: float, guessing: float) -> float:
    """Return the expected tokens a second with so many guesses."""
    tokens = sum(acceptance**i for i in range(number + 1))
    return tokens / (max(reading, (number + 1) * row) + number * guessing)


@given(shares, seconds, seconds, limits, st.floats(0, 1e3))
def test_no_other_number_of_guesses_is_faster(
    acceptance: float, reading: float, row: float, limit: int, guessing: float
) -> None:
    number, expected = worth_guessing(acceptance, reading, row, limit, guessing)
    assert 0 <= number <= limit
    speeds = [speed(i, acceptance, reading, row, guessing) for i in range(limit + 1)]
    assert expected == pytest.approx(speeds[number])
    if number:
        assert speeds[number] >= max(speeds) * (1 - 1e-9)
        assert speeds[number] >= LEAST_GAIN * speeds[0] * (1 - 1e-9)
    else:
        assert max(speeds) <= LEAST_GAIN * speeds[0] * (1 + 1e-9)


@pytest.mark.parametrize(("num_others", "number"), [(0, 9), (4, 5), (8, 1), (9, 0), (20, 0)])
def test_rows_of_others_take_the_place_of_guesses(num_others: int, number: int) -> None:
    assert worth_guessing(1.0, 1.0, 0.1, 15, num_others=num_others).number == number


def test_times_follow_a_disk_that_gets_slower_and_faster() -> None:
    times = Times(1.0, 0.1)
    for _ in range(30):
        times.note(4, 2.0, 1.2, 2.0)
    assert times.pass_seconds == pytest.approx(2.0, rel=0.01) and times.row_seconds == pytest.approx(0.2, rel=0.01)
    for _ in range(30):
        times.note(4, 0.4, 0.0, 0.4)  # nothing waits: reading takes no longer than that
    assert times.pass_seconds == pytest.approx(0.4) and times.row_seconds == pytest.approx(0.1, rel=0.01)


def test_rows_that_take_long_do_not_make_more_rows_look_free() -> None:
    times = Times(0.12, 0.1)
    for _ in range(30):
        number = worth_guessing(0.6, times.pass_seconds, times.row_seconds, 8).number
        seconds = 0.1 * (1 + number) + 0.06  # the first weights are waited for
        times.note(1 + number, seconds, 0.06, 0.12)
    assert times.pass_seconds == pytest.approx(0.12)
    assert number == 0  # a row takes as long as reading does


def test_acceptance_follows_the_text_for_each_quality() -> None:
    judged = Judged(Lookup([]))

    def noted(quality: int, number: int, *guess: int) -> float:
        judged.quality = quality
        for _ in range(number):
            judged.note(*guess)
        return judged.acceptance

    assert (noted(1, 0), noted(4, 0), noted(9, 0)) == (*(pytest.approx(Lookup.expected[i]) for i in (1, 4)), 0.5)
    assert noted(4, 100, 5, 5) > 0.95 and noted(1, 100, 5, 0) < 0.05 and noted(9, 1, 100, 100) > 0.95
    assert noted(9, 400, 0, 0) == pytest.approx(0.5, abs=0.05)  # nothing was guessed


tokens = st.lists(st.integers(-3, 2**20) | st.integers(0, 3), max_size=60)


@given(tokens, st.integers(1, 9))
def test_a_guess_is_what_followed_the_longest_match(text: list[int], number: int) -> None:
    lookup = Lookup(text[:5])
    for token in text[5:]:
        lookup.add(token)
    length = lookup.look()
    lengths = [n for n in range(1, MAX_MATCH + 1) if n < len(text) and _latest(text, n) is not None]
    assert length == max(lengths, default=0)
    if length:
        at = _latest(text, length)
        assert at is not None
        longer = list(text)
        while len(longer) < len(text) + number:
            longer.append(longer[at + len(longer) - len(text)])
        assert lookup.guess(number) == longer[len(text) :]


def _latest(text: list[int], length: int) -> int | None:
    """Return where the text goes on after the latest earlier occurrence of its last tokens."""
    for at in range(len(text) - 1, length - 1, -1):
        if text[at - length : at] == text[-length:]:
            return at
    return None


class Fixed(Oracle):
    """A source whose guesses are right, or never are."""

    def __init__(self, text: list[int], *, is_right: bool, guess_seconds: float = 0.0) -> None:
        super().__init__(text)
        self._text = [token + (not is_right) for token in text]
        self.guess_seconds, self.num_asked = guess_seconds, 0

    def guess(self, number: int) -> list[int]:
        self.num_asked += 1
        return super().guess(number)


def passes_of(text: list[int], guesses: Guesses, times: Times) -> int:
    """Go through a text, and return the number of passes."""
    at = passes = 0
    while at < len(text):
        limit = len(text) - at - 1
        guessed = guesses.take(times, limit) if guesses.look(limit) else []
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guessed, text[at:], strict=False)))
        for token in text[at : at + right + 1]:
            guesses.add(token)
        if guessed:
            guesses.note(len(guessed), right)
        at, passes = at + right + 1, passes + 1
    return passes


@pytest.mark.parametrize("seconds", [0.0, 0.001])
@pytest.mark.parametrize("order", [1, -1])
def test_the_better_of_two_sources_is_asked(seconds: float, order: int) -> None:
    text, times = list(range(300)), Times(1.0, 0.01)
    right, wrong = Fixed(text, is_right=True, guess_seconds=seconds), Fixed(text, is_right=False)
    assert passes_of(text, Guesses(*[right, wrong][::order]), times) < 1.2 * 300 / 16


def test_a_slow_source_is_left_alone_where_a_free_one_is_as_good() -> None:
    text, times = list(range(300)), Times(1.0, 0.01)
    free, slow = Fixed(text, is_right=True), Fixed(text, is_right=True, guess_seconds=0.1)
    passes_of(text, Guesses(slow, free), times)
    assert slow.num_asked == 0


# --- a model's own head guesses ---------------------------------------------------------------------------------------


HEAD_PROMPT = [5, 17, 290, 3, 42, 64, 99, 51, 8, 120]
HEAD_TOKENS = 20

Heads = Callable[..., Path]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Return the folder of a model with a head, made once."""
    made: dict[str, Path] = {}

    def find(name: str, **options: Any) -> Path:
        key = json.dumps([name, options])
        if key not in made:
            made[key] = save_with_head(tmp_path_factory.mktemp(name) / "model", name, **options)
        return made[key]

    return find


def generated(model: FlashLLM, prompt: list[int] = HEAD_PROMPT, **options: Any) -> list[tuple[int, mx.array]]:
    mx.random.seed(3)
    options = {"max_tokens": HEAD_TOKENS, "prefill_step_size": STEP, **options}
    return list(mlx_flash.generate_step(mx.array(prompt), model, **options))


@pytest.mark.parametrize("name", NAMES)
def test_the_head_computes_what_its_family_computes(heads: Heads, name: str) -> None:
    """That is mlx-lm's layer between norms, on rows of an embedding and a hidden state, and the model's own head."""
    path = heads(name)
    layout = prepare(path, config()).layout
    whole, raw = stock(path), dict(mx.load(str(path / "model.safetensors")))
    assert layout.head is not None and not layout.lacks_head
    body: Any = body_of(whole)
    prefix, layer_prefix, names = NAMES[name]
    raw = {key.removeprefix(prefix): value for key, value in raw.items() if key.startswith(prefix)}
    inner = {**config_of(name).get("text_config", config_of(name)), **ALONE}
    one: Any = build({**config_of(name), "text_config": inner} if "text_config" in config_of(name) else inner)
    layer = body_of(one).layers[0]  # type: ignore[union-attr]
    lacking = 1.0 if name == "qwen3_next" else 0.0  # norms of such a checkpoint lack a one
    experts = {key.partition(".experts.")[0] for key in raw if ".experts." in key}
    for start in experts:
        for kind in ("gate_proj", "up_proj", "down_proj"):
            stack = [raw.pop(f"{start}.experts.{i}.{kind}.weight") for i in range(inner["num_experts"])]
            raw[f"{start}.switch_mlp.{kind}.weight"] = mx.stack(stack)
    norms = ("layernorm.weight", "q_norm.weight", "k_norm.weight")
    weights = {
        key.removeprefix(layer_prefix): value + lacking * key.endswith(norms)
        for key, value in raw.items()
        if key.removeprefix(layer_prefix).startswith(("self_attn", "mlp", "input_", "post_"))
    }
    layer.load_weights(list(weights.items()), strict=False)

    def normed(module: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, raw[f"{names[module]}.weight"] + lacking, body.norm.eps)

    tokens, before = mx.array([[3, 5, 17]]), mx.random.normal((1, 3, inner["hidden_size"]))
    pair = [normed("enorm", body.embed_tokens(tokens)), normed("hnorm", before)]
    x = mx.concatenate(pair[::-1] if name == "mimo" else pair, axis=-1) @ raw[f"{names['join']}.weight"].T
    x = normed("norm", layer(x, create_attention_mask(x, None, return_array=True), None))
    owner = next(each for each in whole.modules() if body in each.values())
    expected = owner.lm_head(x) if "lm_head" in owner else body.embed_tokens.as_linear(x)
    head = layout.head
    states = head.states(tokens, before, head.make_cache(256))
    assert mx.allclose(states, x, atol=1e-4) and mx.allclose(head.logits(states), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "knows", "bits", "head_bits"),
    [
        *((name, knows, None, None) for name in NAMES for knows in (False, True)),
        *(("qwen3_5", True, 4, head_bits) for head_bits in (4, None, 8)),
        *(("qwen3_5_moe", True, 8, 8), ("mimo", True, 8, None)),
    ],
)
def test_output_is_that_of_plain_decoding(
    heads: Heads, free_rows: None, name: str, knows: bool, bits: int | None, head_bits: int | None
) -> None:
    path = heads(name, knows=knows, bits=bits, head_bits=head_bits)
    with streamed_with_head(path) as model:
        check_equal(generated(model), alone(path, HEAD_PROMPT, HEAD_TOKENS))
        counters = model.counters
        assert counters.num_passes == HEAD_TOKENS - counters.num_right
        if bits is not None:
            assert counters.num_right > HEAD_TOKENS / 3
        elif knows:
            assert counters.num_right == counters.num_guessed and counters.num_passes < HEAD_TOKENS / 3
        else:
            assert counters.num_guessed > counters.num_right
        head = model.layout.head
        assert head is not None and any(".scales" in each.name for each in head.parameters) is (head_bits is not None)


def test_a_long_prompt_is_read_in_parts(heads: Heads, free_rows: None) -> None:
    """Its head knows as many tokens as the plan has room for, and begins anew."""
    path, prompt = heads("qwen3_5", knows=True), [(7 * i * i + 3 * i) % 300 for i in range(700)]
    with streamed_with_head(path) as model:
        assert model.plan.context_length == 256
        check_equal(generated(model, prompt), alone(path, prompt, HEAD_TOKENS))
        assert model.counters.num_right > HEAD_TOKENS / 2


def test_the_plan_counts_the_head_and_the_budget_holds(heads: Heads, free_rows: None) -> None:
    path = heads("qwen3_5", knows=True)
    prepared = prepare(path, config())
    assert prepared.plan.mtp_bytes == 0, "the smallest budget has no room"
    head = prepared.layout.head
    assert head is not None
    with streamed_with_head(path) as model:
        plan, stats = model.plan, model.engine.reader.stats  # type: ignore[union-attr]
        assert plan.mtp_bytes >= sum(each.nbytes for each in head.parameters) + 256 * head.row_bytes
        assert ("own guesses (MTP)", plan.mtp_bytes) in plan.parts()
        given = model.own_guesses(None)
        assert given and not model.own_guesses(256), "all room is given"
        del given
        loaded = stats.nbytes
        with_head = sum(each.nbytes for each in head.parameters)
        assert loaded >= with_head
        generated(model)
        read = model.engine.reader.stats.nbytes - loaded  # type: ignore[union-attr]
        rows = 4 * 128 * 2 * (len(HEAD_PROMPT) + 3 * HEAD_TOKENS)  # of the table
        assert read <= (model.counters.num_passes + 1) * plan.read_bytes + rows
        assert footprint() <= plan.budget_bytes


def test_a_head_is_used_where_it_pays(heads: Heads) -> None:
    path = heads("qwen3_5")
    prepared = prepare(path, config(ram_budget_gb=LARGE_GB))
    slow = replace(prepared.machine.disk, bytes_per_second=10e6)
    machine = replace(prepared.machine, disk=slow)
    assert not prepared.plan.read_bytes and not prepared.plan.mtp_bytes, "nothing is streamed"
    budgets = [prepared.plan.minimum_bytes / 1e9 + 0.0002 * i for i in range(40)]
    plans = [make_plan(prepared.sizes, config(ram_budget_gb=budget), machine) for budget in budgets]
    used, off = [plan for plan in plans if plan.mtp_bytes], prepare(path, config(mtp="off")).sizes
    assert used
    for plan in used:
        assert plan.peak_bytes <= plan.budget_bytes and plan.read_bytes > 0
        plain = make_plan(off, config(ram_budget_gb=plan.budget_bytes / 1e9), machine)
        assert plan.prefill_step_size == plain.prefill_step_size and not plain.mtp_bytes
    fast = replace(machine, disk=replace(slow, bytes_per_second=1e12))
    same = config(ram_budget_gb=used[0].budget_bytes / 1e9)
    assert not make_plan(prepared.sizes, same, fast).mtp_bytes, "rows cost time where computing is the limit"


@pytest.mark.parametrize("settings", [{"mtp": "off"}, {"speculation": False}, {"kv_max_tokens": 1024, "kv_keep": 256}])
def test_no_head_is_loaded_where_nothing_is_guessed(heads: Heads, settings: dict[str, Any]) -> None:
    assert prepare(heads("qwen3_5"), config(**settings)).layout.head is None


def test_loading_a_head_draws_no_random_numbers(heads: Heads) -> None:
    """With a seed from before the model was loaded, samples are those of mlx-lm."""
    path, found = heads("qwen3_5"), []
    for load in (stock, lambda path: prepare(path, config())):
        mx.random.seed(7)
        load(path)
        found.append(mx.random.uniform().item())
    assert found[0] == found[1]


def test_a_head_that_was_lost(heads: Heads, tmp_path: Path) -> None:
    path = save(tmp_path / "model", config_of("qwen3_5"))
    layout = prepare(path, config()).layout
    assert layout.lacks_head and layout.head is None
    assert not prepare(heads("qwen3_5"), config()).layout.lacks_head
    assert not prepare(save(tmp_path / "plain", configuration("qwen3_5")), config()).layout.lacks_head


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda raw: raw.pop("mtp.fc.weight"),
            r"no tensor for 1 of .* 'language_model.model.embed_tokens.join.weight'",
        ),
        (lambda raw: raw.update({"mtp.fc.weight": mx.zeros((128, 128))}), r"Expected shape \(128, 256\)"),
        (lambda raw: raw.update({"mtp.norm.weight": mx.zeros(128, mx.complex64)}), "unsupported type complex64"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_head_that_does_not_fit_is_named_and_not_used(
    heads: Heads, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, found: str
) -> None:
    path = Path(shutil.copytree(heads("qwen3_5"), tmp_path / "model"))
    raw = dict(mx.load(str(path / "model.safetensors")))
    change(raw)
    mx.eval(raw)
    mx.save_safetensors(str(path / "model.safetensors"), raw, {"format": "mlx"})
    prepared = prepare(path, config())
    assert prepared.layout.head is None and not prepared.layout.lacks_head
    [told] = [each.message for each in caplog.records if "multi-token" in each.message]
    assert re.search(found, told, re.DOTALL) and "mtp='off'" in told
    caplog.clear()
    assert prepare(path, config(mtp="off")).layout.head is None and not caplog.records


def test_a_prompt_from_the_prefix_cache(heads: Heads, free_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head begins with the tokens that are computed."""
    path, prompt = heads("glm4_moe", knows=True), [(7 * i * i + 3 * i) % 300 for i in range(300)]
    for _ in range(2):
        with streamed_with_head(path, kv_prefixes="exact", context_length=512) as model:
            check_equal(generated(model, prompt), alone(path, prompt, HEAD_TOKENS))
            assert model.counters.num_right == model.counters.num_guessed > HEAD_TOKENS / 3
            assert model.prefixes is not None
            num_restored = model.prefixes.counters.num_restored
    assert num_restored >= 256
