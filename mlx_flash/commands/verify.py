"""``mlx-flash verify``: a receipt that streamed output equals mlx-lm's own on this machine."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO

from mlx_flash.commands.common import Status, emit, labelled, make_config
from mlx_flash.commands.receipt import (
    FORMAT,
    Call,
    calls_of,
    calls_to_json,
    checked_bytes,
    file_digests,
    first_difference,
    reference_trace,
    streamed_trace,
)
from mlx_flash.commands.report import Json, surroundings
from mlx_flash.commands.vision import is_vision
from mlx_flash.config import FlashConfig
from mlx_flash.convert.pack import pack
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import CheckpointError, FileChangedError, WriteError
from mlx_flash.files import write_atomically
from mlx_flash.folders import cache_directory
from mlx_flash.layout.load import load_config
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import available_memory
from mlx_flash.monitor.words import filled
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.sessions import PrivateFolder
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.storage.selftest import way_of_reading
from mlx_flash.storage.source import identity_of

VERIFICATION = """
Model: {model}, {plan.model_bytes:size}, {num_files:file}
Streamed: in {plan.budget_bytes:size}, {bytes_read:size} read {way_of_reading}
Weights: {bytes_compared:size} in memory compared with the files, {is_equal:equal}, \
{num_wrong:tensor} WRONG, such as {wrong}
Compared: with {library}, {compared}, {num_calls:call}, {num_layers:layer}, all logits
Result: {result}
Against: {other}: {otherwise}
Digest: {digest}
Took: {seconds:duration}
"""
"""A receipt in words."""

EXIT_DIFFERS = 3
RESIDENT_SHARE = 0.7
"""A model with at most this share of the free memory is compared in memory, others layer by layer."""


def verify(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash verify``. Return ``EXIT_DIFFERS`` where anything differs."""
    path = resolve(args.model)
    files = [shard.path for shard in read_checkpoint(path).shards]
    identities = [identity_of(file) for file in files]
    earlier = None if args.against is None else _read_receipt(args.against)
    if args.output is not None:
        _check_place(args.output)
    began = time.perf_counter()
    with Status("Files", args.verbose) as status:
        digests = file_digests(files, status.show_bytes)
    prompt = None
    if is_vision(args, path, prefers=True):
        from mlx_flash.commands.seen import reference_seeing, stream_seeing

        plan, layout, calls, numbers, prompt = stream_seeing(args, path)
    else:
        plan, layout, calls, numbers = _stream(args, path, make_config(args))
    resident = args.reference == "resident"
    if args.reference is None:
        resident = plan.model_bytes <= RESIDENT_SHARE * available_memory()
    library = "mlx-lm" if prompt is None else "mlx-vlm"
    with _stock_copy(path) as stock, Status(library, args.verbose) as status:
        again: dict[str, Any] = {"resident": resident, "report": status.show}
        if prompt is None:
            expected = reference_trace(stock, layout, calls, **again)
        else:
            expected = reference_seeing(stock, layout, prompt, calls, plan.prefill_step_size, **again)
    if changed := [file.name for file, before in zip(files, identities, strict=True) if identity_of(file) != before]:
        raise FileChangedError(f"{changed[0]} was written to while it was verified. Hint: verify again.")
    receipt: Json = {
        "format": FORMAT,
        "model": path.name,
        "is_exact": expected == calls and not numbers["wrong_bytes"],
        "difference": first_difference(expected, calls),
        **numbers,
        "library": library,
        "reference": "resident" if resident else "layers",
        "seconds": time.perf_counter() - began,
        "files": digests,
        "calls": calls_to_json(calls),
        "plan": _plan(plan),
        "way_of_reading": way_of_reading(),
        **surroundings(),
    }
    against = [] if earlier is None else differences(earlier, receipt, args.against)
    _write(args, receipt, against, out)
    return 0 if receipt["is_exact"] and not against else EXIT_DIFFERS


