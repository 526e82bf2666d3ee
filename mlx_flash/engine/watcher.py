"""A thread that makes the budget follow the machine's free memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mlx_flash.engine.tide import Tide
from mlx_flash.errors import FlashError
from mlx_flash.memory.footprint import footprint
from mlx_flash.memory.pressure import MemoryReading, read_memory

INTERVAL_SECONDS = 1.0

_log = logging.getLogger("mlx_flash")


class Budgeted(Protocol):
    """Models that share a budget, as the watcher knows them: a :class:`~mlx_flash.engine.manager.ModelManager`."""

    @property
    def budget_bytes(self) -> int:
        """The budget; 0 without models."""

    @property
    def least_budget(self) -> int:
        """The smallest one that the models can run within."""

    def set_ram_budget(self, ram_budget_gb: float, reason: str) -> None:
        """Change the budget."""


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
        manager: Budgeted,
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
        """True until the last model was closed."""
        return self._thread.is_alive()

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
                _log.warning("the budget was not changed: %s", error)
            time.sleep(INTERVAL_SECONDS)
