"""Nothing that was accepted is refused later: long prompts at the smallest budget, with default settings."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash import BudgetError, FlashConfig, load_model
from mlx_flash.engine.call import Lane, Row, check_least
from mlx_flash.kv.kvledger import KVOptions
from mlx_flash.residency.plan import PROMISED_CONTEXT
from models import LLAMA, MAMBA2, QWEN3_MOE, save, stock
from zoo import configuration

SMALL = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SMALL,
    "mixture": QWEN3_MOE,
    "hybrid": configuration("jamba"),
    "recurrent": MAMBA2,
}
LENGTH, NUM_TOKENS = 520, 4


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_beyond_the_plan_runs_at_the_smallest_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Logits are those of mlx-lm with the parts that were used."""
    lengths, finish = list[int](), Row.finish

    def watched(row: Row, calls: Any, outcome: Any) -> None:
        lengths.extend([call.num_tokens for call in calls][: 1 if calls[0].checkpoints else None])
        finish(row, calls, outcome)

    monkeypatch.setattr("mlx_flash.residency.plan.PROMISED_CONTEXT", LENGTH + NUM_TOKENS)
    monkeypatch.setattr(KVOptions, "under_way_bytes", lambda *_: 4096)  # the buffers are larger than tiny caches
    monkeypatch.setattr(Row, "finish", watched)
    directory, config = save(tmp_path, MODELS[name]), FlashConfig(ram_budget_gb="min", speculation=False)
    prompt = mx.random.randint(3, MODELS[name]["vocab_size"], (LENGTH,), key=mx.random.key(7))
    with load_model(directory, config)[0] as model:
        plan = model.plan
        assert plan.context_length < LENGTH or not plan.cache.token_bytes + plan.activations.scores_per_pair
        found = [(int(token), logprobs) for token, logprobs in generate_step(prompt, model, max_tokens=NUM_TOKENS)]
    del lengths[len(lengths) - (sum(lengths) > LENGTH + NUM_TOKENS - 1) :]  # mlx-lm computes the last token, too
    resident, tokens = stock(directory), [*prompt.tolist(), *[token for token, _ in found[:-1]]]
    cache, ends = make_prompt_cache(resident), [*accumulate(lengths)]
    logits = [
        resident(mx.array([tokens[end - n : end]]), cache=cache)[0, -1] for n, end in zip(lengths, ends, strict=True)
    ]
    assert ends[-1] == len(tokens) and len(lengths) > NUM_TOKENS
    for (token, logprobs), row in zip(found, logits[-NUM_TOKENS:], strict=True):
        assert mx.array_equal(logprobs, row - mx.logsumexp(row)) and token == int(mx.argmax(row))


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_smallest_budget_has_room_for_the_tokens_of_a_prompt(tmp_path: Path, name: str) -> None:
    """20 000 tokens take 80 kB, by which they were refused. A refused prompt is not cut: that would not help."""
    with load_model(save(tmp_path, MODELS[name]), FlashConfig(ram_budget_gb="min"))[0] as model:
        model.start()
        tokens = mx.zeros((1, PROMISED_CONTEXT), mx.int32)
        mx.eval(tokens)
        row = model.row(tokens, model.make_cache(), 2048)
        check_least(model.plan, Lane(row.whole))
        others = mx.zeros((model.plan.budget_bytes,), mx.uint8)
        mx.eval(others)
        left, num_left = row.left, len(row.left)
        model.advance([row])
        assert isinstance(row.error, BudgetError) and row.left is left and len(left) == num_left
