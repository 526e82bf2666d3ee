"""The figures of README and of the benchmarks are those of benchmarks/results, and README's arithmetic is right."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from children import ROOT

OVERHEAD_GB, DISK_GB_PER_SECOND = 1.2, 3.0


def rows_of(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table with this beginning of its first line, without its head."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (table,) = [part for part in text.split("\n\n") if part.startswith(head)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def number(text: str) -> float:
    found = re.search(r"[\d.]+", text)
    assert found, text
    return float(found[0])


def agrees(text: str, value: float) -> bool:
    """Return whether the number of a text is the value, rounded to as many places."""
    digits = re.search(r"\d+(?:\.(\d+))?", text)
    return digits is not None and float(digits[0]) == pytest.approx(value, abs=0.51 * 10 ** -len(digits[1] or ""))


def test_the_table_of_budgets() -> None:
    summary = result("limits-qwen-bf16")["summary"]
    rows = rows_of("docs/benchmarks.md", "| budget | tokens/s | peak | read a token | stock mlx-lm | llama.cpp |")
    assert len(rows) == len(summary["streamed"])
    for row, found, others in zip(rows, summary["streamed"], summary["in_limit"], strict=True):
        assert float(row[0].split()[0]) == found["budget"]
        assert agrees(row[1], found["tokens_per_second"]) and agrees(row[2], found["peak_bytes_max"] / 1e9), row
        assert agrees(row[3], found["bytes_per_token"] / 1e9) or row[3] == "0", row
        stock = others["stock"]
        assert row[4] == "killed" if stock["killed"] else agrees(row[4], stock["tokens_per_second"]), row
        assert agrees(row[5], others["llama_cpp"]["tokens_per_second"]), row


def test_the_short_table() -> None:
    rows = rows_of("docs/benchmarks.md", "| | mlx-flash, tokens/s | peak | mlx-lm | peak |")
    for row, found in zip(rows, result("bench")["rows"], strict=True):
        for i, program in ((1, "mlx-flash"), (3, "mlx-lm")):
            assert agrees(row[i], found["medians"][program]), row
            assert agrees(row[i + 1], found["peaks"][program] / 1e9), row


def test_the_dense_model_on_a_gpu() -> None:
    rows = rows_of("docs/benchmarks.md", "| budget | tokens/s | read a token | rate |")
    for row, found in zip(rows, result("dense-bf16-h200")["summary"]["streamed"], strict=True):
        assert agrees(row[1], found["tokens_per_second"]), row
        assert agrees(row[2], found["bytes_per_token"] / 1e9), row
        assert not row[3] or agrees(row[3], found["read_bytes_per_second"] / 1e9), row


def test_loading() -> None:
    found = {
        (row["model"], row["state"], row["program"]): row["load_seconds"] for row in result("loading-large")["summary"]
    }
    rows = rows_of("docs/benchmarks.md", "| model | cold, mlx-flash | mlx-lm | warm, mlx-flash | mlx-lm |")
    for row, model in zip(rows, ("llama-bf16", "llama-fp32", "llama-8gb"), strict=True):
        ways = [(state, program) for state in ("cold", "warm") for program in ("mlx-flash", "mlx-lm")]
        for cell, way in zip(row[1:], ways, strict=True):
            assert agrees(cell, found[model, *way]), (row, way)


def test_readme_has_what_was_measured() -> None:
    rows = rows_of("README.md", "| measured | budget |")
    qwen, gpu = result("limits-qwen-bf16")["summary"], result("dense-bf16-h200")["summary"]["streamed"][0]
    least = qwen["streamed"][0]
    assert float(rows[0][1].split()[0]) == least["budget"] and agrees(rows[0][2], least["bytes_per_token"] / 1e9)
    alone, in_memory = re.findall(r"[\d.]+ s", rows[0][3])
    assert agrees(alone, least["seconds_per_token"]) and agrees(in_memory, qwen["resident"]["seconds_per_token"])
    assert float(rows[1][1].split()[0]) == gpu["budget"] and agrees(rows[1][2], gpu["bytes_per_token"] / 1e9)
    assert agrees(rows[1][3], gpu["seconds_per_token"])
    elsewhere = rows_of("docs/benchmarks.md", "| model | budget | peak | first token of 15 | a token | read a token |")
    for row, there in ((rows[2], elsewhere[2]), (rows[3], elsewhere[0])):
        assert row[1:3] == [there[1], there[5]] and agrees(row[3], number(there[4])), row


def test_readme_reckons_right() -> None:
    budgets, *models = rows_of("README.md", "| arithmetic, 3 GB/s |")
    for row in models[:2]:
        size = number(row[0].split(",")[1])
        for cell, budget in zip(row[1:], map(number, budgets[1:]), strict=True):
            read = size - (budget - OVERHEAD_GB)
            assert cell == "in memory" if read <= 0 else agrees(cell, read / DISK_GB_PER_SECOND), (row, read)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "9.1 GB, so 7.9 GB of weights stay and 40 - 7.9 = 32.1 GB are read for each token: 32.1 / 3 = 11 s" in text
    reads = [row[5] for row in rows_of("docs/benchmarks.md", "| model | budget | peak | first token of 15 |")]
    bounds = [4.4, *map(number, reads[:2])]  # GB a token: with no expert in memory, and in budgets of 8 and 16 GB
    below, above, least = [round(bound / DISK_GB_PER_SECOND, 1) for bound in bounds]
    assert models[2][1:] == [f"{above} to {below} s", f"{least} to {above} s", f"at most {least} s"]
