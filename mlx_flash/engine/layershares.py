"""The layers that each rank computes, from what the plans of all machines can keep in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from mlx_flash.config import FlashConfig
from mlx_flash.errors import BudgetError
from mlx_flash.layout.load import LoadedModel, iter_parameters
from mlx_flash.layout.units import layers_of
from mlx_flash.ranks import Chain, Peers, RankSpeed, follow_files, share_layers
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes


def make_chain(
    loaded: LoadedModel,
    sizes: ModelSizes,
    config: FlashConfig,
    machine: Machine,
    able: Sequence[Sequence[int]],
    peers: Peers,
) -> Chain:
    """Give every rank layers that it has the files of, from what all ranks can keep in memory, and their speeds.

    Args:
        loaded: the whole model.
        sizes: the whole model in numbers: a plan for it shows how much this machine can keep in memory.
        config: how to stream.
        machine: this machine in numbers.
        able: for each layer the ranks that have its files.
        peers: the ranks.
    """
    try:
        plan = make_plan(sizes, config, machine)
    except BudgetError:  # the whole model may be too much for a budget that has room for a part
        plan = None
    ranks = [RankSpeed(*numbers) for numbers in peers.gather(astuple(_speed(machine, plan)))]
    nbytes = layer_bytes(loaded)
    owners = follow_files(share_layers(nbytes, ranks), nbytes, able)
    return Chain(layers_of(loaded.model), owners, peers)


def share_equally(loaded: LoadedModel, plan: ResidencyPlan, machine: Machine, num_ranks: int) -> list[int]:
    """Return the rank of each layer, if a model is shared by some machines like this one."""
    return share_layers(layer_bytes(loaded), [_speed(machine, plan)] * num_ranks)


def layer_bytes(loaded: LoadedModel) -> list[int]:
    """Return the bytes of each layer."""
    layers = layers_of(loaded.model)
    return [sum(array.nbytes for _, _, _, array in iter_parameters(layer)) for layer in layers]


def _speed(machine: Machine, plan: ResidencyPlan | None) -> RankSpeed:
    """Return a machine in numbers. Without a plan it keeps nothing in memory."""
    return RankSpeed(
        0.0 if plan is None else plan.resident_bytes + plan.pinned_bytes + plan.pool_bytes,
        machine.disk.bytes_per_second,
        machine.compute_bytes_per_second,
        machine.kept_bytes_per_second,
    )
