"""Passes and time per token of real text: plain, with prompt lookup, and with a draft model.

    python scripts/grow_model.py examples/pair/target MODEL --layers 12 --width 4
    python benchmarks/speculation.py --model MODEL --draft examples/pair/draft --text examples/pair/heldout.txt

Two tasks: *rewrite* gives a passage, and the answer is that passage with its commonest long word renamed. A logits
processor leaves the model no other token, since one so small does not follow instructions: passes are those of any
model that gives this answer. *continue* gives a passage and lets the model go on, greedily and by sampling. Every
answer is compared with that of stock ``mlx_lm.stream_generate``, in memory and with the same prefill step and
processor, and the program fails where a token differs.

Passes are counted and timed, from the first token to the last. How many tokens are guessed follows the measured times
of the machine, unless ``--free-rows`` says that a pass waits for the disk while sixteen rows are computed. Times mean
nothing then.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from harness import describe, describe_cold, describe_model, slowed, write_json
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model as load_stock_model
from passes import FreeRows
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import mlx_flash
from mlx_flash import FlashConfig, FlashLLM
from mlx_flash.config import GB, parse_budget

REWRITE_CHARACTERS, CONTINUE_CHARACTERS = 600, 240
PLAIN, LOOKUP, DRAFT = "plain", "lookup", "draft"


@dataclass(frozen=True)
class Task:
    """A prompt to be continued.

    Attributes:
        name: the kind of the task.
        prompt: the text.
        temperature: of sampling; 0 for greedy decoding.
        seed: of sampling.
        text: the answer; None for the model's own.
    """

    name: str
    prompt: str
    temperature: float = 0.0
    seed: int = 0
    text: str | None = None


@dataclass(frozen=True)
class Answer:
    """A prompt's continuation.

    Attributes:
        tokens: the tokens.
        passes: passes for the tokens after the first one.
        guessed, right: tokens that were guessed and computed, and those that were right.
        seconds: from the first token to the last.
    """

    tokens: list[int]
    passes: int = 0
    guessed: int = 0
    right: int = 0
    seconds: float = 0.0


def make_tasks(text: str, count: int, temperature: float) -> list[Task]:
    """Return tasks of each kind, on passages that are spread over a text."""
    starts = [i * (len(text) - REWRITE_CHARACTERS) // max(1, count - 1) for i in range(count)]
    # A passage begins at the beginning of a line, or nearly so.
    passages = [text[text.rfind("\n", 0, start + 1) + 1 :] for start in starts]
    files = [passage[:REWRITE_CHARACTERS] for passage in passages]
    tasks = [Task("rewrite", file + "\n\n", text=renamed(file)) for file in files]
    for seed, passage in enumerate(passages):
        prompt = passage[:CONTINUE_CHARACTERS]
        tasks += [Task("continue", prompt), Task("continue, sampled", prompt, temperature, seed)]
    return tasks


def renamed(passage: str) -> str:
    """Return a passage in which the commonest word of at least five letters is another."""
    words = Counter(re.findall(r"[A-Za-z_]{5,}", passage))
    return re.sub(rf"\b{words.most_common(1)[0][0]}\b", "renamed", passage) if words else passage


class Fixed:
    """A logits processor that leaves one token at each step.

    Args:
        tokens: the answer.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = iter(tokens)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return logits of which all but one are minus infinity."""
        wanted = next(self._tokens, 0)
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits, -mx.inf)


def answer(generate: Any, model: Any, tokenizer: Any, task: Task, num_tokens: int, step: int, **options: Any) -> Answer:
    """Continue a prompt, and count."""
    mx.random.seed(task.seed)
    counters = model.counters if isinstance(model, FlashLLM) else None
    options |= {"sampler": make_sampler(temp=task.temperature), "prefill_step_size": step}
    if task.text is not None:
        wanted = tokenizer.encode(task.text, add_special_tokens=False)
        options["logits_processors"], num_tokens = [Fixed(wanted)], min(num_tokens, len(wanted))
    steps = generate(model, tokenizer, task.prompt, max_tokens=num_tokens, **options)
    tokens, began = [next(steps).token], time.perf_counter()
    before = replace(counters) if counters is not None else None
    tokens += [response.token for response in steps]
    if counters is None or before is None:
        return Answer(tokens)
    return Answer(
        tokens,
        counters.num_passes - before.num_passes,
        counters.num_guessed - before.num_guessed,
        counters.num_right - before.num_right,
        time.perf_counter() - began,
    )


def streamed(args: argparse.Namespace, tasks: Sequence[Task]) -> tuple[dict[str, list[Answer]], dict[str, Any]]:
    """Return the answers of the streamed model in each way, and the plan in numbers."""
    answers: dict[str, list[Answer]] = {}
    plan: dict[str, Any] = {}
    draft = load_stock_model(args.draft)[0] if args.draft else None
    for speculation in (False, True):
        config = FlashConfig(
            ram_budget_gb=args.budget,
            context_length=args.context,
            speculation=speculation,
            lend_reserves=False,
            telemetry=False,
            io=args.io,
        )
        model, tokenizer = mlx_flash.load(args.model, config)
        with model:
            model.start()
            if args.free_rows:
                model.times = FreeRows(1.0, 1 / 16)
            step = model.plan.prefill_step_size
            plan = {"budget_bytes": model.plan.budget_bytes, "read_bytes": model.plan.read_bytes, "step": step}
            ways: dict[str, dict[str, Any]] = {LOOKUP: {}} if speculation else {PLAIN: {}}
            if speculation and draft is not None:
                ways[DRAFT] = {"draft_model": draft, "num_draft_tokens": args.draft_tokens}
            for way, options in ways.items():
                answers[way] = [
                    answer(mlx_flash.stream_generate, model, tokenizer, task, args.tokens, step, **options)
                    for task in tasks
                ]
    return answers, plan


def by_stock(args: argparse.Namespace, tasks: Sequence[Task], step: int) -> list[Answer]:
    """Return the answers of stock mlx-lm, in memory."""
    model, tokenizer = mlx_lm.load(str(args.model))[:2]
    return [answer(mlx_lm.stream_generate, model, tokenizer, task, args.tokens, step) for task in tasks]


def differences(tasks: Sequence[Task], answers: dict[str, list[Answer]], expected: Sequence[Answer]) -> list[str]:
    """Return the answers whose tokens are not stock mlx-lm's."""
    return [
        f"{way}, {task.name!r}: {task.prompt[:40]!r}"
        for way, found in answers.items()
        for task, one, other in zip(tasks, found, expected, strict=True)
        if one.tokens != other.tokens
    ]


