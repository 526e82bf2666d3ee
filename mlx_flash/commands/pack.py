"""``mlx-flash pack``: a checkpoint in the order in which it is read."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from mlx_flash.commands.common import Status, emit, labelled
from mlx_flash.commands.models import model_of
from mlx_flash.commands.report import compression_in_words as in_words
from mlx_flash.convert.pack import PackReport
from mlx_flash.convert.pack import pack as pack_checkpoint
from mlx_flash.files import nearest
from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.units import make_layout
from mlx_flash.monitor.words import counted, filled
from mlx_flash.residency.machine import computes_on_cores, largest_linear, read_products
from mlx_flash.storage.blocks import Compression, decode_speed, zstandard_library
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.storage.selftest import profile_for

PACKED = """
Packed: {target}, {num_tensors:tensor}, {nbytes:size} in {files}, in {seconds:duration}
Resumed: after {resumed_bytes:size} of an interrupted run
Checked: {is_equal:every tensor was read back and is equal}
Compression: {verdict}
"""
"""A packed checkpoint in words."""


def pack(args: argparse.Namespace, out: TextIO) -> int:
    """Write the packed checkpoint, and report its size."""
    source, target = model_of(args), Path(args.target)
    decision = _Decision(source, target, args.compress_always) if args.compress or args.compress_always else None
    with Status("Packing", args.verbose) as status:
        report = pack_checkpoint(source, target, progress=status.show_bytes, compress=decision)
    facts = {**asdict(report), **(decision.facts() if decision else {})}
    kind = "safetensors file" if report.ratio == 1 else "file"
    more = {"is_equal": True, "files": counted(report.num_shards, kind), "verdict": decision and decision.words(report)}
    emit(args, facts, labelled(filled(PACKED, {**facts, **more})), out)
    return 0


class _Decision:
    """The decision to compress a copy, from measurements of disk, decoder and processor."""

    def __init__(self, source: Path, target: Path, always: bool) -> None:
        zstandard_library()
        self._always = always
        checkpoint, folder = read_checkpoint(source), nearest(target)
        shard = max(checkpoint.shards, key=lambda shard: shard.nbytes).path
        is_there = shard.stat().st_dev == folder.stat().st_dev
        disk = profile_for(shard if is_there else folder, "auto")
        compute = read_products(largest_linear(make_layout(load_lazily(source, checkpoint))))
        speeds = decode_speed(), disk.bytes_per_second, compute
        self._expected = Compression(1.0, *speeds, shares_cores=computes_on_cores())

    def __call__(self, ratio: float) -> bool:
        self._expected = replace(self._expected, ratio=ratio)
        return self._always or self._expected.pays

    def facts(self) -> dict[str, object]:
        """Return what was expected, for JSON."""
        return {"compression": {**asdict(self._expected), "gain": self._expected.gain, "pays": self._expected.pays}}

    def words(self, report: PackReport) -> str:
        """Return the decision and its reasons."""
        if self._expected.ratio == 1:
            return "not compressed: no tensor that every pass reads shrinks"
        if report.ratio < 1:
            return f"compressed to {report.ratio:.0%} of the bytes: {in_words(self._expected)}"
        return f"not compressed: {in_words(self._expected)}. Hint: --compress-always"
