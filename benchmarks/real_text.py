"""Guesses on a trained model's answers: how many tokens a pass yields, and what that is worth on a slow disk.

    python benchmarks/real_text.py record --model MODEL --draft DRAFT --json answers.json
    python benchmarks/real_text.py replay answers.json --read-gb 2.1 --disk-mb-per-second 100 300 1000
    python benchmarks/real_text.py stream answers.json --model MODEL --budget 1.03 --io direct --disk-mb-per-second 300

*record* answers the tasks of ``real_tasks.json`` with stock mlx-lm, greedily and in memory. After each token it also
asks the draft model what it would guess. *replay* needs no model: it goes through these answers with the engine's own
sources of guesses and its own choice of how many to take. A clock that counts passes stands for the disk, so a replay
has no noise. *stream* generates the answers with a streamed model, and fails where a token or a logarithm of a
probability is not the recorded one. With ``--disk-mb-per-second`` reads are limited (Linux, root). With ``--read-gb``
too, passes are as long as on replay's clock, whatever they take; it fails where prompt lookup counts other passes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import psutil
from harness import Run, describe, describe_cold, describe_model, slowed, write_json
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_stock_model
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import mlx_flash
from mlx_flash import FlashConfig, FlashLLM
from mlx_flash.config import parse_budget
from mlx_flash.speculation import Draft, Guesses, Lookup, Source, Times

TASKS = Path(__file__).with_name("real_tasks.json")
STEP = 512
"""Prompt tokens of a call; another number may give other bits."""

NONE, LOOKUP, DRAFT, BOTH, OWN = "none", "lookup", "draft", "lookup and draft", "lookup and own head"
SETTLED = 30
"""Tokens after which the way that the engine chooses has to be near the best one."""


@dataclass(frozen=True)
class Answer:
    """A prompt, and the answer that stock mlx-lm gives.

    Attributes:
        kind: the kind of the task.
        prompt, tokens: the prompt with the chat template around it, and the answer.
        digests: of the logarithms of all probabilities that each token was chosen by.
        drafted: for each token, what the draft model guesses to follow it; empty without one.
        text: the answer.
    """

    kind: str
    prompt: list[int]
    tokens: list[int]
    digests: list[str]
    drafted: list[int]
    text: str


@dataclass(frozen=True)
class Counts:
    """An answer after its first token.

    Attributes:
        tokens, passes: tokens, and passes over the weights.
        guessed, right: tokens that were guessed and computed, and those that were right.
        seconds: from the first token to the last.
        settled_tokens, settled_seconds: without the first ``SETTLED`` tokens.
        disk_bytes: what the disk delivered, without what the page cache held; 0 where the system does not tell it.
    """

    tokens: int
    passes: int
    guessed: int
    right: int
    seconds: float
    settled_tokens: int = 0
    settled_seconds: float = 0.0
    disk_bytes: int = 0


@dataclass(frozen=True)
class Clock:
    """Seconds that a pass, a row and a guess of the draft model take."""

    pass_seconds: float
    row_seconds: float
    guess_seconds: float

    def reading(self, num_rows: int) -> float:
        """Return the time of a pass."""
        return max(self.pass_seconds, num_rows * self.row_seconds)


class FixedTimes(Times):
    """Times of a pass that stay as they were given, whatever passes take."""

    def note(self, num_rows: int, seconds: float, waited_seconds: float, reading_seconds: float) -> None:
        """Do nothing."""


class Recorded(Source):
    """Guesses of a draft model that were recorded.

    Attributes:
        num_guessed: guesses that were taken.
    """

    def __init__(self, answer: Answer, guess_seconds: float) -> None:
        self.guess_seconds = guess_seconds
        self.expected = dict[int, float]()
        self.cache: list[Any] = []
        self.num_guessed = 0
        self._answer, self._at = answer, -1

    def add(self, token: int) -> None:
        """Go on to the next token."""
        self._at += 1

    def look(self) -> int:
        """Return the quality of a guess: all are of one."""
        return 1

    def guess(self, number: int) -> Sequence[int]:
        """Return the next tokens. What follows a wrong one does not matter."""
        self.num_guessed += number
        return self._answer.drafted[self._at :][:number]


# --- record ----------------------------------------------------------------------------------------------------------


def record(args: argparse.Namespace) -> int:
    """Answer the tasks, and note what the draft model would guess."""
    loaded = mlx_lm.load(str(args.model))
    model, tokenizer = loaded[0], loaded[1]
    draft = load_stock_model(args.draft)[0] if args.draft else None
    answers, seconds, guess_seconds = [], 0.0, 0.0
    for task in json.loads(args.tasks.read_text()):
        prompt, drafted = prompt_of(tokenizer, task["prompt"]), list[int]()
        steps = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=args.tokens, prefill_step_size=STEP)
        tokens, digests, took = generated(steps)
        if draft is not None:
            drafted, guess_seconds = drafted_after(draft, prompt, tokens)
        answers.append(Answer(task["kind"], prompt, tokens, digests, drafted, tokenizer.decode(tokens)))
        seconds += took
        print(f"{task['kind']}: {len(prompt)} tokens, then {len(tokens)} in {took:.1f} s", flush=True)
    num_tokens = sum(len(answer.tokens) - 1 for answer in answers)
    result = describe(args.model, describe_cold(None)) | {"model": describe_model(args.model)}
    result |= {"draft": describe_model(args.draft) if args.draft else None, "max_tokens": args.tokens}
    result |= {"row_seconds": seconds / num_tokens, "guess_seconds": guess_seconds}
    write_json(args.json, result | {"answers": [asdict(answer) for answer in answers]})
    return 0


def prompt_of(tokenizer: Any, text: str) -> list[int]:
    """Return a message with the model's chat template around it; the text alone where the model has none."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(text))
    return list(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True))


