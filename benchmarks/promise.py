"""Prompts of many lengths at many budgets, each in a kernel limit: nothing that was accepted is refused or killed.

    python benchmarks/promise.py models/promise --json out.json

Writes four small random models into the folder, where they are missing: a dense one, a mixture of experts, a hybrid of
recurrent layers and attention, and a recurrent one. Each cell of the matrix is a process of its own, with default
settings but for the budget, in a memory limit of the budget plus 5 %. The process notes how many tokens each call of
mlx-lm's model had. mlx-lm, resident and without a limit, repeats these calls; tokens and a digest of all log
probabilities must be equal. A cell is ``ok``, ``refused``, ``killed``, ``differs``, or ``over``: its peak was above the
budget. Cells that the file of ``--json`` has already are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from harness import (
    ROOT,
    KilledError,
    Run,
    describe,
    describe_cold,
    describe_model,
    run_command,
    run_worker,
    write_json,
)
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine.call import ForwardCall, Row
from mlx_flash.engine.prepare import prepare
from mlx_flash.errors import FlashError
from mlx_flash.generation import generate_step
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import peak_footprint

LENGTHS = (10, 700, 2500, 20_000)
BUDGETS = ("min", "1.05 min", "1.5 min", "third", "all")
LIMIT = 1.05
"""The kernel limit, in budgets."""

NUM_TOKENS = 3
SEED = 11

SHARED: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dense": {**SHARED, "model_type": "llama"},
    "mixture": {
        **SHARED,
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "hybrid": {
        **SHARED,
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    "recurrent": {
        "model_type": "mamba",
        "vocab_size": 32000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "state_size": 16,
        "num_hidden_layers": 4,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 16,
        "tie_word_embeddings": True,
    },
}
"""Small ones: attention over 20 000 tokens ends in under a minute."""


def prompt_of(length: int, vocabulary: int) -> list[int]:
    """Return random tokens."""
    tokens: list[int] = np.random.default_rng(SEED).integers(3, vocabulary, length).tolist()
    return tokens


def least_budget(path: Path) -> dict[str, Any]:
    """Return the smallest budget of a model and its bytes."""
    prepared = prepare(path, FlashConfig(ram_budget_gb="min"))
    plan = prepared.plan
    return {"minimum_bytes": plan.minimum_bytes, "model_bytes": plan.model_bytes, "parts": plan.parts()}


def budget_bytes(name: str, least: dict[str, Any]) -> int:
    """Return a budget of the matrix in bytes."""
    minimum, model = int(least["minimum_bytes"]), int(least["model_bytes"])
    shares = {"min": minimum, "1.05 min": minimum * 1.05, "1.5 min": minimum * 1.5, "third": minimum + model / 3}
    return int(shares.get(name, minimum + 1.1 * model)) // 1000 * 1000 + 1000


def watch_calls(length: int) -> list[int]:
    """Return a list that the new tokens of each call of the prompt are appended to, once its results are kept."""
    lengths: list[int] = []
    finish = Row.finish

    def watched(row: Row, calls: Sequence[ForwardCall], outputs: Sequence[Any]) -> None:
        if sum(lengths) < length:
            lengths.extend(call.num_tokens for call in calls)
        finish(row, calls, outputs)

    Row.finish = watched  # type: ignore[method-assign]
    return lengths


def answer(path: Path, budget: float | str, length: int) -> Run:
    """Answer a prompt with default settings in this process."""
    lengths = watch_calls(length)
    began = time.perf_counter()
    try:
        model, config = load_model(path, FlashConfig(ram_budget_gb=budget))
        with model:
            digest, tokens = Digest(), []
            prompt = mx.array(prompt_of(length, config["vocab_size"]))
            for token, logprobs in generate_step(prompt, model, max_tokens=NUM_TOKENS):
                tokens.append(int(token))
                digest.add(logprobs)
            kv = None if model.kv is None else model.kv.note().disk_bytes
            plan = model.plan
    except FlashError as error:
        return {"status": "refused", "why": f"{type(error).__name__}: {error}"}
    return {
        "status": "ok",
        "tokens": tokens,
        "digest": digest.hex,
        "calls": [*lengths, *[1] * (NUM_TOKENS - 1)],  # guessed tokens that were wrong do not count
        "peak_bytes": peak_footprint(),
        "predicted_bytes": plan.peak_bytes,
        "kv_disk_bytes": kv,
        "seconds": time.perf_counter() - began,
    }


class Digest:
    """A digest of log probabilities."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, logprobs: mx.array) -> None:
        """Add those of a token."""
        self._hash.update(np.array(logprobs.astype(mx.float32)).tobytes())

    @property
    def hex(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()


def repeat_calls(path: Path, length: int, calls: Sequence[int]) -> Run:
    """Repeat the calls of a run with mlx-lm: parts of the prompt, and a token each."""
    model, config = mlx_lm_utils.load_model(path)
    cache, digest, found = make_prompt_cache(model), Digest(), []
    tokens = prompt_of(length, config["vocab_size"])
    for num_tokens in calls:
        part, tokens = tokens[:num_tokens], tokens[num_tokens:]
        logits = model(mx.array([part]), cache=cache)
        mx.eval([entry.state for entry in cache])
        if not tokens:
            row = logits[:, -1, :]
            logprobs = (row - mx.logsumexp(row, keepdims=True)).squeeze(0)
            digest.add(logprobs)
            found.append(int(mx.argmax(logprobs)))
            tokens = found[-1:]
    return {"tokens": found, "digest": digest.hex}


def make_models(folder: Path, names: Sequence[str]) -> None:
    """Write the models that are missing."""
    for name in names:
        if not (folder / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            config = folder / f"{name}.json"
            config.write_text(json.dumps(CONFIGURATIONS[name]))
            script = ROOT / "scripts" / "make_random_model.py"
            command = [sys.executable, script, folder / name, "--config", config, "--dtype", "float32"]
            run_command(command, label=f"making {name}")


def cells(options: argparse.Namespace, done: Sequence[Run]) -> Iterator[Run]:
    """Yield the cells of the matrix, without those that are done."""
    known = {key_of(run): run["expected"] for run in done if "expected" in run}
    left = {(run["model"], run["length"], run["budget"]) for run in done}
    least: dict[str, Run] = {}
    for length, name, budget in product(options.lengths, options.models, options.budgets):
        if (name, length, budget) in left:
            continue
        path = options.folder / name
        if name not in least:
            least[name] = run_worker(__file__, [path, "--least"], label=name)
        nbytes = budget_bytes(budget, least[name])
        cell = {"model": name, "budget": budget, "budget_bytes": nbytes, "length": length}
        yield cell | run_cell(path, nbytes, length, known)


def key_of(run: Run) -> str:
    """Return what the tokens of a run depend on: the model and its calls."""
    return f"{run['model']} {run['length']} {run['calls']}"


def run_cell(path: Path, nbytes: int, length: int, known: dict[str, Run]) -> Run:
    """Run a cell in its limit, and compare it with mlx-lm.

    Args:
        path: the model.
        nbytes: the budget.
        length: tokens of the prompt.
        known: results of mlx-lm so far, by model and calls.
    """
    label = f"{path.name} {nbytes} {length}"
    try:
        run = run_worker(
            __file__, [path, "--answer", nbytes / GB, length], label=label, limit_bytes=int(LIMIT * nbytes)
        )
    except KilledError:
        return {"status": "killed"}
    except SystemExit as error:
        return {"status": "failed", "why": str(error)}
    if run["status"] != "ok":
        return run
    key = key_of(run | {"model": path.name, "length": length})
    if key not in known:
        known[key] = run_worker(__file__, [path, "--repeat", length, json.dumps(run["calls"])], label=f"mlx-lm {label}")
    run["expected"] = known[key]
    if any(run[name] != known[key][name] for name in ("tokens", "digest")):
        return run | {"status": "differs"}
    return run | ({"status": "over"} if run["peak_bytes"] > nbytes else {})


def summary(run: Run) -> str:
    """Return a cell in one line."""
    cell = f"{run['model']:10} {run['length']:6} {run['budget']:9} {run['budget_bytes'] / 1e6:8.1f} MB  {run['status']}"
    if "peak_bytes" not in run:
        return f"{cell}  {run.get('why', '')}"
    steps = ", ".join(f"{count} x {length}" for length, count in Counter(run["calls"]).items())
    return f"{cell}  peak {run['peak_bytes'] / 1e6:.1f}, on disk {(run['kv_disk_bytes'] or 0) / 1e6:.1f} MB; {steps}"


def run_matrix(options: argparse.Namespace) -> None:
    """Run the cells that the file lacks, and write it after each."""
    is_begun = options.json is not None and options.json.exists()
    runs = json.loads(options.json.read_text())["cells"] if is_begun else []
    models = [describe_model(options.folder / name) for name in options.models]
    about = describe(options.folder, describe_cold(None, limited=True)) | {"models": models}
    for run in cells(options, runs):
        runs.append(run)
        print(summary(run), flush=True)
        statuses = Counter(run["status"] for run in runs)
        write_json(options.json, about | {"statuses": statuses, "cells": runs})
    print(", ".join(f"{count} {status}" for status, count in Counter(run["status"] for run in runs).items()))


def main() -> None:
    """Run the matrix, or a part of it as a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=BUDGETS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--least", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", nargs=2, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--repeat", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.least:
        print(json.dumps(least_budget(options.folder)))
    elif options.answer:
        print(json.dumps(answer(options.folder, options.answer[0], int(options.answer[1]))))
    elif options.repeat:
        print(json.dumps(repeat_calls(options.folder, int(options.repeat[0]), json.loads(options.repeat[1]))))
    else:
        make_models(options.folder, options.models)
        run_matrix(options)


if __name__ == "__main__":
    main()
