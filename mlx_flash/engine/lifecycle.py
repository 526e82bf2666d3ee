"""A streamed model from loading to its end: it waits for its first call, runs, and may be planned again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_flash import enginethread
from mlx_flash.compat.arrays import evaluate
from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine.call import parse_call
from mlx_flash.engine.engine import Engine, Progress
from mlx_flash.engine.modelmanager import ModelManager
from mlx_flash.engine.passes import Passes
from mlx_flash.engine.prepare import Prepared
from mlx_flash.engine.session import Session
from mlx_flash.engine.status import PassCounters
from mlx_flash.errors import ClosedError
from mlx_flash.forks import finalize
from mlx_flash.kv.diskcache import arrays_of
from mlx_flash.kv.growth import tokens_fit
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.wear import open_governor
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.memory.footprint import footprint, free_unused
from mlx_flash.prefixes.leaves import forget
from mlx_flash.prefixes.prefixcache import PrefixCache
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.speculation import Times

T = TypeVar("T")


class Lifecycle:
    """A model as the manager of the process knows it. It knows nothing of the object that is called.

    Args:
        prepared: the model and the plan for it.
        config: the settings.
        name: what to call it.

    Attributes:
        prepared, config, name: as given; the name says which rank this is.
        plan: what is in memory, and what is not. Made anew by :meth:`start`.
        promised_bytes: of other models, which the plan counts as memory of the process.
        layout: the model's units.
        kv: what its KV caches share; None where they are mlx-lm's own.
        counters: what its calls did so far.
        governor: counts writes.
        engine, prefixes: those of the session; None without one.
        passes, times: its passes, and their measured times. There from :meth:`start` on.
    """

    passes: Passes
    times: Times

    def __init__(self, prepared: Prepared, config: FlashConfig, name: str) -> None:
        self.prepared = prepared
        self.config = config
        self.plan, self.layout = prepared.plan, prepared.layout
        self.promised_bytes = 0
        self._sessions: list[Session] = []
        self.engine: Engine | None = None
        self.prefixes: PrefixCache | None = None
        self.governor = open_governor(config)
        options = prepared.plan.kv.options
        self._lock = threading.RLock()
        self.kv = None if options is None else KVPool(options, self.governor.count, self._lock)
        self.counters = PassCounters()
        peers = None if prepared.chain is None else prepared.chain.peers
        self.name = name if peers is None else f"{name} (rank {peers.rank} of {peers.size})"
        self._pid = os.getpid()
        finalize(self, enginethread.leave, partial(_end_all, self._sessions))
        self._closed = self._has_ended = False
        self._is_planned = False
        self._manager = ModelManager.of_process()
        self._manager.add(self)
        if config.ram_budget_gb == "auto":
            enginethread.run(self._manager.watch)  # an interrupt of `Thread.start` may leave one that never runs

    def start(self, progress: Progress | None = None) -> None:
        """Start the model, and all others that wait. As :meth:`FlashLLM.start`."""
        if os.getpid() != self._pid:
            raise _forked(self._pid)
        if self._closed:
            raise _closed()
        if self.engine is None:
            self._manager.start(self, progress and partial(_told, progress))

    @property
    def session(self) -> Session | None:
        """The plan in force; None before :meth:`start`."""
        return self._sessions[0] if self._sessions else None

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
            self.prepared = self.prepared.renewed(self.config, promised_bytes)
            self.plan, self.promised_bytes = self.prepared.plan, promised_bytes
        self.carry_out(self.prepared, progress)

    def carry_out(self, prepared: Prepared, progress: Progress | None = None) -> None:
        """Read the pinned weights of a plan, and begin to stream the rest. The model runs once it has an engine."""
        # Known before it changes anything, for begin()
        session = Session(prepared, self.config, self.name, self.counters, self.kv, self.governor)
        self._sessions.append(session)
        session.start(progress)
        self.layout, self.plan = prepared.layout, prepared.plan
        self.prefixes = session.prefixes
        self.passes = Passes(prepared.loaded.called, session, self.kv, self.counters)
        self.times = Times(self.plan.seconds, self.plan.row_seconds)
        self.engine = session.engine

    def run(self, work: Callable[[Passes], T], given: Callable[[], Any]) -> T:
        """Start the model, and return what some work returns that has the passes to itself.

        It is done in the engine thread.

        Args:
            work: what is to be done.
            given: returns what the caller made: caches, and objects with arrays. They are evaluated, which only the
                caller's thread can do.
        """
        self.start()
        mx.eval(arrays_in(given()))
        return enginethread.run(partial(self._run_in_turn, work))

    def _run_in_turn(self, work: Callable[[Passes], T]) -> T:
        while True:
            self.start()
            with self._lock:
                if self.engine is not None and not self._closed:  # else start() starts it again, or refuses
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
            if not is_small and not self.passes.admit(self.plan, parse_call(args, kwargs)):
                return None
            if self.prefixes is not None:
                forget(cache)
            self.counters.begin(tokens.size, len(tokens), len(tokens) if tokens.shape[1] == 1 else 0)
            try:
                output = self.prepared.loaded.called(*args, **kwargs)
                if not is_small or self.plan.cache.largest_state:
                    # Only this thread can begin them, and no logits need the last state
                    evaluate(arrays_of(cache), waits=False)
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
            self._adapt(replace(self.plan, budget_bytes=nbytes))

    def set_budget(self, nbytes: int, base_bytes: int, *, is_alone: bool) -> None:
        """Change the budget. If what can be given back is not enough, plan again and start at the next call."""
        with self._lock:
            self.config = replace(self.config, ram_budget_gb=nbytes / GB)
            if self.engine is not None and is_alone and self.config.lend_reserves:
                adapted = self.engine.lending.adapt(self.plan, nbytes)
                if adapted is not None:
                    self._adapt(adapted)
                    self.engine.lending.recall(footprint() - nbytes)
                    return
            self.prepared = self.prepared.planned(self.config, base_bytes)
            self.plan, self._is_planned = self.prepared.plan, is_alone
            self.promised_bytes = 0
            self.engine = self.prefixes = None
            self._stop()

    def _adapt(self, plan: ResidencyPlan) -> None:
        """Go on with a plan for another budget, in the same session."""
        self.plan = plan
        if self.engine is not None and self.session is not None:
            self.session.adapt(plan)

    def close(self) -> nn.Module:
        """End streaming. As :meth:`FlashLLM.close`."""
        model: nn.Module = self.prepared.loaded.model
        if os.getpid() != self._pid:
            return model  # of the parent, which goes on
        enginethread.run(self._end)
        return model

    def _end(self) -> None:
        with self._manager.lock, self._lock:
            if not self._has_ended:
                self._closed = True
                self._manager.remove(self)
                self._stop()
                if self.kv is not None:
                    self.kv.close()
                if self.prepared.chain is not None:
                    self.prepared.chain.close()
                self._has_ended = True

    def _stop(self) -> None:
        """End the session, if there is one. Each step may be repeated."""
        if (session := self.session) is not None:
            session.end()
            session.engine.close()
            self._sessions.clear()
            del session
            free_unused()


def _end_all(sessions: Sequence[Session]) -> None:
    for session in sessions:
        session.end()


def _told(progress: Progress, done: int, total: int) -> None:
    """Have the caller's thread report progress."""
    enginethread.tell(partial(progress, done, total))


def _closed() -> ClosedError:
    return ClosedError("the model was closed. Hint: load it again.")


def _forked(pid: int) -> ClosedError:
    """Return the error of a forked child of the process that loaded a model."""
    return ClosedError(
        f"the model was loaded in process {pid}; its fork {os.getpid()} has no threads that read. Hint: load the "
        "model after the fork, or use the spawn method of multiprocessing."
    )
