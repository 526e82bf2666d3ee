"""The part of the budget that nothing else needs now: weights have it that would be read otherwise."""

from __future__ import annotations

from dataclasses import replace

from mlx_flash.experts.expertlayers import Experts
from mlx_flash.memory.footprint import release_freed_memory
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.streaming.loans import Loans


class Lending:
    """Lends memory to streamed weights, and what these leave to experts. Experts give it back first.

    A byte of a streamed weight saves a byte on every pass, a byte of an expert only when that is chosen. Experts may
    give more than was lent: all but the slots that the pool cannot do without.

    Not for several threads at once: the caller holds a lock around a whole forward pass.

    Args:
        loans: of streamed weights.
        experts: the mixture's experts, if they are read one by one.
        grows: whether the pool may have more slots than the plan gives it.
    """

    def __init__(self, loans: Loans, experts: Experts | None, *, grows: bool) -> None:
        self._loans = loans
        self._experts = experts
        self._planned = 0 if experts is None else experts.pool.slots.num_slots
        self._most = experts.pool.slots.capacity if experts is not None and grows else self._planned

    @property
    def nbytes(self) -> int:
        """Memory that weights have beyond the plan, in bytes. It is negative when they have less."""
        if self._experts is None:
            return self._loans.nbytes
        slots = self._experts.pool.slots
        return self._loans.nbytes + slots.committed - self._planned * slots.pitch

    @property
    def recallable(self) -> int:
        """Memory that weights can give back, in bytes."""
        if self._experts is None or not self._experts.pool.slots.can_resize:
            return self._loans.nbytes
        slots = self._experts.pool.slots
        return self._loans.nbytes + max(0, slots.committed - self._experts.least_slots * slots.pitch)

    def lend(self, nbytes: int) -> None:
        """Allow so much more memory. Weights take it in the next pass. Replaces the last call's."""
        left = self._loans.lend(nbytes)
        has_lent = left < nbytes
        if self._experts is not None:
            slots = self._experts.pool.slots
            wanted = min(slots.num_within(slots.committed + max(0, left)), self._most)
            self._resize(max(wanted, slots.num_touched))
            has_lent |= slots.num_slots > slots.num_touched
        if has_lent:
            release_freed_memory()  # what the last call has left in the heap takes room

    def recall(self, nbytes: int) -> int:
        """Free at least so much memory now, or all that can be freed. Return the bytes that were freed."""
        before = self.nbytes
        if self._experts is not None:
            slots = self._experts.pool.slots
            wanted = slots.num_within(max(0, slots.committed - nbytes))
            self._resize(min(slots.num_touched, max(wanted, self._experts.least_slots)))
        self._loans.recall(nbytes - (before - self.nbytes))
        return before - self.nbytes

    def adapt(self, plan: ResidencyPlan, budget_bytes: int) -> ResidencyPlan | None:
        """Return the plan for another budget, with fewer experts if it is smaller; None when that is not enough."""
        over, pool = plan.peak_bytes - budget_bytes, plan.pool
        if over > 0 and pool is not None and self._experts is not None and self._experts.pool.slots.can_resize:
            num_slots = max(pool.num_slots - -(-over // pool.slot_bytes), self._experts.least_slots)
            pool = replace(pool, num_slots=min(num_slots, pool.num_slots))
        adapted = replace(plan, budget_bytes=budget_bytes, pool=pool)
        if adapted.peak_bytes > budget_bytes:
            return None
        if pool is not None and self._experts is not None:
            self._planned = min(pool.num_slots, self._experts.pool.slots.capacity)
        return adapted

    def end(self) -> None:
        """Give back all that was lent."""
        self._loans.recall(self._loans.nbytes)
        if self._experts is not None:
            self._resize(self._planned)

    def _resize(self, num_slots: int) -> None:
        assert self._experts is not None
        slots = self._experts.pool.slots
        is_right = num_slots == slots.num_slots and slots.num_touched <= num_slots
        if slots.can_resize and not is_right:
            self._experts.resize(num_slots)
