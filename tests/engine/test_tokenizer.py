"""The memory of a tokenizer is part of the process, and known before a budget is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlx_lm import tokenizer_utils
from mlx_lm import utils as mlx_lm_utils
from transformers import tokenization_utils_base

import children
from mlx_flash import BudgetError, CheckpointError, FlashConfig, apply_flash_patch, load
from mlx_flash.compat import tokenizers
from mlx_flash.compat.tokenizers import without_model
from mlx_flash.engine import prepare as preparing
from mlx_flash.engine.prepare import load_tokenizer, prepare
from models import LLAMA, save
from vocabularies import write_tokenizer

NUM_ENTRIES = 250_000
TEXT = 'Zwölf Boxkämpfer say "model": {"a": 1}, \\ <|end|> 가나다'


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary as large as Gemma's."""
    return write_tokenizer(save(tmp_path_factory.mktemp("large"), LLAMA), NUM_ENTRIES)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_tokenizer(save(tmp_path, LLAMA), 600, ("<|end|>", '"model": {', "decoder"))


MEASURED = """
import sys
from mlx_flash import FlashConfig, load
from mlx_flash.memory.footprint import footprint, peak_footprint
import mlx_flash.engine.prepare
before = footprint()
model, tokenizer = load(sys.argv[1], FlashConfig(ram_budget_gb="min"))
with model:
    loaded = peak_footprint()
    import mlx.core as mx
    mx.eval(model(mx.array([[1, 2, 3]])))
    print(model.plan.budget_bytes, before, loaded, peak_footprint())
"""


PATCHED = MEASURED.replace(
    'model, tokenizer = load(sys.argv[1], FlashConfig(ram_budget_gb="min"))',
    """
from mlx_flash.integration.lmstudio import apply_flash_patch
import mlx_lm
apply_flash_patch(FlashConfig(ram_budget_gb="min"))
model, tokenizer = mlx_lm.load(sys.argv[1])
""",
)
"""mlx-lm loads the model first: it is planned before its tokenizer is there."""


@pytest.mark.parametrize("program", [MEASURED, PATCHED], ids=["load", "patch"])
def test_smallest_budget_holds_a_large_tokenizer_and_its_loading(large: Path, program: str) -> None:
    """Loading took the process to 0.5 GB, and the smallest budget was 0.3 GB."""
    run = children.run("-c", program, large, forks=False)
    assert run.returncode == 0, run.stderr.decode()
    budget, before, loaded, peak = map(int, run.stdout.split())
    assert peak <= budget
    assert loaded - before < 1000 * NUM_ENTRIES  # mlx-lm's own loader: 1600


def test_budget_below_the_cost_of_the_tokenizer_is_refused_before_it_is_loaded(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "footprint", lambda: 150_000_000)
    monkeypatch.setattr(preparing, "active_memory", lambda: 0)  # other tests may have left arrays
    monkeypatch.setattr(tokenizers, "stock_load_tokenizer", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(BudgetError, match=r"0\.3, but loading the tokenizer .*tokenizer\.json holds 7.* values\. Hint"):
        load(str(large), FlashConfig(ram_budget_gb=0.3))


def test_plans_count_the_peak_of_loading(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preparing._REACHED, small.resolve(), 5_001_000_000)
    plan = prepare(small, FlashConfig(ram_budget_gb="min")).plan
    assert plan.budget_bytes == plan.minimum_bytes == 5_008_000_000
    assert prepare(small, FlashConfig(ram_budget_gb=5.008)).plan.minimum_bytes == 5_008_000_000
    with pytest.raises(BudgetError, match=r"5, but loading the tokenizer took this process to 5\.001 GB.*give 5\.008"):
        prepare(small, FlashConfig(ram_budget_gb=5.0))


def test_a_tokenizer_is_mlx_lms(small: Path) -> None:
    ours, stock = load_tokenizer(small), mlx_lm_utils.load_tokenizer(small)
    assert ours.backend_tokenizer.to_str() == stock.backend_tokenizer.to_str()
    assert type(ours.detokenizer) is type(stock.detokenizer)
    assert ours.init_kwargs == stock.init_kwargs and ours.eos_token_ids == stock.eos_token_ids
    tokens = ours.encode(TEXT)
    assert tokens == stock.encode(TEXT) and ours.decode(tokens) == stock.decode(tokens)
    assert tokenizer_utils.json is json and tokenization_utils_base.json is json


def test_the_patch_spares_mlx_lm_the_copies(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(tokenizers, "without_model", lambda path: seen.append(path.name))
    stock = mlx_lm_utils.load_tokenizer
    with apply_flash_patch(FlashConfig(ram_budget_gb=1)):
        mlx_lm_utils.load_tokenizer(small)
    assert seen and set(seen) == {"tokenizer.json"} and mlx_lm_utils.load_tokenizer is stock


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", lambda text: text[:-40]),
        ("tokenizer.json", lambda text: text.replace('"merges": [', '"merges": ]')),
        ("tokenizer.json", lambda text: "null"),
        ("tokenizer_config.json", lambda text: "[]"),
        ("tokenizer_config.json", lambda text: '{"tool_parser_type": "unknown"}'),
        ("config.json", lambda text: '{"model_type": "llama", "eos_token_id": "0"}'),
    ],
)
def test_files_that_are_no_tokenizer(small: Path, name: str, change: Callable[[str], str]) -> None:
    (small / name).write_text(change((small / name).read_text()))
    with pytest.raises(CheckpointError, match=r"cannot load the tokenizer .*Hint"):
        load_tokenizer(small)


def test_a_file_that_begins_with_the_model_is_parsed_whole(small: Path) -> None:
    file = small / "tokenizer.json"
    file.write_text(json.dumps(dict(sorted(json.loads(file.read_text()).items(), reverse=True))))
    assert without_model(file) is None
    assert load_tokenizer(small).encode("a <|end|>")[-1] == 600
