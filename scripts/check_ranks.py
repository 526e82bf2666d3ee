"""Check that a model on several ranks of this machine has the logits and tokens of one rank, bit for bit.

Every rank streams its layers of a small random model at the smallest budget, then the whole model alone. With NCCL each
rank uses a GPU of its own. Prints a line of JSON for each rank.

Example:
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

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "--layers 6 --hidden-size 1024 --intermediate-size 2816 --heads 16 --kv-heads 8 --vocab-size 4000"
CALLS = ([5, 17, 900, 3, 3, 42, 64, 99, 128, 7, 21], [12], [999], [0], [512, 4, 8])
PROMPT = [1, 5, 9, 30, 2, 7]
TIMEOUT_SECONDS = 300


def run_rank(model: Path) -> bool:
    """Compare one rank of a group with one rank alone, and with mlx-lm. Return whether it equals the former."""
    import mlx.core as mx
    import mlx_lm.utils

    import mlx_flash

    group = mx.distributed.init()
    settings = mlx_flash.FlashConfig(ram_budget_gb="min", context_length=256, kv_cache="stock", kv_prefixes="off")
    found: list[tuple[list[mx.array], list[int]]] = []
    read = []
    for ranks in (group, None):
        with mlx_flash.load_model(model, settings, group=ranks)[0] as streamed:
            found.append((logits(streamed), tokens(streamed)))
            assert streamed.engine is not None
            read.append(streamed.engine.reader.stats.nbytes)
    stock = mlx_lm.utils.load_model(model)[0]
    found.append((logits(stock), tokens(stock)))
    equal = [[all(map(mx.array_equal, found[0][0], other[0])), found[0][1] == other[1]] for other in found[1:]]
    report: dict[str, Any] = {
        "rank": group.rank(),
        "ranks": group.size(),
        "device": str(mx.default_device()),
        "logits_and_tokens_equal_one_rank": equal[0],
        "logits_and_tokens_equal_mlx_lm": equal[1],
        "bytes_read": read[0],
        "bytes_read_by_one_rank": read[1],
    }
    print(json.dumps(report), flush=True)
    return group.size() > 1 and all(equal[0]) and 0 < read[0] < read[1]


def logits(model: Any) -> list[Any]:
    """Return the logits of some calls with one prompt cache."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    found = [model(mx.array([call]), cache=cache) for call in CALLS]
    mx.eval(found)
    return found


def tokens(model: Any) -> list[int]:
    """Return the likeliest tokens after a prompt."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache, found = make_prompt_cache(model), []
    given = mx.array([PROMPT])
    for _ in range(8):
        found.append(int(mx.argmax(model(given, cache=cache)[0, -1]).item()))
        given = mx.array([found[-1:]])
    return found


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
        own = {**nccl, "CUDA_VISIBLE_DEVICES": str(rank)} if backend == "nccl" else ring
        found.append({**os.environ, "MLX_RANK": str(rank), **own})
    return found


def main() -> int:
    """Return 0 if all ranks of the group have the logits and tokens of one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["ring", "nccl"], default="ring")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--model", type=Path, help="a model directory (default: a random model of 0.15 GB is made)")
    args = parser.parse_args()
    if "MLX_RANK" in os.environ:
        return int(not run_rank(args.model))
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if args.model is None:
            make = [sys.executable, str(ROOT / "scripts" / "make_random_model.py"), str(model), *SHAPE.split()]
            subprocess.run(make, check=True)
        command = [sys.executable, __file__, "--model", str(model)]
        started = [subprocess.Popen(command, env=env) for env in environments(args.backend, args.ranks, Path(folder))]
        try:
            failed = [rank for rank, process in enumerate(started) if process.wait(TIMEOUT_SECONDS)]
        finally:
            for process in started:
                process.kill()
    print(f"{args.ranks} ranks, {args.backend}: " + (f"ranks {failed} FAILED" if failed else "equal to one rank"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
