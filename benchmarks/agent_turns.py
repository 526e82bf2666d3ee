"""Ten turns of an agent through the server: the tokens of each prompt that were known before and are computed again.

    python benchmarks/agent_turns.py TOKENIZER --json agent_turns.json

TOKENIZER is a folder with a tokenizer whose chat template knows tools. The model is a random one of two layers, since
only tokens are counted; its answers are written here. Requests have the shape of Claude Code's (Anthropic's API: three
system texts, tools, results of calls), with and without a line that changes in each request. The server is started
again before the sixth turn, or before every turn, and before the first turn of a second conversation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import ROOT, Run, describe, write_json
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from live import Live, live
from mlx_flash.server import loaded
from mlx_flash.server.prompts import num_common
from models import make_random_model

TEXT = "the file path must exist before a tool reads it and each change is checked with tests after every step"
NUM_TURNS, RESTART = 10, 6
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json", "vocab.json")


def prose(num_words: int, seed: int) -> str:
    """Return sentences that are the same each time."""
    chosen = random.Random(seed).choices(TEXT.split(), k=num_words)
    return ". ".join(" ".join(chosen[at : at + 12]) for at in range(0, num_words, 12)) + "."


def tool(number: int) -> dict[str, Any]:
    """Return the name, the description and the schema of a tool."""
    fields = {name: {"type": "string", "description": prose(20, number)} for name in ("path", "text", "mode")}
    schema = {"type": "object", "properties": fields, "required": ["path"]}
    return {"name": f"tool_{number}", "description": prose(160, 100 + number), "input_schema": schema}


TOOLS = [tool(number) for number in range(14)]


class Recorder:
    """The prompts that a server computes, and the answers that it gives."""

    def __init__(self) -> None:
        self.answer = ""
        self.prompts: list[list[int]] = []
        self.known: list[list[int]] = []  # prompts with their answers
        self._make_prompt = loaded.make_prompt

    def make_prompt(self, request: Any, tokenizer: Any, *rest: Any) -> Any:
        """Make a prompt, and note its tokens."""
        found = self._make_prompt(request, tokenizer, *rest)
        self.prompts.append(found.tokens)
        self.known.append([*found.tokens, *tokenizer.encode(self.answer, add_special_tokens=False)])
        return found

    def sampler_of(self, sampling: Any, tokenizer: Any, vocab_size: int) -> Any:
        """Return a sampler that chooses the tokens of the answer, and then the end."""
        tokens = iter([*tokenizer.encode(self.answer, add_special_tokens=False), *sorted(tokenizer.eos_token_ids)])
        return lambda logprobs: mx.array([next(tokens)])

    def num_known(self) -> int:
        """Return how many tokens of the last prompt an earlier prompt and its answer begin with."""
        return max((num_common(self.prompts[-1], other) for other in self.known[:-1]), default=0)


def claude(number: int, line: str, task: str, turns: Sequence[tuple[str, dict[str, Any], str]]) -> dict[str, Any]:
    """Return the body of a request as Claude Code sends it."""
    first = [{"type": "text", "text": prose(60, 7)}, {"type": "text", "text": task}]
    messages: list[Any] = [{"role": "user", "content": first}]
    for at, (text, arguments, result) in enumerate(turns):
        call = {"type": "tool_use", "id": f"toolu_{at}", "name": f"tool_{at}", "input": arguments}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text}, call]})
        found = {"type": "tool_result", "tool_use_id": f"toolu_{at}", "content": result}
        messages.append({"role": "user", "content": [found]})
    system = [{"type": "text", "text": text} for text in (line, prose(12, 5), prose(1200, 6)) if text]
    body = {"model": "default_model", "max_tokens": 400, "system": system, "tools": TOOLS, "messages": messages}
    return body | {"metadata": {"user_id": f"user_{number}"}}


def converse(line: str, restarts: Sequence[int], serve: Any, recorder: Recorder) -> Iterator[Run]:
    """Have ten turns with restarts before some, and the first turn of another conversation after a restart."""
    turns: list[tuple[str, dict[str, Any], str]] = []
    sizes = (60, 400, 900, 120, 30, 700, 250, 80, 500, 40)

    def ask(server: Live, number: int, body: dict[str, Any]) -> Run:
        status, reply = server.post("/v1/messages", body)
        assert status == 200, reply
        num_prompt, cached, known = (
            len(recorder.prompts[-1]),
            reply["usage"]["cache_read_input_tokens"],
            recorder.num_known(),
        )
        computed = num_prompt - cached
        again = max(0, known - cached)
        return {"turn": number, "prompt": num_prompt, "computed": computed, "again": again}

    for first, last in pairwise((1, *restarts, NUM_TURNS + 1)):
        with serve() as server:
            for number in range(first, last):
                at = number - 1
                text = f"I look at step {number} now."
                arguments = {"path": f"src/part_{number}.py", "text": prose(25, 40 + number), "mode": "read"}
                call = json.dumps({"name": f"tool_{at}", "arguments": arguments})
                recorder.answer = f"{text}\n<tool_call>\n{call}\n</tool_call>"
                body = claude(number, line.format("c40"), "Mend the tests of the parser.", turns)
                yield ask(server, number, body) | {"restarted": number in restarts}
                turns.append((text, arguments, prose(sizes[at], 60 + number)))
    with serve() as server:
        recorder.answer = "Done."
        body = claude(99, line.format("9a2"), "Write the release notes.", [])
        yield ask(server, 1, body) | {"restarted": True, "conversation": 2}


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let every answer be the recorder's, and note the prompts."""
    before = loaded.make_prompt, loaded.sampler_of
    loaded.make_prompt, loaded.sampler_of = recorder.make_prompt, recorder.sampler_of  # type: ignore[assignment]
    try:
        yield
    finally:
        loaded.make_prompt, loaded.sampler_of = before


