"""Picture of the tokens that a pass yields on kinds of text, from the JSON of ``real_text.py replay``.

    python benchmarks/plot_real.py benchmarks/results/real-replay.json real-text.png

Needs the extra ``plots``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plot_budget import write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "none": "plain decoding",
    "lookup": "prompt lookup (default)",
    "lookup and draft": "with a 4-bit copy as draft",
}
WIDTH = 0.27


def draw(axes: Axes, result: dict[str, Any], disk: float) -> None:
    """Draw a bar for each kind of text and each way."""
    rows = [row for row in result["summary"] if row["disk_mb_per_second"] == disk]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for number, (way, label) in enumerate(LABELS.items()):
        found = {row["kind"]: row["tokens_per_pass"] for row in rows if row["way"] == way}
        heights = [found[kind] for kind in kinds]
        bars = axes.bar([i + (number - 1) * WIDTH for i in range(len(kinds))], heights, WIDTH, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("tokens a pass over the weights")
    model, draft = result["model"]["name"], result["draft"]["name"]
    axes.set_title(f"{model}, draft {draft}; disk of {disk:g} MB/s; {result['date'][:10]}", fontsize=9)
    axes.legend()


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="from real_text.py replay --json")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    parser.add_argument("--disk-mb-per-second", type=float, default=300.0)
    options = parser.parse_args()
    result = json.loads(options.json.read_text())
    write_picture(options.picture, lambda axes: draw(axes, result, options.disk_mb_per_second))


if __name__ == "__main__":
    main()
