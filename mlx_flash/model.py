"""``FlashLLM`` and ``load``: where everything meets."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat import loading
from mlx_flash.compat.callers import requested_kv_size
from mlx_flash.config import FlashConfig
from mlx_flash.convert.derived import adopt_derived
from mlx_flash.engine.dropped import DroppedResult, result_is_dropped
from mlx_flash.engine.engine import Engine, ExpertOptions, Progress
from mlx_flash.engine.facade import ModelFacade
from mlx_flash.engine.headroom import check_headroom, check_not_forked
from mlx_flash.engine.meter import SpeedMeter
from mlx_flash.engine.status import PassCounters, Status
from mlx_flash.errors import CheckpointNotFoundError, ClosedError, ConfigError, FlashError
from mlx_flash.forks import finalize
from mlx_flash.kv.cache import make_caches
from mlx_flash.kv.pool import KVPool
from mlx_flash.kv.wear import open_governor
from mlx_flash.layout.arrays import arrays_in
from mlx_flash.layout.fingerprint import fingerprint_of, state_of
from mlx_flash.layout.identity import ModelIdentity
from mlx_flash.layout.load import LoadedModel, ModelLayout, load_config, load_lazily, model_name
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.arena import kernel_alignment
from mlx_flash.prefixes.cache import PrefixCache, open_prefixes
from mlx_flash.prefixes.leaves import forget
from mlx_flash.residency.machine import look_at_machine, look_at_memory
from mlx_flash.residency.plan import Machine, ResidencyPlan
from mlx_flash.residency.search import make_plan
from mlx_flash.residency.sizes import measure
from mlx_flash.storage.prefetcher import BackgroundPrefetcher
from mlx_flash.storage.safetensors import read_checkpoint
from mlx_flash.telemetry import Publisher

_log = logging.getLogger("mlx_flash")

_models: weakref.WeakValueDictionary[int, FlashLLM] = weakref.WeakValueDictionary()
"""The streamed models of this process that are not closed; they share its budget."""

_starting = threading.RLock()


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before weights are read.

    Attributes:
        loaded: mlx-lm's model, every weight a lazily loaded array.
        layout: the model's units.
        machine: the machine in numbers.
        plan: what will be in memory.
        identity: what decides the model's output; None where there is no prefix cache.
    """

    loaded: LoadedModel
    layout: ModelLayout
    machine: Machine
    plan: ResidencyPlan
    identity: ModelIdentity | None = None


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
        self._told = False
        self._told_kv_size = False
        self.counters = PassCounters()
        self._release: weakref.finalize[Any, Any] | None = None
        with _starting:
            _models[id(self)] = self

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
        if self.engine is not None and not self._closed:
            return
        with _starting:
            if self._closed:
                raise ClosedError("the model was closed. Hint: load it again.")
            for model in _waiting():
                try:
                    model._start(progress if model is self else None)
                except FlashError:
                    if model is self:
                        raise  # another one fails when it is called itself

    def _start(self, progress: Progress | None) -> None:
        before = self._prepared
        for other in list(_models.values()):
            if other.engine is not None:
                with other._lock:
                    other.engine.loans.recall(other.engine.loans.nbytes)
        layout = make_layout(before.loaded)  # modules may have changed since
        machine = look_at_memory(before.machine, _promised(self))
        plan = make_plan(measure(layout, before.loaded.config, kernel_alignment()), self._config, machine)
        self._carry_out(layout, plan, progress)

    def _carry_out(
        self,
        layout: ModelLayout,
        plan: ResidencyPlan,
        progress: Progress | None,
    ) -> None:
        config = self._config
        fingerprint = self._fingerprint()  # while modules have the classes that they were loaded with
        reader = BackgroundPrefetcher(
            _files(layout),
            direct=config.io != "buffered",
            read_size=plan.read_size,
            queue_depth=plan.queue_depth,
            in_place=self._prepared.machine.reads_beside,
        )
        experts = ExpertOptions(self._prepared.machine.exact_tiles, config.expert_lookahead)
        engine = Engine(layout, plan, reader, kernel_alignment(), config.poison_released_slots, progress, experts)
        self.layout, self.plan, self.engine = layout, plan, engine
        self._meter = SpeedMeter(plan, reader.stats, engine.stream.stats)
        if fingerprint is not None:
            self.prefixes = open_prefixes(config, fingerprint, self.name, plan.prefix_bytes, self._governor)
        cache_limit = mx.set_cache_limit(plan.cache_limit) if plan.cache_limit else None
        publisher = None
        if config.telemetry:  # what it collects from must not be this object, whose end closes it
            status = Status(self.name, plan, layout, engine, self.counters, self.kv)
            status.tell("writes", self._governor.telemetry)
            if self.prefixes is not None:
                status.tell("prefixes", self.prefixes.telemetry)
            publisher = Publisher(status.collect)
            publisher.start()
        machine = self._prepared.machine
        save_speed = partial(self._meter.save, machine.speed_key, machine.speed)
        self._release = finalize(self, _let_go, reader, cache_limit, publisher, save_speed, self.prefixes)

    def _fingerprint(self) -> str | None:
        """Of the model, its adapters included; None when its prompts are not to be remembered, or cannot be."""
        identity = self._prepared.identity
        fingerprint = None if identity is None else identity.fingerprint()
        if identity is not None and fingerprint is None:
            _log.warning("prompts of %s are not remembered: too much of it is not as it was loaded.", self.name)
        return fingerprint

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
        self.start()
        with self._lock:
            if self._closed:
                raise ClosedError("the model was closed. Hint: load it again.")
            step = self._step(*args, **kwargs)
            num_tokens = args[0].size if args and isinstance(args[0], mx.array) else 1
            cache = kwargs.get("cache", args[1] if len(args) > 1 else None)
            is_dropped = result_is_dropped(sys._getframe(1))
            loans = self._engine.loans if self._config.lend_reserves and len(_models) == 1 else None
            check_headroom(
                self.plan, num_tokens, cache, step and step * len(args[0]), all_logits=not is_dropped, loans=loans
            )
            self._engine.drop_logits(is_dropped)
            if step is None:
                return self._pass(is_dropped, *args, **kwargs)
            return self._in_steps(is_dropped, args[0], step, **kwargs)

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

    def _pass(self, is_dropped: bool, *args: Any, **kwargs: Any) -> Any:
        """Run the part of a forward call that the prefix cache does not answer."""
        cache = kwargs.get("cache", args[1] if len(args) > 1 else None)
        if self.prefixes is None or not isinstance(cache, list | tuple):
            return self._counted(*args, **kwargs)
        if not _is_plain(args, kwargs):
            forget(cache)
            return self._counted(*args, **kwargs)
        tokens = args[0]
        call = self.prefixes.begin(tokens, cache, is_prompt=is_dropped)
        if call is None:
            return self._counted(tokens, cache=cache)
        output: Any = DroppedResult()
        if not call.is_answered:
            computed = self._counted(tokens[:, call.num_restored :], cache=cache)
            output = output if call.num_restored else computed
        self.prefixes.end(call)
        return output

    @property
    def is_batchable(self) -> bool:
        """Whether batches keep what the settings say: their caches are mlx-lm's, in memory, and forget nothing."""
        return self.kv is None or (self.kv.options.max_tokens is None and not self.plan.kv.num_on_disk)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args and isinstance(args[0], mx.array) and args[0].ndim == 2 else None
        num_tokens, batch_size = (1, 1) if tokens is None else (tokens.size, len(tokens))
        self.counters.begin(num_tokens, batch_size)
        self._meter.begin()
        try:
            output = self._model(*args, **kwargs)
        except BaseException:
            self.counters.end(failed=True)
            if self._engine.experts is not None:
                self._engine.experts.let_go()
            raise
        if self.kv is not None:
            self.kv.note()
        self.counters.end()
        self._meter.end(num_tokens, batch_size)
        return output

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _in_steps(self, is_dropped: bool, tokens: mx.array, step: int, **kwargs: Any) -> Any:
        if not self._told:
            self._told = True
            _log.warning(
                "the budget has room for %d prompt tokens at a time: output is mlx-lm's own for --prefill-step-size %d",
                step * len(tokens),
                step,
            )
        outputs = []
        for i in range(0, tokens.shape[1], step):
            mx.eval(arrays_in(kwargs["cache"]))  # lets the intermediate results of the step before go
            outputs.append(self._pass(is_dropped, tokens[:, i : i + step], **kwargs))
        dropped = [output for output in outputs if isinstance(output, DroppedResult)]
        return dropped[0] if dropped else mx.concatenate(outputs, axis=1)

    def _step(self, *args: Any, **kwargs: Any) -> int | None:
        """New tokens of each sequence that may go through at a time; None when they need not or cannot be cut."""
        if len(args) != 1 or not _is_plain(args, kwargs):
            return None
        tokens = args[0]
        step = max(1, self.plan.prefill_step_size // max(1, len(tokens)))
        return step if step < tokens.shape[1] else None

    def close(self) -> nn.Module:
        """Ends streaming: restores classes and lazily loaded weights, closes the files, joins the threads.

        Returns:
            mlx-lm's model, lazily loaded, as if it had never been streamed.
        """
        if os.getpid() != self._pid:
            return cast(nn.Module, self._model)  # of the parent, which goes on
        with _starting, self._lock:
            if not self._closed:
                self._closed = True
                _models.pop(id(self), None)
                if self._release is not None:
                    self._release()
                if self.engine is not None:
                    self.engine.close()
                if self.kv is not None:
                    self.kv.close()
            return cast(nn.Module, self._model)

    def __enter__(self) -> FlashLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _waiting() -> list[FlashLLM]:
    """The models that are not started, the smallest first."""
    waiting = [model for model in _models.values() if model.engine is None]
    return sorted(waiting, key=lambda model: model.plan.model_bytes)


def _promised(model: FlashLLM) -> int:
    """Bytes of the budget that other models of this process will take, or may."""
    others = [other for other in _models.values() if other is not model]
    running = [other.plan for other in others if other.engine is not None]
    waiting = [other.plan for other in others if other.engine is None]
    return sum(plan.kv_bytes + plan.activation_bytes for plan in running) + sum(
        max(0, plan.minimum_bytes - plan.base_bytes) for plan in waiting
    )


def _is_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call gives tokens and a prompt cache, and nothing else."""
    others = [key for key, value in kwargs.items() if value is not None and key != "cache"]
    tokens = args[0] if len(args) == 1 + (kwargs.get("cache") is None) else None
    return not others and isinstance(tokens, mx.array) and tokens.ndim == 2


def _let_go(
    reader: BackgroundPrefetcher,
    cache_limit: int | None,
    publisher: Publisher | None,
    save_speed: Callable[[], None],
    prefixes: PrefixCache | None,
) -> None:
    if publisher is not None:
        publisher.close()
    if prefixes is not None:
        prefixes.close()
    save_speed()
    reader.close()
    if cache_limit is not None:
        mx.set_cache_limit(cache_limit)


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
    tokenizer = mlx_lm_utils.load_tokenizer(path, tokenizer_config, eos_token_ids=load_config(path).get("eos_token_id"))
    model, _ = load_model(path, config, adapter_path=adapter_path, model_config=model_config, progress=progress)
    return model, tokenizer


def resolve(path_or_hf_repo: str, revision: str | None = None) -> Path:
    """The directory of a model; one that is named by its Hugging Face repository is downloaded.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    try:
        return loading.download(path_or_hf_repo, revision)
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"there is no directory {path_or_hf_repo!r}, and it cannot be had from Hugging Face: {error}"
        ) from error


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


