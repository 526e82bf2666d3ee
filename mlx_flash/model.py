"""``FlashLLM``: where everything meets."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.callers import requested_kv_size
from mlx_flash.config import FlashConfig
from mlx_flash.engine.call import ForwardCall, parse_call
from mlx_flash.engine.dropped import DroppedResult, result_is_dropped
from mlx_flash.engine.engine import Progress
from mlx_flash.engine.facade import ModelFacade
from mlx_flash.engine.group import CallGroup
from mlx_flash.engine.headroom import check_headroom, check_not_forked
from mlx_flash.engine.manager import FlashManager
from mlx_flash.engine.prepare import Prepared
from mlx_flash.engine.session import Session
from mlx_flash.engine.status import PassCounters
from mlx_flash.errors import ClosedError
from mlx_flash.forks import finalize
from mlx_flash.kv.cache import make_caches
from mlx_flash.kv.pool import KVPool
from mlx_flash.kv.wear import open_governor
from mlx_flash.layout.arrays import arrays_in
from mlx_flash.prefixes.cache import PrefixCache
from mlx_flash.prefixes.leaves import forget

_log = logging.getLogger("mlx_flash")


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
        prefixes: the prefix cache; None before :meth:`start`, and where the settings want none.
    """

    def __init__(self, prepared: Prepared, config: FlashConfig, name: str) -> None:
        super().__init__(prepared.loaded.model, prepared.layout)
        self._prepared = prepared
        self._config = config
        self.plan = prepared.plan
        self.prefixes: PrefixCache | None = None
        self._governor = open_governor(config)
        options = prepared.plan.kv.options
        self.kv = None if options is None else KVPool(options, self._governor.count)
        self.name = name
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._told_step = False
        self._told_kv_size = False
        self.counters = PassCounters()
        self._session: Session | None = None
        self._manager = FlashManager.of_process()
        self._manager.add(self)

    def start(self, progress: Progress | None = None) -> None:
        """Reads what is pinned, and begins to stream the rest. Harmless when repeated.

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
        self._carry_out(self._prepared.renewed(self._config, promised_bytes), progress)

    def _carry_out(self, prepared: Prepared, progress: Progress | None = None) -> None:
        session = Session(prepared, self._config, self.name, self.counters, self.kv, self._governor, progress)
        self.layout, self.plan = prepared.layout, prepared.plan
        self.engine, self.prefixes, self._session = session.engine, session.prefixes, session
        self._group = CallGroup(self._model, session.engine)
        self._release = finalize(self, session.end)

    def end_loans(self) -> None:
        """Free the memory that streamed weights have from reserves. The manager calls this when another one starts."""
        with self._lock:
            self._running.engine.loans.recall(self._running.engine.loans.nbytes)

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
        self.start()
        with self._lock:
            self._check_open()
            step = call.step_within(self.plan.prefill_step_size)
            if step is not None:
                self._tell_step(step, call.batch_size)
            outputs = self._run(call, [call] if step is None else list(call.parts(step)))
            if step is None:
                return outputs[0]
            return mx.concatenate(outputs, axis=1) if call.wants_logits else DroppedResult()

    def prompt(self, tokens: mx.array, cache: list[Any], step: int, progress: Progress = lambda *_: None) -> mx.array:
        """Compute a prompt, in one pass over the weights if memory allows.

        Args:
            tokens: the prompt, ``(1, length)``.
            cache: the prompt cache, which the prompt is added to.
            step: mlx-lm's ``prefill_step_size``. All tokens but the last are computed in parts of so many, and the last
                one alone, as mlx-lm does.
            progress: called with (tokens done, tokens to do). What it raises ends the pass, where the cache can be put
                back.

        Returns:
            The logits of the last token, ``(1, 1, vocabulary)``.

        Raises:
            As a call.
        """
        self.start()
        whole = parse_call((tokens,), {"cache": cache}, wants_logits=False)
        limit = self.plan.prefill_step_size
        if limit < min(step, tokens.shape[1] - 1):
            self._tell_step(limit, 1)
        borders = sorted({*range(0, tokens.shape[1] - 1, step), tokens.shape[1] - 1, tokens.shape[1]})
        chunks = [whole.part(start, stop) for start, stop in pairwise(borders)]
        calls = [part for chunk in chunks for part in chunk.parts(limit)]
        calls[-1] = replace(calls[-1], wants_logits=True)
        with self._lock:
            self._check_open()
            return cast(mx.array, self._run(whole, calls, progress)[-1])

    def _tell_step(self, step: int, batch_size: int) -> None:
        if not self._told_step:
            self._told_step = True
            _log.warning(
                "the budget has room for %d prompt tokens at a time: output is mlx-lm's own for --prefill-step-size %d",
                step * batch_size,
                step,
            )

    def _run(self, whole: ForwardCall, calls: Sequence[ForwardCall], progress: Progress = lambda *_: None) -> list[Any]:
        """Compute a call in parts. As many of them share a pass as memory allows.

        Returns:
            The outputs of the parts whose logits are wanted.
        """
        step = max(call.num_tokens for call in calls) // whole.batch_size
        lends = self._config.lend_reserves and self._manager.is_alone
        per_part = max(1, self.plan.activations.waiting_bytes(step * whole.batch_size))
        granted = check_headroom(
            self.plan,
            whole,
            step if len(calls) > 1 else None,
            self._running.engine.loans if lends else None,
            (len(calls) - 1) * per_part,
        )
        size = 1 + granted // per_part
        outputs: list[Any] = []
        for start in range(0, len(calls), size):
            if start:
                mx.eval(arrays_in(whole.cache))  # lets the intermediate results of the parts before go
            group = calls[start : start + size]
            found = self._together(group, partial(_report, progress, calls, start, len(group)))
            outputs += [o for o, call in zip(found, group, strict=True) if call.wants_logits or len(calls) == 1]
            _report(progress, calls, start, len(group), 1.0)
        return outputs

    def _together(self, calls: Sequence[ForwardCall], progress: Callable[[float], None]) -> list[Any]:
        """Compute calls that share a prompt cache, in one pass over the weights where the model allows it."""
        cache = calls[0].cache
        in_order = len(calls) == 1 or cache is None or self.prefixes is not None or not self._group.fits(cache)
        if not in_order:
            outputs = self._counted(calls, partial(self._group.run, calls, progress))
            in_order = outputs is None
        if in_order:
            outputs = []
            for i, call in enumerate(calls):
                if i:
                    mx.eval(arrays_in(call.cache))
                outputs.append(self._with_prefixes(call))
        return cast("list[Any]", outputs)

    def _with_prefixes(self, call: ForwardCall) -> Any:
        """Compute the part of a call that the prefix cache does not answer."""
        if self.prefixes is None or call.cache is None:
            return self._compute(call)
        if call.tokens is None or not call.is_plain:
            forget(call.cache)
            return self._compute(call)
        cached = self.prefixes.begin(call.tokens, call.cache, is_prompt=not call.wants_logits)
        if cached is None:
            return self._compute(call)
        output = None if cached.is_answered else self._compute(call.part(cached.num_restored))
        self.prefixes.end(cached)
        return DroppedResult() if cached.num_restored else output

    def _compute(self, call: ForwardCall) -> Any:
        """Call mlx-lm's model."""
        self._running.engine.drop_logits(not call.wants_logits)
        return self._counted([call], partial(self._model, *call.arguments, **call.keywords))

    def _counted(self, calls: Sequence[ForwardCall], run: Callable[[], Any]) -> Any:
        """Compute some calls in one pass, and count it."""
        running = self._running
        num_tokens, batch_size = sum(call.num_tokens for call in calls), calls[0].batch_size
        self.counters.begin(num_tokens, batch_size)
        running.meter.begin()
        try:
            output = run()
        except BaseException:
            self.counters.end(failed=True)
            if running.engine.experts is not None:
                running.engine.experts.let_go()
            raise
        if self.kv is not None:
            self.kv.note()
        self.counters.end()
        running.meter.end(num_tokens, batch_size)
        return output

    @property
    def _running(self) -> Session:
        assert self._session is not None
        return self._session

    def make_cache(self) -> list[Any]:
        """A prompt cache, for mlx-lm's ``make_prompt_cache``: the model's own, its plain entries as the settings say.

        What mlx-lm was asked for with ``max_kv_size`` stays mlx-lm's.
        """
        requested = requested_kv_size(sys._getframe(1))
        if requested is not None and not self._told_kv_size and hasattr(self._model, "make_cache"):
            self._told_kv_size = True
            _log.warning(
                "max_kv_size=%d has no effect: mlx-lm lets %s build its own caches, which keep every token of the "
                "context. Hint: set kv_max_tokens to bound them.",
                requested,
                self.name,
            )
        stock = make_prompt_cache(self._model, requested)
        return stock if self.kv is None else make_caches(stock, self.kv.options, self.kv)

    @property
    def is_batchable(self) -> bool:
        """True if batches keep to the settings: their caches are mlx-lm's, in memory, and forget nothing."""
        return self.kv is None or (self.kv.options.max_tokens is None and not self.plan.kv.num_on_disk)

    def close(self) -> nn.Module:
        """Ends streaming: restores classes and lazily loaded weights, closes the files, joins the threads.

        Returns:
            mlx-lm's model, lazily loaded, as if it had never been streamed.
        """
        if os.getpid() != self._pid:
            return cast(nn.Module, self._model)  # of the parent, which goes on
        with self._manager.lock, self._lock:
            if not self._closed:
                self._closed = True
                self._manager.remove(self)
                if self._session is not None:
                    self._release()
                    self._session.engine.close()
                if self.kv is not None:
                    self.kv.close()
            return cast(nn.Module, self._model)

    def __enter__(self) -> FlashLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _report(progress: Progress, calls: Sequence[ForwardCall], start: int, num_calls: int, share: float) -> None:
    """Report tokens done, when a share of some calls is done."""
    before, now = (sum(call.num_tokens for call in calls[i:j]) for i, j in ((0, start), (start, start + num_calls)))
    progress(before + int(share * now), sum(call.num_tokens for call in calls))
