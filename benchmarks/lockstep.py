"""Time to the first token, and throughput of batches, when calls share passes over the weights.

    python scripts/make_random_model.py MODEL --size-gb 14.5 --dtype bfloat16
    python benchmarks/lockstep.py --model MODEL --prompts 23 2000 8000 --batches 1 2 4 8 16 --json lockstep.json

Three processes, one after another: *now* streams with mlx-flash's loop; *before* streams the same plan with mlx-lm's
``generate_step``, which takes a pass for each part of the prompt, one for its last token and one for the token ahead;
*resident* is stock mlx-lm with all weights in memory. All use the plan's prefill step. First tokens, and every row of
every batch, are compared with mlx-lm's run of that prompt alone: tokens, and their log probabilities to the last bit.
The program fails where one differs. ``--disk-mb-per-second`` slows reads down, as the block-I/O controller does it, to
the ratio of a machine whose processor is much faster than its disk; it needs root. So does ``--limit``, which runs the
streamed models in a kernel memory limit of the budget plus 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import Run, describe, describe_cold, describe_model, last_json, run_command, write_json
from mlx_lm.utils import load_model as load_stock_model
from ranks import LIMIT_ROOM, slow_disk
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mlx_flash import FlashConfig, FlashLLM, generate_step, load_model
from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.compat.generation import stock_generate_step
from mlx_flash.config import GB, parse_budget
from mlx_flash.generation import RowGenerator
from mlx_flash.memory.footprint import peak_footprint

ROW_TOKENS = 23
NOW, BEFORE, RESIDENT = "now", "before", "resident"

Token = tuple[int, float]
"""A token and the logarithm of its probability."""


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        way, model: ``now``, ``before`` or ``resident``; the model's folder.
        budget, io: its size in GB; how files are read.
        prompts: lengths of prompts, of which the first token is timed.
        batches, tokens: numbers of sequences that are decoded together, and tokens of each.
        step: prompt tokens in a call; None for the plan's.
        context: tokens of KV cache to reserve; None for what the prompts and batches need.
    """

    way: str
    model: str
    budget: Any
    prompts: list[int]
    batches: list[int]
    tokens: int
    io: Any
    step: int | None = None
    context: int | None = None


def prompt_of(length: int, row: int = 0) -> list[int]:
    """Return the prompt of a row of a batch; rows differ in length, too."""
    return [7 + (13 * i + 31 * row + row * i * i) % 89 for i in range(length + row % 3)]


def work(job: Job) -> Run:
    """Run a job in this process."""
    if job.way == RESIDENT:
        assert job.step is not None
        model, _ = load_stock_model(Path(job.model))
        run = {"first": first_tokens(stock_generate_step, model, job, job.step)}
        rows = [solo(model, row, job) for row in range(max(job.batches, default=0))]
        return {**run, "rows": rows, "peak_bytes": peak_footprint()}
    least = max([*job.prompts, CACHE_STEP * max(job.batches, default=1)]) + job.tokens + CACHE_STEP
    context = least if job.context is None else job.context
    config = FlashConfig(
        ram_budget_gb=job.budget, context_length=context, speculation=False, telemetry=False, io=job.io
    )
    with load_model(job.model, config)[0] as model:
        model.start()
        step = model.plan.prefill_step_size
        run = {"first": first_tokens(generate_step if job.way == NOW else stock_generate_step, model, job, step)}
        if job.way == NOW:
            run["batches"] = [decode(model, number, job, step) for number in job.batches]
        plan = {"budget_bytes": model.plan.budget_bytes, "read_bytes": model.plan.read_bytes, "step": step}
        return run | {"plan": plan, "peak_bytes": peak_footprint()}


