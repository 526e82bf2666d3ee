"""Picture of one token of a streamed model: reads of the disk, waits for them, and units that are computed.

    python benchmarks/timeline.py models/dense --budget 1.95 --disk-mb-per-second 1000 --picture out.png

The process runs in a memory cgroup of 1.05 budgets where one can be made, with a cold page cache. The picture shows the
middle of the last token; the JSON has shares of the whole token, since a wait while the disk is idle is a fault. A
pinned layer is computed between two units. ``--package`` names a checkout of an earlier version, whose ``mlx_flash``
runs instead. Pictures need the extra ``plots``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

import mlx_flash
from mlx_flash.config import parse_budget
from mlx_flash.storage.prefetcher import Ticket
from mlx_flash.streaming.stream import WeightStream

PROMPT = [1, 11, 43, 85]
LIMIT_SHARE = 1.05
SHOWN_SECONDS = 0.15

Span = tuple[float, float]
Run = dict[str, Any]


class Recorder:
    """Times of reads, waits and units since it was made."""

    def __init__(self) -> None:
        self.reads, self.waits, self.units = list[Span](), list[Span](), list[Span]()
        self.nbytes: list[int] = []
        held: dict[int, float] = {}
        read, acquire, release = os.preadv, WeightStream.acquire, WeightStream.release

        def preadv(*args: Any) -> int:
            began = time.perf_counter()
            count = read(*args)
            self.reads.append((began, time.perf_counter()))
            self.nbytes.append(count)
            return count

        def acquired(stream: WeightStream, index: int) -> None:
            acquire(stream, index)
            held[index] = time.perf_counter()

        def released(stream: WeightStream, index: int, wait: Callable[[], None] | None = None) -> None:
            release(stream, index, wait)
            if wait is None:
                self.units.append((held[index], time.perf_counter()))

        os.preadv, WeightStream.acquire, WeightStream.release = preadv, acquired, released  # type: ignore[method-assign,assignment]
        for name in ("wait", "done_by"):
            if hasattr(Ticket, name):
                setattr(Ticket, name, self._waiting(getattr(Ticket, name)))

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*args: Any) -> Any:
            began = time.perf_counter()
            found = wait(*args)
            self.waits.append((began, time.perf_counter()))
            return found

        return waited


def work(model_path: Path, budget: Any, num_tokens: int) -> Run:
    """Generate, and return the times of the last token."""
    recorder = Recorder()
    model, _ = mlx_flash.load_model(model_path, mlx_flash.FlashConfig(ram_budget_gb=budget))
    stamps = [time.perf_counter() for _ in generate_step(mx.array(PROMPT), model, max_tokens=num_tokens)]
    token = (stamps[-2], stamps[-1])
    inside = [span[0] >= token[0] for span in recorder.reads]
    nbytes = sum(n for n, is_inside in zip(recorder.nbytes, inside, strict=True) if is_inside)
    reads, waits = merged(recorder.reads, token), merged(recorder.waits, token)
    return {
        "token_seconds": token[1] - token[0],
        "read_bytes": nbytes,
        "disk_busy": seconds(reads) / (token[1] - token[0]),
        "waiting": seconds(waits) / (token[1] - token[0]),
        "disk_busy_while_waiting": seconds(both(reads, waits)) / max(seconds(waits), 1e-9),
        "spans": {
            name: [(low - token[0], high - token[0]) for low, high in merged(spans, token, joins=name != "units")]
            for name, spans in (("reads", recorder.reads), ("waits", recorder.waits), ("units", recorder.units))
        },
    }


def merged(spans: Sequence[Span], within: Span, *, joins: bool = True) -> list[Span]:
    """Return the parts of some spans in another one, in order. Those that overlap become one, if they are joined."""
    found: list[Span] = []
    for low, high in sorted((max(low, within[0]), min(high, within[1])) for low, high in spans):
        if low >= high:
            continue
        if joins and found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def both(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return where two lists of spans overlap."""
    return [part for span in left for part in merged(right, span)]


def seconds(spans: Sequence[Span]) -> float:
    """Return the length of some spans."""
    return sum(high - low for low, high in spans)


def draw(path: Path, run: Run, title: str) -> None:
    """Draw the middle of a token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axes = figure.subplots()
    start = max(0.0, run["token_seconds"] / 2 - SHOWN_SECONDS / 2)
    for row, (name, color) in enumerate((("units", "C2"), ("waits", "C3"), ("reads", "C0"))):
        spans = merged(run["spans"][name], (start, start + SHOWN_SECONDS), joins=False)
        axes.broken_barh(
            [(1e3 * (low - start), 1e3 * (high - low)) for low, high in spans],
            (row - 0.35, 0.7),
            color=color,
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(3), ["unit computed", "waiting", "disk reads"])
    axes.set_xlim(0, 1e3 * SHOWN_SECONDS)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, print shares, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--budget", type=parse_budget, required=True, metavar="GB")
    parser.add_argument("--disk-mb-per-second", type=float, metavar="N", help="limit of reads")
    parser.add_argument("--tokens", type=int, default=6, help="the last one is shown (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--package", type=Path, metavar="DIR", help="checkout of an earlier version")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.model, args.budget, args.tokens)))
        return
    import harness  # not before: it needs the package of its own version

    environment = {"PYTHONPATH": str(args.package)} if args.package else {}
    with harness.slowed(args.model, args.disk_mb_per_second):
        words = [args.model, "--work", "--budget", args.budget, "--tokens", args.tokens]
        limit = int(LIMIT_SHARE * args.budget * 1e9) if isinstance(args.budget, float | int) else None
        run = harness.run_worker(__file__, words, label="timeline", environment=environment, limit_bytes=limit)
    shares = {name: round(value, 3) for name, value in run.items() if name != "spans"}
    print(json.dumps(shares))
    described = harness.describe(args.model, harness.describe_cold(None, limited=limit is not None))
    harness.write_json(args.json, described | {"model": harness.describe_model(args.model), "token": shares})
    if args.picture:
        busy, waiting = run["disk_busy"], run["disk_busy_while_waiting"]
        title = f"{run['token_seconds']:.2f} s a token, {run['read_bytes'] / 1e9:.2f} GB read"
        draw(args.picture, run, f"{title}; the disk is busy {busy:.0%} of it, and {waiting:.1%} of the waits")


if __name__ == "__main__":
    main()
