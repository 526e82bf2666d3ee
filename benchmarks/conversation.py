"""Five turns of a chat about a source file, through ``mlx-flash serve`` and the ``openai`` client.

    python benchmarks/conversation.py MODEL --budgets min 1.03 6 --json conversation.json

The first message holds a file of about 4000 tokens. The server keeps prompts with ``--kv-prefixes longest`` in an empty
folder, and is started again before the fourth turn. Noted are the seconds to the first token and the tokens/s after
it. Each budget begins with an empty folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from harness import ROOT, Run, describe, describe_cold, describe_model, make_cold, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from servers import serving

QUESTIONS = (
    "What is this file for? Answer in two sentences.",
    "Which classes does it define? List their names.",
    "Pick the shortest function, and show it with a docstring.",
    "Write a pytest test for that function.",
    "Name one thing that you would rename, and say why.",
)
RESTART = 3
"""The server is started again before this turn, counted from 0."""


def converse(args: argparse.Namespace, budget: str, folder: Path) -> list[Run]:
    """Have the conversation in one budget."""
    words = ["mlx_flash", "serve", "--model", str(args.model), "--ram-budget-gb", budget, "--kv-prefixes", "longest"]
    words += ["--max-tokens", str(args.tokens), *args.flags]
    os.environ["XDG_CACHE_HOME"] = str(folder)
    messages: list[Any] = []
    turns: list[Run] = []
    for first, last in ((0, RESTART), (RESTART, len(QUESTIONS))):
        make_cold(sorted(args.model.glob("*.safetensors")), drop_caches=False)
        with serving(words, folder / f"server-{first}.log") as server:
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=3600
            )
            for number in range(first, last):
                text = QUESTIONS[number] if number else f"```python\n{args.file.read_text()}```\n\n{QUESTIONS[0]}"
                messages.append({"role": "user", "content": text})
                turn = ask(client, messages)
                messages.append({"role": "assistant", "content": turn["answer"]})
                turns.append({"turn": number + 1, "restarted": number == RESTART} | turn)
                print(f"{budget}: {turns[-1]}", flush=True)
            server.end()
    return [turn | {"budget": budget} for turn in turns]


def ask(client: openai.OpenAI, messages: list[Any]) -> Run:
    """Send the conversation so far. Return the answer and its times."""
    began, first, parts, usage = time.perf_counter(), 0.0, list[str](), None
    for chunk in client.chat.completions.create(
        model="default_model", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            parts.append(chunk.choices[0].delta.content)
        usage = chunk.usage or usage
    seconds = time.perf_counter() - began
    assert usage is not None
    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": cached or 0,
        "first_token_seconds": first,
        "answer_tokens": usage.completion_tokens,
        "tokens_per_second": (usage.completion_tokens - 1) / (seconds - first),
        "answer": "".join(parts),
    }


def print_table(turns: Sequence[Run]) -> None:
    """Print the times of all turns."""
    names = ("budget", "turn", "prompt", "from the cache", "first token, s", "tokens", "tokens/s")
    table = Table(*names, box=SIMPLE_HEAD)
    for turn in turns:
        table.add_row(
            turn["budget"],
            f"{turn['turn']}{', after a restart' if turn['restarted'] else ''}",
            str(turn["prompt_tokens"]),
            str(turn["cached_tokens"]),
            f"{turn['first_token_seconds']:.1f}",
            str(turn["answer_tokens"]),
            f"{turn['tokens_per_second']:.2f}",
        )
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Have the conversation in every budget, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--budgets", nargs="+", default=["min"])
    parser.add_argument("--file", type=Path, default=ROOT / "mlx_flash" / "config.py")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of the server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    turns = []
    for budget in args.budgets:
        with tempfile.TemporaryDirectory() as folder:
            turns += converse(args, budget, Path(folder))
    result = describe(args.model, describe_cold()) | {"model": describe_model(args.model), "file": args.file.name}
    write_json(args.json, result | {"load": os.getloadavg(), "turns": turns})
    print_table(turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
