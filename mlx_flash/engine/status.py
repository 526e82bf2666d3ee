"""The state of a running model in JSON, for flash-monitor and other readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import mlx.core as mx

from mlx_flash.engine.engine import Engine
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.layout.units import trunk_of
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint, peak_footprint
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.streaming.stream import UnitState, unit_states
from mlx_flash.telemetry import FACTS, Json

LONGEST_GAP_SECONDS = 60.0
"""A longer time between two calls is idle time, not the evaluation of what a call left lazy."""


@dataclass(slots=True)
class PassCounters:
    """Counters of a model's forward calls, as :mod:`mlx_flash.telemetry` describes them.

    The calling thread writes them, any thread may read them. Moments are of ``time.perf_counter()``. A gap is the time
    between a call that ended and the next one, in which MLX evaluates what the call left lazy. Idle time is not
    counted, and tokens of prompts that share a pass with generated ones count as neither.
    """

    num_passes: int = 0
    num_failed: int = 0
    num_tokens_in: int = 0
    num_tokens_out: int = 0
    num_prompt_tokens: int = 0
    num_sequences: int = 0
    pass_seconds: float = 0.0
    last_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_gap_seconds: float = 0.0
    decode_gap_seconds: float = 0.0
    num_guessed: int = 0
    num_right: int = 0
    began: float | None = None
    last_began: float = 0.0
    last_ended: float = 0.0
    num_tokens: int = 0
    batch_size: int = 0
    num_decoding: int = 0

    def begin(self, num_tokens: int, batch_size: int, num_decoding: int) -> None:
        """Note the start of a pass: its new tokens over all sequences, these, and those of them with one new token."""
        now = time.perf_counter()
        gap = now - self.last_ended
        if self.num_passes and self.last_ended >= self.last_began and gap < LONGEST_GAP_SECONDS:
            if not self.num_decoding:
                self.prompt_gap_seconds += gap
                self.num_prompt_tokens += self.num_tokens
            elif num_tokens == batch_size:
                self.decode_gap_seconds += gap
        self.num_tokens, self.batch_size, self.num_decoding = num_tokens, batch_size, num_decoding
        self.began = self.last_began = now

    def end(self, *, failed: bool = False) -> None:
        """Note the end of the call; when it ``failed``, no tokens are counted. Harmless when none has begun."""
        if self.began is None:
            return
        now = time.perf_counter()
        seconds = now - self.began
        self.pass_seconds += seconds
        self.began = None
        if failed:
            self.num_failed += 1
            return
        Machine.has_run = True
        self.num_passes += 1
        self.num_tokens_in += self.num_tokens
        self.num_sequences += self.batch_size
        self.last_seconds = seconds
        if self.num_decoding:
            self.decode_seconds += seconds
            self.num_tokens_out += self.num_decoding
        self.last_ended = now

    def end_guess(self, num_guessed: int, num_right: int) -> None:
        """Count the tokens that were guessed in the last call, which counts as one token, and those that were right."""
        self.num_guessed += num_guessed
        self.num_right += num_right
        self.num_tokens_in += num_right
        self.num_tokens_out += num_right


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
