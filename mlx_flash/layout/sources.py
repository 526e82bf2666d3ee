"""The tensors of a checkpoint that an array is made of, when its bytes are theirs.

mlx-lm's ``sanitize`` puts the tensors of experts, one by one in original checkpoints, into stacks. Along the first axis
a stack's bytes are those of its parts, one after another, and the rows of a tensor are a run of its bytes. So while
``sanitize`` runs, the functions of MLX that stack, concatenate, split and reshape are watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_flash.compat.arrays import CHANGING, wrapped_functions
from mlx_flash.storage.safetensors import Checkpoint, TensorRecord

_watching = threading.RLock()


class Sources:
    """The tensors that arrays are made of.

    Args:
        checkpoint: where the tensors lie.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._found: dict[int, tuple[mx.array, tuple[TensorRecord, ...]]] = {}

    def of(self, array: mx.array) -> tuple[TensorRecord, ...]:
        """The tensors, or rows of them, whose bytes one after another are the array's. Empty when it was computed."""
        return self._found.get(id(array), (array, ()))[1]

    def read(self, weights: Mapping[str, mx.array]) -> None:
        """Note arrays as they come from the checkpoint, by the names of their tensors."""
        for name, array in weights.items():
            record = self._checkpoint.tensors.get(name)
            if record is not None:
                self._note(array, (record,))

    @contextmanager
    def watching(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """Notes what happens to arrays that were read from the checkpoint, by the names of their tensors."""
        self.read(weights)
        with _watching, wrapped_functions(self._watched):  # the functions belong to the process
            yield

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        notes: dict[str, Callable[..., None]] = {
            "split": self._note_split,
            "contiguous": self._note_copied,
            "stack": self._note_joined,
            "concatenate": self._note_joined,
            **dict.fromkeys(CHANGING, self._note_changed),
        }
        note: Callable[..., None] = notes.get(name, self._note_reshaped)

        def watched(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            note(result, *args, **options)
            return result

        return watched

    def _note(self, array: mx.array, records: tuple[TensorRecord, ...]) -> None:
        if sum([record.nbytes for record in records]) == array.nbytes:  # mlx reads some dtypes as others
            self._found[id(array)] = array, records

    def _note_joined(self, result: mx.array, arrays: Sequence[mx.array], axis: int = 0, **_: Any) -> None:
        parts = [self.of(array) for array in arrays]
        if axis == 0 and all(parts) and all(array.dtype == result.dtype for array in arrays):
            self._note(result, tuple(record for part in parts for record in part))

    def _note_split(self, results: Sequence[mx.array], array: mx.array, indices: Any, axis: int = 0, **_: Any) -> None:
        records = self.of(array)
        if axis == 0 and len(records) == 1 and records[0].shape == tuple(array.shape):
            start = 0
            for result in results:
                self._note(result, (records[0].rows(start, start + result.shape[0]),))
                start += result.shape[0]
        if axis == 1 and array.ndim == 3:
            self._note_rows_of_experts(results, _one_by_one(records))

    def _note_rows_of_experts(self, results: Sequence[mx.array], experts: Sequence[TensorRecord]) -> None:
        """Note parts of a stack that have some rows of each expert."""
        start = 0
        for result in results:
            num_experts, num_rows, _ = result.shape
            if len(experts) == num_experts:
                self._note(result, tuple(expert.rows(start, start + num_rows) for expert in experts))
            start += num_rows

    def _note_copied(self, result: mx.array, array: mx.array, *_: Any, **__: Any) -> None:
        self._note(result, self.of(array))

    def _note_changed(self, result: Any, array: mx.array, *_: Any) -> None:
        self._found.pop(id(array), None)

    def _note_reshaped(self, result: mx.array, array: mx.array, *_: Any, **__: Any) -> None:
        records = self.of(array)
        if len(records) > 1 or (records and records[0].shape[:1] == tuple(result.shape[:1])):
            self._note(result, records)  # rows have to stay rows


def _one_by_one(records: Sequence[TensorRecord]) -> list[TensorRecord]:
    """Return the matrices that a stack is made of: its own, or those of tensors that are matrices."""
    if len(records) == 1 and len(records[0].shape) == 3:
        rows = [records[0].rows(i, i + 1) for i in range(records[0].shape[0])]
        return [replace(record, shape=record.shape[1:]) for record in rows]
    return list(records) if all(len(record.shape) == 2 for record in records) else []
