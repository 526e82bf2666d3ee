"""A file of the experts of every call, for comparing eviction policies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mlx_flash.errors import WriteError
from mlx_flash.experts.pooledstacks import Routing
from mlx_flash.files import write_at
from mlx_flash.layout.parts import ExpertStack

FORMAT = 1


class RoutingTrace:
    """A writer of JSON lines: the model, then ``[pass, tokens, layer, [[expert, tokens of it], ...]]`` for each call.

    Args:
        path: the file; replaced if it exists.
        model: name of the model.
        stacks: its experts.

    Raises:
        WriteError: the file cannot be written. Calls raise it too.
    """

    def __init__(self, path: Path, model: str, stacks: Sequence[ExpertStack]) -> None:
        layers = [
            {"name": stack.unit.name, "num_experts": stack.num_experts, "expert_bytes": stack.expert_bytes}
            for stack in stacks
        ]
        self._num_pass, self._last = 0, -1
        self._path, self._nbytes = path, 0
        with self._explained():
            self._file = path.open("wb", buffering=0)  # a line is written at once, so a kill leaves whole ones
        try:
            self._write({"format": FORMAT, "model": model, "top_k": stacks[0].top_k, "layers": layers})
        except WriteError:
            self._file.close()
            raise

    def __call__(self, layer: int, routing: Routing) -> None:
        """Add a call of a layer with the experts of each token, ``(..., top_k)``."""
        self._num_pass += layer <= self._last
        self._last = layer
        experts, counts = np.unique(routing, return_counts=True)
        pairs = [[int(expert), int(count)] for expert, count in zip(experts, counts, strict=True)]
        self._write([self._num_pass, routing.size // routing.shape[-1], layer, pairs])

    def _write(self, value: object) -> None:
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with self._explained():
            write_at(self._file.fileno(), line, self._nbytes)
        self._nbytes += len(line)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(
                f"cannot write the routing trace {self._path}: {error.strerror}. Hint: set another file."
            ) from error

    def __enter__(self) -> RoutingTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
