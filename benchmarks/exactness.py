"""Answers of mlx-flash beside stock mlx-lm's, for real models in kernel memory limits: a report that resumes.

    python benchmarks/exactness.py MODEL ... --copies 4 8 compressed --budgets min 0.5 1 2 --state exactness.jsonl

Work: one prompt (*text*), a server with four clients (*server*), a chat whose prompt cache grows (*chat*), and a text
cut into calls whose logits all count (*score*), for each model, copy and budget, in a memory cgroup of 1.05 budgets
where one can be made. Answers are compared by tokens and all bits of the log probabilities, those of *server* by text.
Stock mlx-lm runs without a limit, with the prefill step of the plan, since another one may give other bits. Prompts are
parts of a text.

``--state`` has a line of JSON for each case that is done: the same command goes on from there, and prints a table in
Markdown. The exit status is 1 if an answer differs or a case fails, other than by a budget that is too small.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import mlx.core as mx
import mlx_lm
import numpy as np
from harness import NOT_AVAILABLE, ROOT, SMALL_MACHINE, KilledError, Run, describe_versions, run_command, run_worker
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_tokenizer
from servers import LIMIT_ROOM, serving

import mlx_flash
from mlx_flash import FlashConfig
from mlx_flash.config import parse_budget
from mlx_flash.memory.footprint import peak_footprint

KINDS = {"text": 1, "server": 4, "chat": 4, "score": 1}
"""Kinds of work, and their prompts: one, one for each client, or one for each turn."""

SCORED_TOKENS = 256
"""Tokens of a call whose logits all count, at most."""

TEMPLATE_TOKENS = 64
"""Room for the chat template, and for tokens that a part of the text has more than it had in the text."""

REFUSED = "BudgetError"
"""Part of the error of a budget that is too small, which is no fault."""


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Without a step it is planned only, without a budget stock mlx-lm does it. All caches together have room for
    ``length`` tokens, or for those that every budget promises, and an answer has at most ``tokens``.
    """

    model: str
    kind: str
    prompts: list[str]
    length: int | None
    tokens: int
    step: int | None = None
    budget: str | None = None


def work(job: Job) -> Run:
    """Plan, or answer the prompts of a job."""
    if job.budget is not None:
        budget = parse_budget(job.budget)
        config = FlashConfig(ram_budget_gb=budget, context_length=job.length, prefill_step_size=job.step)
        model, tokenizer = mlx_flash.load(job.model, config)
        if job.step is None:
            return {"budget_bytes": model.plan.budget_bytes, "step": model.plan.prefill_step_size}
    else:
        model, tokenizer, *_ = mlx_lm.load(job.model)
    if job.kind == "score":
        tokens = tokenizer.encode(job.prompts[0])
        return {"answers": [scored(model, tokens, min(SCORED_TOKENS, job.step or 1))], "peak_bytes": peak_footprint()}
    answers, prompt_cache = [], make_prompt_cache(model)
    for prompt in job.prompts:
        if job.kind == "server":
            prompt_cache = make_prompt_cache(model)
        tokens = tokenizer.encode(prompt)
        if job.kind == "chat" and tokenizer.has_chat_template:
            tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        options = {"max_tokens": job.tokens, "prompt_cache": prompt_cache, "prefill_step_size": job.step}
        digest, words = sha256(), list[str]()
        for step in mlx_lm.stream_generate(model, tokenizer, tokens, **options):
            words.append(step.text)
            digest.update(step.token.to_bytes(4, "little") + np.array(step.logprobs.astype(mx.float32)).tobytes())
        answers.append({"text": "".join(words), "num_tokens": len(words), "digest": digest.hexdigest()})
    return {"answers": answers, "peak_bytes": peak_footprint()}


def scored(model: Any, tokens: Sequence[int], size: int) -> Run:
    """Return a digest of the logits of all tokens, in calls of so many."""
    digest = sha256()
    for at in range(0, len(tokens), size):
        for row in model(mx.array([tokens[at : at + size]]))[0].astype(mx.float32):
            digest.update(np.array(row).tobytes())
    return {"text": "", "num_tokens": len(tokens), "digest": digest.hexdigest()}


