"""``mlx-flash pack``: a checkpoint in the order in which it is read."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.progress import DownloadColumn

from mlx_flash.commands.common import print_json, progress_bar
from mlx_flash.convert.order import ReadPattern
from mlx_flash.convert.pack import PackReport
from mlx_flash.convert.pack import pack as pack_checkpoint
from mlx_flash.engine.prepare import resolve
from mlx_flash.monitor.words import counted, duration, size


def pack(args: argparse.Namespace, out: TextIO) -> int:
    """Write the packed checkpoint, and report its size and how it is read."""
    with progress_bar(args, "Packing", DownloadColumn()) as progress:
        report = pack_checkpoint(resolve(args.source), Path(args.target), verify=args.verify, progress=progress)
    if args.json:
        print_json({**asdict(report), "target": str(report.target)}, out)
    else:
        print(_in_words(report, args.verify), file=out)
    return 0


def _in_words(report: PackReport, verified: bool) -> str:
    lines = [
        f"{report.target}: {report.num_tensors} tensors, {size(report.nbytes)} in "
        f"{counted(report.num_shards, 'safetensors file')}, packed in {duration(report.seconds)}",
        f"one pass reads, before: {_reads(report.before)}",
        f"one pass reads, packed: {_reads(report.after)}",
    ]
    lines += [f"resumed after {size(report.resumed_bytes)} of an interrupted run"] if report.resumed_bytes else []
    return "\n".join(lines + ["every tensor was read back and is equal"] * verified)


def _reads(pattern: ReadPattern) -> str:
    return (
        f"{size(pattern.nbytes)} in {pattern.num_reads} runs of {size(pattern.median_bytes)} (median), "
        f"{pattern.num_copied} of them through a bounce buffer"
    )
