"""KV caches that are interrupted at any point: undone, or done, and never wrong or stuck from then on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from interrupt_points import interrupted_in, sample, total_points
from interrupted_kv import SCENARIOS, program

FOLDERS = ("kv",)


def pool_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "mlx-flash-kv" in thread.name]


@pytest.mark.parametrize("name", SCENARIOS)
def test_interrupted_caches_are_right(name: str, tmp_path: Path) -> None:
    run_all = program(name, tmp_path)
    total = total_points(run_all, FOLDERS)
    where = [interrupted_in(run_all, number, FOLDERS) for number in sample(total, 8)]
    print(f"{name}: {sum(map(bool, where))} interrupts at {len(set(where))} places, of {total} points")
    assert not pool_threads()
