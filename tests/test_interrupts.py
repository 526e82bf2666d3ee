"""What an interrupt cuts in two is undone, or refuses: never another bit."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from interrupting import every_interrupt
from mlx_flash import FlashLLM
from mlx_flash.memory.arena import Arena
from mlx_flash.streaming.loans import Loans
from mlx_flash.streaming.stream import WeightStream, _Slot
from models import LLAMA, run, same_bits, save, stock
from test_model import streamed_whole

CALLS = [[1, 2, 3]]
EVERYTHING = 1 << 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), LLAMA | {"num_hidden_layers": 2}, mx.float32)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[mx.array]:
    return run(stock(directory), CALLS)


def loans_of(model: FlashLLM) -> Loans:
    assert model.engine is not None
    return model.engine.loans


def test_interrupts_while_loans_end(directory: Path, expected: list[mx.array]) -> None:
    functions = [
        Loans.recall,
        Loans._end,
        Loans._settle_moving,
        Loans._change_reads,
        WeightStream.complete,
        _Slot.empty,
    ]
    with streamed_whole(directory, cut=1, tile_rows=10**9) as model:
        model.start()
        loans = loans_of(model)

        def prepare() -> None:
            loans.lend(EVERYTHING)
            run(model, CALLS)
            assert loans.nbytes

        num = 0
        for where in every_interrupt(functions, prepare, lambda: loans.recall(1), 2):
            num += 1
            loans.recall(EVERYTHING)
            assert same_bits(run(model, CALLS), expected), where
            assert loans.nbytes == loans.saved_bytes == 0
        assert num > 100


def test_interrupts_while_loans_begin(directory: Path, expected: list[mx.array]) -> None:
    functions = [Loans._copy_out, Loans._change_reads, WeightStream.release, WeightStream._fill, _Slot.empty]
    with streamed_whole(directory, tile_rows=10**9) as model:
        model.start()
        loans = loans_of(model)

        def prepare() -> None:
            loans.recall(EVERYTHING)
            loans.lend(300_000)

        num = 0
        for where in every_interrupt(functions, prepare, lambda: run(model, CALLS) and None, 7):
            num += 1
            assert same_bits(run(model, CALLS), expected), where
        assert num > 50


def test_a_model_that_a_reader_thread_frees(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector frees it in whatever thread allocates memory, also in one that the end waits for."""
    real, freed = os.preadv, threading.Event()

    def preadv(*args: Any) -> int:
        if not freed.is_set() and threading.current_thread().name.startswith("mlx-flash-reader"):
            freed.set()
            gc.enable()
            gc.collect()
        return real(*args)

    model: Any = streamed_whole(directory)
    model.start()
    run(model, CALLS)
    assert model.engine is not None
    reader, unit, arena = model.engine.reader, model.engine.stream.units[0], Arena(1 << 20)
    gc.collect()
    gc.disable()
    try:
        vars(model)["itself"] = model
        del model
        monkeypatch.setattr(os, "preadv", preadv)
        reader.submit(unit.placement.segments, arena.memory)
        assert freed.wait(10)
        end = time.monotonic() + 10
        while [thread for thread in threading.enumerate() if thread.name.startswith("mlx-flash")]:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        gc.enable()
