"""Short names of models: the shipped table agrees with mlx-lm, and the user's own names."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_flash.errors import ConfigError
from mlx_flash.layout.names import known_models, repository_of


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
