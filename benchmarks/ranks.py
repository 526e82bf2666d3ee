"""One model on several ranks of this machine, each in a memory limit and with a disk of limited speed.

Each rank is ``mlx-flash generate``, as ``mlx.launch`` would start it, in a kernel memory limit of its budget plus 5 %
and in a group of the block-I/O controller that bounds its reads. The tokens are compared with those of stock mlx-lm.
With NCCL each rank has a GPU of its own and no memory limit.

Examples (the first one as root):
    python benchmarks/ranks.py MODEL --ranks 1 2 3 --budget 0.2 --disk-mb-per-second 40
    python benchmarks/ranks.py MODEL --ranks 1 2 --budget 2 --backend nccl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import SMALL_MACHINE, describe, describe_model, in_group, slow_disk, write_json

from mlx_flash.layout.load import load_config

REPRODUCIBLE = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}
"""cuDNN's attention has other last bits from run to run."""

LIMIT_ROOM = 1.05
SPEEDS = ("generation_tokens_per_second", "time_to_first_token_seconds")

PROMPT = "Several machines compute one model."


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


def run_ranks(args: argparse.Namespace, num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run the ranks of one model, and return what the first printed, and the reports of all groups."""
    flags = ["--prompt", PROMPT, "--max-tokens", args.max_tokens, "--ram-budget-gb", args.budget, "--json"]
    flags += ["--ignore-chat-template"]
    command = [sys.executable, "-m", "mlx_flash", "generate", "--model", args.model, *flags]
    limit = [SMALL_MACHINE, "--warm", int(args.budget * LIMIT_ROOM * 1e9)] if args.backend == "ring" else []
    with contextlib.ExitStack() as stack:
        processes = []
        for environment in environments(args.backend, num_ranks, folder):
            words = [*limit, *command]
            if args.disk_mb_per_second is not None:
                entry = stack.enter_context(slow_disk(args.model, int(args.disk_mb_per_second * 1e6)))
                words = in_group(entry, words)
            if num_ranks == 1:
                environment = {**os.environ, **REPRODUCIBLE}
            processes.append(
                subprocess.Popen(
                    [str(word) for word in words],
                    env={**environment, "MLX_FLASH_SPECULATION": "off"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        found = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, found, strict=True):
        if process.returncode:
            raise SystemExit(errors.strip())
    reports = [errors.strip().splitlines()[-1] for _, errors in found] if limit else []
    return [json.loads(found[0][0]), *({"group": report} for report in reports)]


STOCK = """
import json, sys
from mlx_lm import load, stream_generate
model, tokenizer, *_ = load(sys.argv[1])
found = stream_generate(model, tokenizer, sys.argv[2], max_tokens=int(sys.argv[3]))
print(json.dumps([response.token for response in found]))
"""


def stock_tokens(args: argparse.Namespace) -> list[int]:
    """Return the tokens of mlx-lm itself."""
    command = [sys.executable, "-c", STOCK, str(args.model), PROMPT, str(args.max_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **REPRODUCIBLE})
    tokens: list[int] = json.loads(done.stdout)
    return tokens


def main() -> int:
    """Return 1 if tokens differ."""
    args = make_parser().parse_args()
    expected = stock_tokens(args)
    speeds: dict[int, list[float]] = {num_ranks: [] for num_ranks in args.ranks}
    runs, all_equal = [], True
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for num_ranks in args.ranks:
                first, *groups = run_ranks(args, num_ranks, Path(folder))
                speeds[num_ranks].append(first["generation_tokens_per_second"])
                all_equal = all_equal and first["tokens"] == expected
                keys = (*SPEEDS, "peak_memory_bytes", "bytes_read_per_token", "generation_wait_share")
                runs.append({"ranks": num_ranks, **{key: first[key] for key in keys}, "groups": groups})
                print(f"{num_ranks} ranks: {speeds[num_ranks][-1]:.3f} tokens/s", flush=True)
    medians = {num_ranks: statistics.median(found) for num_ranks, found in speeds.items()}
    for num_ranks, speed in medians.items():
        print(f"{num_ranks} ranks: median {speed:.3f} tokens/s, {speed / medians[args.ranks[0]]:.2f} times the first")
    print("tokens:", "those of stock mlx-lm" if all_equal else "DIFFERENT from stock mlx-lm")
    cold = ["weights are read past the page cache in a limit, or with MLX_FLASH_IO=direct"]
    result = {
        **describe(args.model, cold),
        "model": describe_model(args.model),
        "model_type": load_config(args.model)["model_type"],
        "budget_gb": args.budget,
        "backend": args.backend,
        "disk_bytes_per_second_of_a_rank": args.disk_mb_per_second and args.disk_mb_per_second * 1e6,
        "medians": medians,
        "tokens_equal": all_equal,
        "runs": runs,
    }
    write_json(args.json, result)
    return int(not all_equal)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="numbers of ranks")
    parser.add_argument("--budget", type=float, required=True, metavar="GB", help="budget of each rank")
    parser.add_argument("--backend", choices=["ring", "nccl"], default="ring")
    parser.add_argument("--disk-mb-per-second", type=float, metavar="MB", help="speed of each disk; unset for no limit")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
