"""``mlx-flash models``: models that people run, and how fast this machine is expected to run them."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import constants

from mlx_flash.commands.common import Status, emit, make_config, tabled
from mlx_flash.commands.models import downloaded, expect
from mlx_flash.layout.names import Known, known_models
from mlx_flash.memory.footprint import available_memory, footprint, total_memory
from mlx_flash.memory.pressure import MemoryReading
from mlx_flash.monitor.words import formatted
from mlx_flash.residency.machine import kept_products, read_products
from mlx_flash.residency.planner import budget_of
from mlx_flash.residency.sizes import expected_hits
from mlx_flash.storage.probe import folder_profile
from mlx_flash.storage.selftest import reads_directly
from mlx_flash.telemetry import Json

OVERHEAD_BYTES = 1_200_000_000
"""Memory in the budget for all but weights: the process, buffers, keys and values. A plan adds it up exactly."""

KNOWN = {
    "model": "{name}{mark}",
    "size": "{bytes:size}",
    "experts": "{kind}",
    "reads": "{read_bytes:read}",
    "tokens/s": "{tokens_per_second:rate}",
    "licence": "{licence}",
}
"""A table of models."""

CAPTION = (
    "reads: from the disk for each token, with a budget of {budget_bytes:size}; the disk has {disk:GB/s}. Models with "
    "* are on this machine and planned for. The others are estimated from their sizes; `mlx-flash plan NAME` fetches "
    "their headers and plans."
)


def models(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash models``: the models that run best come first."""
    config, here = make_config(args), {model["name"]: Path(model["folder"]) for model in downloaded()}
    memory = MemoryReading(total_memory(), available_memory())
    budget = budget_of(config, memory, footprint(), OVERHEAD_BYTES)
    direct, may_buffer = reads_directly(config.io), config.io == "auto"
    disk = folder_profile(Path(constants.HF_HUB_CACHE), direct, may_buffer).bytes_per_second
    linear = nn.QuantizedLinear(4096, 4096, bits=4)
    linear.set_dtype(mx.bfloat16)  # as the models of the table have it
    speeds = Speeds(disk, read_products(linear), kept_products(linear))
    found = []
    with Status("Planning", args.verbose) as status:
        for number, (name, known) in enumerate(known_models().items()):
            status.show(number, len(known_models()))
            folder = here.get(known.repository)
            outcome = reckon(known, budget, speeds) if folder is None else expect(folder, config)
            found.append({**_facts(name, known), "is_here": folder is not None, **outcome})
    found.sort(key=lambda model: (-(model["tokens_per_second"] or 0), model["name"]))
    marked = ({**model, "mark": " *" if model["is_here"] else ""} for model in found)
    words = tabled(KNOWN, marked, caption=formatted(CAPTION, {"budget_bytes": budget, **asdict(speeds)}))
    words.caption_justify = "left"
    words.columns[0].no_wrap = True
    emit(args, {"budget_bytes": budget, "disk_bytes_per_second": speeds.disk, "models": found}, words, out)
    return 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second: of reads from the disk, and of weights in products, just read and kept in a GPU's own memory.

    The last is 0 where processor and device share memory.
    """

    disk: float
    read: float
    kept: float

    def seconds(self, read_bytes: int, token_bytes: int) -> float:
        """Return the time of a token that computes with some bytes, of which some are read from the disk."""
        computing = read_bytes / self.read + (token_bytes - read_bytes) / (self.kept or self.read)
        return max(read_bytes / self.disk, computing)


def reckon(known: Known, budget: int, speeds: Speeds) -> Json:
    """Return how a model would run that is not on this machine, as :func:`expect` does, from its sizes alone."""
    room, trunk = max(0, budget - OVERHEAD_BYTES), known.token - known.chosen_bytes
    if room < trunk:
        nbytes = known.token - room
    else:
        share = (room - trunk) / known.experts if known.experts else 1.0
        nbytes = round(known.chosen_bytes * (1 - expected_hits(share, known.chosen[1])))
    return {
        "way": "streamed" if nbytes else "in memory",
        "tokens_per_second": 1 / speeds.seconds(nbytes, known.token),
        "budget_bytes": budget,
        "read_bytes": nbytes,
        "why": "",
    }


def _facts(name: str, known: Known) -> Json:
    kind = f"{known.chosen[0]} of {known.chosen[1]}" if known.experts else "dense"
    return {
        "name": name,
        "repository": known.repository,
        "bytes": known.bytes,
        "token_bytes": known.token,
        "kind": kind,
        "licence": known.licence,
        "source": known.source,
    }
