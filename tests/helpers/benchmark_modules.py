from __future__ import annotations

import importlib
import sys
from typing import Any

from children import ROOT

BENCHMARKS = ROOT / "benchmarks"


def load_benchmark(name: str) -> Any:
    """Import a module of ``benchmarks/``, whose modules import each other by their plain names."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)