def generated(steps: Iterator[Any]) -> tuple[list[int], list[str], float]:
    """Return the tokens of an answer, digests of their logits, and the seconds from the first to the last."""
    responses, began = [next(steps)], time.perf_counter()
    responses += steps
    seconds = time.perf_counter() - began
    return [each.token for each in responses], [digest(each.logprobs) for each in responses], seconds


def digest(logprobs: mx.array) -> str:
    """Return a short digest of an array."""
    return sha256(np.array(logprobs.astype(mx.float32)).tobytes()).hexdigest()[:8]


def drafted_after(draft: Any, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], float]:
    """Return what a draft model guesses after each token, and the time that it takes for a guess."""
    source, found = Draft(draft, make_prompt_cache(draft), prompt, STEP), []
    for token in tokens:
        source.add(token)
        found += source.guess(1)
    return [int(guess) for guess in found], source.guess_seconds


# --- replay ----------------------------------------------------------------------------------------------------------


def replay(args: argparse.Namespace) -> int:
    """Count passes of the recorded answers with each source, on disks of several speeds."""
    recorded = json.loads(args.answers.read_text())
    answers, rows = answers_of(recorded), []
    for megabytes in args.disk_mb_per_second:
        clock = clock_of(args, recorded, megabytes)
        for way in [NONE, LOOKUP, *([DRAFT, BOTH] if recorded["draft"] else [])]:
            found = [replayed(each, sources_of(each, way, clock), clock, recorded["max_tokens"]) for each in answers]
            rows += [{"disk_mb_per_second": megabytes, "way": way} | row for row in summarized(answers, found)]
    result = {name: recorded[name] for name in ("date", "machine", "versions", "model", "draft")}
    write_json(args.json, result | {"read_gb": args.read_gb, "clock": asdict(clock), "summary": rows})
    print_table(rows)
    return 0


def answers_of(recorded: Run) -> list[Answer]:
    """Return the answers of a file that *record* wrote."""
    return [Answer(**each) for each in recorded["answers"]]


def clock_of(args: argparse.Namespace, recorded: Run, megabytes: float) -> Clock:
    """Return the clock for a disk that reads so many megabytes a second."""
    row = args.row_seconds or recorded["row_seconds"]
    return Clock(args.read_gb * 1e3 / megabytes, row, args.guess_seconds or recorded["guess_seconds"])


def passes_of(counts: Sequence[Counts]) -> list[tuple[int, int]]:
    """Return passes and guessed tokens."""
    return [(each.passes, each.guessed) for each in counts]


def sources_of(answer: Answer, way: str, clock: Clock) -> list[Source]:
    """Return the sources of guesses, at the end of the prompt."""
    lookup, draft = Lookup(answer.prompt), Recorded(answer, clock.guess_seconds)
    ways: dict[str, list[Source]] = {NONE: [], LOOKUP: [lookup], DRAFT: [draft], BOTH: [lookup, draft]}
    return ways[way]


