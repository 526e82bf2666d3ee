"""A streamed model from loading to its end, its state in JSON, and the models of a process, which share one budget.

A model waits for its first call, runs, and may be planned again. A thread makes the budget follow free memory.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_flash import enginethread
from mlx_flash.compat.arrays import evaluate
from mlx_flash.config import GB, FlashConfig, parse_budget
from mlx_flash.engine.call import parse_call
from mlx_flash.engine.engine import Engine
from mlx_flash.engine.passes import PassCounters, Passes
from mlx_flash.engine.prepare import BEFORE_LOADING, Prepared
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, ClosedError, ConfigError, FlashError
from mlx_flash.forks import finalize, wait_for_finalizers
from mlx_flash.kv.disk import WriteGovernor
from mlx_flash.kv.growth import tokens_fit
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.units import trunk_of
from mlx_flash.logs import log
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import MemoryReading, footprint, free_unused, peak_footprint, read_memory
from mlx_flash.prefixes.prefixcache import forget
from mlx_flash.residency.plan import ResidencyPlan, in_gb
from mlx_flash.speculation import Times
from mlx_flash.streaming.stream import UnitState, unit_states
from mlx_flash.telemetry import FACTS, Json


class Status:
    """The state of one model. No lock is taken that a forward pass waits for longer than for a few additions.

    ``sections`` return further sections.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        counters: PassCounters,
        layout: ModelLayout,
        sections: Mapping[str, Callable[[], Json]] = MappingProxyType({}),
    ) -> None:
        self._engine, self._counters, self._sections = engine, counters, sections
        self._num_units = len(engine.stream.units)
        trunk = layout if engine.plan.pool is None else trunk_of(layout)
        self._parts = _parts(trunk, engine.plan, engine.units)
        self._model = {"name": name, "bytes": engine.plan.model_bytes}
        self._told_plan = plan_numbers(engine.plan)

    def collect(self) -> Json:
        """Return the state now, as :mod:`mlx_flash.telemetry` has it. Touches no array: any thread may call it."""
        stream = self._engine.stream
        return {
            "model": self._model,
            "plan": self._told_plan,
            "units": self._units(),
            "passes": asdict(self._counters),
            "stream": asdict(stream.stats),
            "read": {
                **asdict(self._engine.reader.stats),
                "cached_file_bytes": self._engine.reader.cached.file_bytes,
            },
            "memory": self._memory(),
            "experts": self._experts(),
            "kv": None if self._engine.kv is None else asdict(self._engine.kv.usage),
            **{section: collect() for section, collect in self._sections.items()},
        }

    def _experts(self) -> Json | None:
        plan, experts = self._engine.plan.pool, self._engine.experts
        if plan is None or experts is None:
            return None
        return {
            **asdict(experts.pool.stats),
            "num_slots": experts.pool.slots.num_slots,
            "slot_bytes": plan.slot_bytes,
            "num_resident": experts.pool.num_resident,
            "num_experts": plan.num_experts,
            "expert_bytes": max(layer.expert_bytes for layer in experts.pool.layers),
        }

    def _units(self) -> list[Json]:
        # A closed engine has a stream without units.
        states = unit_states(self._engine.stream, self._counters.last_began) or ["waiting"] * self._num_units
        return [
            {**part, "state": _joint_state([states[i] for i in numbers]) if numbers else "pinned"}
            for part, numbers in self._parts
        ]

    def _memory(self) -> Json:
        own, active = self._engine, active_memory()
        models = [(model.engine, model.counters) for model in _OF_PROCESS.running]
        running = [(engine, counters) for engine, counters in models if engine is not None and engine is not own]
        others = [engine for engine, _ in running]
        rest = active - sum(each.weight_bytes + each.usage.reserved_bytes for each in (own, *others))
        rest -= min(each.plan.active_bytes for each in (own, *others))  # arrays of the program
        is_latest = all(counters.last_began <= self._counters.last_began for _, counters in running)
        return {
            "footprint": footprint(),
            "peak_footprint": peak_footprint(),
            "active": active,
            "cache": int(mx.get_cache_memory()),
            "peak": int(mx.get_peak_memory()),
            "lent": own.loans.nbytes,
            "pool": own.pool_bytes,
            # All other arrays belong to the last call. A cache may take less than it reserves.
            "kv_and_activations": own.usage.memory_bytes + (max(0, rest) if is_latest else 0),
            "others": sum(other.weight_bytes + other.usage.memory_bytes for other in others),
        }


