"""``mlx-flash models``: models that people run, and how fast this machine is expected to run them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import constants

from mlx_flash.commands.common import Status, emit, make_config, tabled
from mlx_flash.commands.models import downloaded, expect
from mlx_flash.layout.names import Known, known_models
from mlx_flash.memory.footprint import MemoryReading, available_memory, footprint, total_memory
from mlx_flash.monitor.words import formatted
from mlx_flash.residency.machine import kept_products, read_products
from mlx_flash.residency.planner import budget_of
from mlx_flash.residency.sizes import expected_hits
from mlx_flash.storage.selftest import profile_for
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
    disk = profile_for(Path(constants.HF_HUB_CACHE), config.io).bytes_per_second
    linear = nn.QuantizedLinear(4096, 4096, bits=4)
    linear.set_dtype(mx.bfloat16)  # as the models of the table have it
    products = read_products(linear), kept_products(linear) or read_products(linear)
    found = []
    with Status("Planning", args.verbose) as status:
        for number, (name, known) in enumerate(known_models().items()):
            status.show(number, len(known_models()))
            folder = here.get(known.repository)
            outcome = reckon(known, budget, disk, *products) if folder is None else expect(folder, config)
            kind = f"{known.chosen[0]} of {known.chosen[1]}" if known.experts else "dense"
            found.append({"name": name, **asdict(known), "kind": kind, "is_here": folder is not None, **outcome})
    found.sort(key=lambda model: (-(model["tokens_per_second"] or 0), model["name"]))
    marked = ({**model, "mark": " *" if model["is_here"] else ""} for model in found)
    words = tabled(KNOWN, marked, caption=formatted(CAPTION, {"budget_bytes": budget, "disk": disk}))
    words.caption_justify = "left"
    words.columns[0].no_wrap = True
    emit(args, {"budget_bytes": budget, "disk_bytes_per_second": disk, "models": found}, words, out)
    return 0


def reckon(known: Known, budget: int, disk: float, read: float, kept: float) -> Json:
    """Return how a model would run that is not on this machine, as :func:`expect` does, from its sizes alone.

    Args:
        known: the model.
        budget: in bytes.
        disk: bytes a second that the disk reads.
        read, kept: bytes a second of products with weights that were just read, and with those that stay in memory.
    """
    room, trunk = max(0, budget - OVERHEAD_BYTES), known.token - known.chosen_bytes
    if room < trunk:
        nbytes = known.token - room
    else:
        share = (room - trunk) / known.experts if known.experts else 1.0
        nbytes = round(known.chosen_bytes * (1 - expected_hits(share, known.chosen[1])))
    computing = nbytes / read + (known.token - nbytes) / kept
    return {
        "way": "streamed" if nbytes else "in memory",
        "tokens_per_second": 1 / max(nbytes / disk, computing),
        "budget_bytes": budget,
        "read_bytes": nbytes,
        "why": "",
    }
