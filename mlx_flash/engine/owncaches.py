"""The caches of a pool in a pass: whether they take more memory, and the room that they get."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mlx_flash.engine.lane import Lane
from mlx_flash.engine.refusals import no_room_for_kv, of_several_pools
from mlx_flash.kv.kvledger import KVLedger
from mlx_flash.kv.kvpool import Adding
from mlx_flash.kv.layerrows import LayerRows
from mlx_flash.kv.options import NUM_SLOTS
from mlx_flash.memory.lazy import commits_lazily
from mlx_flash.residency.plan import ResidencyPlan


class OwnCaches:
    """The caches in the pool that a pass adds to.

    Args:
        plan: the plan of the model.
        lanes: the calls.
    """

    def __init__(self, plan: ResidencyPlan, lanes: Sequence[Lane]) -> None:
        self._plan = plan
        self._all = lanes
        self._lanes = [lane for lane in lanes if lane.own]
        self._pool = self._lanes[0].own[0].pool if self._lanes else None
        self._adding = self._tokens()

    def _tokens(self) -> Adding:
        """Return the tokens that the calls add."""
        rows, step, tokens = self._plan.kv.rows, 0, dict[LayerRows, tuple[int, int]]()
        for lane in self._lanes:
            new, num_layers = lane.tokens, len(lane.own)
            num_new, batch_size = new.num_tokens // new.batch_size, new.batch_size
            step = max(step, new.num_at_once // batch_size)
            known = rows if len(rows) == num_layers else [max(rows, default=0)] * num_layers
            tokens |= {
                entry.rows: (num_new, batch_size * nbytes) for entry, nbytes in zip(lane.own, known, strict=True)
            }
        return Adding(tokens, step)

    @property
    def are_on_disk(self) -> bool:
        """True if layers are on disk."""
        return self._pool is not None and self._ledger.is_on_disk

    @property
    def replaced_bytes(self) -> int:
        """The most bytes of a layer's buffers that are in memory, and have no room for the tokens."""
        return 0 if self._pool is None else self._ledger.replaced

    @property
    def growth(self) -> int:
        """The bytes that a pass adds to caches in memory, as far as the plan lets them grow."""
        if self._pool is None:
            return 0
        ledger, limit = self._ledger, self._plan.kv.limit
        growth = ledger.growth if limit is None else min(ledger.growth, max(0, limit - ledger.now))
        return max(growth, self.growth_on_disk(NUM_SLOTS)) if ledger.is_on_disk else growth

    def growth_on_disk(self, num_slots: int = 1) -> int:
        """Return the bytes that a pass adds with every layer on disk."""
        return 0 if self._pool is None else max(0, self._ledger.least_with(num_slots) - self._ledger.now)

    def goes_to_disk(self, missing: int) -> bool:
        """Return whether some layers go to disk, or stay there, if so many bytes are missing for the pass."""
        pool = self._pool
        if pool is None or pool.options.budget_bytes is None:
            return False
        way = self._ledger.way(self._rooms(missing)[-1])
        return bool(way.num_slots) and not way.missing

    def admit(self, missing: int) -> int:
        """Offload layers for the pass, if so many bytes are missing. Return the bytes that are still missing."""
        pool = self._pool
        if pool is None:
            return missing
        while True:
            held = self._slots_held if self.are_on_disk else 0
            room, lacking = self.room(missing, held)
            if not lacking:
                pool.admit(self._adding, room)
                vars(self).pop("_ledger", None)  # layers may have moved
            if lacking or held or not self.are_on_disk or not self._slots_held:
                return lacking

    def room(self, missing: int, held: int = 0) -> tuple[int, int]:
        """Return a limit for keys and values, and the bytes that are missing even with all of them on disk.

        Slots that calls hold while others compute take ``held`` bytes.

        Raises:
            BudgetError: a limit that the user set is too low.
            WriteError: they would have to go to disk, which has no room.
        """
        plan, pool = self._plan, self._pool
        if pool is None:
            return 0, missing
        for room in self._rooms(missing, held):
            wanted = pool.way(self._ledger, room).missing
            if not wanted:
                break
        if wanted and plan.kv.is_fixed and room == plan.kv.limit:
            raise no_room_for_kv(plan, self._all, room + wanted)
        return room, wanted

    def _rooms(self, missing: int, held: int = 0) -> list[int]:
        """Return limits for keys and values: the plan's, and then all that is free."""
        kv, free = self._plan.kv, self._ledger.now - missing - held
        if kv.limit is None:
            return [free]
        return [min(free, kv.limit - held), *(() if kv.is_fixed else (free,))]

    @property
    def _slots_held(self) -> int:
        ledger, together = self._plan.ledger, [lane.tokens for lane in self._lanes]
        held = ledger.slots_held(together)
        if self._pool is None or not held or commits_lazily() or any(lane.step for lane in self._lanes):
            return held
        # one slot serves all, with room for the longest and for tokens to come, and MLX replaces it as a whole
        longest = max(together, key=lambda new: new.context * new.batch_size)
        slot = ledger.slot_held(self._pool.options.slot_tokens(longest.context), longest.batch_size)
        return max(slot, *[each.nbytes for each in self._pool.ring.slots]) * (len(together) - 1)

    @cached_property
    def _ledger(self) -> KVLedger:
        assert self._pool is not None
        if (num_pools := len({rows.pool for rows in self._adding.tokens})) > 1:
            raise of_several_pools(num_pools)
        return self._pool.ledger(self._adding)