def _joint_state(states: Sequence[UnitState]) -> UnitState:
    """The state of a head from those of its tiles: it is being computed from its first tile to its last."""
    if len(set(states)) == 1:
        return states[0]
    if "computing" in states or "done" in states:
        return "computing" if "waiting" in states or "computing" in states else "done"
    return "reading" if "reading" in states else "resident" if "resident" in states else "waiting"


def _parts(layout: ModelLayout, plan: ResidencyPlan, units: Sequence[Unit]) -> list[tuple[Json, list[int]]]:
    """Return layers in calling order, then heads, among them embedding tables that serve as one.

    Each has its numbers in the stream: none if it is pinned whole, several if it is cut into units or tiles. ``units``
    has for each unit in the stream the unit of the layout that it is, or is a tile of.
    """
    streamed = plan.streaming.parameters(layout)
    numbers: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        for parameter in unit.large:
            numbers.setdefault(id(parameter), []).append(number)
    tied = [unit for unit in layout.embeddings if unit.name in layout.tied]
    found = list[tuple[Json, list[int]]]()
    for unit in [*layout.layers, *layout.heads, *tied]:
        own = sorted({number for parameter in unit.large for number in numbers.get(id(parameter), ())})
        nbytes = sum(parameter.nbytes for parameter in unit.large if own and parameter.name in streamed)
        kind = "layer" if len(found) < len(layout.layers) else "head"
        found.append(({"name": unit.name, "kind": kind, "bytes": unit.nbytes, "streamed_bytes": nbytes}, own))
    return found


def plan_numbers(plan: ResidencyPlan) -> Json:
    """Return the facts about a plan: its attributes of the same names, and a few others."""
    others = {
        "num_slots": plan.streaming.num_slots,
        "kv_disk_bytes": plan.kv.disk_bytes,
        "read_bytes_per_pass": plan.read_bytes,
        "predicted_seconds_per_pass": plan.opening_seconds,
    }
    names = [name.removeprefix("plan.") for name in FACTS if name.startswith("plan.")]
    return {name: others[name] if name in others else getattr(plan, name) for name in names}


DEADBAND = 0.05
"""Changes of less than this share of the budget are not made."""

HIGH_PRESSURE = 0.1
"""Share of time that tasks wait for memory from which on the budget falls, however much seems to be free."""

PRESSURE_STEP = 0.1
"""Share of the budget that goes then."""

PRESSURE_SECONDS = 10.0
"""Time between two such steps: the pressure is an average over as long."""

CALM_SECONDS = 60.0
"""Time in which there is more room before the budget rises. A program that comes and goes more often holds it down."""

T = TypeVar("T")

NUM_CHANGES = 8
"""Changes of the budget that are kept for flash-monitor."""

INTERVAL_SECONDS = 1.0
"""Time between two looks at the machine's memory."""


