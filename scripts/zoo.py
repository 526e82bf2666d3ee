"""Comparison of every architecture of mlx-lm, stock and streamed, bit for bit, with tiny random models.

``--vision`` compares mlx-vlm's architectures, in fp32.

Example:
    python scripts/zoo.py
    python scripts/zoo.py llama gemma3n --variants 4bit,mxfp4
    python scripts/zoo.py --vision qwen2_vl gemma3
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from zoo import names
from zoo.compare import Outcome
from zoo.pool import Case, outcome_of, run
from zoo.weights import VARIANTS

DEFAULT_VARIANTS = "bf16,4bit"


def main() -> int:
    """Return 1 when any architecture failed."""
    arguments = parse_arguments()
    if arguments.vision:
        import vlm_zoo

        chosen, default = arguments.names or vlm_zoo.architectures(), "fp32"
        run_one = partial(outcome_of, target=vlm_zoo.compare)
    else:
        chosen, default, run_one = select(arguments.names), DEFAULT_VARIANTS, outcome_of
    variants = (arguments.variants or default).split(",")
    instead = {} if arguments.variants else {"bf16": "fp32"}
    cases = [Case(name, variant, instead.get(variant)) for variant in variants for name in chosen]
    outcomes: list[Outcome] = []
    for outcome in run(cases, arguments.jobs, arguments.timeout, run_one):
        outcomes.append(outcome)
        print(line(outcome), flush=True)
    counts = Counter(outcome.status for outcome in outcomes)
    seen = sum(outcome.sees and outcome.status == "ok" for outcome in outcomes)
    pictures = f" ({seen} with a picture)" if arguments.vision else ""
    print(
        f"{counts['ok']} ok{pictures}, {counts['failed']} failed, {counts['refused']} refused, "
        f"{counts['cannot']} cannot run stock, of {len(outcomes)} (mlx {version('mlx')}, mlx-lm {version('mlx-lm')})"
    )
    if arguments.json is not None:
        versions = {package: version(package) for package in ("mlx", "mlx-lm")}
        arguments.json.write_text(json.dumps({"versions": versions, "outcomes": list(map(asdict, outcomes))}, indent=1))
    return int(counts["failed"] > 0)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare streamed models with stock mlx-lm, bit for bit.")
    parser.add_argument("names", nargs="*", help="architectures, such as llama or 'qwen*'; all of them by default")
    parser.add_argument(
        "--variants",
        metavar="LIST",
        help=f"of {', '.join(VARIANTS)}; the default is {DEFAULT_VARIANTS}, with fp32 where stock cannot run bf16",
    )
    parser.add_argument("--vision", action="store_true", help="compare with mlx-vlm, in fp32")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for each architecture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the details to a file")
    arguments = parser.parse_args()
    if unknown := set((arguments.variants or DEFAULT_VARIANTS).split(",")) - set(VARIANTS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}. There are {', '.join(VARIANTS)}.")
    return arguments


def select(patterns: list[str]) -> list[str]:
    """Return the names of configurations that match any pattern, or all."""
    wanted = [pattern if ":" in pattern else f"{pattern}:*" for pattern in patterns or ["*"]]
    chosen = [name for name in names() if any(fnmatch.fnmatch(name if ":" in name else f"{name}:", p) for p in wanted)]
    if not chosen:
        sys.exit(f"no architecture is called {' or '.join(patterns)}. There are {', '.join(names())}.")
    return chosen


def line(outcome: Outcome) -> str:
    """Return one outcome as a line."""
    start = f"{outcome.status:<9} {outcome.name:<24} {outcome.variant:<9}"
    if outcome.status == "cannot":
        return f"{start} cannot run stock: {outcome.reason}"
    share = 100 * outcome.streamed_bytes / max(1, outcome.nbytes)
    streamed = f"layers streamed {outcome.num_streamed}/{outcome.num_layers}  {share:3.0f} % of bytes"
    layers = f"{streamed}  " if outcome.num_layers else ""
    experts = f"{outcome.num_stacks} stacks of experts, {outcome.num_pools} pools  " if outcome.num_stacks else ""
    towers = f"with a picture, {outcome.num_towers} units in towers  " if outcome.sees else ""
    return f"{start} {layers}{outcome.seconds:5.1f} s  {experts}{towers}{outcome.reason}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
