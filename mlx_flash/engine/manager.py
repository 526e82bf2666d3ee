"""The streamed models of a process, which share one budget."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import mlx.nn as nn

from mlx_flash.engine.engine import Engine, Progress
from mlx_flash.errors import FlashError
from mlx_flash.residency.plan import ResidencyPlan


class StreamedModel(Protocol):
    """A model as the manager knows it.

    Attributes:
        name: of the model, for people.
        plan: what is in memory once it runs.
        engine: None until it runs.
    """

    name: str
    plan: ResidencyPlan
    engine: Engine | None

    def begin(self, promised_bytes: int, progress: Progress | None) -> None:
        """Begin to stream.

        Args:
            promised_bytes: the part of the budget that the other models will take, or may.
            progress: called while pinned weights are read.
        """

    def end_loans(self) -> None:
        """Free the memory that was lent, so that another model finds what is reserved for this one."""

    def close(self) -> nn.Module:
        """End streaming."""


class FlashManager:
    """The models that share the budget of a process: those that run, and those that wait for their first call.

    Attributes:
        lock: held while models are started, added and removed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._models: weakref.WeakValueDictionary[int, StreamedModel] = weakref.WeakValueDictionary()

    @staticmethod
    def of_process() -> FlashManager:
        """Return the manager of this process."""
        return _OF_PROCESS

    @property
    def running(self) -> list[StreamedModel]:
        """Models whose weights are streamed now."""
        return [model for model in self._models.values() if model.engine is not None]

    @property
    def waiting(self) -> list[StreamedModel]:
        """Models that were not called yet, the smallest first."""
        waiting = [model for model in self._models.values() if model.engine is None]
        return sorted(waiting, key=lambda model: model.plan.model_bytes)

    @property
    def is_alone(self) -> bool:
        """True if there is only one model, which need not leave memory to others."""
        return len(self._models) == 1

    def add(self, model: StreamedModel) -> None:
        """Take in a model that was loaded. It stays until :meth:`remove`, or until nobody refers to it."""
        with self.lock:
            self._models[id(model)] = model

    def remove(self, model: StreamedModel) -> None:
        """Forget a model that was closed. Harmless when repeated."""
        with self.lock:
            self._models.pop(id(model), None)

    def start(self, model: StreamedModel, progress: Progress | None = None) -> None:
        """Start a model and all others that wait, the smallest first: each leaves those after it what they need.

        Raises:
            FlashError: the model could not be started. Another one that could not fails when it is called itself.
        """
        with self.lock:
            for running in self.running:
                running.end_loans()
            for waiting in self.waiting:
                try:
                    waiting.begin(self._promised_by_others(waiting), progress if waiting is model else None)
                except FlashError:
                    if waiting is model:
                        raise

    def _promised_by_others(self, model: StreamedModel) -> int:
        """Return the bytes of the budget that other models will take, or may."""
        running = [other.plan for other in self.running if other is not model]
        waiting = [other.plan for other in self.waiting if other is not model]
        return sum(plan.kv_bytes + plan.activation_bytes for plan in running) + sum(
            max(0, plan.minimum_bytes - plan.base_bytes) for plan in waiting
        )


_OF_PROCESS = FlashManager()