class Lifecycle:
    """A model as the manager of the process knows it. It knows nothing of the object that is called.

    ``engine`` is the plan in force: None before :meth:`start`, and while none is. ``promised_bytes`` are those of other
    models, which the plan counts as memory of the process.
    """

    passes: Passes
    times: Times

    def __init__(self, prepared: Prepared, config: FlashConfig, name: str) -> None:
        self.prepared = prepared
        self.config = config
        self.promised_bytes = 0
        self._started: list[Engine] = []  # the engine, also while it starts
        self.engine: Engine | None = None
        self.governor = WriteGovernor(config.ssd_write_gb_per_day)
        options = prepared.plan.kv.options
        self._lock = threading.RLock()
        self.kv = None if options is None else KVPool(options, self.governor.count, self._lock)
        self.counters = PassCounters()
        peers = None if prepared.chain is None else prepared.chain.peers
        self.name = name if peers is None else f"{name} (rank {peers.rank} of {peers.size})"
        self._pid = os.getpid()
        finalize(self, enginethread.leave, partial(_end_all, self._started))
        self._closed = self._is_planned = False
        self._manager = ModelManager.of_process()
        self._manager.add(self)
        if config.ram_budget_gb == "auto":
            enginethread.run(self._manager.watch)  # an interrupt of `Thread.start` may leave one that never runs

    @property
    def plan(self) -> ResidencyPlan:
        """The weights in memory, and those that are not. Made anew by :meth:`start`; another one adapts the engine."""
        return self.prepared.plan

    @plan.setter
    def plan(self, plan: ResidencyPlan) -> None:
        self.prepared = replace(self.prepared, plan=plan)
        if self.engine is not None:
            self.engine.adapt(plan)

    @property
    def layout(self) -> ModelLayout:
        return self.prepared.layout

    def start(self, progress: Progress | None = None) -> None:
        """Start the model, and all others that wait. As :meth:`FlashLLM.start`."""
        if os.getpid() != self._pid:
            raise _forked(self._pid)
        if self._closed:
            raise _closed()
        if self.engine is None:
            told = progress and (lambda done, total: enginethread.tell(partial(progress, done, total)))
            self._manager.start(self, told)

    @property
    def is_as_loaded(self) -> bool:
        """True if nobody has changed its modules. What a program made for them belongs to its thread."""
        return self.prepared.identity.is_unchanged

    def begin(self, promised_bytes: int, progress: Progress | None) -> None:
        """Carry out a plan of now, beside what other models will take, or may. The manager calls this once, in turn."""
        if self._closed:
            raise _closed()
        self._stop()  # one whose start an interrupt has cut in two, where a program's own thread starts the model
        if not self._is_planned:
            self.prepared, self.promised_bytes = self.prepared.renewed(self.config, promised_bytes), promised_bytes
        self.carry_out(self.prepared, progress)

    def carry_out(self, prepared: Prepared, progress: Progress | None = None) -> None:
        """Read the pinned weights of a plan, and begin to stream the rest. The model runs once it has an engine."""
        engine = Engine(prepared, self.config, self.name, self.kv, self.governor)
        self._started.append(engine)  # before it changes anything, for begin()
        engine.start(progress)
        if self.config.telemetry:
            sections = {"writes": self.governor.telemetry, "budget": self._manager.telemetry}
            sections |= {} if engine.chain is None else {"ranks": engine.chain.telemetry}
            sections |= {} if engine.prefixes is None else {"prefixes": engine.prefixes.telemetry}
            status = Status(self.name, engine, self.counters, prepared.layout, sections)
            engine.publish(status.collect)
        self.prepared = prepared
        self.times = Times(self.plan.seconds, self.plan.row_seconds)
        self.passes = Passes(prepared.loaded.called, engine, self.counters, self.times)
        self.engine = engine

    def run(self, work: Callable[[Passes], T], *given: Any) -> T:
        """Start the model, and return what some work returns that has the passes to itself, in the engine thread.

        ``given`` is what the caller made: caches, and objects with arrays. Only the caller's thread can evaluate them.
        """
        self.start()
        mx.eval(arrays_in(given))
        return enginethread.run(partial(self._run_in_turn, work))

    def _run_in_turn(self, work: Callable[[Passes], T]) -> T:
        self.start()
        with self._lock:  # nothing stops a model but work of this thread
            return work(self.passes)

    def compute(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that is mlx-lm's own, in the thread of its caller; None if this one is not.

        That is, where everything is in memory, a token of each sequence for which no buffer of the cache grows, or
        tokens that there is room for without anything else leaving memory.
        """
        if self.engine is None or not self.passes.is_in_memory or self._closed or os.getpid() != self._pid:
            return None
        tokens = args[0] if args else None
        if not isinstance(tokens, mx.array) or tokens.ndim != 2:
            return None
        cache = args[1] if len(args) > 1 else kwargs.get("cache")
        with self._lock:
            if self.engine is None or self._closed or not isinstance(cache, list | tuple):
                return None
            is_small = tokens.shape[1] == 1 and tokens_fit(cache)
            if not is_small and not self.passes.admit(parse_call(args, kwargs)):
                return None
            if self.engine.prefixes is not None:
                forget(cache)
            self.counters.begin(tokens.size, len(tokens), len(tokens) if tokens.shape[1] == 1 else 0)
            try:
                output = self.prepared.loaded.called(*args, **kwargs)
                if not is_small or self.plan.cache.largest_state:
                    # Only this thread can begin them, and no logits need the last state
                    evaluate(arrays_in(cache), waits=False)
            except BaseException:
                self.counters.end(failed=True)
                raise
            self.counters.end()
            if self.kv is not None and not is_small:
                self.kv.note()
            return output

    def lends(self) -> bool:
        """Return whether weights may have the memory that is reserved for calls until these need it."""
        return self.config.lend_reserves and self._manager.is_alone

    def end_loans(self) -> None:
        """Free the memory that weights have from reserves. The manager calls this when another one starts."""
        with self._lock:
            assert self.engine is not None
            self.engine.lending.end()

    def share_budget(self, nbytes: int) -> None:
        """Take the budget of the process. With ``min``, a plan's own one counts only the models before it."""
        if nbytes > self.plan.budget_bytes:
            self.plan = replace(self.plan, budget_bytes=nbytes)

    def set_budget(self, nbytes: int, base_bytes: int, *, is_alone: bool) -> None:
        """Change the budget. If what can be given back is not enough, plan again and start at the next call."""
        with self._lock:
            self.config = replace(self.config, ram_budget_gb=nbytes / GB)
            if self.engine is not None and is_alone and self.config.lend_reserves:
                adapted = self.engine.lending.adapt(self.plan, nbytes)
                if adapted is not None:
                    self.plan = adapted
                    self.engine.lending.recall(footprint() - nbytes)
                    return
            self.prepared, self._is_planned = self.prepared.planned(self.config, base_bytes), is_alone
            self.promised_bytes = 0
            self.engine = None
            self._stop()

    def close(self) -> nn.Module:
        model: nn.Module = self.prepared.loaded.model
        if os.getpid() != self._pid:
            return model  # of the parent, which goes on
        enginethread.run(self._end)
        return model

    def _end(self) -> None:
        with self._manager.lock, self._lock:
            self._closed = True
            self._manager.remove(self)
            self._stop()
            if self.kv is not None:
                self.kv.close()
            if self.prepared.chain is not None:
                self.prepared.chain.close()

    def _stop(self) -> None:
        """End the engine, if there is one. May be repeated."""
        if self._started:
            self._started[0].close()
            self._started.clear()
            free_unused()


def _end_all(engines: Sequence[Engine]) -> None:
    for engine in engines:
        engine.end()


def _closed() -> ClosedError:
    return ClosedError("the model was closed. Hint: load it again.")


def _forked(pid: int) -> ClosedError:
    """Return the error of a forked child of the process that loaded a model."""
    return ClosedError(
        f"the model was loaded in process {pid}; its fork {os.getpid()} has no threads that read. Hint: load the "
        "model after the fork, or use the spawn method of multiprocessing."
    )


class ModelManager:
    """The models that share the budget of a process: those that run, and those that wait for their first call."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while models are started, added and removed
        self._changes: deque[dict[str, Any]] = deque(maxlen=NUM_CHANGES)
        self._watcher: Watcher | None = None
        self._models: weakref.WeakValueDictionary[int, Lifecycle] = weakref.WeakValueDictionary()

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
            if self._watcher is None or not self._watcher.is_watching:
                self._watcher = Watcher(self)
                self._watcher.start()

    def telemetry(self) -> dict[str, Any]:
        """Return the budget and its last changes for the published state."""
        watcher = self._watcher
        reading = watcher.reading if watcher is not None and watcher.is_watching else None
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
    def running(self) -> list[Lifecycle]:
        """Models whose weights are streamed now."""
        return [model for model in list(self._models.values()) if model.engine is not None]

    @property
    def waiting(self) -> list[Lifecycle]:
        """Models that were not called yet, the smallest first."""
        waiting = [model for model in self._models.values() if model.engine is None]
        return sorted(waiting, key=lambda model: model.plan.model_bytes)

    @property
    def is_alone(self) -> bool:
        """True if there is only one model, which need not leave memory to others."""
        return len([*self._models.values()]) == 1  # whatever the dictionary still counts

    def add(self, model: Lifecycle) -> None:
        """Take in a model that was loaded. It stays until :meth:`remove`, or until nobody refers to it."""
        with self.lock:
            self._models[id(model)] = model

    def remove(self, model: Lifecycle) -> None:
        """Forget a model that was closed. Harmless when repeated."""
        with self.lock:
            self._models.pop(id(model), None)
            _CLOSED.add(model)

    def start(self, model: Lifecycle, progress: Progress | None = None) -> None:
        """Start a model and all others that wait, the smallest first: each leaves those after it what they need.

        Raises: FlashError: the model could not be started. Another one fails when it is called itself.
        """
        start = partial(self._start, model, progress)
        with self.lock:
            are_as_loaded = all(waiting.is_as_loaded for waiting in self.waiting)
        if are_as_loaded:
            enginethread.run(start)
        else:
            start()

    def _start(self, model: Lifecycle, progress: Progress | None) -> None:
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

    def _promised_by_others(self, model: Lifecycle) -> int:
        """Return the bytes of the budget that other models will take, or may."""
        running = [other.plan for other in self.running if other is not model]
        waiting = [other.plan for other in self.waiting if other is not model]
        return sum(plan.reserved_bytes for plan in running) + sum(
            max(0, plan.minimum_bytes - plan.base_bytes) for plan in waiting
        )


class Watcher(threading.Thread):
    """A thread that watches the machine's memory, and changes the budget of a manager's models between passes.

    The budget falls to the room at once. It rises once there was more for a calm period, to the least of that time.
    """

    def __init__(
        self,
        manager: ModelManager,
        read: Callable[[], MemoryReading] = read_memory,
        held: Callable[[], int] = footprint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="mlx-flash-watcher", daemon=True)
        self.reading: MemoryReading | None = None  # the last look; None before the first one
        self._manager, self._read, self._held, self._clock = manager, read, held, clock
        self._calm_since, self._least_room, self._fallen_at = clock(), math.inf, -math.inf

    @property
    def is_watching(self) -> bool:
        """True until the last model was closed; not in a forked child, which has no such thread."""
        # not `is_alive`, of which Python 3.11 makes False for good if an interrupt ends it
        return self in threading.enumerate()

    def look(self) -> None:
        budget, now = self._manager.budget_bytes, self._clock()
        self.reading = self._read()
        wanted = max(self._wanted(budget, self.reading, now), self._manager.least_budget)
        if wanted != budget:
            self._manager.set_ram_budget(wanted / 1e9, "others need memory" if wanted < budget else "memory is free")

    def _wanted(self, budget: int, reading: MemoryReading, now: float) -> int:
        room = reading.room(self._held())
        if reading.pressure >= HIGH_PRESSURE:
            is_due = now - self._fallen_at >= PRESSURE_SECONDS
            room = min(room, int(budget * (1 - PRESSURE_STEP * is_due)))
        if room > budget * (1 + DEADBAND):
            self._least_room = min(self._least_room, room)
            if now - self._calm_since < CALM_SECONDS:
                return budget
            room = int(self._least_room)
        elif room < budget * (1 - DEADBAND):
            self._fallen_at = now
        else:
            room = budget
        self._calm_since, self._least_room = now, math.inf
        return room

    def run(self) -> None:
        while self._manager.budget_bytes:
            try:
                self.look()
            except FlashError as error:  # a model was closed meanwhile, or needs more than a moment ago
                log.warning("the budget was not changed: %s", error)
            time.sleep(INTERVAL_SECONDS)


_OF_PROCESS = ModelManager()
_CLOSED: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def make_room() -> None:
    """Free what is not to count for the plan of another model: closed models that only garbage refers to, and loans."""
    with _OF_PROCESS.lock:
        if _CLOSED:
            gc.collect()
            _CLOSED.clear()
    wait_for_finalizers()  # which leave the ends of models to the engine thread
    enginethread.run(_OF_PROCESS.end_loans)


BEFORE_LOADING.append(make_room)
