"""The state of a running model in JSON, for flash-monitor and other readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

import mlx.core as mx

from mlx_flash.engine.engine import Engine
from mlx_flash.engine.passes import PassCounters
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.layout.units import trunk_of
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint, peak_footprint
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.streaming.stream import UnitState, unit_states
from mlx_flash.telemetry import Json


class Status:
    """The state of one model. No lock is taken that a forward pass waits for longer than for a few additions.

    ``running`` returns the models of the process that run, and their counters; ``sections`` return further sections.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        counters: PassCounters,
        layout: ModelLayout,
        running: Callable[[], Sequence[tuple[Engine, PassCounters]]] = tuple,
        sections: Mapping[str, Callable[[], Json]] = MappingProxyType({}),
    ) -> None:
        self._engine, self._counters, self._running, self._sections = engine, counters, running, sections
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
        running = [(engine, counters) for engine, counters in self._running() if engine is not own]
        others = [engine for engine, _ in running]
        models = (own, *others)
        rest = active - sum(model.weight_bytes + model.usage.reserved_bytes for model in models)
        rest -= min(model.plan.active_bytes for model in models)  # arrays of the program
        is_latest = all(counters.last_began <= self._counters.last_began for _, counters in running)
        return {
            "footprint": footprint(),  # as the budget counts it
            "peak_footprint": peak_footprint(),
            "active": active,  # arrays of MLX
            "cache": int(mx.get_cache_memory()),  # freed arrays that MLX keeps
            "peak": int(mx.get_peak_memory()),
            "lent": own.loans.nbytes,  # streamed weights in reserved memory
            "pool": own.pool_bytes,  # experts
            # All other arrays belong to the last call. A cache may take less than it reserves.
            "kv_and_activations": own.usage.memory_bytes + (max(0, rest) if is_latest else 0),
            # weights, keys and values of other models of the process
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


_PLAN = ("budget", "base", "resident", "pinned", "slots", "pool", "kv", "activation", "spare", "bounce")
"""Parts of a plan whose bytes are published."""

_OF_PLAN = ("cache_limit", "context_length", "prefill_step_size", "disk_bytes_per_second")


def plan_numbers(plan: ResidencyPlan) -> Json:
    """Return the facts about a plan: its attributes of the same names, and a few others."""
    return {
        **{name: getattr(plan, name) for name in (*(f"{part}_bytes" for part in _PLAN), *_OF_PLAN)},
        "num_slots": plan.streaming.num_slots,
        "kv_disk_bytes": plan.kv.disk_bytes,
        "read_bytes_per_pass": plan.read_bytes,
        "predicted_seconds_per_pass": plan.opening_seconds,
    }
