"""Some of mlx-vlm's architectures, of which `scripts/zoo_vlm.py` compares all."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_vlm")

from vlm_zoo import compare


@pytest.mark.parametrize("name", ["gemma4", "glm5_next", "llama4", "qwen3_5_moe", "smolvlm"])
def test_outputs_equal(name: str, tmp_path: Path) -> None:
    outcome = compare(name, tmp_path)
    assert (outcome.status, outcome.pictures) == ("equal", True), outcome.text
    assert outcome.num_towers
