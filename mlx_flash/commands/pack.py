"""``mlx-flash pack``: a checkpoint in the order in which it is read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from mlx_flash.commands.common import Status, print_json
from mlx_flash.commands.report import compression_in_words as in_words
from mlx_flash.convert.pack import PackReport, ReadPattern
from mlx_flash.convert.pack import pack as pack_checkpoint
from mlx_flash.engine.prepare import resolve
from mlx_flash.files import nearest
from mlx_flash.layout.load import load_lazily
from mlx_flash.layout.units import make_layout
from mlx_flash.monitor.words import counted, duration, size
from mlx_flash.residency.machine import compute_bytes_per_second, computes_on_cores
from mlx_flash.storage.codec import Compression, check_installed, decode_speed
from mlx_flash.storage.probe import disk_profile, sample_in
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.storage.selftest import reads_directly


def pack(args: argparse.Namespace, out: TextIO) -> int:
    """Write the packed checkpoint, and report its size and how it is read."""
    source, target = resolve(args.model), Path(args.target)
    decision = _Decision(source, target, args.compress_always) if args.compress or args.compress_always else None
    with Status("Packing", args.verbose) as status:
        report = pack_checkpoint(source, target, progress=status.show_bytes, compress=decision)
    if args.json:
        print_json({**asdict(report), "target": str(report.target), **(decision.facts() if decision else {})}, out)
    else:
        print("\n".join([*_in_words(report), *(decision.words(report) if decision else [])]), file=out)
    return 0


class _Decision:
    """The decision to compress a copy, from measurements of disk, decoder and processor.

    Raises:
        ConfigError: the codec is not installed.
    """

    def __init__(self, source: Path, target: Path, always: bool) -> None:
        check_installed()
        self._always = always
        checkpoint, folder = read_checkpoint(source), nearest(target)
        shard = max(checkpoint.shards, key=lambda shard: shard.nbytes).path
        with ExitStack() as stack:
            is_there = shard.stat().st_dev == folder.stat().st_dev
            file = shard if is_there else stack.enter_context(sample_in(folder))
            disk = disk_profile(file, reads_directly("auto"), may_cache=True)
        compute = compute_bytes_per_second(make_layout(load_lazily(source, checkpoint)))
        speeds = decode_speed(), disk.bytes_per_second, compute
        self._expected = Compression(1.0, *speeds, shares_cores=computes_on_cores())

    def __call__(self, ratio: float) -> bool:
        self._expected = replace(self._expected, ratio=ratio)
        return self._always or self._expected.pays

    def facts(self) -> dict[str, object]:
        """Return what was expected, for JSON."""
        return {"compression": {**asdict(self._expected), "gain": self._expected.gain, "pays": self._expected.pays}}

    def words(self, report: PackReport) -> Iterator[str]:
        """Yield the decision and its reasons."""
        expected = self._expected
        if expected.ratio == 1:
            yield "not compressed: no tensor that every pass reads shrinks"
            return
        is_compressed = report.ratio < 1
        done = f"compressed to {report.ratio:.0%} of the bytes" if is_compressed else "not compressed"
        yield f"{done}: {in_words(expected)}"
        if not is_compressed:
            yield "Hint: --compress-always"


def _in_words(report: PackReport) -> list[str]:
    kind = "safetensors file" if report.ratio == 1 else "file"
    lines = [
        f"{report.target}: {report.num_tensors} tensors, {size(report.nbytes)} in "
        f"{counted(report.num_shards, kind)}, packed in {duration(report.seconds)}",
        f"one pass reads, before: {_reads(report.before)}",
        f"one pass reads, packed: {_reads(report.after)}",
    ]
    lines += [f"resumed after {size(report.resumed_bytes)} of an interrupted run"] if report.resumed_bytes else []
    return [*lines, "every tensor was read back and is equal"]


def _reads(pattern: ReadPattern) -> str:
    return (
        f"{size(pattern.nbytes)} in {pattern.num_reads} runs of {size(pattern.median_bytes)} (median), "
        f"{pattern.num_copied} of them through a bounce buffer"
    )
