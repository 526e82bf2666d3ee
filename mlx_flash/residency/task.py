"""The input of a plan, and the memory that it sets aside for tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mlx_flash.compat.caches import CACHE_STEP
from mlx_flash.config import FlashConfig
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.kv import KVShare, in_memory, ledger_of, on_disk, prefix_bytes
from mlx_flash.residency.ledger import Ledger
from mlx_flash.residency.machine import Machine
from mlx_flash.residency.plan import MB, PREFILL_STEPS
from mlx_flash.residency.sizes import ModelSizes


class Reserve(NamedTuple):
    """Tokens that memory is set aside for."""

    prefill_step_size: int
    context_length: int


class Tokens(NamedTuple):
    """The memory that is set aside for the tokens of a reserve, in bytes.

    Attributes:
        reserve: the tokens.
        ledger: says what they take.
        kv, prefix_bytes, activation_bytes, spare_bytes, mtp_bytes: as in a plan.
    """

    reserve: Reserve
    ledger: Ledger
    kv: KVShare
    prefix_bytes: int
    activation_bytes: int
    spare_bytes: int
    mtp_bytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.kv.nbytes + self.prefix_bytes + self.activation_bytes + self.spare_bytes + self.mtp_bytes


@dataclass(frozen=True)
class Task:
    """The input of a plan.

    Attributes:
        sizes: the model.
        config: the settings.
        machine: the machine.
        promised_bytes: for keys, values and activations of a long context.
        cache_limit: what MLX may keep of freed buffers.
        kv_on_disk: whether the KV cache is planned to be on disk.
        kv_room: memory that it may take then, if that is of use.
    """

    sizes: ModelSizes
    config: FlashConfig
    machine: Machine
    promised_bytes: int
    cache_limit: int
    kv_on_disk: bool = False
    kv_room: int = 0

    @property
    def process_bytes(self) -> int:
        """The process without weights and tokens."""
        return self.machine.base_bytes + self.machine.runtime_bytes + self.cache_limit

    @cached_property
    def _tokens(self) -> dict[Reserve, Tokens]:
        """Results of :meth:`tokens`: a search asks for the same often."""
        return {}

    def tokens(self, reserve: Reserve) -> Tokens:
        """Return the memory for a reserve."""
        found = self._tokens.get(reserve)
        if found is None:
            found = self._tokens[reserve] = self._set_aside(reserve)
        return found

    def _set_aside(self, reserve: Reserve) -> Tokens:
        sizes, config, (step, context) = self.sizes, self.config, reserve
        ledger, in_steps = ledger_of(sizes, config, context, step), round_up(context, CACHE_STEP)
        kv = on_disk(ledger, context, self.kv_room, config.kv_ram_gb) if self.kv_on_disk else in_memory(ledger, context)
        # the larger of a prefill step without logits and a short call with all of them
        activations = ledger.computing(min(PREFILL_STEPS[-1], step), in_steps)
        own_head, row = sizes.own_head if sizes.own_head is not None and sizes.guesses else (0, 0)
        return Tokens(
            reserve,
            ledger,
            kv,
            prefix_bytes=prefix_bytes(sizes.cache, config, context),
            activation_bytes=activations,
            spare_bytes=max(0, self.promised_bytes - kv.nbytes - activations),
            mtp_bytes=own_head + row * in_steps,
        )


def cache_limit_of(machine: Machine, budget: int) -> int:
    """Return the bytes of freed buffers that MLX may keep. Of CUDA's driver it gets others at once."""
    most = 64 * MB if machine.context_bytes else 256 * MB
    return min(max(64 * MB, budget // 20), most) if machine.has_buffer_cache else 0