@contextmanager
def _stock_copy(path: Path) -> Iterator[Path]:
    """Yield a folder that stock mlx-lm can load: the model's own, or an uncompressed copy for the moment."""
    if not read_checkpoint(path).tables:
        yield path
        return
    with closing(PrivateFolder(cache_directory() / "verify", "an uncompressed copy")) as private:
        yield pack(path, private.path / path.name).target


def _stream(
    args: argparse.Namespace, path: Path, config: FlashConfig
) -> tuple[ResidencyPlan, ModelLayout, list[Call], Json]:
    """Return the plan, the layers, the streamed calls, and what reading and comparing bytes counted."""
    vocabulary = int(load_config(path).get("vocab_size", 98))
    prompt = [1 + i * 7 % (min(vocabulary, 98) - 1) for i in range(args.prompt_tokens)]
    model, _ = load_model(path, config)
    with model, Status("Streamed", args.verbose) as status:
        assert model.engine is not None
        with checked_bytes(model.engine, model.layout) as (_, numbers):
            found = streamed_trace(model, prompt, args.max_tokens, status.show)
        return model.plan, model.layout, found, numbers


def differences(earlier: Json, receipt: Json, path: Path) -> list[str]:
    """Return the ways in which two receipts are of other weights or other results, in words."""
    found = []
    files = {*earlier["files"], *receipt["files"]}
    if other := sorted(name for name in files if earlier["files"].get(name) != receipt["files"].get(name)):
        found.append(f"other bytes in {', '.join(other)}")
    difference = first_difference(calls_of(earlier, path), calls_of(receipt, path))
    if difference is not None:
        found.append(difference)
    return found


def _read_receipt(path: Path) -> Json:
    try:
        receipt = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the receipt {path}: {error}") from error
    calls_of(receipt, path)
    if not isinstance(receipt.get("files"), dict):
        raise CheckpointError(f"{path} has no digests of files. Hint: make a receipt with mlx-flash verify.")
    return dict(receipt)


def _plan(plan: ResidencyPlan) -> Json:
    return {
        "budget_bytes": plan.budget_bytes,
        "model_bytes": plan.model_bytes,
        "pinned_bytes": plan.pinned_bytes,
        "read_bytes_per_pass": plan.read_bytes,
        "num_slots": plan.streaming.num_slots,
        "num_expert_slots": plan.pool.num_slots if plan.pool else 0,
        "prefill_step_size": plan.prefill_step_size,
    }


def _write(args: argparse.Namespace, receipt: Json, against: Sequence[str], out: TextIO) -> None:
    wrong, calls, difference = receipt["wrong_bytes"], receipt["calls"], receipt["difference"]
    how = {"resident": "the model in memory", "layers": "one layer in memory at a time"}
    more = {
        "num_files": len(receipt["files"]),
        "is_equal": not wrong,
        "num_wrong": len(wrong),
        "wrong": next(iter(wrong), None),
        "compared": how[receipt["reference"]],
        "num_calls": len(calls),
        "num_layers": len(calls[0]["layers"]),
        "result": f"DIFFERENT from {difference} on" if difference else "identical",
        "other": args.against,
        "otherwise": "; ".join(against) or "identical",
        "digest": calls[-1]["logits"],
    }
    words = labelled(filled(VERIFICATION, {**receipt, **more}))
    emit(args, {**receipt, "against": list(against)}, words, out)
    if args.output is not None:  # in the end: if it fails, the result has been printed
        save_receipt(args.output, receipt)


def _check_place(path: Path) -> None:
    """Refuse a place for the receipt before the work, which may take hours.

    Raises:
        WriteError: no file can be written there.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise WriteError(f"cannot write the receipt {path}: its folder takes no such file. Hint: set another file.")


def save_receipt(path: Path, receipt: Json) -> None:
    """Write a receipt to a file, which it replaces.

    Raises:
        WriteError: it cannot be written. The old file is unchanged.
    """
    try:
        write_atomically(path, json.dumps(receipt, indent=1) + "\n", mode=0o644)
    except OSError as error:
        raise WriteError(
            f"cannot write the receipt {path}: {error.strerror}. Hint: --json prints it; set another file."
        ) from error
