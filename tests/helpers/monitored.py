from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import children
from mlx_flash.monitor.frames import Canvas, frame
from mlx_flash.monitor.rates import History, SystemMemory
from mlx_flash.telemetry import SCHEMA, Json, Published

MACHINE = SystemMemory(25_000_000_000, 5_000_000_000, 1_000_000_000, 500_000_000, 0.03)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of its own, also for the processes that are started."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def state(num_layers: int = 24, **sections: Any) -> Json:
    kinds = ["pinned", "done", "done", "computing", "resident", "reading", "waiting", "waiting"]
    states = [kinds[i * 8 // num_layers] for i in range(num_layers)]
    told: Json = {
        "model": {"name": "llama-big", "bytes": 2_430_000_000},
        "units": [
            {"name": f"model.layers.{i}", "kind": "layer", "bytes": 100_000_000, "state": kind,
             "streamed_bytes": 80_000_000 if kind != "pinned" else 0} for i, kind in enumerate(states)
        ],
        "plan": {"budget_bytes": 1_000_000_000, "pinned_bytes": 300_000_000, "resident_bytes": 1_000_000,
                 "slots_bytes": 200_000_000, "kv_bytes": 90_000_000, "activation_bytes": 10_000_000,
                 "disk_bytes_per_second": 2.2e9},
        "passes": {"num_passes": 11, "num_failed": 0, "num_tokens_in": 30, "num_tokens_out": 10, "pass_seconds": 7.0,
                   "decode_seconds": 5.0, "began": 99.5, "last_ended": 99.4, "num_tokens": 1, "batch_size": 1},
        "stream": {"wait_seconds": 2.0, "held_seconds": 4.0},
        "read": {"nbytes": 11_000_000_000, "busy_seconds": 5.5},
        "memory": {"footprint": 800_000_000, "peak_footprint": 850_000_000, "active": 550_000_000, "cache": 50_000_000,
                   "peak": 600_000_000, "kv_and_activations": 49_000_000, "lent": 20_000_000},
    }  # fmt: skip
    for name, changes in sections.items():
        told[name] = {**told.get(name, {}), **changes} if isinstance(changes, dict) else changes
    return told


SLOT = 5_000_000
"""Bytes of an expert."""


def pool(**changes: Any) -> Json:
    counters = ["num_calls", "num_full", "num_routed", "num_hits", "num_predicted", "num_predicted_right"]
    counters += ["num_evicted", "read_bytes"]
    told: Json = {**dict.fromkeys(counters, 0), "wait_seconds": 0.0, "num_slots": 420}
    told |= {"slot_bytes": SLOT, "num_resident": 412, "num_experts": 3072, "expert_bytes": SLOT - 1000}
    return {**told, **changes}


def published(told: Json, clock: float = 100.0, **changes: Any) -> Published:
    fields: dict[str, Any] = {"path": Path("f"), "pid": 4321, "number": 0, "started": 1.0, "schema": SCHEMA}
    return Published(**{**fields, "written": time.time(), "clock": clock, "state": told, **changes})


def canvas(width: int = 80, height: int | None = 24) -> Canvas:
    return Canvas(width, height)


def text_of(*histories: History, chosen: int = 0, on: Canvas | None = None) -> list[str]:
    return [line.plain for line in frame(histories, chosen, MACHINE, on or canvas())]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    done = children.run("-m", "mlx_flash", "monitor", *arguments, env={"COLUMNS": os.environ["COLUMNS"], **environment})
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
