"""The streamed models of a process, which share one budget, and the thread that makes it follow free memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import mlx.nn as nn

from mlx_flash import enginethread
from mlx_flash.config import GB, parse_budget
from mlx_flash.engine.engine import Engine, Progress
from mlx_flash.engine.status import PassCounters
from mlx_flash.engine.tide import Tide
from mlx_flash.errors import BudgetError, ConfigError, FlashError
from mlx_flash.forks import wait_for_finalizers
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.logs import log
from mlx_flash.memory.footprint import MemoryReading, footprint, read_memory
from mlx_flash.residency.plan import ResidencyPlan, in_gb

NUM_CHANGES = 8
"""Changes of the budget that are kept for flash-monitor."""

INTERVAL_SECONDS = 1.0
"""Time between two looks at the machine's memory."""


class StreamedModel(Protocol):
    """A model as the manager knows it.

    Attributes:
        name: of the model, for people.
        plan: what is in memory once it runs.
        promised_bytes: of other models, which the plan counts as memory of the process.
        engine: None until it runs.
        counters: of its calls.
        kv: what its KV caches share; None where they are mlx-lm's own.
    """

    name: str
    plan: ResidencyPlan
    promised_bytes: int
    engine: Engine | None
    counters: PassCounters
    kv: KVPool | None

    @property
    def is_as_loaded(self) -> bool:
        """True if nobody has changed its modules. What a program made for them belongs to its thread."""

    def begin(self, promised_bytes: int, progress: Progress | None) -> None:
        """Begin to stream, beside what the other models will take, or may."""

    def end_loans(self) -> None:
        """Free the memory that was lent, so that another model finds what is reserved for this one."""

    def share_budget(self, nbytes: int) -> None:
        """Count against a budget that other models raised: it stands for the process, and they are part of it."""

    def set_budget(self, nbytes: int, base_bytes: int, *, is_alone: bool) -> None:
        """Change the budget of the process between passes, given the process without models."""

    def close(self) -> nn.Module:
        """End streaming."""


class ModelManager:
    """The models that share the budget of a process: those that run, and those that wait for their first call.

    Attributes:
        lock: held while models are started, added and removed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changes: deque[dict[str, Any]] = deque(maxlen=NUM_CHANGES)
        self._watcher: Watcher | None = None
        self._models: weakref.WeakValueDictionary[int, StreamedModel] = weakref.WeakValueDictionary()

    @staticmethod
    def of_process() -> ModelManager:
        """Return the manager of this process."""
        return _OF_PROCESS

    @property
    def budget_bytes(self) -> int:
        """The budget of the process; 0 without models."""
        return max((model.plan.budget_bytes for model in list(self._models.values())), default=0)

    def watch(self) -> None:
        """Make the budget follow the machine's free memory until the last model is closed."""
        with self.lock:
            if self._watcher is None or not self._watcher.is_alive:
                self._watcher = Watcher(self)
                self._watcher.start()

    def telemetry(self) -> dict[str, Any]:
        """Return the budget and its last changes for the published state."""
        watcher = self._watcher
        reading = watcher.reading if watcher is not None and watcher.is_alive else None
        return {
            "bytes": self.budget_bytes,
            "is_auto": reading is not None,
            "machine": None if reading is None else asdict(reading),
            "changes": list(self._changes),
        }

    @property
    def least_budget(self) -> int:
        """The smallest budget in bytes that all models of the process can run within."""
        plans = [model.plan for model in self._models.values()]
        return self._base_bytes + sum(max(0, plan.minimum_bytes - plan.base_bytes) for plan in plans)

    @property
    def _base_bytes(self) -> int:
        """The process without models, and what running adds to it."""
        return min((model.plan.base_bytes - model.promised_bytes for model in self._models.values()), default=0)

    def set_ram_budget(self, ram_budget_gb: float, reason: str = "set by the program") -> None:
        """Change the budget of all models of the process, running or not. The output does not change.

        Memory above a smaller budget is freed before this returns, which waits for the pass that is computed now. A
        model gives back what it was lent and then experts. If that is not enough, it ends and starts again with another
        plan when it is called next. Memory of a larger budget is lent to weights as they are read.

        Args:
            ram_budget_gb: peak memory of the process in GB (10**9 bytes).
            reason: why, for flash-monitor.

        Raises:
            BudgetError: the models need more; nothing has changed.
            ConfigError: it is no number of GB.
        """
        budget = parse_budget(ram_budget_gb)
        if not isinstance(budget, float):
            raise ConfigError(f"set_ram_budget() was given {ram_budget_gb!r}: it must be a number of GB (10**9 bytes)")
        enginethread.run(partial(self._set_budget, round(budget * GB), reason))

    def _set_budget(self, nbytes: int, reason: str) -> None:
        with self.lock:
            models = [*self.running, *self.waiting]
            if nbytes < self.least_budget:
                needs = ", ".join(f"{model.name} {in_gb(model.plan.minimum_bytes)}" for model in models)
                raise BudgetError(
                    f"set_ram_budget() was given {nbytes / GB:g} GB, but the models of this process need at least "
                    f"{in_gb(self.least_budget)} together (each alone: {needs}). Hint: give more, or close a model.",
                    self.least_budget,
                )
            base_bytes, before = self._base_bytes, self.budget_bytes
            self._changes.append({"at": time.time(), "before": before, "after": nbytes, "reason": reason})
            for model in models:
                model.set_budget(nbytes, base_bytes, is_alone=len(models) == 1)

    @property
    def running(self) -> list[StreamedModel]:
        """Models whose weights are streamed now."""
        return [model for model in list(self._models.values()) if model.engine is not None]

    @property
    def waiting(self) -> list[StreamedModel]:
        """Models that were not called yet, the smallest first."""
        waiting = [model for model in self._models.values() if model.engine is None]
        return sorted(waiting, key=lambda model: model.plan.model_bytes)

    @property
    def is_alone(self) -> bool:
        """True if there is only one model, which need not leave memory to others."""
        return len([*self._models.values()]) == 1  # whatever the dictionary still counts

    def add(self, model: StreamedModel) -> None:
        """Take in a model that was loaded. It stays until :meth:`remove`, or until nobody refers to it."""
        with self.lock:
            self._models[id(model)] = model

    def remove(self, model: StreamedModel) -> None:
        """Forget a model that was closed. Harmless when repeated."""
        with self.lock:
            self._models.pop(id(model), None)
            _CLOSED.add(model)

    def start(self, model: StreamedModel, progress: Progress | None = None) -> None:
        """Start a model and all others that wait, the smallest first: each leaves those after it what they need.

        Raises:
            FlashError: the model could not be started. Another one that could not fails when it is called itself.
        """
        start = partial(self._start, model, progress)
        with self.lock:
            are_as_loaded = all(waiting.is_as_loaded for waiting in self.waiting)
        if are_as_loaded:
            enginethread.run(start)
        else:
            start()

    def _start(self, model: StreamedModel, progress: Progress | None) -> None:
        with self.lock:
            self.end_loans()
            for waiting in self.waiting:
                try:
                    waiting.begin(self._promised_by_others(waiting), progress if waiting is model else None)
                except FlashError:
                    if waiting is model:
                        raise
            for running in self.running:
                running.share_budget(self.budget_bytes)

    def end_loans(self) -> None:
        """Free the memory that running models were lent: another one may need it."""
        with self.lock:
            for running in self.running:
                running.end_loans()

    def _promised_by_others(self, model: StreamedModel) -> int:
        """Return the bytes of the budget that other models will take, or may."""
        running = [other.plan for other in self.running if other is not model]
        waiting = [other.plan for other in self.waiting if other is not model]
        return sum(plan.reserved_bytes for plan in running) + sum(
            max(0, plan.minimum_bytes - plan.base_bytes) for plan in waiting
        )


