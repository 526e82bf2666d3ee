"""Picture of tokens/s against the RAM budget, from the JSON of ``streaming.py --limit``.

    python benchmarks/plot_budget.py out.json docs/images/budget.png

It draws mlx-flash in each budget, on a logarithmic scale. Beside it are stock mlx-lm and llama.cpp with memory-mapped
weights, each in the kernel memory limit of that budget. A run that the kernel killed is a cross above the axis. Needs
the extra ``plots``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GB = 1e9


def best_runs(summary: dict[str, Any]) -> dict[float, dict[str, Any]]:
    """Return the fastest streamed run of each budget, by its size in GB."""
    found: dict[float, dict[str, Any]] = {}
    for run in sorted(summary["streamed"], key=lambda run: run["tokens_per_second"]):
        found[run["budget_bytes"] / GB] = run
    return dict(sorted(found.items()))


def draw(axes: Axes, result: dict[str, Any]) -> None:
    """Draw all series, the model's size and the labels."""
    from matplotlib.ticker import LogLocator, NullFormatter

    summary, model = result["summary"], result["model"]
    ours = best_runs(summary)
    axes.plot([*ours], [run["tokens_per_second"] for run in ours.values()], "o-", color="C0", label="mlx-flash")
    draw_other(axes, summary, "llama_cpp", "llama.cpp, mmap", "s--", "C1")
    draw_other(axes, summary, "stock", "stock mlx-lm", "^:", "C2")
    size = model["nbytes"] / GB
    axes.axvline(size, color="0.6", linewidth=1)
    axes.annotate(f"model: {size:.2f} GB", (size, 0.02), xycoords=("data", "axes fraction"), rotation=90, color="0.4")
    axes.set(xlabel="RAM budget, GB", ylabel="tokens/s, decoding")
    axes.set_title(title(result), fontsize=9)
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend()


def draw_other(axes: Axes, summary: dict[str, Any], name: str, label: str, style: str, color: str) -> None:
    """Draw the runs of another program in the limits, if it ran: a line, and a cross where it was killed."""
    runs = [(float(entry["budget"]), entry[name]) for entry in summary.get("in_limit", []) if entry[name]]
    alive = [(budget, run["tokens_per_second"]) for budget, run in runs if not run["killed"]]
    killed = [budget for budget, run in runs if run["killed"]]
    if alive:
        axes.plot(*zip(*alive, strict=True), style, color=color, label=label)
    if killed:
        bottom = axes.get_xaxis_transform()
        axes.plot(killed, [0.03] * len(killed), "x", color=color, transform=bottom, label=f"{label}: killed")


def title(result: dict[str, Any]) -> str:
    """Return model, machine, software and date, in two lines."""
    machine, versions, model = result["machine"], result["versions"], result["model"]
    disk = " ".join(word for word in (machine["disk"]["device"], machine["disk"]["file_system"]) if word)
    rates = [entry["best"] for entry in result["summary"]["probe"]]
    if limit := result.get("disk_mb_per_second"):
        disk += f", limited to {limit:g} MB/s"
    first = f"{model['name']}, {model['nbytes'] / GB:.2f} GB; {machine['cpu']}, {machine['threads']} threads"
    speed = f", {max(rates) / GB:.1f} GB/s" if rates and not limit else ""
    return f"{first}\n{disk}{speed}; MLX {versions['mlx']} on {machine['device']}; {result['date'][:10]}"


def write_picture(path: Path, result: dict[str, Any]) -> None:
    """Write the picture, without a screen."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("matplotlib is missing. Hint: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    draw(axes, result)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="from streaming.py --json")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    options = parser.parse_args()
    result = json.loads(options.json.read_text())
    write_picture(options.picture, result)


if __name__ == "__main__":
    main()
