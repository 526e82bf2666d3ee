"""``mlx-flash pack``: a checkpoint in the order in which it is read."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from mlx_flash.commands.common import Status, emit, labelled
from mlx_flash.commands.models import model_of
from mlx_flash.convert.pack import pack as pack_checkpoint
from mlx_flash.monitor.words import counted, filled

PACKED = """
Packed: {target}, {num_tensors:tensor}, {nbytes:size} in {files}, in {seconds:duration}
Resumed: after {resumed_bytes:size} of an interrupted run
Checked: {is_equal:every tensor was read back and is equal}
Compression: {compressed:percent} of the bytes, `mlx-flash plan` of the copy shows whether that pays here
Compression: {is_stock:none since no tensor that every pass reads shrinks}
"""
"""A packed checkpoint in words."""


def pack(args: argparse.Namespace, out: TextIO) -> int:
    """Write the packed checkpoint, and report its size."""
    with Status("Packing", args.verbose) as status:
        found = pack_checkpoint(model_of(args), Path(args.target), progress=status.show_bytes, compresses=args.compress)
    is_stock = found.ratio == 1
    more = {"is_equal": True, "files": counted(found.num_shards, "safetensors file" if is_stock else "file")}
    more |= {"compressed": None if is_stock else found.ratio, "is_stock": is_stock and args.compress}
    emit(args, asdict(found), labelled(filled(PACKED, {**asdict(found), **more})), out)
    return 0