def prepare(
    model_path: Path | str,
    config: FlashConfig,
    model_config: dict[str, Any] | None = None,
    *,
    progress: Progress | None = None,
    writes: bool = True,
    **loading: Any,
) -> Prepared:
    """Everything that comes before weights are read: the lazily loaded model, its layout and plan.

    Args:
        model_path: the model directory.
        config: how to stream.
        model_config: entries that replace those of ``config.json``.
        progress: called with (bytes written, bytes to write) while large derived parameters are written to the cache.
        writes: whether they may be written; if not, the plan is that of when they are.
        loading: further arguments of ``mlx_lm.utils.load_model``.
    """
    path = Path(model_path)
    checkpoint = read_checkpoint(path)
    loaded = load_lazily(path, checkpoint, model_config, **loading)
    adopt_derived(loaded, checkpoint, path, config.derived_cache_gb, progress, write=writes)
    layout = make_layout(loaded)
    sizes = measure(layout, loaded.config, kernel_alignment())
    largest = max(checkpoint.shards, key=lambda shard: shard.nbytes)
    machine = look_at_machine(largest.path, layout, config)
    identity = None
    if config.kv_prefixes != "off":
        identity = ModelIdentity(loaded.model, fingerprint_of(loaded, state_of(checkpoint)))
    plan = make_plan(sizes, config, machine)
    return Prepared(loaded, layout, machine, plan, identity)


def _files(layout: ModelLayout) -> list[Path]:
    paths = {record.extent.path for unit in layout.units for p in unit.large for record in p.records}
    return sorted(paths)
