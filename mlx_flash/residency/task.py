"""The input of a plan, one way of cutting the model, and the memory that is taken before any weight is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import FlashConfig
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.kv import in_memory, ledger_of, on_disk, prefix_bytes, promised_bytes
from mlx_flash.residency.ledger import Ledger, reader_bytes
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import MB, PREFILL_STEPS, ResidencyPlan, Streaming
from mlx_flash.residency.selection import Streamed, spread
from mlx_flash.residency.sizes import ExpertSizes, ModelSizes, UnitSize
from mlx_flash.residency.timing import pool_of


class Reserve(NamedTuple):
    """Tokens that memory is set aside for, and how many parts of a prompt share a pass over the weights."""

    prefill_step_size: int
    context_length: int
    num_parts: int = 1


@dataclass(frozen=True)
class Task:
    """The input of a plan.

    Attributes:
        sizes: the model.
        config: the settings.
        machine: the machine.
        cache_limit: what MLX may keep of freed buffers.
        pool_slots: of the pool of experts that was asked for; 0 leaves that open.
        kv_on_disk: whether the KV cache is planned to be on disk.
        kv_room: memory that it may take then, if that is of use.
        cut: the way its layers are cut, as in ``Streaming.cut``.
        is_tiled: whether some linear layers pass through the slots in tiles of rows.
    """

    sizes: ModelSizes
    config: FlashConfig
    machine: Machine
    cache_limit: int
    pool_slots: int = 0
    kv_on_disk: bool = False
    kv_room: int = 0
    cut: int = 0
    is_tiled: bool = False

    @cached_property
    def cuts(self) -> tuple[Task, ...]:
        """The task with whole layers, then with smaller and smaller units in their place."""
        finer = enumerate(self.sizes.cuts[1:], 1)
        return (self, *[replace(self, sizes=sizes, cut=i) for i, sizes in finer])

    def with_(self, **changes: Any) -> Task:
        """Return the task with other values; itself, with the results that it keeps, if they are no others."""
        return self if {name: getattr(self, name) for name in changes} == changes else replace(self, **changes)

    def ledger(self, reserve: Reserve) -> Ledger:
        """Return the memory of tokens."""
        context, step = reserve.context_length, reserve.prefill_step_size
        return ledger_of(self.sizes, self.config, context, step, cut=self.cut, is_tiled=self.is_tiled)

    @cached_property
    def promised_bytes(self) -> int:
        """Memory for keys, values and activations of a long context."""
        return promised_bytes(self.sizes, self.config)

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        """Results of the methods below, by what they were asked for: bisections ask for the same often."""
        return {}

    def streamed(self, target: int, whole_layers: bool) -> Streamed:
        """Return the tensors for a number of bytes spread over the layers."""
        key = target, whole_layers
        found: Streamed | None = self.sizes.sums.get(key)
        if found is None:
            found = self.sizes.sums[key] = spread(self.sizes.layers, target, whole_layers)
        return found

    def tiled(self, units: Sequence[UnitSize]) -> Task:
        """Return the task in its finest cut, with some linear layers in row tiles."""
        key, sizes = tuple([unit.name for unit in units]), self.sizes
        found: Task | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = replace(self, sizes=sizes.tiled(set(key)), cut=len(sizes.finer), is_tiled=True)
        return found

    def bare(self, reserve: Reserve) -> ResidencyPlan:
        """Return the plan for a reserve without weights of layers and heads, and with the smallest pool of experts."""
        found: ResidencyPlan | None = self._kept.get(reserve)
        if found is None:
            found = self._kept[reserve] = self._bare(reserve)
        return found

    def _bare(self, reserve: Reserve) -> ResidencyPlan:
        sizes, machine, experts = self.sizes, self.machine, self.sizes.experts
        context, ledger = reserve.context_length, self.ledger(reserve)
        if self.kv_on_disk:
            kv = on_disk(ledger, context, self.kv_room, self.config.kv_ram_gb)
        else:
            kv = in_memory(ledger, context)
        # the larger of a prefill step without logits and a short call with all of them
        num_answer = min(PREFILL_STEPS[-1], ledger.step)
        activations = ledger.computing(num_answer, round_up(context, CACHE_STEP))
        parts = ledger.parts_waiting(reserve.num_parts - 1, context)
        copies = sizes.copies or machine.arrival != "in place" or (experts is not None and experts.copies)
        bounces = machine.arrival == "copied by the driver" or (machine.disk.direct and copies)
        num_readers = 1 if experts is None else 2  # urgent reads have threads and buffers of their own
        decodes = machine.compression is not None
        own_head, row = sizes.own_head if sizes.own_head is not None and sizes.guesses else (0, 0)
        return ResidencyPlan(
            budget_bytes=0,
            minimum_bytes=0,
            model_bytes=sizes.nbytes,
            base_bytes=machine.base_bytes + machine.runtime_bytes,
            active_bytes=machine.active_bytes,
            context_bytes=machine.context_bytes,
            resident_bytes=sizes.resident_bytes,
            pinned_bytes=0,
            streaming=Streaming(),
            pool=None if experts is None else pool_of(machine, experts, self.pool_slots or experts.least_slots),
            kv=kv,
            prefix_bytes=prefix_bytes(sizes.cache, self.config, context),
            activation_bytes=activations,
            spare_bytes=max(0, self.promised_bytes - kv.nbytes - activations, parts),
            bounce_bytes=num_readers * reader_bytes(machine.disk, bounces=bounces, decodes=decodes),
            read_size=machine.disk.read_size,
            queue_depth=machine.disk.queue_depth,
            disk_bytes_per_second=machine.disk.bytes_per_second,
            cache_limit=self.cache_limit,
            prefill_step_size=ledger.step,
            context_length=context,
            kv_bytes_per_token=sizes.cache.token_bytes,
            activations=sizes.activations,
            cache=sizes.cache,
            compression=machine.compression,
            keeps_states=ledger.keeps_states,
            mtp_bytes=own_head + row * round_up(context, CACHE_STEP),
        )

    def most_slots(self, experts: ExpertSizes) -> int:
        """Return the most slots that a pool may have: it is one array."""
        return min(sum(experts.num_experts), self.machine.largest_array // experts.slot_bytes)


def cache_limit_of(machine: Machine, budget: int) -> int:
    """Return the bytes of freed buffers that MLX may keep. Of CUDA's driver it gets others at once."""
    most = 64 * MB if machine.context_bytes else 256 * MB
    return min(max(64 * MB, budget // 20), most) if machine.has_buffer_cache else 0
