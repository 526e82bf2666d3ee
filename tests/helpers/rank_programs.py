from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from children import HELPERS

PROGRAM = HELPERS / "ranks_program.py"


def lines_of(done: Sequence[subprocess.CompletedProcess[str]]) -> list[list[Any]]:
    return [json.loads(line) for each in done for line in each.stdout.splitlines() if line.startswith("[")]