def run_case(job: Job, stock: Callable[[int], Run]) -> Run:
    """Run one case and compare it with mlx-lm's answers, which ``stock`` returns for a prefill step."""
    try:
        planned = in_process(replace(job, step=None))
        job = replace(job, step=planned["step"])
        budget = server_budget(job) if job.kind == "server" else planned["budget_bytes"]
        has_limits = subprocess.run([SMALL_MACHINE, "100M", "true"], capture_output=True).returncode != NOT_AVAILABLE
        limit = int(LIMIT_ROOM * budget) if has_limits else None
        found = {"step": job.step, "budget_bytes": budget, "limit_bytes": limit}
        began = time.perf_counter()
        found |= serve(job, limit) if job.kind == "server" else in_process(job, limit)
    except (KilledError, SystemExit) as error:
        return {"error": str(error)}
    seconds = time.perf_counter() - began
    expected = stock(planned["step"])
    names = ("text",) if job.kind == "server" else ("text", "num_tokens", "digest")
    pairs = zip(found.pop("answers"), expected["answers"], strict=True)
    right = [all(mine[name] == theirs[name] for name in names) for mine, theirs in pairs]
    tokens = sum(answer["num_tokens"] for answer in expected["answers"])
    return found | {"seconds": seconds, "right": sum(right), "answers": len(right), "tokens": tokens}


def in_process(job: Job, limit: int | None = None) -> Run:
    """Run a job in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(asdict(job)))
        return run_worker(__file__, ["--work", path], label=job.kind, limit_bytes=limit)


def _server(job: Job) -> list[object]:
    words = ["mlx_flash", "serve", job.model, "--kv-prefixes", "off", "--prefill-step-size", job.step]
    words += [] if job.length is None else ["--context-length", job.length]
    return [*words, "--ram-budget-gb", job.budget]


def server_budget(job: Job) -> int:
    """Return the budget of a server in bytes: ``min`` depends on the libraries of the process."""
    with tempfile.TemporaryDirectory() as folder, serving(_server(job), Path(folder) / "log") as server:
        lines = _reply(server.port, "/metrics").decode().splitlines()
        return int(max(float(line.split()[-1]) for line in lines if line.startswith("mlx_flash_budget_bytes")))


def serve(job: Job, limit: int | None) -> Run:
    """Ask a server for all answers at once."""
    under = [] if limit is None else [str(SMALL_MACHINE), str(limit)]
    with tempfile.TemporaryDirectory() as folder, serving(_server(job), Path(folder) / "log", under) as server:

        def ask(prompt: str) -> Run:
            body = {"prompt": prompt, "max_tokens": job.tokens, "temperature": 0, "seed": 0}
            return {"text": json.loads(_reply(server.port, "/v1/completions", body))["choices"][0]["text"]}

        try:
            with ThreadPoolExecutor(len(job.prompts)) as clients:
                return {"answers": list(clients.map(ask, job.prompts)), "peak_bytes": server.peak_bytes}
        except OSError as error:  # a killed server closes the connections
            raise SystemExit(f"{error}; the server: {server.log.read_text()[-500:]}") from error


def _reply(port: int, path: str, body: Run | None = None) -> bytes:
    data, kind = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", data, kind), timeout=86_400) as reply:
        return bytes(reply.read())


def copies(model: Path, kinds: Sequence[str], folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the model that stock mlx-lm runs and the one to compare: itself and its copies, made where missing."""
    yield model, model
    for kind in kinds:
        path, unfinished = folder / f"{model.name}-{kind}", folder / f"{model.name}-{kind}-unfinished"
        words = ["mlx_lm", "convert", "--hf-path", model, "--mlx-path", unfinished, "--quantize", "--q-bits", kind]
        if kind == "compressed":
            words = ["mlx_flash", "pack", model, unfinished, "--compress"]
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            run_command([sys.executable, "-m", *words], label=f"making {path}")
            unfinished.rename(path)
        yield (model if kind == "compressed" else path), path