def summarize(tasks: Sequence[Task], answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """Return the counts of each kind of task, in each way."""
    rows = []
    for name in dict.fromkeys(task.name for task in tasks):
        chosen = [i for i, task in enumerate(tasks) if task.name == name]
        for way, found in answers.items():
            some = [found[i] for i in chosen]
            tokens = sum(len(each.tokens) - 1 for each in some)
            row: dict[str, Any] = {"task": name, "way": way, "tokens": tokens}
            row |= {key: sum(getattr(each, key) for each in some) for key in ("passes", "guessed", "right", "seconds")}
            rows.append(row)
    return rows


def print_table(rows: Iterable[dict[str, Any]]) -> None:
    """Print the counts."""
    table = Table("task", "way", "further tokens", "passes", "tokens a pass", "right", "tokens/s", box=SIMPLE_HEAD)
    for row in rows:
        share = f"{row['right']} of {row['guessed']}" if row["guessed"] else ""
        speed = f"{row['tokens'] / max(1, row['passes']):.2f}"
        table.add_row(
            row["task"],
            row["way"],
            str(row["tokens"]),
            str(row["passes"]),
            speed,
            share,
            f"{row['tokens'] / row['seconds']:.2f}",
        )
    Console(width=120).print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="folder of a smaller model with the same vocabulary")
    parser.add_argument("--text", type=Path, required=True, help="a file that neither model was trained on")
    parser.add_argument("--budget", type=parse_budget, default="min")
    parser.add_argument("--context", type=int, default=2048, help="tokens of KV cache to reserve")
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=8, help="the most tokens that the draft model guesses")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--io", choices=["direct", "auto", "buffered"], default="auto")
    parser.add_argument("--disk-mb-per-second", type=float, help="limit reads with the block-I/O controller (root)")
    parser.add_argument("--free-rows", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and time passes, compare tokens, print a table."""
    args = parse(arguments)
    tasks = make_tasks(args.text.read_text(), args.passages, args.temperature)
    with slowed(args.model, args.disk_mb_per_second):
        answers, plan = streamed(args, tasks)
    expected = by_stock(args, tasks, plan["step"])
    if differ := differences(tasks, answers, expected):
        raise SystemExit("tokens differ from stock mlx-lm's: " + "; ".join(differ))
    rows = summarize(tasks, answers)
    result = describe(args.model, describe_cold(None)) | {"model": describe_model(args.model), "plan": plan}
    result |= {"identical": True, "summary": rows}
    write_json(args.json, result)
    sizes = f"budget {plan['budget_bytes'] / GB:.3f} GB, {plan['read_bytes'] / GB:.3f} GB read in a pass"
    print(f"{args.model.name}: {sizes}; every token is stock mlx-lm's")
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
