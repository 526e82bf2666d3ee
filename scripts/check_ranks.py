"""Check that a model on several ranks of this machine has the logits and tokens of one rank, bit for bit.

Every rank streams its part of a small random model at the smallest budget: calls one after another, then several
sequences that share passes, one of them with a prompt in parts. It compares logits, tokens and their log probabilities
with those of the whole model on one rank, and of mlx-lm.
With NCCL each rank uses a GPU of its own. Prints a line of JSON for each rank.

Examples:
    python scripts/check_ranks.py --backend nccl --ranks 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

import mlx_flash
from mlx_flash.generation import RowGenerator

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "--layers 12 --hidden-size 1024 --intermediate-size 2816 --heads 16 --kv-heads 8 --vocab-size 4000"
CALLS = ([5, 17, 900, 3, 3, 42, 64, 99, 128, 7, 21], [12], [999], [0], [512, 4, 8])
PROMPT = [1, 5, 9, 30, 2, 7]
PROMPTS = [[(7 * i * i + 3 * i + row) % 3900 for i in range(length)] for row, length in enumerate((150, 1, 40, 65))]
STEP = 32
"""Tokens of a part of a prompt."""
NUM_TOKENS = 6
TIMEOUT_SECONDS = 300

REPRODUCIBLE = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}
"""cuDNN's attention has other last bits from run to run."""

Found = list[Any]
"""Logits of calls, tokens, and for each sequence its tokens and their log probabilities."""


def run_rank(model: Path) -> bool:
    """Compare one rank of a group with one rank alone, and with mlx-lm. Return whether it equals the former."""
    group = mx.distributed.init()
    settings = mlx_flash.FlashConfig(
        ram_budget_gb="min",
        context_length=256 * len(PROMPTS),
        kv_cache="stock",
        kv_prefixes="off",
        prefill_step_size=STEP,
        speculation=False,
    )
    found: list[Found] = []
    read, passes = [], []
    for ranks in (group, None):
        with mlx_flash.load_model(model, settings, group=ranks)[0] as streamed:
            found.append([logits(streamed), tokens(streamed), rows(streamed)])
            assert streamed.engine is not None
            read.append(streamed.engine.reader.stats.nbytes)
            passes.append(streamed.counters.num_passes)
    stock = mlx_lm.utils.load_model(model)[0]
    found.append([logits(stock), tokens(stock), rows_by_stock(stock)])
    names = ("logits", "tokens", "sequences")
    equal = [dict(zip(names, map(are_equal, found[0], other), strict=True)) for other in found[1:]]
    report: dict[str, Any] = {
        "rank": group.rank(),
        "ranks": group.size(),
        "device": str(mx.default_device()),
        "equal_one_rank": equal[0],
        "equal_mlx_lm": equal[1],
        "bytes_read": read[0],
        "bytes_read_by_one_rank": read[1],
        "passes": passes[0],
        "passes_of_one_rank": passes[1],
    }
    print(json.dumps(report), flush=True)
    return group.size() > 1 and all(equal[0].values()) and 0 < read[0] < read[1]


def logits(model: Any) -> list[Any]:
    """Return the logits of some calls with one prompt cache."""
    cache = make_prompt_cache(model)
    found = [model(mx.array([call]), cache=cache) for call in CALLS]
    mx.eval(found)
    return found


def tokens(model: Any) -> list[int]:
    """Return the likeliest tokens after a prompt."""
    cache, found = make_prompt_cache(model), []
    given = mx.array([PROMPT])
    for _ in range(8):
        found.append(int(mx.argmax(model(given, cache=cache)[0, -1]).item()))
        given = mx.array([found[-1:]])
    return found


def rows(model: Any) -> Found:
    """Return tokens and log probabilities of several sequences that share passes."""
    number = len(PROMPTS)
    generator = RowGenerator(
        model, prefill_step_size=STEP, stop_tokens=[], completion_batch_size=number, prefill_batch_size=number
    )
    found: dict[int, Found] = {uid: [] for uid in generator.insert(PROMPTS, [NUM_TOKENS] * number)}
    while any(len(row) < NUM_TOKENS for row in found.values()):
        for response in generator.next_generated():
            found[response.uid].append((int(response.token), response.logprobs))
    generator.close()
    return list(found.values())


def rows_by_stock(model: Any) -> Found:
    """Return the same of sequences that mlx-lm computes one after another."""
    found: Found = []
    for prompt in PROMPTS:
        steps = generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS, prefill_step_size=STEP)
        found.append([(int(token), logprobs) for token, logprobs in steps])
        mx.synchronize(generation_stream)  # it computes a token ahead
    return found


def are_equal(left: Any, right: Any) -> bool:
    """Return whether two values are equal, arrays bit for bit."""
    if isinstance(left, mx.array):
        return left.dtype == right.dtype and bool(
            mx.array_equal(*(mx.contiguous(a).view(mx.uint8) for a in (left, right)))
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(are_equal, left, right))
    return bool(left == right)


def environments(backend: str, num_ranks: int, folder: Path) -> list[dict[str, str]]:
    """Return what each rank needs in its environment, as ``mlx.launch`` sets it."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ranks)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    ring = {"MLX_HOSTFILE": str(hosts)}
    nccl = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(num_ranks)}
    found = []
    for rank in range(num_ranks):
        own = {**nccl, "CUDA_VISIBLE_DEVICES": str(rank), **REPRODUCIBLE} if backend == "nccl" else ring
        found.append({**os.environ, "MLX_RANK": str(rank), **own})
    return found


def main() -> int:
    """Return 0 if all ranks of the group have the logits and tokens of one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["ring", "nccl"], default="ring")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--model", type=Path, help="a model directory (default: a random model of 0.3 GB is made)")
    args = parser.parse_args()
    if "MLX_RANK" in os.environ:
        return int(not run_rank(args.model))
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if args.model is None:
            make = [sys.executable, str(ROOT / "scripts" / "make_random_model.py"), str(model), *SHAPE.split()]
            subprocess.run(make, check=True)
        command = [sys.executable, __file__, "--model", str(model)]
        # Files that ranks wrote for a model are removed with the model.
        cache = {"XDG_CACHE_HOME": folder} if args.model is None else {}
        found = environments(args.backend, args.ranks, Path(folder))
        started = [subprocess.Popen(command, env=env | cache) for env in found]
        try:
            failed = [rank for rank, process in enumerate(started) if process.wait(TIMEOUT_SECONDS)]
        finally:
            for process in started:
                process.kill()
    print(f"{args.ranks} ranks, {args.backend}: " + (f"ranks {failed} FAILED" if failed else "equal to one rank"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
