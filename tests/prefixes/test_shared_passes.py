"""Prompts that the prefix cache knows, in passes that several sequences share."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_flash import FlashLLM
from mlx_flash.generation.chooser import Chooser
from mlx_flash.generation.sequence import GeneratedSequence, compute
from models import LLAMA, save
from prefix_runs import PROMPT, STEP, generated, loaded, restored

PROMPTS = [PROMPT, PROMPT[::-1]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), LLAMA | {"vocab_size": 1000})


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


def test_a_pass_that_is_undone_has_restored_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert failed and [row.num_restored for row in rows] == [0, 0]
        monkeypatch.undo()
        while not all(row.is_done for row in rows):
            model.advance(rows)
        assert rows[0].num_restored == rows[1].num_restored > STEP
        assert all(isinstance(row.outputs[0], mx.array) for row in rows)