def replayed(answer: Answer, sources: Sequence[Source], clock: Clock, max_tokens: int) -> Counts:
    """Go through an answer as the engine does, on a clock."""
    guesses = Guesses(*sources) if sources else None
    tokens, times = answer.tokens, FixedTimes(clock.pass_seconds, clock.row_seconds)
    at, passes, num_guessed, reading, marks = 0, 0, 0, 0.0, [0.0]
    if guesses is not None:
        guesses.add(tokens[0])
    while at < len(tokens) - 1:
        limit = max_tokens - at - 2
        guessed = guesses.take(times, limit) if guesses is not None and guesses.look(limit) else []
        pairs = zip(guessed, tokens[at + 1 :], strict=False)
        new = tokens[at + 1 :][: 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
        at, passes, num_guessed = at + len(new), passes + 1, num_guessed + len(guessed)
        reading += clock.reading(1 + len(guessed))
        drafted = sum(each.num_guessed for each in sources if isinstance(each, Recorded))
        marks += [reading + drafted * clock.guess_seconds] * len(new)
        if guesses is not None:
            for token in new:
                guesses.add(token)
            if guessed:
                guesses.note(len(guessed), len(new) - 1)
    num_settled = max(0, at - SETTLED)
    settled = (num_settled, marks[-1] - marks[SETTLED]) if num_settled else (0, 0.0)
    return Counts(at, passes, num_guessed, at - passes, marks[-1], *settled)


# --- stream ----------------------------------------------------------------------------------------------------------


def stream(args: argparse.Namespace) -> int:
    """Generate the recorded answers with a streamed model, and compare every token and every logit."""
    recorded = json.loads(args.answers.read_text())
    clock = None if args.read_gb is None else clock_of(args, recorded, args.disk_mb_per_second)
    args.disk_mb_per_second = limit = args.disk_mb_per_second if clock is None else None
    num_tokens = args.tokens or recorded["max_tokens"]
    answers = [replace(each, tokens=each.tokens[:num_tokens]) for each in answers_of(recorded)]
    plans, rows = {}, []
    with slowed(args.model, args.disk_mb_per_second):
        for way in args.ways:
            found, plans[way] = streamed(args, answers, num_tokens, way, clock)
            rows += [{"disk_mb_per_second": limit, "way": way} | row for row in summarized(answers, found)]
            if clock is None or way == OWN:  # whose guesses are not recorded
                continue
            expected = [replayed(answer, sources_of(answer, way, clock), clock, num_tokens) for answer in answers]
            if way == LOOKUP and passes_of(found) != passes_of(expected):
                raise SystemExit(f"the engine counts {found}, the replay {expected}")
    result = describe(args.model, describe_cold(is_direct=args.io == "direct" or None)) | {"identical": True}
    result |= {"model": describe_model(args.model), "draft": describe_model(args.draft) if args.draft else None}
    result |= {"clock": clock and asdict(clock), "load": os.getloadavg(), "plans": plans, "tokens": num_tokens}
    write_json(args.json, result | {"summary": rows})
    print(f"every token and every logit is stock mlx-lm's; {json.dumps(plans)}")
    print_table(rows)
    return 0


def streamed(
    args: argparse.Namespace, answers: Sequence[Answer], num_tokens: int, way: str, clock: Clock | None
) -> tuple[list[Counts], Run]:
    """Generate the answers in one way. Return the counts, and the plan and the measured times in numbers."""
    model, tokenizer = mlx_flash.load(args.model, config_of(args, answers, num_tokens, way))
    options = {"draft_model": load_stock_model(args.draft)[0]} if way == BOTH else {}
    with model:
        model.start()
        if clock is not None:
            model.times = FixedTimes(clock.pass_seconds, clock.row_seconds)
        plan, planned = model.plan, asdict(model.times)
        found, row_seconds = zip(
            *[continued(model, tokenizer, each, num_tokens, options) for each in answers], strict=True
        )
        sizes = {"budget_bytes": plan.budget_bytes, "read_bytes": plan.read_bytes, "planned": planned}
        return list(found), sizes | {"pass_seconds": model.times.pass_seconds, "row_seconds": row_seconds}


def config_of(args: argparse.Namespace, answers: Sequence[Answer], num_tokens: int, way: str) -> FlashConfig:
    """Return the settings of a streamed run."""
    return FlashConfig(
        ram_budget_gb=args.budget,
        context_length=max(STEP, *(len(answer.prompt) + num_tokens for answer in answers)),  # has room for all rows
        prefill_step_size=STEP,
        speculation=way != NONE,
        mtp="auto" if way == OWN else "off",
        lend_reserves=False,
        telemetry=False,
        io=args.io,
    )


def continued(
    model: FlashLLM, tokenizer: Any, answer: Answer, num_tokens: int, options: dict[str, Any]
) -> tuple[Counts, float]:
    """Generate an answer again. Return the counts, and the mean over its passes of the measured time of a row.

    Raises:
        SystemExit: a token or a logit is not the recorded one.
    """
    responses, before, began, had, rows = [], None, 0.0, 0, dict[int, float]()
    for response in mlx_flash.stream_generate(
        model, tokenizer, answer.prompt, max_tokens=num_tokens, prefill_step_size=STEP, **options
    ):
        if before is None:
            before, began, had = replace(model.counters), time.perf_counter(), disk_bytes()
        responses.append(response)
        rows[model.counters.num_passes] = model.times.row_seconds
    seconds, delivered = time.perf_counter() - began, disk_bytes() - had
    tokens, digests = [each.token for each in responses], [digest(each.logprobs) for each in responses]
    if (tokens, digests) != (answer.tokens[: len(tokens)], answer.digests[: len(tokens)]):
        raise SystemExit(f"{answer.kind}: other tokens or logits than stock mlx-lm's")
    assert before is not None
    counters = model.counters
    guessed, right = counters.num_guessed - before.num_guessed, counters.num_right - before.num_right
    print(f"{answer.kind}: {len(tokens)} tokens in {seconds:.1f} s", flush=True)
    passes = counters.num_passes - before.num_passes
    counts = Counts(len(tokens) - 1, passes, guessed, right, seconds, disk_bytes=delivered)
    return counts, sum(rows.values()) / len(rows)


def disk_bytes() -> int:
    """Return how many bytes the disk has delivered to this process; 0 where the system does not tell it."""
    return int(psutil.Process().io_counters().read_bytes) if sys.platform == "linux" else 0


# --- results ---------------------------------------------------------------------------------------------------------


def summarized(answers: Sequence[Answer], found: Sequence[Counts]) -> list[Run]:
    """Return the counts of each kind of task, summed, with tokens a pass and tokens/s."""
    rows = []
    for kind in dict.fromkeys(answer.kind for answer in answers):
        some = [asdict(each) for answer, each in zip(answers, found, strict=True) if answer.kind == kind]
        row = {name: sum(each[name] for each in some) for name in some[0]}
        settled = row["settled_tokens"] / row["settled_seconds"] if row["settled_seconds"] else None
        rates = {"tokens_per_pass": row["tokens"] / row["passes"], "tokens_per_second": row["tokens"] / row["seconds"]}
        rows.append({"kind": kind} | row | rates | {"settled_tokens_per_second": settled})
    return rows


def print_table(rows: Iterable[Run]) -> None:
    """Print the counts."""
    names = (
        "disk, MB/s",
        "task",
        "guesses",
        "tokens",
        "passes",
        "tokens a pass",
        "right",
        "tokens/s",
        "after 30",
        "GB",
    )
    table = Table(*names, box=SIMPLE_HEAD)
    for row in rows:
        settled = row["settled_tokens_per_second"]
        table.add_row(
            str(row["disk_mb_per_second"] or ""),
            row["kind"],
            row["way"],
            str(row["tokens"]),
            str(row["passes"]),
            f"{row['tokens_per_pass']:.2f}",
            f"{row['right']} of {row['guessed']}" if row["guessed"] else "",
            f"{row['tokens_per_second']:.3f}",
            f"{settled:.3f}" if settled else "",
            f"{row['disk_bytes'] / 1e9:.2f}" if row["disk_bytes"] else "",
        )
    Console(width=140).print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    adding = commands.add_parser("record")
    adding.set_defaults(run=record)
    adding.add_argument("--model", type=Path, required=True)
    adding.add_argument("--draft", type=Path, help="folder of a smaller model with the same vocabulary")
    adding.add_argument("--tasks", type=Path, default=TASKS)
    adding.add_argument("--tokens", type=int, default=128)
    going = commands.add_parser("replay")
    going.set_defaults(run=replay)
    going.add_argument("--read-gb", type=float, required=True, help="GB that a pass reads")
    going.add_argument("--disk-mb-per-second", type=float, nargs="+", default=[100.0, 300.0, 1000.0])
    streaming = commands.add_parser("stream")
    streaming.set_defaults(run=stream)
    streaming.add_argument("--model", type=Path, required=True)
    streaming.add_argument("--draft", type=Path)
    streaming.add_argument("--budget", type=parse_budget, required=True)
    streaming.add_argument("--ways", nargs="+", choices=[NONE, LOOKUP, BOTH, OWN], default=[NONE, LOOKUP])
    streaming.add_argument("--tokens", type=int, help="the most tokens of an answer; unset for the recorded ones")
    streaming.add_argument("--io", choices=["direct", "auto", "buffered"], default="auto")
    streaming.add_argument("--disk-mb-per-second", type=float)
    streaming.add_argument("--read-gb", type=float, help="GB that a pass reads on the clock")
    for each in (going, streaming):
        each.add_argument("answers", type=Path, help="the file that *record* wrote")
        each.add_argument("--row-seconds", type=float, help="time of a row; unset for the recorded one")
        each.add_argument(
            "--guess-seconds", type=float, help="time of a draft model's guess; unset for the recorded one"
        )
    for each in (adding, going, streaming):
        each.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    args = parse(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
