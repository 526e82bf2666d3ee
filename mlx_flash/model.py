"""``FlashLLM``: where everything meets."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.callers import requested_kv_size
from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine.call import parse_call
from mlx_flash.engine.dropped import DroppedResult, result_is_dropped
from mlx_flash.engine.engine import Progress
from mlx_flash.engine.facade import ModelFacade, check_not_forked
from mlx_flash.engine.forecast import Forecast
from mlx_flash.engine.guesses import GuessedRows, guessed_row
from mlx_flash.engine.manager import FlashManager
from mlx_flash.engine.passes import Passes, Row
from mlx_flash.engine.prepare import Prepared
from mlx_flash.engine.session import Session
from mlx_flash.engine.status import PassCounters
from mlx_flash.engine.warn import Warnings
from mlx_flash.errors import BudgetError, ClosedError, WriteError
from mlx_flash.forks import finalize
from mlx_flash.kv.cache import make_caches
from mlx_flash.kv.pool import KVPool
from mlx_flash.kv.wear import open_governor
from mlx_flash.memory.footprint import footprint, release_freed_memory
from mlx_flash.prefixes.cache import PrefixCache
from mlx_flash.speculation.pace import Times


class FlashLLM(ModelFacade):
    """A model of mlx-lm whose weights are streamed. Made by ``mlx_flash.load`` and ``load_model``.

    It is called as mlx-lm's model is, and answers to every attribute of it (``layers``, ``make_cache``, ``args`` ...).
    Its own module tree is empty, so that what sums up arrays does not count a slot once for each layer in it.
    Forward calls from several threads run one after another.

    Until :meth:`start`, or the first forward call, nothing is in memory and modules can be changed as mlx-lm's own:
    that is when adapters are applied.

    Args:
        prepared: the model and the plan for it.
        config: the settings.
        name: what to call it.

    Attributes:
        plan: what is in memory, and what is not. Made anew by :meth:`start`.
        layout: the model's units.
        engine: None before :meth:`start`; its ``stream.stats`` and ``reader.stats`` count.
        kv: what its KV caches share; None where they are mlx-lm's own.
        name: what to call it.
        counters: what its calls did so far.
        times: measured times of its passes. There from :meth:`start` on.
        prefixes: the prefix cache; None before :meth:`start`, and where the settings want none.
        forecast: the gain of a larger budget; None before :meth:`start`.
    """

    def __init__(self, prepared: Prepared, config: FlashConfig, name: str) -> None:
        super().__init__(prepared.loaded.model, prepared.layout)
        self._prepared = prepared
        self._config = config
        self.plan = prepared.plan
        self.prefixes: PrefixCache | None = None
        self.forecast: Forecast | None = None
        self._governor = open_governor(config)
        options = prepared.plan.kv.options
        self.kv = None if options is None else KVPool(options, self._governor.count)
        peers = None if prepared.chain is None else prepared.chain.peers
        self.name = name if peers is None else f"{name} (rank {peers.rank} of {peers.size})"
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._is_planned = False
        self._warnings = Warnings(name)
        self.counters = PassCounters()
        self._session: Session | None = None
        self._manager = FlashManager.of_process()
        self._manager.add(self)
        if config.ram_budget_gb == "auto":
            self._manager.watch()

    def start(self, progress: Progress | None = None) -> None:
        """Read the pinned weights, and begin to stream the rest. Harmless when repeated.

        Other models of this process that are waiting to be started are started too, the smallest first, since they
        share the budget: each leaves those after it what they need at least.

        Args:
            progress: called with (bytes read, bytes to read) while pinned weights are loaded.

        Raises:
            BudgetError: the budget cannot hold the plan.
            ReadError: weights could not be read.
            ClosedError: the model was closed.
        """
        check_not_forked(self._pid)
        if self.engine is None or self._closed:
            with self._manager.lock:
                self._check_open()
                self._manager.start(self, progress)

    def begin(self, promised_bytes: int, progress: Progress | None) -> None:
        """Carry out a plan of now. The manager calls this once, when the model's turn has come.

        Args:
            promised_bytes: the part of the budget that other models of the process will take, or may.
            progress: called while pinned weights are loaded.
        """
        if not self._is_planned:
            self._prepared = self._prepared.renewed(self._config, promised_bytes)
        self._carry_out(self._prepared, progress)

    def _carry_out(self, prepared: Prepared, progress: Progress | None = None) -> None:
        session = Session(prepared, self._config, self.name, self.counters, self.kv, self._governor, progress)
        self.layout, self.plan = prepared.layout, prepared.plan
        self.engine, self.prefixes, self.forecast = session.engine, session.prefixes, session.forecast
        self._session = session
        self._passes = Passes(self._model, session, self.kv, self.counters)
        expert_seconds = self.plan.pool.seconds if self.plan.pool is not None else 0.0
        self.times = Times(self.plan.seconds, self.plan.streaming.compute_seconds + expert_seconds)
        self._release = finalize(self, session.end)

    def end_loans(self) -> None:
        """Free the memory that weights have from reserves. The manager calls this when another one starts."""
        with self._lock:
            self._running.engine.lending.end()

    def set_budget(self, nbytes: int, base_bytes: int, *, is_alone: bool) -> None:
        """Change the budget. If what can be given back is not enough, plan again and start at the next call."""
        with self._lock:
            self._config = replace(self._config, ram_budget_gb=nbytes / GB)
            if self.engine is not None and is_alone and self._config.lend_reserves:
                adapted = self.engine.lending.adapt(self.plan, nbytes)
                if adapted is not None:
                    self.plan = adapted
                    self.engine.lending.recall(footprint() - nbytes)
                    return
            self._prepared = self._prepared.planned(self._config, base_bytes)
            self.plan, self._is_planned = self._prepared.plan, is_alone
            self._stop()
            self.engine = self._session = None
            release_freed_memory()

    def _stop(self) -> None:
        if self._session is not None:
            self._release()
            self._session.engine.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock of a model that has been started. While it is held, the manager's lock must not be taken."""
        while True:
            self.start()
            with self._lock:
                self._check_open()
                if self.engine is not None:
                    yield
                    return

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the model was closed. Hint: load it again.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass, with the arguments and the result of mlx-lm's model.

        More new tokens than ``plan.prefill_step_size`` are worked through in several passes, as mlx-lm's
        ``prefill_step_size`` does; that needs a prompt cache.

        Raises:
            ReadError: weights could not be read. The model can be called again; give it a fresh prompt cache, since
                the layers before the failure have added to the one given.
            BudgetError: the call would need more memory than the budget has left, or, with the first call, the budget
                cannot hold the plan.
            ClosedError: the model was closed.
        """
        call = parse_call(args, kwargs, wants_logits=not result_is_dropped(sys._getframe()))
        with self._turn():
            step = call.step_within(self.plan.prefill_step_size)
            if step is not None:
                self._warnings.step(step * call.batch_size)
            outputs = self._compute(Row(call, [call] if step is None else list(call.parts(step))))
            if len(outputs) == 1:
                return outputs[0]
            return mx.concatenate(outputs, axis=1) if call.wants_logits else DroppedResult()

    def prompt(self, tokens: mx.array, cache: list[Any], step: int, progress: Progress = lambda *_: None) -> mx.array:
        """Compute a prompt, in one pass over the weights if memory allows.

        Args:
            tokens, cache, step: as of :meth:`row`.
            progress: called with (tokens done, tokens to do). What it raises ends the pass, where the cache can be put
                back.

        Returns:
            The logits of the last token, ``(1, 1, vocabulary)``.

        Raises:
            As a call.
        """
        row = self.row(tokens, cache, step)
        row.report = progress
        with self._turn():
            return cast(mx.array, self._compute(row)[-1])

    def row(
        self, tokens: mx.array, cache: list[Any], step: int, *, wants_logits: bool = True, ends: Sequence[int] = ()
    ) -> Row:
        """Return a prompt, or a token, to be computed by :meth:`advance`.

        Args:
            tokens: ``(1, length)``.
            cache: the prompt cache, which the tokens are added to.
            step: mlx-lm's ``prefill_step_size``. All tokens but the last are computed in parts of so many, and the last
                one alone, as mlx-lm does.
            wants_logits: whether to compute the logits of the last token. If not, it is not computed alone.
            ends: numbers of tokens at which a part ends too, ascending.
        """
        self.start()
        whole = parse_call((tokens,), {"cache": cache}, wants_logits=False)
        limit = self.plan.prefill_step_size
        num_together = tokens.shape[1] - wants_logits
        if limit < min(step, num_together):
            self._warnings.step(limit)
        starts = [start for begin, end in pairwise([0, *ends, num_together]) for start in range(begin, end, step)]
        borders = sorted({*starts, num_together, tokens.shape[1]})
        chunks = [whole.part(start, stop) for start, stop in pairwise(borders)]
        parts = [part for chunk in chunks for part in chunk.parts(limit)]
        parts[-1] = replace(parts[-1], wants_logits=wants_logits)
        return Row(parts[0] if len(parts) == 1 else whole, parts)

    def advance(self, rows: Sequence[Row]) -> None:
        """Compute at least a part of each row, in as few passes over the weights as memory allows.

        What fails in one row is noted there, and leaves the others as if it had never been there.

        Args:
            rows: made by :meth:`row`; those that are done stay as they are.

        Raises:
            ReadError: weights could not be read, and no row went on. Caches that can be trimmed are put back.
        """
        with self._turn():
            self._passes.advance(self.plan, rows, lends=self._config.lend_reserves and self._manager.is_alone)

    def rows(self, tokens: Sequence[int], cache: list[Any]) -> GuessedRows:
        """Compute tokens that follow each other, in one pass over the weights and each in a call of its own.

        Args:
            tokens: the next token, and guesses at the tokens after it.
            cache: the prompt cache, which the tokens are added to.

        Returns:
            The logits of the next token, and of as many others as memory has room for.

        Raises:
            As a call. The cache is put back, if there is more than one token.
        """
        row = guessed_row(tokens, cache)
        with self._turn():
            stats = self._running.engine.stream.stats
            began, waited = time.perf_counter(), stats.wait_seconds
            self.advance([row])
            if isinstance(row.error, BudgetError | WriteError) and len(tokens) > 1:
                return self.rows(tokens[:1], cache)
            if row.error is not None:
                raise row.error
            mx.eval(row.outputs)
            self.times.note(len(row.outputs), time.perf_counter() - began, stats.wait_seconds - waited)
        return GuessedRows(row, self.counters)

    def refusal(self, cache: Sequence[Any]) -> str | None:
        """Return the reason why :meth:`rows` computes one token at a time with a prompt cache; None if it does not."""
        self.start()
        return self._passes.refusal(cache) if self._config.speculation else "speculation is switched off"

    def _compute(self, row: Row) -> list[Any]:
        while not row.is_done:
            self.advance([row])
        if row.error is not None:
            raise row.error
        return row.outputs

    @property
    def _running(self) -> Session:
        assert self._session is not None
        return self._session

    def make_cache(self) -> list[Any]:
        """A prompt cache, for mlx-lm's ``make_prompt_cache``: the model's own, its plain entries as the settings say.

        What mlx-lm was asked for with ``max_kv_size`` stays mlx-lm's.
        """
        requested = requested_kv_size(sys._getframe(1))
        if requested is not None and hasattr(self._model, "make_cache"):
            self._warnings.max_kv_size(requested)
        stock = make_prompt_cache(self._model, requested)
        return stock if self.kv is None else make_caches(stock, self.kv.options, self.kv)

    @property
    def batching(self) -> str:
        """The way several sequences are computed: ``"exact"`` or ``"stock"``."""
        return self._config.batching

    @property
    def is_batchable(self) -> bool:
        """True if mlx-lm's batches keep to the settings: their caches are mlx-lm's, in memory, and forget nothing."""
        return self.kv is None or (self.kv.options.max_tokens is None and not self.plan.kv.num_on_disk)

    def close(self) -> nn.Module:
        """End streaming: restore classes and lazily loaded weights, close the files, join the threads.

        Returns:
            mlx-lm's model, lazily loaded, as if it had never been streamed.
        """
        if os.getpid() != self._pid:
            return cast(nn.Module, self._model)  # of the parent, which goes on
        with self._manager.lock, self._lock:
            if not self._closed:
                self._closed = True
                self._manager.remove(self)
                self._stop()
                if self.kv is not None:
                    self.kv.close()
                if self._prepared.chain is not None:
                    self._prepared.chain.close()
            return cast(nn.Module, self._model)

    def __enter__(self) -> FlashLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