def job_of(model: Path, kind: str, text: str, prompt_tokens: int, args: argparse.Namespace) -> Job:
    """Return the work of a kind, without a budget."""
    tokenizer: Any = load_tokenizer(model)
    number, parts = KINDS[kind], KINDS[kind] if kind == "chat" else 1
    ids, each, tokens = tokenizer.encode(text), prompt_tokens // parts, args.tokens // parts
    prompts = [tokenizer.decode(ids[i * each : (i + 1) * each], skip_special_tokens=True) for i in range(number)]
    length = None if args.unset_context else number * (each + tokens + TEMPLATE_TOKENS)
    return Job(str(model), kind, prompts, length, tokens)


def print_table(runs: Sequence[Run]) -> None:
    """Print the report in Markdown."""
    print("| model | work | prompt | budget, GB | limit, GB | prefill step | tokens | peak, GB | time, s | as mlx-lm |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for run in runs:
        cells = [run["model"], run["kind"], run["prompt_tokens"], run["budget"]]
        if "error" in run:
            cells += [""] * 5 + [run["error"].partition(": process")[0]]
        else:
            cells[-1] += f" ({run['budget_bytes'] / 1e9:.3f})" * (cells[-1] == "min")
            cells += [f"{run['limit_bytes'] / 1e9:.3f}" if run["limit_bytes"] else "none", run["step"], run["tokens"]]
            cells += [f"{run['peak_bytes'] / 1e9:.3f}", f"{run['seconds']:.0f}", f"{run['right']} of {run['answers']}"]
        print(f"| {' | '.join(map(str, cells))} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that are not done, and print all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", type=Path, nargs="*", help="folders of models that stock mlx-lm loads")
    add("--copies", nargs="*", default=[], choices=("4", "8", "compressed"), help="copies to make and compare")
    add("--folder", type=Path, default=Path("models"), help="for the copies (default: %(default)s)")
    add("--budgets", nargs="+", default=["min", "0.5", "1", "2"], help="GB, or min (default: min 0.5 1 2)")
    add("--kinds", nargs="+", default=KINDS, choices=KINDS)
    add("--text", type=Path, nargs="+", default=sorted(ROOT.glob("docs/*.md")), help="for prompts (default: docs)")
    add("--prompt-tokens", type=int, nargs="+", default=[2000], metavar="N", help="lengths (default: 2000)")
    add("--unset-context", action="store_true", help="leave context_length unset: 20,480 tokens are promised")
    add("--tokens", type=int, default=300, help="most tokens of an answer, all turns of a chat (default: %(default)s)")
    add("--state", type=Path, default=Path("exactness.jsonl"), help="the cases that are done (default: %(default)s)")
    add("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        print(json.dumps(work(Job(**json.loads(args.work.read_text())))))
        return 0
    done: dict[str, Run] = {}
    if args.state.exists():
        done = {line["key"]: line["run"] for line in map(json.loads, args.state.read_text().splitlines())}

    def once(job: Job, model: Path, make: Callable[[], Run]) -> Run:
        key = f"{model.name} {job.kind} {job.budget} {sha256(json.dumps(asdict(job)).encode()).hexdigest()[:12]}"
        if key not in done:
            done[key] = make()
            with args.state.open("a") as file:
                file.write(json.dumps({"key": key, "run": done[key], "versions": describe_versions()}) + "\n")
            print(f"{key}: {done[key].get('error') or done[key].get('right', 'done')}", file=sys.stderr, flush=True)
        return done[key]

    def stock(job: Job, step: int) -> Run:
        job = replace(job, step=step)
        return once(job, Path(job.model), partial(in_process, job))

    text, runs = "\n".join(path.read_text() for path in args.text), []
    for own, model in [pair for each in args.models for pair in copies(each, args.copies, args.folder)]:
        for kind, length in product(args.kinds, args.prompt_tokens):
            plain = job_of(own, kind, text, length, args)
            for budget in args.budgets:
                job = replace(plain, model=str(model), budget=budget)
                run = once(job, model, partial(run_case, job, partial(stock, plain)))
                runs.append({"model": model.name, "kind": kind, "prompt_tokens": length, "budget": budget} | run)
    print_table(runs)
    return int(not all(run["right"] == run["answers"] if "right" in run else REFUSED in run["error"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
