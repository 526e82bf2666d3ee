"""The engines of this user, followed over time."""

from __future__ import annotations

import time
from dataclasses import is_dataclass
from typing import Any

from mlx_flash.monitor.rates import History
from mlx_flash.monitor.system import SystemMemory, system_memory
from mlx_flash.telemetry import Json, find

Key = tuple[int, int, float]


class Watcher:
    """The running engines, and the one that ended last.

    Args:
        pid: follow only this process, or None.

    Raises:
        PermissionError: a folder is not private to the user.

    Attributes:
        histories: the engines running now, by process and number.
        ended: the engine that ended last, until another one starts.
        other_pids: processes with engines that are not followed.
        system: memory of the machine.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._known: dict[Key, History] = {}
        self._chosen: Key | None = None
        self._is_picked = False  # by the user
        self.other_pids: list[int] = []
        self.histories: list[History] = []
        self.ended: History | None = None
        self.system: SystemMemory = system_memory()

    @property
    def chosen(self) -> int:
        """Index of the engine to show: the one that the user chose, or one that is not idle, or the first."""
        keys = list(self._known)
        return keys.index(self._chosen) if self._chosen in keys else 0

    def look(self) -> None:
        """Read what engines published since the last look.

        Raises:
            PermissionError: a folder is not private to the user.
        """
        running: dict[Key, History] = {}
        found = find()
        for published in found:
            if self._pid not in (None, published.pid):
                continue
            key = (published.pid, published.number, published.started)
            history = running[key] = self._known.get(key) or History(published)
            history.add(published)
        gone = [history for key, history in self._known.items() if key not in running]
        if gone:
            self.ended = gone[-1]
            self.ended.ended = time.time()
        elif running.keys() - self._known.keys():
            self.ended = None
        self._known = running
        self._is_picked &= self._chosen in running
        busy = [key for key, history in running.items() if not history.is_idle()]
        if busy and self._chosen not in busy and not self._is_picked:
            self._chosen = busy[0]
        self.histories = list(running.values())
        self.other_pids = sorted({published.pid for published in found} - {key[0] for key in running})
        self.system = system_memory()

    def choose_next(self) -> None:
        """Choose the next engine of the list."""
        keys = list(self._known)
        if keys:
            self._chosen, self._is_picked = keys[(self.chosen + 1) % len(keys)], True

    def to_json(self) -> list[Json]:
        """Return one JSON object for each running engine."""
        return [_to_json(history, self.system) for history in self.histories]


def _to_json(history: History, system: SystemMemory) -> Json:
    published = history.latest
    return {
        "schema": published.schema,
        "pid": published.pid,
        "number": published.number,
        "started": published.started,
        "written": published.written,
        "clock": published.clock,
        **published.state,
        "idle": history.is_idle(),
        "rates": _fields(history.rates),
        "system": _fields(system),
    }


def _fields(value: Any) -> Any:
    """Return the fields of a dataclass. ``asdict`` would copy each number."""
    if not is_dataclass(value):
        return value
    return {name: _fields(getattr(value, name)) for name in value.__dataclass_fields__}
