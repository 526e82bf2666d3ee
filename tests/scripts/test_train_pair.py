"""Tests of the script that trains a target and its draft."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load

from models import script

WORDS = ["some", "words", "that", "follow", "each", "other", "in", "the", "text"]
DOCSTRING = "A docstring of more than eighty letters, which is prose: " + " ".join(WORDS)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of a few files."""
    folder = tmp_path / "library"
    (folder / "site-packages").mkdir(parents=True)
    topics = {f"topic{i}": f"Topic {i}. " + " ".join(WORDS[i % 5 :] * 5) for i in range(9)}
    (folder / "topics.py").write_text(f"topics = {topics!r}  # licence\n")
    (folder / "plain.py").write_text(f'"""{DOCSTRING}"""\nvalue = 1\n')
    (folder / "foreign.py").write_text(f'# Copyright (c) Somebody\n"""{DOCSTRING}"""\n')
    (folder / "site-packages" / "other.py").write_text("other = 1\n")
    (folder / "broken.py").write_text("def (:\n")
    return folder


@pytest.fixture
def train_pair() -> ModuleType:
    return script("train_pair")


def test_text_is_the_librarys_own(train_pair: ModuleType, library: Path) -> None:
    prose, sources, held_out = train_pair.read_text(library)
    assert DOCSTRING in prose
    assert sources == [(library / name).read_text() for name in ("broken.py", "plain.py")]
    assert [text[:8] for text in held_out] == ["Topic 7."]
    assert len(prose) == 1 + 8


def test_windows_repeat_a_passage(train_pair: ModuleType, tmp_path: Path) -> None:
    args = train_pair.parse(["--out", str(tmp_path), "--batch-size", "10", "--context", "63"])
    again = np.array([-1, -2], np.int32)
    text = np.arange(4000, dtype=np.int32)
    batch = np.array(train_pair.Windows(text[:500], text[500:], again, args).draw())
    assert batch.shape == (10, 64)
    assert [-1 in row for row in batch] == 2 * [True] + 8 * [False]
    for row in batch[:2]:
        middle = int(np.argmax(row == -1))
        assert np.array_equal(row[:middle], row[middle + 2 : 2 * middle + 2])
    assert all(np.array_equal(row, np.arange(row[0], row[0] + 64)) for row in batch[2:])


def test_pair_is_trained_and_loaded(
    train_pair: ModuleType, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
    monkeypatch.setattr(train_pair, "SHAPES", {"target": shape, "draft": shape})
    seconds = count(0, 0.005)  # as many steps on a slow machine
    monkeypatch.setattr(train_pair, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    flags = ["--minutes=0.01", "--batch-size=2", "--context=16", "--vocab-size=300", "--warmup=1", "--dtype=float32"]
    mx.disable_compile()  # compiling for the CPU takes seconds
    try:
        assert train_pair.main(["--out", str(tmp_path / "pair"), "--library", str(library), *flags]) == 0
    finally:
        mx.enable_compile()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("target  ") or "target 1" in line]
    losses = [float(line.split("held out ")[1].split()[0]) for line in lines]
    assert losses[-1] < losses[0] < 7
    for name in ("target", "draft"):
        model, tokenizer = load(str(tmp_path / "pair" / name))[:2]
        assert tokenizer.decode(tokenizer.encode("some wörds")) == "some wörds"
        assert tokenizer.eos_token_ids == {0}
        assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.bfloat16}
    assert (tmp_path / "pair" / "heldout.txt").read_text().startswith("Topic 7.")
