"""A model's own head guesses tokens; the output stays mlx-lm's, and the budget holds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import mlx_flash
from mlx_flash import FlashLLM, ReadError, load_model
from mlx_flash.engine.prepare import prepare
from mlx_flash.generation import RowGenerator
from mlx_flash.layout.parts import body_of
from mlx_flash.memory.footprint import footprint
from mlx_flash.residency import planner
from mlx_flash.residency.plan import Streaming
from mlx_flash.residency.planner import make_plan
from models import build, save, stock
from oracle import free_rows as free_rows  # a fixture
from shared_passes import STEP, alone, by_generator, check_equal
from streamed import LARGE_GB, config, failing_once
from zoo import configuration

QWEN = {"norm": "norm", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "join": "fc"}
DEEPSEEK = {"norm": "shared_head.norm", "enorm": "enorm", "hnorm": "hnorm", "join": "eh_proj"}
MIMO = {"norm": "final_layernorm", "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "join": "input_proj"}

NAMES: dict[str, tuple[str, str, Mapping[str, str]]] = {
    "qwen3_5": ("mtp.", "layers.0.", QWEN),
    "qwen3_5_moe": ("mtp.", "layers.0.", QWEN),
    "qwen3_next": ("mtp.", "layers.0.", QWEN),
    "glm4_moe": ("model.layers.4.", "", DEEPSEEK),
    "glm4_moe_lite": ("model.layers.4.", "", DEEPSEEK),
    "deepseek_v32": ("model.layers.4.", "", DEEPSEEK),
    "glm_moe_dsa": ("model.layers.4.", "", DEEPSEEK),
    "mimo": ("model.mtp_layers.0.", "", MIMO),
}
"""Of each model the beginning of the names of the head, of its layer in it, and of the modules beside the layer."""

COUNTS = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}

ALONE = {"num_hidden_layers": 1, "full_attention_interval": 1, "mlp_only_layers": [], "first_k_dense_replace": 0}
"""Entries of a configuration that make a head's layer the only one."""

ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Matrices whose zeros make a layer return its input."""


def config_of(name: str) -> dict[str, Any]:
    found = configuration(name)
    return {**found, **({"text_config": {**found["text_config"], **COUNTS}} if "text_config" in found else COUNTS)}


def save_with_head(
    directory: Path, name: str, *, knows: bool = False, bits: int | None = None, head_bits: int | None = None
) -> Path:
    """Write a random model with a random head; where it ``knows``, the next token follows from the last one alone."""
    config = config_of(name)
    weights = _weights(build(config, bits=bits), knows)
    inner = {**config.get("text_config", config), **ALONE}
    whole = {**config, "text_config": inner} if "text_config" in config else inner
    layer = _weights(build({key: value for key, value in whole.items() if key != "quantization"}), knows)
    [path] = {key.partition("layers.0.")[0] for key in layer if "layers.0." in key}
    dims = inner["hidden_size"]
    prefix, layer_prefix, names = NAMES[name]
    head = {
        f"{layer_prefix}{key.partition('layers.0.')[2]}": value for key, value in layer.items() if "layers.0." in key
    }
    ones, join = mx.ones(dims), 0.05 * mx.random.normal((dims, 2 * dims))
    if knows:
        halves = [mx.zeros((dims, dims)) if is_hidden != (name == "mimo") else mx.eye(dims) for is_hidden in (0, 1)]
        join = mx.concatenate(halves, axis=1)
    head |= {f"{names[norm]}.weight": ones for norm in ("enorm", "hnorm")} | {f"{names['join']}.weight": join}
    head[f"{names['norm']}.weight"] = weights[f"{path}norm.weight"]
    if head_bits is not None:
        head = _quantized(head, head_bits)
    weights |= {f"{prefix}{key}": value for key, value in head.items()}
    if name == "qwen3_next":  # mlx-lm drops the head of such a checkpoint only where experts are one by one
        weights = _one_by_one(weights)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


def _weights(model: nn.Module, knows: bool) -> dict[str, mx.array]:
    found = dict(tree_flatten(model.parameters()))
    if knows:
        dense = dict(tree_flatten(model.parameters()))
        found = {key: mx.zeros_like(value) if _ends(key, dense) else value for key, value in found.items()}
    return found


def _ends(key: str, weights: Mapping[str, mx.array]) -> bool:
    module = key.rpartition(".")[0]
    return f"{module}.weight".endswith(ENDS) and not key.endswith("norm.weight")


def _one_by_one(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    found = dict(weights)
    for key in [key for key in weights if ".switch_mlp." in key]:
        for number, expert in enumerate(found.pop(key)):
            found[key.replace("switch_mlp", f"experts.{number}")] = expert
    return found


def _quantized(head: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    found = dict(head)
    for key, value in head.items():
        if key.endswith(".weight") and value.ndim == 2 and "gate.weight" not in key:
            parts = mx.quantize(value, group_size=32, bits=bits)
            found |= dict(zip((key, f"{key[:-6]}scales", f"{key[:-6]}biases"), parts, strict=True))
    return found


def streamed_with_head(directory: Path, **settings: Any) -> FlashLLM:
    """A model that has its head in memory, and streams whole layers, whatever the planner would do."""
    model, _ = load_model(directory, config(**{"ram_budget_gb": LARGE_GB, **settings}))
    prepared = model._life.prepared
    least = replace(model._life.config, ram_budget_gb="min")
    plan = planner._plain_plan(prepared.sizes.guessing, least, prepared.machine)
    units = prepared.layout.layers
    streaming = Streaming(
        layers=tuple((unit.name, tuple(each.name for each in unit.large)) for unit in units),
        tables=tuple(unit.name for unit in prepared.layout.embeddings if unit.name not in prepared.layout.tied),
        num_units=len(units),
        num_slots=2,
        slot_bytes=max(unit.nbytes for unit in units) + 300_000,
        read_bytes=sum(unit.nbytes for unit in units),
    )
    plan = replace(plan, streaming=streaming, pool=None, budget_bytes=plan.budget_bytes + plan.model_bytes + 50_000_000)
    model._life._stop()
    model._life.carry_out(replace(prepared, plan=plan))
    assert plan.mtp_bytes
    return model


PROMPT = [5, 17, 290, 3, 42, 64, 99, 51, 8, 120]
NUM_TOKENS = 20

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


def generated(model: FlashLLM, prompt: list[int] = PROMPT, **options: Any) -> list[tuple[int, mx.array]]:
    mx.random.seed(3)
    options = {"max_tokens": NUM_TOKENS, "prefill_step_size": STEP, **options}
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


@pytest.mark.parametrize("knows", [False, True], ids=["random", "knows"])
@pytest.mark.parametrize("name", NAMES)
def test_output_is_that_of_plain_decoding(heads: Heads, free_rows: None, name: str, knows: bool) -> None:
    path = heads(name, knows=knows)
    with streamed_with_head(path) as model:
        check_equal(generated(model), alone(path, PROMPT, NUM_TOKENS))
        counters = model.counters
        assert counters.num_passes == NUM_TOKENS - counters.num_right
        if knows:
            assert counters.num_right == counters.num_guessed and counters.num_passes < NUM_TOKENS / 3
        else:
            assert counters.num_guessed > counters.num_right


def test_sampled_with_a_seed(heads: Heads, free_rows: None) -> None:
    path, sampler = heads("qwen3_5"), make_sampler(temp=0.7)
    with streamed_with_head(path) as model:
        check_equal(generated(model, sampler=sampler), alone(path, PROMPT, NUM_TOKENS, sampler=sampler))


@pytest.mark.parametrize(
    ("name", "bits", "head_bits"),
    [("qwen3_5", 4, 4), ("qwen3_5", 4, None), ("qwen3_5", 4, 8), ("qwen3_5_moe", 8, 8), ("mimo", 8, None)],
)
def test_quantized(heads: Heads, free_rows: None, name: str, bits: int, head_bits: int | None) -> None:
    path = heads(name, knows=True, bits=bits, head_bits=head_bits)
    with streamed_with_head(path) as model:
        check_equal(generated(model), alone(path, PROMPT, NUM_TOKENS))
        assert model.counters.num_right > NUM_TOKENS / 3
        head = model.layout.head
        assert head is not None and any(".scales" in each.name for each in head.parameters) is (head_bits is not None)


def test_a_long_prompt_is_read_in_parts(heads: Heads, free_rows: None) -> None:
    """Its head knows as many tokens as the plan has room for, and begins anew."""
    path, prompt = heads("qwen3_5", knows=True), [(7 * i * i + 3 * i) % 300 for i in range(700)]
    with streamed_with_head(path) as model:
        assert model.plan.context_length == 256
        check_equal(generated(model, prompt), alone(path, prompt, NUM_TOKENS))
        assert model.counters.num_right > NUM_TOKENS / 2


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
        loaded = stats.nbytes
        with_head = sum(each.nbytes for each in head.parameters)
        assert loaded >= with_head
        generated(model)
        read = model.engine.reader.stats.nbytes - loaded  # type: ignore[union-attr]
        rows = 4 * 128 * 2 * (len(PROMPT) + 3 * NUM_TOKENS)  # of the table
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


def test_several_sequences_share_passes_and_the_room(heads: Heads, free_rows: None) -> None:
    path = heads("qwen3_5", knows=True)
    prompts = [PROMPT, [9, 8, 7], [300 - i for i in range(40)]]
    with streamed_with_head(path, context_length=512) as model:
        generator = RowGenerator(model, max_tokens=8, prefill_step_size=STEP)
        uids = generator.insert(prompts)
        for got, prompt in zip(by_generator(generator, uids), prompts, strict=True):
            check_equal(got, alone(path, prompt, 8))
        assert model.counters.num_right > 8
        del generator
        first = model.own_guesses(256)
        assert first and model.own_guesses(None) and not model.own_guesses(256), "all room is given"


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_a_failed_read_leaves_sequences_that_go_on(heads: Heads, free_rows: None, name: str) -> None:
    path = heads(name, knows=True)
    with streamed_with_head(path) as model:
        generator = RowGenerator(model, max_tokens=12, prefill_step_size=STEP)
        [uid] = generator.insert([PROMPT])
        found = []
        for number in range(40):
            if number in (0, 2):
                with failing_once(model, 1), pytest.raises(ReadError, match="unplugged"):
                    generator.next()
            _, answers = generator.next()
            found += [(answer.token, answer.logprobs) for answer in answers if answer.uid == uid]
            if len(found) == 12:
                break
        check_equal(found, alone(path, PROMPT, 12))
        assert model.counters.num_right == model.counters.num_guessed > 0


@pytest.mark.parametrize("where", ["between tokens", "in a pass", "in a guess"])
@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_an_interrupt_leaves_the_callers_cache_right(
    heads: Heads, free_rows: None, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    path = heads(name, knows=True)
    expected = alone(path, PROMPT, NUM_TOKENS)
    for stop in (1, 5):
        with streamed_with_head(path) as model, monkeypatch.context() as patch:
            cache, got = make_prompt_cache(model), list[Any]()
            steps = mlx_flash.generate_step(
                mx.array(PROMPT), model, max_tokens=-1, prompt_cache=cache, prefill_step_size=STEP
            )
            with pytest.raises(KeyboardInterrupt):
                for step in steps:
                    got.append(step)
                    if len(got) == stop and where == "between tokens":
                        raise KeyboardInterrupt
                    if len(got) == stop and where == "in a pass":
                        patch.setattr(model.engine.stream, "acquire", interrupted)  # type: ignore[union-attr]
                    elif len(got) == stop:
                        patch.setattr("mlx_flash.speculation.mx.argmax", interrupted)
            patch.undo()
            steps.close()  # type: ignore[attr-defined]
            check_equal(got, expected[: len(got)])
            rest = generated(model, [expected[len(got)][0]], prompt_cache=cache, max_tokens=4)
            check_equal(rest, expected[len(got) + 1 : len(got) + 5])


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_a_cache_that_is_looked_at_between_two_tokens(heads: Heads, free_rows: None) -> None:
    path = heads("qwen3_5", knows=True)
    expected = alone(path, PROMPT, NUM_TOKENS)
    with streamed_with_head(path) as model:
        cache, got = make_prompt_cache(model), []
        for step in mlx_flash.generate_step(
            mx.array(PROMPT), model, max_tokens=NUM_TOKENS, prompt_cache=cache, prefill_step_size=STEP
        ):
            got.append(step)
            if len(got) in (2, 7):
                mx.eval([entry.state for entry in cache])
        check_equal(got, expected)
        assert model.counters.num_right == model.counters.num_guessed > NUM_TOKENS / 3


def test_a_new_budget_without_room_for_the_head(heads: Heads, free_rows: None) -> None:
    path = heads("qwen3_5", knows=True)
    expected = alone(path, PROMPT, NUM_TOKENS)
    with streamed_with_head(path) as model:
        got = []
        for step in mlx_flash.generate_step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS, prefill_step_size=STEP):
            got.append(step)
            if len(got) == 6:
                life = model._life
                life._stop()
                life.engine = None
                plain = prepare(path, config()).plan
                life.carry_out(replace(life.prepared, plan=replace(plain, budget_bytes=10**9)))
                assert not life.plan.mtp_bytes
        check_equal(got, expected)


def test_a_prompt_from_the_prefix_cache(heads: Heads, free_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head begins with the tokens that are computed."""
    path, prompt = heads("glm4_moe", knows=True), [(7 * i * i + 3 * i) % 300 for i in range(300)]
    for _ in range(2):
        with streamed_with_head(path, kv_prefixes="exact", context_length=512) as model:
            check_equal(generated(model, prompt), alone(path, prompt, NUM_TOKENS))
            assert model.counters.num_right == model.counters.num_guessed > NUM_TOKENS / 3
            assert model.prefixes is not None
            num_restored = model.prefixes.counters.num_restored
    assert num_restored >= 256