def random_model(tokenizer: Path, folder: Path) -> Path:
    """Write a random model of two layers with a tokenizer."""
    num_tokens = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    shape = "--layers 2 --hidden-size 64 --intermediate-size 128 --heads 4 --kv-heads 2"
    make_random_model(folder, *shape.split(), "--vocab-size", str(num_tokens))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)
    path = folder / "config.json"
    eos = json.loads((tokenizer / "config.json").read_text())["eos_token_id"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
    return folder


def show(runs: Sequence[Run]) -> None:
    """Print the tokens that were computed in each turn; in brackets those of them that were known."""
    table = Table("line", "restarts", *map(str, range(1, NUM_TURNS + 1)), "another", box=SIMPLE_HEAD)
    for key, group in groupby(runs, lambda run: (run["changing line"], run["restarts"])):
        line, restarts = key
        cells = [f"{run['computed']} ({run['again']})" for run in group]
        table.add_row("changes" if line else "", str(restarts), *cells)
    Console(width=200).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Have all conversations in each budget, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER", help="folder with config.json and a tokenizer")
    parser.add_argument("--prefixes", default="unset", help="kv_prefixes; default: the server's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    args = parser.parse_args(arguments)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="agent-turns-") as name:
        folder, recorder = Path(name), Recorder()
        model = random_model(args.tokenizer, folder / "model")
        lines = ("x-client-header: version=2.1.197.{}; entry=cli;", "")
        settings: dict[str, Any] = {"context_length": 16384, "ram_budget_gb": 4.0}
        settings |= {} if args.prefixes == "unset" else {"kv_prefixes": args.prefixes}
        for number, (line, restarts) in enumerate(product(lines, ((RESTART,), range(2, NUM_TURNS + 1)))):
            os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{number}")
            recorder.known.clear()
            serve = partial(live, str(model), **settings)
            with recording(recorder):
                for run in converse(line, restarts, serve, recorder):
                    runs.append({"changing line": bool(line), "restarts": len(restarts), **run})
                    print(json.dumps(runs[-1]), flush=True)
        result = {"runs": runs, **describe(folder, [])}
    show(runs)
    write_json(args.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