def first_tokens(steps: Any, model: Any, job: Job, step: int) -> list[Run]:
    """Time the first tokens of prompts, after one that compiles the kernels, which MLX keeps for the next process."""
    found: list[Run] = []
    for length in (warm := [] if job.way == BEFORE else [1]) + job.prompts:
        before, began = count(model), time.perf_counter()
        with closing(steps(mx.array(prompt_of(length)), model, max_tokens=job.tokens, prefill_step_size=step)) as one:
            token = chosen(*next(one))
        seconds = time.perf_counter() - began
        num_passes, nbytes = (now - then for now, then in zip(count(model), before, strict=True))
        one_run = {"token": token, "seconds": seconds, "passes": num_passes, "read": nbytes}
        found.append({"prompt_tokens": length, **one_run})
    return found[len(warm) :]


def count(model: Any) -> tuple[int, int]:
    """Return the passes and the bytes read of a streamed model so far."""
    if not isinstance(model, FlashLLM) or model.engine is None:
        return 0, 0
    return model.counters.num_passes, model.engine.reader.stats.nbytes


def chosen(token: Any, logprobs: mx.array) -> Token:
    """Return a token and the logarithm of its probability."""
    return int(token), float(logprobs[int(token)].item())


def solo(model: Any, row: int, job: Job) -> list[Token]:
    """Return the tokens of a row of the batches, computed alone."""
    prompt, num_tokens = mx.array(prompt_of(ROW_TOKENS, row)), job.tokens + max(job.batches)
    steps = stock_generate_step(prompt, model, max_tokens=num_tokens, prefill_step_size=job.step)
    return [chosen(*one) for one in steps]


def decode(model: FlashLLM, number: int, job: Job, step: int) -> Run:
    """Decode several sequences together. The clock runs from the pass of the first tokens to the last."""
    generator = RowGenerator(
        model, prefill_step_size=step, stop_tokens=[], completion_batch_size=number, prefill_batch_size=number
    )
    limit = job.tokens + number  # the first ones go on while the last ones join
    uids = generator.insert([prompt_of(ROW_TOKENS, row) for row in range(number)], [limit] * number)
    rows: dict[int, list[Token]] = {uid: [] for uid in uids}
    while not all(rows.values()):
        take(generator, rows)
    if any(len(row) == limit for row in rows.values()):
        raise RuntimeError(f"the budget does not hold {number} sequences at once. Hint: give a larger --budget.")
    num_first, (passes, nbytes), began = sum(map(len, rows.values())), count(model), time.perf_counter()
    for _ in range(job.tokens - 1):
        take(generator, rows)
    seconds, (passes_after, bytes_after) = time.perf_counter() - began, count(model)
    generator.close()
    counts = {"passes": passes_after - passes, "read": bytes_after - nbytes, "seconds": seconds}
    speed = (sum(map(len, rows.values())) - num_first) / seconds
    return {"sequences": number, "rows": list(rows.values()), **counts, "tokens_per_second": speed}


def take(generator: RowGenerator, rows: dict[int, list[Token]]) -> None:
    """Compute the next tokens of all rows."""
    for response in generator.next_generated():
        rows[response.uid].append(chosen(response.token, response.logprobs))


def run_job(job: Job, mb_per_second: float | None, in_limit: bool) -> Run:
    """Run a job in a process of its own. A streamed one reads at most so fast, and in a limit if one is wanted."""
    command: list[object] = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    with ExitStack() as stack:
        if mb_per_second is not None and job.way != RESIDENT:
            entry = stack.enter_context(slow_disk(Path(job.model), int(mb_per_second * 1e6)))
            command = ["bash", "-c", f'echo $$ > {entry} && exec "$@"', "bash", *command]
        limit_bytes = int(job.budget * LIMIT_ROOM * GB) if in_limit and job.way != RESIDENT else None
        return last_json(run_command(command, label=f"the run {job.way!r}", limit_bytes=limit_bytes))


def differences(runs: dict[str, Run]) -> list[str]:
    """Return where a token is not that of stock mlx-lm."""
    expected = runs[RESIDENT]
    tokens = {one["prompt_tokens"]: one["token"] for one in expected["first"]}
    found = [
        f"{way}: first token after {one['prompt_tokens']} tokens"
        for way in (NOW, BEFORE)
        for one in runs[way]["first"]
        if one["token"] != tokens[one["prompt_tokens"]]
    ]
    return found + [
        f"row {number} of a batch of {batch['sequences']}"
        for batch in runs[NOW]["batches"]
        for number, row in enumerate(batch["rows"])
        if row != expected["rows"][number][: len(row)]
    ]