class Watcher:
    """A thread that watches the machine's memory, and changes the budget of a manager's models between passes.

    Args:
        manager: its models get the budget.
        read: looks at the machine.
        held: returns the footprint of this process.
        clock: returns the time in seconds.

    Attributes:
        reading: the last look; None before the first one.
    """

    def __init__(
        self,
        manager: ModelManager,
        read: Callable[[], MemoryReading] = read_memory,
        held: Callable[[], int] = footprint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reading: MemoryReading | None = None
        self._manager = manager
        self._read = read
        self._held = held
        self._clock = clock
        self._tide: Tide | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-flash-watcher", daemon=True)

    @property
    def is_alive(self) -> bool:
        """True until the last model was closed; not in a forked child, which has no such thread."""
        # not the thread's own `is_alive`, of which Python 3.11 makes False for good if an interrupt ends it
        return self._thread in threading.enumerate()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def look(self) -> None:
        """Look at the machine once, and change the budget if it is time to."""
        budget = self._manager.budget_bytes
        tide = self._tide if self._tide is not None and self._tide.budget == budget else Tide(budget, self._clock())
        self.reading = self._read()
        self._tide = tide.after(self.reading, self._held(), self._clock())
        wanted = max(self._tide.budget, self._manager.least_budget)
        if wanted != budget:
            self._manager.set_ram_budget(wanted / 1e9, "others need memory" if wanted < budget else "memory is free")
        self._tide = self._tide.at(self._manager.budget_bytes)

    def _run(self) -> None:
        while self._manager.budget_bytes:
            try:
                self.look()
            except FlashError as error:  # a model was closed meanwhile, or needs more than a moment ago
                log.warning("the budget was not changed: %s", error)
            time.sleep(INTERVAL_SECONDS)


_OF_PROCESS = ModelManager()
_CLOSED: weakref.WeakSet[StreamedModel] = weakref.WeakSet()


def make_room() -> None:
    """Free what is not to count for the plan of another model: closed models that only garbage refers to, and loans."""
    with _OF_PROCESS.lock:
        if _CLOSED:
            gc.collect()
            _CLOSED.clear()
    wait_for_finalizers()  # which leave the ends of models to the engine thread
    enginethread.run(_OF_PROCESS.end_loans)
