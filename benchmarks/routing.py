"""Record the experts that a run needs, for ``benchmarks/eviction.py``.

    python benchmarks/routing.py DIR trace.jsonl --ram-budget-gb 4 --prompt "Why is the sky blue?" --max-tokens 200

The budget must leave some experts on the disk: where all weights are in memory, mlx-flash does not see the routing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mlx_lm.generate import stream_generate

from mlx_flash import FlashConfig, FlashLLM, load
from mlx_flash.config import parse_budget
from mlx_flash.experts.pooledstacks import Routing
from mlx_flash.layout.parts import ExpertStack

FORMAT = 1
"""Version of the files."""


class RoutingTrace:
    """A writer of JSON lines: the model, then ``[pass, tokens, layer, [[expert, tokens of it], ...]]`` for each call.

    Args:
        path: the file; replaced if it exists.
        model: name of the model.
        stacks: its experts.
    """

    def __init__(self, path: Path, model: str, stacks: Sequence[ExpertStack]) -> None:
        layers = [
            {"name": stack.unit.name, "num_experts": stack.num_experts, "expert_bytes": stack.expert_bytes}
            for stack in stacks
        ]
        self._num_pass, self._last = 0, -1
        self._file = path.open("w", encoding="utf-8", buffering=1)  # a kill leaves whole lines
        self._write({"format": FORMAT, "model": model, "top_k": stacks[0].top_k, "layers": layers})

    def __call__(self, layer: int, routing: Routing) -> None:
        """Add a call of a layer with the experts of each token, ``(..., top_k)``."""
        self._num_pass += layer <= self._last
        self._last = layer
        experts, counts = np.unique(routing, return_counts=True)
        pairs = [[int(expert), int(count)] for expert, count in zip(experts, counts, strict=True)]
        self._write([self._num_pass, routing.size // routing.shape[-1], layer, pairs])

    def _write(self, value: object) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")

    def __enter__(self) -> RoutingTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ram-budget-gb", type=parse_budget, default="min")
    parser.add_argument("--expert-pool-gb", type=float)
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args(arguments)
    model, tokenizer = load(
        args.model, FlashConfig(ram_budget_gb=args.ram_budget_gb, expert_pool_gb=args.expert_pool_gb)
    )
    assert isinstance(model, FlashLLM) and model.engine is not None
    experts = model.engine.experts
    if experts is None:
        parser.error("this run reads no experts one by one. Hint: take a mixture, and a budget for some of its experts")
    with model, RoutingTrace(args.trace, args.model, experts.stacks) as trace:
        experts.listeners.append(trace)
        for response in stream_generate(model, tokenizer, args.prompt, max_tokens=args.max_tokens):
            print(response.text, end="", flush=True)


if __name__ == "__main__":
    main()