def print_tables(runs: dict[str, Run]) -> None:
    """Print times to the first token, and throughput."""
    console = Console(width=120)
    by_way = {way: {one["prompt_tokens"]: one for one in runs[way]["first"]} for way in runs}
    table = Table("prompt tokens", "now, s", "passes", "before, s", "passes", "ratio", "resident, s", box=SIMPLE_HEAD)
    for length, now in by_way[NOW].items():
        before, resident = by_way[BEFORE].get(length), by_way[RESIDENT][length]
        old = (f"{before['seconds']:.2f}", str(before["passes"])) if before else ("", "")
        ratio = f"{before['seconds'] / now['seconds']:.1f}" if before else ""
        table.add_row(
            str(length), f"{now['seconds']:.2f}", str(now["passes"]), *old, ratio, f"{resident['seconds']:.2f}"
        )
    console.print(table)
    table = Table("sequences", "tokens/s", "of one", "passes", "GB read a token", "GB/s", box=SIMPLE_HEAD)
    alone = {batch["sequences"]: batch["tokens_per_second"] for batch in runs[NOW]["batches"]}.get(1)
    for batch in runs[NOW]["batches"]:
        speed, num_tokens = batch["tokens_per_second"], batch["tokens_per_second"] * batch["seconds"]
        read, rate = batch["read"] / num_tokens / GB, batch["read"] / batch["seconds"] / GB
        gain = f"{speed / alone:.1f}" if alone else ""
        cells = (f"{speed:.3f}", gain, str(batch["passes"]), f"{read:.2f}", f"{rate:.2f}")
        table.add_row(str(batch["sequences"]), *cells)
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--budget", type=parse_budget, help="in GB; a third of the model unless given")
    parser.add_argument("--prompts", type=int, nargs="*", default=[23, 2000, 8000])
    parser.add_argument("--before", type=int, nargs="*", help="prompts that also run the old way; all unless given")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=4, help="of each sequence of a batch")
    parser.add_argument(
        "--context", type=int, help="tokens of KV cache to reserve; what is not used holds parts of prompts"
    )
    parser.add_argument("--io", choices=["direct", "auto", "buffered"], default="direct")
    parser.add_argument("--disk-mb-per-second", type=float)
    parser.add_argument("--limit", action="store_true", help="run the streamed models in a kernel memory limit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare tokens, print tables."""
    args = parse(arguments)
    if args.job:
        print(json.dumps(work(Job(**json.loads(args.job)))))
        return 0
    model = describe_model(args.model)
    budget = args.budget or model["nbytes"] / 3 / GB
    runs: dict[str, Run] = {}
    for way in (NOW, BEFORE, RESIDENT):
        prompts = args.before if way == BEFORE and args.before is not None else args.prompts
        step = runs[NOW]["plan"]["step"] if NOW in runs else None
        job = Job(way, str(args.model), budget, prompts, args.batches, args.tokens, args.io, step, args.context)
        runs[way] = run_job(job, args.disk_mb_per_second, args.limit)
    result = describe(args.model, describe_cold(None, is_direct=args.io == "direct", limited=args.limit))
    result |= {"model": model, "runs": runs, "differences": differences(runs)}
    write_json(args.json, result)
    plan = runs[NOW]["plan"]
    sizes = (n / GB for n in (model["nbytes"], plan["budget_bytes"], runs[NOW]["peak_bytes"], plan["read_bytes"]))
    print("model {:.2f} GB, budget {:.2f} GB, peak {:.2f} GB, {:.2f} GB read in a pass".format(*sizes))
    print_tables(runs)
    if result["differences"]:
        raise SystemExit("tokens differ from stock mlx-lm's: " + "; ".join(result["differences"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
