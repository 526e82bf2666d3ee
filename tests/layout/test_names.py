"""Short names of models: the shipped table agrees with mlx-lm, and the user's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlx_flash.errors import ConfigError
from mlx_flash.layout.names import known_models, repository_of

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 128_256, "num_key_value_heads": 8}
_QWEN = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151_936, "head_dim": 128}
_QWEN |= {"num_key_value_heads": 8, "max_position_embeddings": 40_960}
_MIXTURE = _QWEN | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4}
_MIXTURE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_TIED = {"head_dim": 64, "tie_word_embeddings": True}
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "llama-3.2-1b": (_LLAMA | _TIED, (2048, 8192, 16, 32)),
    "llama-3.3-70b": (_LLAMA, (8192, 28_672, 80, 64)),
    "mistral-7b": (_LLAMA | {"vocab_size": 32_768}, (4096, 14_336, 32, 32)),
    "qwen3-8b": (_QWEN, (4096, 12_288, 36, 32)),
    "qwen3-30b-a3b": (_MIXTURE | {"moe_intermediate_size": 768}, (2048, 6144, 48, 32)),
}
"""Configurations of some rows whose models all have 4 bits, and their shapes."""


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_the_table_are_those_of_mlx_lm(name: str) -> None:
    known, (entries, shape) = known_models()[name], CONFIGS[name]
    config = {"tie_word_embeddings": False, **entries, **dict(zip(_SHAPE, shape, strict=True))}
    kind, settings = _get_classes(config)
    model = kind(settings.from_dict(config))
    model.apply(lambda array: array.astype(mx.bfloat16))
    nn.quantize(model, 64, 4)  # nothing is computed
    sizes = {path: array.nbytes for path, array in tree_flatten(model.parameters())}
    assert sum(sizes.values()) == pytest.approx(known.bytes, rel=1e-3)  # routers have 4 bits here, some have 8
    experts = sum(nbytes for path, nbytes in sizes.items() if "switch_mlp" in path)
    table = sum(nbytes for path, nbytes in sizes.items() if "embed_tokens" in path)
    idle = experts - known.chosen_bytes + (0 if config["tie_word_embeddings"] else table)
    assert (known.experts, known.bytes - known.token) == (experts, idle)


def test_rows_make_sense() -> None:
    for name, known in known_models().items():
        assert name == name.lower() and "/" not in name and known.repository.count("/") == 1 and known.source
        assert 0 < known.token <= known.bytes and known.experts <= known.bytes and known.licence
        assert bool(known.experts) == (known.chosen != (0, 1)) and known.chosen_bytes < known.token


def test_names_stand_for_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mlx-flash" / "config.toml"
    file.parent.mkdir()
    file.write_text('num_slots = 2\n[models]\nmine = "some/model"\n"qwen3-8b" = "another/model"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert repository_of("Qwen3-30B-A3B") == "mlx-community/Qwen3-30B-A3B-4bit"
    assert repository_of("mine") == "some/model" and repository_of("qwen3-8b") == "another/model"
    assert repository_of("some/model") == "some/model" and repository_of("nothing") == "nothing"
    (tmp_path / "mine").mkdir()
    assert repository_of("mine") == "mine"
    file.write_text("[models]\nmine = 3\n")
    with pytest.raises(ConfigError, match="table models: it must have names of models, each with a text"):
        repository_of("other")
