#!/usr/bin/env python3
"""Run mlx-lm's own tests with stock mlx-lm and with streamed models, and list the tests whose outcomes differ.

The tests are in mlx-lm's source distribution, which has to be that of the installed version. The model that they
download is replaced by a local one.

    python scripts/check_mlx_lm_tests.py mlx_lm-0.32.2.tar.gz MODEL --ram-budget-gb 0.6
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

FILES = ("test_generate.py", "test_prompt_cache.py", "test_server.py")
DOWNLOADED = "mlx-community/Qwen1.5-0.5B-Chat-4bit"

REASONS = {
    "test_generate.py::TestGenerate::test_generate_with_processor": (
        "mlx-lm computes a token that nobody takes, and asks processors about it; that would read all weights"
    ),
    "test_generate.py::TestGenerate::test_stream_generate_speculative": (
        "the model is all in memory, and its draft model is not asked there: tokens are those of plain decoding"
    ),
}
"""Tests that may differ, and why."""

CONFTEST = """
from mlx_flash import FlashConfig, apply_flash_patch
apply_flash_patch(FlashConfig(ram_budget_gb={budget!r}, telemetry=False))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the tests that differ are those with a known reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="mlx-lm's source distribution, a .tar.gz file")
    parser.add_argument("model", type=Path, help="a model folder with a tokenizer and a chat template")
    parser.add_argument("--ram-budget-gb", default="min", help="budget of the streamed runs (default: %(default)s)")
    parser.add_argument("--files", nargs="+", default=FILES, help="names of the test files (default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(args.sdist, folder, args.files, args.model.resolve())
        stock = outcomes(folder, args.files)
        (folder / "conftest.py").write_text(CONFTEST.format(budget=budget_of(args.ram_budget_gb)))
        streamed = outcomes(folder, args.files)
    return report(stock, streamed)


def budget_of(text: str) -> float | str:
    """Return a number of GB, or a word such as ``min``."""
    return text if text.isalpha() else float(text)


def unpack(sdist: Path, folder: Path, files: Sequence[str], model: Path) -> None:
    """Write the tests, with the local model in place of the downloaded one."""
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            data = archive.extractfile(member) if path.parts[1:-1] == ("tests",) and path.name in files else None
            if data is not None:
                text = data.read().decode().replace(f'"{DOWNLOADED}"', repr(str(model)))
                (folder / path.name).write_text(text)


def outcomes(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Return the outcome of each test: ``passed``, ``skipped``, or the first line of its error."""
    found: dict[str, str] = {}
    for file in files:
        results = folder / "results.xml"
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={results}", file]
        subprocess.run(command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL)
        for case in ElementTree.parse(results).iter("testcase"):
            name = f"{file}::{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
            bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
            message = (bad[0].get("message") or "").splitlines() if bad else []
            found[name] = "passed" if not bad else bad[0].tag + ": " + (message or [""])[0]
    return found


def report(stock: dict[str, str], streamed: dict[str, str]) -> int:
    """Print the tests that differ, and the number of each outcome."""
    different = {name for name in stock if stock[name].partition(":")[0] != streamed.get(name, "").partition(":")[0]}
    unexplained = sorted(name for name in different if name not in REASONS)
    for name in sorted(different):
        print(f"{name}\n  mlx-lm: {stock[name]}\n  streamed: {streamed.get(name, 'missing')}")
        print(f"  why: {REASONS.get(name, 'unknown')}")
    for title, results in (("mlx-lm", stock), ("streamed", streamed)):
        passed = sum(outcome == "passed" for outcome in results.values())
        print(f"{title}: {passed} of {len(results)} passed")
    print(f"{len(different)} differ, {len(unexplained)} for an unknown reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
