"""A plan in force: the engine, and what counts, caches and publishes beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mlx_flash.config import FlashConfig
from mlx_flash.engine.engine import Engine, Progress
from mlx_flash.engine.modelmanager import ModelManager
from mlx_flash.engine.prepare import Prepared
from mlx_flash.engine.status import PassCounters, Running, Status
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.layout.load import reads_explained
from mlx_flash.logs import log
from mlx_flash.memory.footprint import FREE_SHARE, available_memory, end_limit, footprint, limit_buffers, total_memory
from mlx_flash.prefixes.prefixcache import PrefixCache, open_prefixes
from mlx_flash.residency.kv import largest_page
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.telemetry import Publisher

_CACHED_SIZE, _CACHED_DEPTH = 2 << 20, 4
"""Read size and queue depth for experts that all lie in the page cache. Such reads are copies by the processor: a 4-bit
mixture of 8.6 GB at 4 GB on an H100 with 16 cores made 14.5 and 15.1 tokens/s with these, 12.5 and 13.9 with 8 threads,
11.5 and 12.4 with 1 MiB and 16. A disk is faster with more in flight."""


class Session:
    """A streamed model from its start to its end. Knows nothing of the object that is called, whose end ends it.

    Args:
        prepared: the model and the plan for it.
        config: the settings.
        name: of the model, for people.
        counters: of the model's calls.
        kv: what its KV caches share; None where they are mlx-lm's own.
        governor: counts writes.

    Attributes:
        engine: carries the plan out.
        prefixes: the prefix cache; None where the settings want none.
        chain: what each rank computes; None where there is one rank.
    """

    def __init__(
        self,
        prepared: Prepared,
        config: FlashConfig,
        name: str,
        counters: PassCounters,
        kv: KVPool | None,
        governor: WriteGovernor,
    ) -> None:
        self._prepared, self._config, self._name = prepared, config, name
        self._counters, self._kv, self._governor = counters, kv, governor
        self.chain = prepared.chain
        self._publisher: Publisher | None = None
        self.prefixes: PrefixCache | None = None
        self._reader = _reader(prepared, config)
        exact_rows = prepared.machine.exact_tiles
        self.engine = Engine(prepared.layout, prepared.plan, self._reader, config, exact_rows)

    def start(self, progress: Progress | None = None) -> None:
        """Read the pinned weights, and begin to stream the rest. If that fails, modules are as they were loaded.

        Args:
            progress: called with (bytes read, bytes to read) while pinned weights are loaded.
        """
        prepared, config, name = self._prepared, self._config, self._name
        plan, governor = prepared.plan, self._governor
        parts = ", ".join(f"{words}: {nbytes}" for words, nbytes in plan.parts() if nbytes)
        if prepared.layout.head is not None and plan.read_bytes and not plan.mtp_bytes:
            log.info("the head of %s for multi-token prediction is not used: weights use its memory better", name)
        log.info("%s starts in a budget of %d bytes: %s", name, plan.budget_bytes, parts)
        with reads_explained(prepared.loaded.streams, prepared.checkpoint.directory):
            fingerprint = _fingerprint(prepared, name)  # while modules have the classes that they were loaded with
            self.engine.start(progress)
        with ExitStack() as stack:
            stack.callback(self.engine.close)
            if fingerprint is not None:
                queue_bytes = plan.prefix_bytes - largest_page(plan.cache, plan.context_length)
                self.prefixes = open_prefixes(config, fingerprint, name, queue_bytes, governor)
            limit_buffers(self, plan.cache_limit)
            if config.telemetry:
                self._publish()
            stack.pop_all()

    def _publish(self) -> None:
        """Publish the state for flash-monitor."""
        own = Running(self._prepared.plan, self.engine, self._counters, self._kv)
        sections = {"writes": self._governor.telemetry, "budget": ModelManager.of_process().telemetry}
        sections |= {} if self.chain is None else {"ranks": self.chain.telemetry}
        sections |= {} if self.prefixes is None else {"prefixes": self.prefixes.telemetry}
        status = Status(self._name, own, self._prepared.layout, _running, sections)
        self._publisher = Publisher(status.collect)
        self._publisher.start()

    def adapt(self, plan: ResidencyPlan) -> None:
        """Go on with a plan for another budget."""
        self._reader.cached.room = _room(self._config, plan)

    def end(self) -> None:
        """Stop everything that has a thread or a file; modules keep what they hold. Also if it never started."""
        if self._publisher is not None:
            self._publisher.close()
        if self.prefixes is not None:
            self.prefixes.close()
        self._reader.close()
        end_limit(self)


def _running() -> list[Running]:
    """Return the running models of the process."""
    models = [(model, model.engine) for model in ModelManager.of_process().running]
    return [Running(model.plan, engine, model.counters, model.kv) for model, engine in models if engine is not None]


def _fingerprint(prepared: Prepared, name: str) -> str | None:
    """Return that of the model, its adapters included; None when its prompts are not to be cached, or cannot be."""
    if prepared.fingerprint is None:
        return None
    changes = prepared.identity.changes()
    if changes is None:
        log.warning("prompts of %s are not remembered: too much of it is not as it was loaded.", name)
        return None
    return prepared.fingerprint + changes


def _reader(prepared: Prepared, config: FlashConfig) -> BackgroundPrefetcher:
    plan = prepared.plan
    layout, checkpoint = prepared.layout, prepared.checkpoint
    parameters = [p for unit in [*layout.units, *layout.towers] for p in [*unit.large, *unit.small]]
    parameters += [*layout.resident, *([] if layout.head is None else layout.head.parameters)]
    records = [record for p in parameters for record in p.records]
    paths = sorted({record.extent.path for record in records})
    read_size, queue_depth = plan.read_size, plan.queue_depth
    is_free = config.io == "auto" and config.queue_depth is None and config.read_size_mb is None
    if is_free and plan.pool is not None and all_cached(paths, plan.budget_bytes):
        size, depth = max(read_size, _CACHED_SIZE), min(queue_depth, _CACHED_DEPTH)
        if size * depth <= read_size * queue_depth:  # in no more memory
            read_size, queue_depth = size, depth
    return BackgroundPrefetcher(
        paths,
        direct=prepared.machine.disk.direct,
        read_size=read_size,
        queue_depth=queue_depth,
        arrival=prepared.machine.arrival,
        tables=checkpoint.tables,
        identities=checkpoint.identities,
        room=_room(config, plan),
    )


def all_cached(paths: Sequence[Path], budget_bytes: int) -> bool:
    """Return whether the machine has room for all files in its page cache."""
    return _spare_memory(budget_bytes) >= sum(path.stat().st_size for path in paths)


def _room(config: FlashConfig, plan: ResidencyPlan) -> Callable[[], int]:
    """Return what tells the memory that the page cache may use for the files."""
    return partial(_spare_memory, plan.budget_bytes) if config.io == "auto" else lambda: 0


def _spare_memory(budget_bytes: int) -> int:
    """Return the bytes of memory that neither this process's budget nor other programs need."""
    return available_memory() - max(0, budget_bytes - footprint()) - int(FREE_SHARE * total_memory())
