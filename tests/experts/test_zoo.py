"""Architectures that differ in kind, streamed, give stock mlx-lm's bits. ``make zoo`` runs all there are."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import utils as mlx_lm_utils

import zoo
from mlx_flash.experts.expertlayers import SORTED_SIZE
from mlx_flash.experts.pool import ExpertPool
from zoo.compare import GENERATIONS, LONGEST_CALL, compare

KINDS = [
    ("gemma3n", "bf16"),  # embeddings for each layer, shared key-value caches, a predicted residual
    ("gemma4_text:experts", "fp32"),  # experts beside a dense network, keys that are values too
    ("deepseek_v32", "fp32"),  # latent attention, with an indexer's own cache
    ("deepseek_v41", "fp32"),  # layers that pass state on, caches of the model's own
    ("minimax_m3_vl", "fp32"),  # block-sparse attention, a text side of its own
    ("qwen3_next", "fp32"),  # gated delta rule, experts
    ("nemotron-nas", "bf16"),  # layers without attention, or without a network
    ("gpt_oss", "mxfp4"),  # attention sinks, sliding windows, experts with biases
    ("iquestloopcoder", "bf16"),  # layers that are passed through twice and never called
    ("longcat_flash_ngram", "fp32"),  # several embedding tables, two attentions a layer
    ("recurrent_gemma", "bf16"),  # recurrent blocks, tied embeddings
    ("falcon_h1", "mixed"),  # state space and attention side by side; 4 and 8 bits
    ("afm7", "fp32"),  # layers that reuse the keys and values of others
]


@pytest.mark.parametrize(("name", "variant"), KINDS, ids=lambda value: str(value))
def test_an_architecture_streams_exactly(name: str, variant: str) -> None:
    outcome = compare(name, variant, in_turns=True)
    assert outcome.status == "ok", outcome.reason
    assert outcome.num_streamed == outcome.num_layers > 0
    assert outcome.streamed_bytes > 0.9 * outcome.nbytes


def test_every_architecture_takes_its_configuration() -> None:
    """Also one that mlx-lm has added: it gets the settings that architectures share."""
    for name in zoo.names():
        with suppress(SystemExit):  # one needs another package
            config = zoo.configuration(name)
            mlx_lm_utils._get_classes(config)[1].from_dict(config)


def test_early_release_of_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_flash.streaming.stream.arrays_in", lambda *roots: [])
    outcome = compare("qwen3", "fp32")
    assert outcome.status == "failed"
    assert outcome.reason.startswith("logits of a prompt in parts")


def test_functions_compiled_while_streamed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal, one architecture keeps a compiled function, which holds the arrays it saw first."""
    pytest.importorskip("mlx_lm.models.kimi_k3")  # before the patch: it makes kernels when it is imported
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    outcome = compare("kimi_k3", "fp32", in_turns=True)
    assert outcome.status == "ok", outcome.reason


def test_experts_stream_through_pools_of_every_size() -> None:
    outcome = compare("qwen3_moe", "fp32")
    assert outcome.status == "ok", outcome.reason
    assert (outcome.num_stacks, outcome.num_pools) == (3, 6)


def test_an_expert_in_the_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the passes that read experts one by one can see it."""

    def another(self: ExpertPool, key: tuple[int, int]) -> Any:
        return prepare(self, (key[0], (key[1] + 1) % len(self.layers[key[0]].placements)))

    prepare = ExpertPool._prepare
    monkeypatch.setattr(ExpertPool, "_prepare", another)
    outcome = compare("qwen3_moe", "fp32", in_turns=True)
    assert outcome.status == "failed" and outcome.num_cuts > 1 and outcome.num_pools == 0
    assert outcome.reason.startswith("pool of ")


def test_one_call_is_long_enough_for_mlx_lm_to_sort_its_tokens() -> None:
    calls = [rows for generation in GENERATIONS for rows in generation]
    assert max(sum(map(len, rows)) for rows in calls) == SORTED_SIZE == LONGEST_CALL
