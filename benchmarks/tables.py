"""Tables of the streaming benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mlx_flash.config import GB


def in_words(settings: dict[str, Any] | None) -> list[str]:
    """Return settings as ``name=value`` words."""
    return [f"{name}={value}" for name, value in (settings or {}).items()]


def print_tables(console: Console, result: dict[str, Any]) -> None:
    """Print machine, model, probes, runs and notes."""
    machine, model, summary = result["machine"], result["model"], result["summary"]
    disk = machine["disk"]
    console.print(f"{model['name']}, {model['nbytes'] / GB:.2f} GB, on {machine['device']}")
    console.print(f"{machine['cpu']}, {machine['threads']} threads, {machine['memory_bytes'] / GB:.1f} GB")
    console.print(f"{machine['os']}; disk {disk['device']} {disk['file_system']} {disk['model'] or ''}")
    console.print(_probe_table(summary["probe"]))
    console.print(_run_table(summary))
    if (experts := _expert_table(summary)) is not None:
        console.print(experts)
    if "in_limit" in summary:
        console.print(_limit_table(summary))
    for note in result["notes"]:
        console.print(f"note: {note}")


def _probe_table(probe: Sequence[dict[str, Any]]) -> Table:
    table = Table("read size", "depth", "best GB/s", "median GB/s", title="disk, cold", box=SIMPLE_HEAD)
    for entry in probe:
        size = f"{entry['read_size'] / (1 << 20):g} MiB"
        rates = (f"{entry[name] / GB:.2f}" for name in ("best", "median"))
        table.add_row(size, str(entry["queue_depth"]), *rates)
    return table


def _run_table(summary: dict[str, Any]) -> Table:
    table = Table(
        title="decoding, medians over the rounds; sizes in GB", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "budget" else "right", no_wrap=True)
    if summary["resident"]:
        run = summary["resident"]
        cells = ("resident", _gb(run["peak_bytes"]), f"{run['tokens_per_second']:.3f}", "1.00")
        table.add_row(*cells, "", "", "", "", f"{run['load_seconds']:.1f}", "")
    for run in summary["streamed"]:
        table.add_row(*_cells(run))
    return table


def _expert_table(summary: dict[str, Any]) -> Table | None:
    """Return a table of the runs that read experts one by one; None without such runs."""
    runs = [run for run in summary["streamed"] if "hit_rate" in run]
    names = ("budget", "hits without look-ahead", "look-ahead right", "missed a token, GB", "read / missed")
    table = Table(*names, title="experts", box=SIMPLE_HEAD)
    for run in runs:
        right, ratio = run.get("predicted_right"), run.get("read_per_missed")
        table.add_row(
            " ".join([_gb(run["budget_bytes"]), *in_words(run["settings"])]),
            f"{run['hit_rate']:.0%}",
            f"{right:.0%}" if right is not None else "",
            _gb(run["missed_bytes_per_token"]),
            f"{ratio:.2f}" if ratio is not None else "",
        )
    return table if runs else None


def _limit_table(summary: dict[str, Any]) -> Table:
    """Return a table of tokens/s in each kernel memory limit: mlx-flash, stock mlx-lm, llama.cpp."""
    names = ("limit, GB", "budget, GB", "mlx-flash", "stock mlx-lm", "llama.cpp, mmap")
    table = Table(*names, title="tokens/s in a kernel memory limit, medians", box=SIMPLE_HEAD)
    for entry in summary["in_limit"]:
        speeds = [
            max(run["tokens_per_second"] for run in summary["streamed"] if run["budget"] == entry["budget"]),
            *(_speed(entry[name]) for name in ("stock", "llama_cpp")),
        ]
        cells = [cell if isinstance(cell, str) else f"{cell:.3f}" for cell in speeds]
        table.add_row(_gb(entry["limit_bytes"]), f"{entry['budget']:g}", *cells)
    return table


def _speed(run: dict[str, Any] | None) -> float | str:
    if run is None:
        return ""
    return "killed" if run["killed"] else float(run["tokens_per_second"])


_COLUMNS = ("budget", "peak", "token/s", "of res.", "a token", "/s read", "waiting", "efficiency", "load", "same")


def _cells(run: dict[str, Any]) -> list[str]:
    word = "min = " if run["budget"] == "min" else ""
    return [
        " ".join([f"{word}{_gb(run['budget_bytes'])}", *in_words(run["settings"])]),
        _gb(run["peak_bytes_max"]) + ("" if run["within_budget"] else " (!)"),
        f"{run['tokens_per_second']:.3f}",
        f"{run['of_resident']:.2f}" if "of_resident" in run else "",
        _gb(run["bytes_per_token"]),
        _gb(run["read_bytes_per_second"]) if "read_bytes_per_second" in run else "",
        f"{run['wait_share']:.0%}",
        f"{run['efficiency_best']:.0%} ({run['efficiency_median']:.0%})",
        f"{run['load_seconds']:.1f}",
        "yes" if run["identical"] else "NO",
    ]


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.3f}"
