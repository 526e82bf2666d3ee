"""``mlx-flash verify``: equal runs have equal receipts, and every byte that is not the file's changes one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from mlx_flash import FileChangedError, FlashConfig
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.commands.verify import EXIT_DIFFERS, Subject, of_tokens, verify
from mlx_flash.engine.prepare import prepare
from mlx_flash.experts.pool import ExpertPool
from mlx_flash.streaming.stream import StreamedLayer, WeightStream
from models import GEMMA3, LLAMA, MAMBA2, QWEN3_MOE, save
from streamed import nbytes_of

MODELS = {"llama": LLAMA, "gemma3": GEMMA3, "mamba2": MAMBA2, "qwen3_moe": QWEN3_MOE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")

    def found(name: str) -> Path:
        path = base / name
        return path if path.exists() else save(path, MODELS[name], num_shards=2 if name == "llama" else 1)

    return found


def verified(directory: Path, *flags: object) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    words = ["verify", "--model", directory, "--ram-budget-gb", "min", "--no-telemetry", "--json", "-m", 3, *flags]
    status = verify(parse_arguments([str(word) for word in words]), out)
    return status, json.loads(out.getvalue())


@pytest.mark.parametrize("name", MODELS)
def test_streamed_output_is_that_of_both_references(folder: Callable[[str], Path], name: str) -> None:
    status, receipt = verified(folder(name), "--reference", "resident")
    assert status == 0 and receipt["is_exact"] and receipt["difference"] is None
    assert receipt["reference"] == "resident" and len(receipt["calls"]) == 4
    assert len(receipt["calls"][0]["layers"]) == MODELS[name]["num_hidden_layers"]
    assert receipt["bytes_compared"] >= receipt["plan"]["read_bytes_per_pass"] > 0
    status, again = verified(folder(name), "--reference", "layers")
    assert status == 0 and again["is_exact"] and again["reference"] == "layers"
    assert again["calls"] == receipt["calls"] and again["files"] == receipt["files"]


def test_long_prompt_is_computed_in_parts(folder: Callable[[str], Path]) -> None:
    status, receipt = verified(folder("qwen3_moe"), "--prompt-tokens", 100, "--prefill-step-size", 64)
    assert status == 0 and [len(call["tokens"]) for call in receipt["calls"]] == [64, 35, 1, 1, 1]
    assert [bool(call["logits"]) for call in receipt["calls"]] == [False, False, True, True, True]


def test_reference_has_one_layer_in_memory(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", {**LLAMA, "num_hidden_layers": 16})
    layout = prepare(directory, FlashConfig(ram_budget_gb="min")).layout
    call = llama.TransformerBlock.__call__
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    of_tokens(layout, [1, 2, 3, 4], 1, 3).repeat(directory, resident=False, report=lambda *_: None)
    assert mx.get_peak_memory() - before < nbytes_of(layout) / 3
    assert llama.TransformerBlock.__call__ is call, "nothing is watched any more"


def flip(memory: memoryview, index: int) -> None:
    np.frombuffer(memory, np.uint8)[index] ^= 1


@pytest.mark.parametrize("where", ["first byte", "last byte", "middle"])
def test_a_flipped_byte_in_a_slot_is_found(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The lowest bit of a weight, in one call only: it may round away in the output."""
    acquire, count = WeightStream.acquire, iter(range(1 << 30))

    def spoiled(self: WeightStream, index: int, inputs: Sequence[mx.array] = ()) -> None:
        acquire(self, index, inputs)
        if next(count) == 3:
            pieces = [piece for segment in self.units[index].reads.segments for piece in segment.pieces]
            piece = pieces[-1] if where == "last byte" else pieces[0]
            at = {"first byte": 0, "last byte": piece.nbytes - 1, "middle": piece.nbytes // 2}[where]
            flip(self.units[index].slot.arena.memory, piece.buffer_offset + at)

    monkeypatch.setattr(WeightStream, "acquire", spoiled)
    status, receipt = verified(folder("llama"))
    assert status == EXIT_DIFFERS and not receipt["is_exact"]
    assert len(receipt["wrong_bytes"]) == 1 and receipt["wrong_bytes"][0].startswith("byte ")


def test_a_flipped_byte_of_an_expert_is_found(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wait_any, spoiled = ExpertPool.wait_any, []

    def wait_and_flip(self: ExpertPool, layer: int, experts: Sequence[int]) -> Sequence[int]:
        came = wait_any(self, layer, experts)
        if came and not spoiled:
            spoiled.append((layer, came[0]))
            piece = self.layers[layer].placements.segments(came[0])[0].pieces[0]
            flip(self.slots.memory(int(self.slot_of[layer][came[0]])), piece.buffer_offset + 3)
        return came

    monkeypatch.setattr(ExpertPool, "wait_any", wait_and_flip)
    status, receipt = verified(folder("qwen3_moe"), "--expert-pool-gb", 0.003, "-m", 1)
    assert spoiled and status == EXIT_DIFFERS and not receipt["is_exact"]


def test_a_computation_that_differs_is_named(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right weights, wrong result: as of a kernel that chooses by shape or address."""
    original, count = StreamedLayer.__call__, iter(range(1 << 30))

    def rounded(layer: StreamedLayer, *args: Any, **kwargs: Any) -> Any:
        result = original(layer, *args, **kwargs)
        return result * (1 + 2**-20) if layer._flash_state[0] == 2 and next(count) == 1 else result

    monkeypatch.setattr(StreamedLayer, "__call__", rounded)
    status, receipt = verified(folder("llama"), "--num-slots", 2)
    assert status == EXIT_DIFFERS and not receipt["wrong_bytes"] and receipt["difference"]


def test_a_file_that_changes_in_between_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path / "model", LLAMA)

    def touched(*args: Any, **keywords: Any) -> Any:
        (directory / "model.safetensors").touch()
        return repeat(*args, **keywords)

    repeat = Subject.repeat
    monkeypatch.setattr(Subject, "repeat", touched)
    with pytest.raises(FileChangedError, match="written to while it was verified"):
        verified(directory)
