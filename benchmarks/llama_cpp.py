"""llama.cpp, whose memory-mapped weights the kernel reads and evicts, on the same model in the same memory limit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness import KilledError, Run, run_command


@dataclass(frozen=True)
class LlamaBench:
    """llama.cpp's ``llama-bench`` and a model.

    Attributes:
        program: ``llama-bench``, by its path, or by its name where the shell finds it.
        model: the same model, as a GGUF file.
        tokens: to decode after one warm-up token.
    """

    program: str  # a Path would take the ``./`` away that says where to look
    model: Path
    tokens: int

    def missing(self) -> str | None:
        """Return a sentence on the file that is missing; None when both are there."""
        if shutil.which(self.program) is None:
            return f"no llama.cpp runs: there is no program {self.program}"
        if not self.model.is_file():
            return f"no llama.cpp runs: there is no file {self.model}"
        return None

    def run(self, limit_bytes: int) -> Run:
        """Decode in a memory cgroup of this size; ``killed`` says whether the kernel ended it."""
        command = [self.program, "--model", self.model, "--load-mode", "mmap", "--n-prompt", 0, "--repetitions", 1]
        command += ["--n-gen", self.tokens, "--threads", psutil.cpu_count(), "--output", "json"]
        try:
            done = run_command(command, label="llama-bench", limit_bytes=limit_bytes)
        except KilledError:
            return {"killed": True}
        (found,) = json.loads(done.stdout)
        return {
            "killed": False,
            "tokens_per_second": found["avg_ts"],
            "threads": found["n_threads"],
            "build": found["build_commit"],
            "read_bytes": int(done.machine["read_MB"] * 1e6),
            "peak_bytes": int(done.machine["anonymous_peak_MB"] * 1e6),
        }
