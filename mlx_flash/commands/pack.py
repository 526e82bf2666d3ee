"""``mlx-flash pack``: a checkpoint in the order in which it is read."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.progress import DownloadColumn

from mlx_flash.commands.common import print_json, shows_progress
from mlx_flash.commands.report import ProgressBar
from mlx_flash.convert.pack import pack as pack_checkpoint
from mlx_flash.model import resolve


def pack(args: argparse.Namespace, out: TextIO) -> int:
    """``mlx-flash pack``: writes the new checkpoint, and tells what it gains."""
    with ProgressBar("Packing", DownloadColumn(), shows_progress(args)) as progress:
        report = pack_checkpoint(resolve(args.source), Path(args.target), verify=args.verify, progress=progress)
    if args.json:
        print_json(asdict(report), out)
    else:
        print(report, file=out)
    return 0
