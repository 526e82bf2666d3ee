#!/usr/bin/env python3
"""Run LM Studio's mlx-engine stock and with the hook, on one model, and compare the tokens.

The engine is a checkout of https://github.com/lmstudio-ai/mlx-engine with its requirements installed in this Python,
and mlx-flash too. Each run is a process of its own: load, two turns of a conversation (the second one reuses the first
one's cache), an answer that is cancelled, three requests at once, unload.

    python scripts/check_lmstudio.py mlx-engine MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
TOKENIZER_BYTES = 300_000_000
"""What the engine takes beside the model and its imports: tokenizer, processor, threads."""

FIRST = "<|im_start|>user\nWhy is the sky blue? Answer in two sentences.<|im_end|>\n<|im_start|>assistant\n"
SECOND = "<|im_end|>\n<|im_start|>user\nAnd at sunset?<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("Count to ten.", "Name three rivers.", "What is a prime number?")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if both runs gave the same tokens, and the one with the hook streamed within its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, help="folder of mlx-engine")
    parser.add_argument("model", type=Path, help="a model folder with a tokenizer")
    parser.add_argument("--max-seq-nums", type=int, default=4, help="of the engine; 1 uses mlx-lm (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer (default: %(default)s)")
    parser.add_argument("--ram-budget-gb", type=float, help="default: the process, and a third of the weights")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        print(json.dumps(answers(args)))
        return 0
    stock, streamed = (run(args, streams=streams) for streams in (False, True))
    print(f"mlx-engine at {commit(args.engine)}, max_seq_nums {args.max_seq_nums}, model {args.model.name}")
    return report(stock, streamed)


def commit(engine: Path) -> str:
    """Return the engine's commit."""
    command = ["git", "-C", str(engine), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(args: argparse.Namespace, *, streams: bool) -> dict[str, Any]:
    """Return the answers of a process with, or without, the hook's patch."""
    paths = [str(SCRIPTS.parent / "examples"), str(args.engine.resolve()), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as home:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOME": home,
            "HF_HUB_OFFLINE": "1",
            "MLX_FLASH_ENABLED": str(streams).lower(),
            "MLX_FLASH_TELEMETRY": "false",
        }
        options = [str(args.engine), str(args.model), "--run", "--max-seq-nums", str(args.max_seq_nums)]
        options += ["--max-tokens", str(args.max_tokens)]
        options += [] if args.ram_budget_gb is None else ["--ram-budget-gb", str(args.ram_budget_gb)]
        done = subprocess.run(
            [sys.executable, __file__, *options], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """Use the engine as LM Studio does. Return tokens, and what the model was."""
    import lmstudio_hook  # noqa: F401  # before mlx-lm and mlx-vlm, as a .pth file does it
    from mlx_engine import create_generator, load_model, stop_generation, tokenize, unload
    from mlx_engine.utils.prompt_progress_reporter import PromptProgressReporter

    class Reporter(PromptProgressReporter):  # type: ignore[misc]
        """Notes how many tokens of a prompt were in a cache."""

        cached_tokens = 0

        def begin(self, is_draft: bool, cached_tokens: int, *_: Any, **__: Any) -> bool:
            self.cached_tokens = cached_tokens
            return True

        def update(self, *_: Any, **__: Any) -> bool:
            return True

        def finish(self, *_: Any, **__: Any) -> bool:
            return True

    def generate(prompt: str | list[int], request: str, stop_after: int | None = None) -> tuple[list[int], int]:
        tokens = tokenize(kit, prompt) if isinstance(prompt, str) else prompt
        reporter = Reporter()
        options = {"temp": 0.0, "max_tokens": args.max_tokens, "request_id": request}
        found: list[int] = []
        try:
            for result in create_generator(kit, tokens, prompt_progress_reporter=reporter, **options):
                found += [token.id for token in result.tokens]
                if stop_after is not None and len(found) >= stop_after:
                    stop_generation(kit, request)
        except Exception as error:
            if type(error).__name__ != "RequestCancelled":
                raise
        return found, reporter.cached_tokens

    weights = sum(file.stat().st_size for file in args.model.glob("*.safetensors"))
    budget = args.ram_budget_gb or (peak_bytes() + TOKENIZER_BYTES + weights / 3) / 1e9
    streams = os.environ["MLX_FLASH_ENABLED"] == "true"
    if streams:  # the hook has read the environment when the engine was imported, whose size the budget depends on
        from mlx_flash import FlashConfig, apply_flash_patch

        apply_flash_patch(FlashConfig.resolve(ram_budget_gb=budget))
    kit = load_model(args.model, max_seq_nums=args.max_seq_nums)
    loading = peak_bytes()
    forget_peak()
    first, _ = generate(FIRST, "first")
    turn = [*tokenize(kit, FIRST), *first, *tokenize(kit, SECOND)]
    second, cached = generate(turn, "second")
    cancelled, _ = generate(FIRST.replace("sky", "sea"), "cancelled", stop_after=3)
    batch: dict[str, list[int]] = {}

    def ask(question: str) -> None:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        batch[question] = generate(prompt, question)[0]

    threads = [threading.Thread(target=ask, args=(question,)) for question in QUESTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {
        "kit": type(kit).__name__,
        "model": f"{type(kit.model).__module__}.{type(kit.model).__name__}",
        "budget": kit.model.plan.budget_bytes if streams else None,
        "loading": loading,
        "answering": peak_bytes(),
        "first": first,
        "second": second,
        "cached": cached,
        "cancelled": cancelled[:3],
        "cancelled_early": len(cancelled) < args.max_tokens,
        "batch": [batch[question] for question in QUESTIONS],
    }
    unload(kit)
    return found


def peak_bytes() -> int:
    """Return the most memory that this process has had; on Linux since :func:`forget_peak`."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let the peak begin again, where the system can."""
    if sys.platform != "darwin":
        Path("/proc/self/clear_refs").write_text("5")


def report(stock: dict[str, Any], streamed: dict[str, Any]) -> int:
    """Print both runs. Return 0 if their tokens are equal, and the second one streamed within its budget."""
    for name, found in (("stock", stock), ("streamed", streamed)):
        peaks = f"{found['loading'] / 1e9:.2f} GB while it loaded, {found['answering'] / 1e9:.2f} GB after that"
        print(f"{name}: {found['kit']} with {found['model']}, {peaks}")
    print(
        f"budget {streamed['budget'] / 1e9:.2f} GB; the second turn found {streamed['cached']} tokens in the engine's "
        "cache"
    )
    parts = ("first", "second", "cached", "cancelled", "cancelled_early", "batch")
    for part in parts:
        print(f"  {part}: {'equal' if stock[part] == streamed[part] else f'{stock[part]} is not {streamed[part]}'}")
    is_streamed = streamed["model"].startswith("mlx_flash.") and streamed["answering"] <= streamed["budget"]
    return 0 if is_streamed and all(stock[part] == streamed[part] for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
