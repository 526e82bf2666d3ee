from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_flash import FlashConfig, FlashLLM, ReadError
from mlx_flash.engine.prepare import Prepared, prepare
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import trunk_of
from mlx_flash.residency.plan import Pool, ResidencyPlan
from mlx_flash.residency.sizes import measure

LARGE_GB = 2 if mx.default_device() == mx.cpu else 6
"""A budget with room for the process and any of these models. With a GPU, the process alone takes 1.2 GB and more."""


def config(**changes: Any) -> FlashConfig:
    """Settings with which every weight that the plan streams is read on every pass."""
    settings: dict[str, Any] = {
        "ram_budget_gb": "min",
        "context_length": 256,
        "poison_released_slots": True,
        "lend_reserves": False,
        "io": "direct",
        "telemetry": False,
    }
    return FlashConfig(**{**settings, **changes})


def failing_once(model: FlashLLM, number: int = 3) -> AbstractContextManager[Any]:
    """Make the read fail that a streamed model waits for after so many others."""
    stream = model.engine.stream  # type: ignore[union-attr]
    acquire, count = stream.acquire, iter(range(1 << 30))

    def failing(index: int, inputs: Sequence[mx.array] = ()) -> None:
        if next(count) == number:
            raise ReadError("a disk that was unplugged")
        acquire(index, inputs)

    return patch.object(stream, "acquire", failing)


def prepared_for(
    directory: Path, exact_rows: bool = True, group: mx.distributed.Group | None = None, **settings: Any
) -> Prepared:
    """Prepare a model with these settings, for rows that are exact where they are."""
    prepared = prepare(directory, config(**settings), group=group)
    exact_rows = exact_rows and mx.default_device() == mx.cpu
    return replace(prepared, machine=replace(prepared.machine, exact_tiles=exact_rows))


def carried_out(prepared: Prepared, plan: ResidencyPlan, **settings: Any) -> FlashLLM:
    """Return a model with these settings and this plan, whatever the planner would do."""
    model = FlashLLM(prepared, config(**settings), "test")
    model._life.carry_out(replace(prepared, plan=plan))
    return model


def pool_with(layout: ModelLayout, num_slots: int) -> Pool:
    """Return a plan's pool of so many experts, or of the fewest there can be."""
    experts: Any = measure(layout, {}).trunk.experts  # type: ignore[union-attr]
    return Pool(max(num_slots, experts.least_slots), experts.slot_bytes, sum(experts.num_experts), 0.5, 0, 0.0)


def streamed_whole(
    directory: Path,
    num_slots: int = 2,
    tile_rows: int = 384,
    io: Any = "direct",
    cut: int | str = 0,
    pool_slots: int | None = None,
    exact_rows: bool = True,
    group: mx.distributed.Group | None = None,
    **settings: Any,
) -> FlashLLM:
    """A model of which everything is streamed and the head is computed in tiles, whatever the planner would do.

    ``cut`` is 0 for whole layers, 1 and more for finer units, "tiles" for rows of linear layers. With ``pool_slots``
    (0 for the fewest) experts are read one by one; without ``exact_rows``, and on a GPU, as they are there.
    """
    settings = {"num_slots": num_slots, "io": io, **settings}
    prepared = prepared_for(directory, exact_rows, group, **settings)
    full, plan = prepared.layout, prepared.plan
    layout, pool = full, None
    if pool_slots is not None:
        layout, pool = trunk_of(full), pool_with(full, pool_slots)
        plan = replace(plan, budget_bytes=plan.budget_bytes + pool.nbytes)
    cuts = [layout.layers, *layout.finer]
    units = cuts[-1] if cut == "tiles" else cuts[int(cut)]
    heads = [*layout.heads, *(unit for unit in layout.embeddings if unit.name in layout.tied)]
    tile_rows = tile_rows if mx.default_device() == mx.cpu else 10**9
    if cut == "tiles":
        heads = [unit for unit in units if unit.num_rows] + heads
        units = [unit for unit in units if not unit.num_rows]
    slot = max(unit.nbytes for unit in full.units) + 300_000
    streaming = replace(
        plan.streaming,
        layers=tuple((unit.name, tuple(p.name for p in unit.large)) for unit in units),
        heads=tuple((unit.name, tile_rows) for unit in heads),
        tables=tuple(unit.name for unit in layout.embeddings),
        num_units=len(units) + sum(-(-unit.num_rows // tile_rows) for unit in heads),
        num_slots=num_slots,
        slot_bytes=slot,
        cut=len(cuts) - 1 if cut == "tiles" else int(cut),
        read_bytes=sum(unit.nbytes for unit in [*units, *heads]),
    )
    budget_bytes = plan.budget_bytes + num_slots * slot + plan.model_bytes + 50_000_000
    return carried_out(prepared, replace(plan, streaming=streaming, pool=pool, budget_bytes=budget_bytes), **settings)


def wait_for_reads(model: FlashLLM) -> None:
    for slot in model.engine.stream._slots:
        if slot.ticket is not None:
            slot.ticket.wait()


def streamed_on_disk(directory: Path, **settings: Any) -> FlashLLM:
    """Such a model, whose keys and values are on disk from their first tokens on, in pages of two tokens."""
    model = streamed_whole(directory, kv_cache="disk", kv_step=2, **settings)
    model.start()
    assert model.kv is not None
    model.kv.options = replace(model.kv.options, always_on_disk=True)
    return model


def nbytes_of(layout: ModelLayout) -> int:
    """Return the bytes of all parameters of a model."""
    parameters = [p for unit in layout.units for p in [*unit.large, *unit.small]]
    return sum(parameter.nbytes for parameter in [*parameters, *layout.resident])
