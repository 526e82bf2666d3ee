"""``FlashLLM`` and ``load``: where everything meets."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.callers import requested_kv_size
from mlx_flash.config import FlashConfig
from mlx_flash.engine.call import ForwardCall, parse_call
from mlx_flash.engine.dropped import DroppedResult, result_is_dropped
from mlx_flash.engine.engine import Progress
from mlx_flash.engine.facade import ModelFacade
from mlx_flash.engine.headroom import check_headroom, check_not_forked
from mlx_flash.engine.manager import FlashManager
from mlx_flash.engine.prepare import Prepared, load_tokenizer, prepare, resolve
from mlx_flash.engine.session import Session
from mlx_flash.engine.status import PassCounters
from mlx_flash.errors import ClosedError, ConfigError
from mlx_flash.forks import finalize
from mlx_flash.kv.cache import make_caches
from mlx_flash.kv.pool import KVPool
from mlx_flash.kv.wear import open_governor
from mlx_flash.layout.arrays import arrays_in
from mlx_flash.layout.load import model_name
from mlx_flash.prefixes.cache import PrefixCache
from mlx_flash.prefixes.leaves import forget

_log = logging.getLogger("mlx_flash")


class FlashLLM(ModelFacade):
    """A model of mlx-lm whose weights are streamed. Made by :func:`load` or :func:`load_model`.

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
            lends = self._config.lend_reserves and self._manager.is_alone
            check_headroom(self.plan, call, step, self._running.engine.loans if lends else None)
            self._running.engine.drop_logits(not call.wants_logits)
            return self._with_prefixes(call) if step is None else self._in_steps(call, step)

    def _in_steps(self, call: ForwardCall, step: int) -> Any:
        """Compute a call step by step, as mlx-lm's prefill does."""
        if not self._told_step:
            self._told_step = True
            _log.warning(
                "the budget has room for %d prompt tokens at a time: output is mlx-lm's own for --prefill-step-size %d",
                step * call.batch_size,
                step,
            )
        outputs = []
        for part in call.parts(step):
            mx.eval(arrays_in(call.cache))  # lets the intermediate results of the step before go
            outputs.append(self._with_prefixes(part))
            if not call.wants_logits:
                outputs.clear()
        return mx.concatenate(outputs, axis=1) if call.wants_logits else DroppedResult()

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
        running = self._running
        self.counters.begin(call.num_tokens, call.batch_size)
        running.meter.begin()
        try:
            output = self._model(*call.arguments, **call.keywords)
        except BaseException:
            self.counters.end(failed=True)
            if running.engine.experts is not None:
                running.engine.experts.let_go()
            raise
        if self.kv is not None:
            self.kv.note()
        self.counters.end()
        running.meter.end(call.num_tokens, call.batch_size)
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
        """Whether batches keep what the settings say: their caches are mlx-lm's, in memory, and forget nothing."""
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


def load(
    path_or_hf_repo: str,
    config: FlashConfig | None = None,
    *,
    adapter_path: str | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> tuple[FlashLLM, Any]:
    """Loads a model and its tokenizer, like ``mlx_lm.load``.

    Args:
        path_or_hf_repo: a model directory, or a Hugging Face repository that is downloaded first.
        config: how to stream; None takes what environment and settings file say (:meth:`FlashConfig.resolve`).
        adapter_path: folder of a LoRA or DoRA adapter to apply.
        tokenizer_config: settings of the tokenizer.
        model_config: entries that replace those of ``config.json``.
        revision: of the repository.
        progress: called with (bytes done, bytes to do) while pinned weights are read, and before, the first time that
            a checkpoint is loaded which mlx-lm rearranges, while the rearranged weights are written to the cache.

    Returns:
        The model and mlx-lm's tokenizer wrapper; ``mlx_lm.stream_generate`` and its kin take both as they are.

    Raises:
        CheckpointError: the model directory is not a usable checkpoint.
        ConfigError: a setting is wrong; BudgetError when the budget is too small.
    """
    path = resolve(path_or_hf_repo, revision)
    tokenizer = load_tokenizer(path, tokenizer_config)
    model, _ = load_model(path, config, adapter_path=adapter_path, model_config=model_config, progress=progress)
    return model, tokenizer


def load_model(
    model_path: Path | str,
    config: FlashConfig | None = None,
    *,
    adapter_path: str | None = None,
    model_config: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[FlashLLM, dict[str, Any]]:
    """Loads a model from a directory, like ``mlx_lm.utils.load_model``; no tokenizer is needed.

    Args, Raises: as :func:`load`.

    Returns:
        The model and its configuration.
    """
    config = config or FlashConfig.resolve()
    if not config.enabled:
        raise ConfigError("enabled is False, which leaves models to mlx-lm. Hint: load this one with mlx_lm.load.")
    prepared = prepare(model_path, config, model_config, progress=progress)
    model = FlashLLM(prepared, config, model_name(model_path))
    if adapter_path is not None:
        mlx_lm_utils.load_adapters(model, adapter_path)
        model.eval()
    model.start(progress)
    return model, prepared.loaded.config
