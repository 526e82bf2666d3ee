"""``FlashLLM``: a streamed model, called as mlx-lm's, and what it answers for the model below."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_flash.compat.arrays import TRAINING_FLAG
from mlx_flash.compat.caches import CACHE_STEP, CacheKinds
from mlx_flash.compat.callers import adapter_file, is_load_adapters, is_save_model, requested_kv_size
from mlx_flash.config import FlashConfig
from mlx_flash.engine.call import DroppedResult, ForwardCall, Row, parse_call, result_is_dropped, token_call
from mlx_flash.engine.engine import Engine
from mlx_flash.engine.lifecycle import Lifecycle
from mlx_flash.engine.passes import Passes
from mlx_flash.engine.prepare import Prepared, prepare_loaded
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, ConfigError, StreamedWeightsError
from mlx_flash.kv.kvpool import make_caches
from mlx_flash.kv.owed import Owed, owed_token
from mlx_flash.kv.views import Checkpoints
from mlx_flash.layout.load import check_adapter, model_name
from mlx_flash.layout.parts import ModelLayout, body_of, head_of
from mlx_flash.logs import log
from mlx_flash.memory.pagecache import round_up
from mlx_flash.prefixes.prefixcache import PrefixCache
from mlx_flash.residency.plan import ResidencyPlan, step_in_words, together_bytes
from mlx_flash.speculation import OwnGuesses, Times

T = TypeVar("T")


class OfLifecycle(Generic[T]):
    """An attribute of a model that its lifecycle keeps."""

    def __set_name__(self, owner: type[ModelFacade], name: str) -> None:
        self._name = name

    def __get__(self, model: ModelFacade, owner: type[ModelFacade]) -> T:
        value: T = getattr(model._life, self._name)
        return value

    def __set__(self, model: ModelFacade, value: T) -> None:
        setattr(model._life, self._name, value)


def _is_floating(dtype: mx.Dtype) -> bool:
    return mx.issubdtype(dtype, mx.floating)


class ModelFacade(nn.Module):
    """Answers to every attribute of mlx-lm's model, with a module tree of its own that is empty.

    Attributes:
        engine: None before streaming begins.
        tokenizer: the one that was loaded with it; None without.
    """

    _generates: Callable[..., Iterator[Any]] | None = None
    tokenizer: Any = None

    layout = OfLifecycle[ModelLayout]()
    engine = OfLifecycle[Engine | None]()

    def __init__(self, model: nn.Module, life: Lifecycle) -> None:
        nn.Module.__init__(self)
        delattr(self, TRAINING_FLAG)  # the model's own counts
        # nn.Module would put the model into the module tree if it were set as usual.
        object.__setattr__(self, "_model", model)
        self._life = life

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of mlx-lm's model, for programs that ask with ``isinstance``; ``type()`` tells the truth."""
        return type(self._model)

    def close(self) -> nn.Module:
        """End streaming: restore classes and lazily loaded weights, close the files, join the threads.

        Returns:
            mlx-lm's model, lazily loaded, as if it had never been streamed.
        """
        return self._life.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def belongs_with(self, tokenizer: Any, generates: Callable[..., Iterator[Any]]) -> None:
        """Note the tokenizer, and the function that generates, for :meth:`stream_generate`."""
        object.__setattr__(self, "tokenizer", tokenizer)
        object.__setattr__(self, "_generates", generates)

    def __getattr__(self, key: str) -> Any:
        if key in ("_model", "_life"):  # not there yet: being made by copy or pickle
            raise AttributeError(key)
        return getattr(self._model, key)

    def parameters(self) -> dict[str, Any]:
        """The parameters that are always in memory, as a tree. While adapters are applied, all of them, lazily loaded.

        Raises: StreamedWeightsError: mlx-lm asks in order to save them.
        """
        caller = sys._getframe(1)
        if is_save_model(caller):
            raise _refusal("mlx_lm.utils.save_model()")
        if is_load_adapters(caller) and self.engine is None:
            return cast(dict[str, Any], self._model.parameters())
        elsewhere = {(id(p.container), p.key) for unit in self.layout.units for p in unit.large}
        engine = self.engine

        def in_memory(module: nn.Module, key: str, value: Any) -> bool:
            is_streamed = (id(module), key) in elsewhere if engine is None else engine.is_streamed(module, key)
            return nn.Module.valid_parameter_filter(module, key, value) and not is_streamed

        return cast(dict[str, Any], self._model.filter_and_map(in_memory))

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> ModelFacade:
        """As ``nn.Module.load_weights``; refused once weights are streamed.

        An adapter's tensors are loaded again: those that mlx-lm loaded belong to this thread until they are computed.

        Raises:
            StreamedWeightsError: weights are streamed.
            CheckpointError: mlx-lm would use random numbers for tensors that an adapter lacks.
        """
        adapter = adapter_file(sys._getframe(1))
        if self.engine is not None:
            raise _refusal("load_weights()")
        if adapter is not None:
            check_adapter(adapter.parent)
        with self._life.prepared.loaded.streams.in_force():
            self._model.load_weights(file_or_weights if adapter is None else str(adapter), strict)
        return self

    def set_dtype(self, dtype: mx.Dtype, predicate: Callable[[mx.Dtype], bool] | None = _is_floating) -> None:
        """As ``nn.Module.set_dtype``; refused once weights are streamed.

        Parameters that change cannot be read from the checkpoint any more: they are computed when the model starts, and
        stay in memory. The budget has to hold them.
        """
        if self.engine is not None:
            raise _refusal("set_dtype()")
        with self._life.prepared.loaded.streams.in_force():
            self._model.set_dtype(dtype, lambda found: found != dtype and (predicate is None or predicate(found)))

    def stream_generate(self, prompt: str | list[int], **options: Any) -> Iterator[str]:
        """Yield the text that follows a prompt, in parts, with the tokenizer that ``mlx_flash.load`` loaded.

        Raises:
            ConfigError: the model was loaded without a tokenizer.
        """
        if self._generates is None:
            raise ConfigError(
                f"{self._life.name} was loaded without a tokenizer. Hint: mlx_flash.load(), or "
                "FlashGenerationLoop(model, tokenizer)."
            )
        for response in self._generates(self, self.tokenizer, prompt, **options):
            yield response.text

    def trainable_parameters(self) -> dict[str, Any]:
        """None: weights that are read again on every pass cannot be trained."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelFacade:
        raise StreamedWeightsError("a streamed model cannot be copied: its weights are on disk. Hint: load it again.")

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise StreamedWeightsError("a streamed model cannot be pickled: its weights are on disk. Hint: load it again.")


def _refusal(what: str) -> StreamedWeightsError:
    return StreamedWeightsError(
        f"{what} on a streamed model would take what happens to be in the slots for its weights. "
        "Hint: load the model with mlx_lm, or call close() and use the model that it returns."
    )


def _delegate(name: str, *, until_start: bool = False) -> Callable[..., Any]:
    """Return a method of mlx-lm's model; one that changes weights is refused once they are streamed."""

    def method(self: ModelFacade, *args: Any, **kwargs: Any) -> Any:
        if until_start and self.engine is not None:
            raise _refusal(f"{name}()")
        with self._life.prepared.loaded.streams.in_force() if until_start else nullcontext():
            result = getattr(self._model, name)(*args, **kwargs)
        return self if until_start or result is self._model else result

    method.__name__ = name
    method.__doc__ = f"As ``nn.Module.{name}``{'; refused once weights are streamed' * until_start}."
    return method


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: ModelFacade, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(f"{name}()")

    method.__name__, method.__doc__ = name, "Refused: it would see slot contents."
    return method


for _name in ("children", "leaf_modules", "modules", "named_modules", "train", "eval", "freeze", "unfreeze"):
    setattr(ModelFacade, _name, _delegate(_name))
for _name in ("update", "update_modules", "apply_to_modules"):
    setattr(ModelFacade, _name, _delegate(_name, until_start=True))
for _name in ("save_weights", "apply"):
    setattr(ModelFacade, _name, _refuse(_name))


_NO_LIMIT = (
    "max_kv_size=%d has no effect: mlx-lm lets %s build its own caches, which keep every token of the context. "
    "Hint: set kv_max_tokens to bound them."
)

Reads = Callable[[mx.array], mx.array]
"""A function that returns the hidden states of a call that are kept: all of them, or the last one."""


class FlashLLM(ModelFacade):
    """A model of mlx-lm whose weights are streamed. Made by ``mlx_flash.load`` and ``load_model``.

    It is called as mlx-lm's model is, and answers to every attribute of it (``layers``, ``make_cache``, ``args`` ...).
    Its own module tree is empty, so that what sums up arrays does not count a slot once for each layer in it.
    Forward calls from several threads run one after another.

    Until :meth:`start`, or the first forward call, nothing is in memory and modules can be changed as mlx-lm's own:
    that is when adapters are applied.

    Args:
        prepared: the model and the plan for it; or a model that mlx-lm loaded lazily and nobody changed.
        model_path: the folder of a lazily loaded model; None finds it.

    Attributes:
        plan: what is in memory, and what is not. Made anew by :meth:`start`.
        engine: None before :meth:`start`; its ``stream.stats`` and ``reader.stats`` count.
        kv: what its KV caches share; None where they are mlx-lm's own.
        counters: what its calls did so far.
        times: measured times of its passes. There from :meth:`start` on.
    """

    plan = OfLifecycle[ResidencyPlan]()
    times = OfLifecycle[Times]()

    def __init__(
        self,
        prepared: Prepared | nn.Module,
        config: FlashConfig,
        name: str | None = None,
        *,
        model_path: str | Path | None = None,
    ) -> None:
        if isinstance(prepared, nn.Module):
            prepared = prepare_loaded(prepared, config, None if model_path is None else Path(model_path))
        life = Lifecycle(prepared, config, name or model_name(prepared.checkpoint.directory))
        super().__init__(prepared.loaded.called, life)
        self.kv = life.kv
        self.name = life.name
        self.counters = life.counters
        self.batching = config.batching
        self._warned: set[str] = set()
        self._own_guesses = WeakSet[OwnGuesses]()

    def start(self, progress: Progress | None = None) -> None:
        """Read the pinned weights, and begin to stream the rest. Harmless when repeated.

        Other models of this process that are waiting to be started are started too, the smallest first, since they
        share the budget: each leaves those after it what they need at least.

        Raises:
            BudgetError: the budget cannot hold the plan.
            ReadError: weights could not be read.
            ClosedError: the model was closed.
        """
        self._life.start(progress)

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
        if (output := self._life.compute(args, kwargs)) is not None:
            return output
        call = parse_call(args, kwargs, wants_logits=not result_is_dropped(sys._getframe()))

        def compute(passes: Passes) -> Any:
            try:
                return self._call(passes, call)
            except BudgetError:
                others = (*call.arguments[1:], *call.keywords.values())
                if call.tokens is None or any(value is not None for value in others):
                    raise
            cache = make_prompt_cache(cast(nn.Module, self))
            return self._call(passes, token_call(call.arguments[0], cache, wants_logits=call.wants_logits))  # in parts

        return self._life.run(compute, args, kwargs)

    def row(
        self,
        tokens: mx.array,
        cache: list[Any],
        step: int,
        *,
        wants_logits: bool = True,
        ends: Sequence[int] = (),
        segment_left: int = 0,
        num_guesses: int = 0,
        owed: Owed | None = None,
        reads: Reads | None = None,
        reader: OwnGuesses | None = None,
    ) -> Row:
        """Return new tokens of a prompt cache, to be computed by :meth:`advance`.

        Args:
            tokens: ``(1, length)``.
            step: mlx-lm's ``prefill_step_size``. All tokens but the last are computed in parts of so many, or of the
                plan's step if that is smaller, and the last one alone, as mlx-lm does.
            wants_logits: whether to compute the logits of the last token. If not, it is not computed alone.
            ends: numbers of tokens at which segments end, and parts too, ascending.
            segment_left: tokens of the last segment that will come later.
            num_guesses: the last tokens that are guesses. Then each token is computed alone, with its logits, as far as
                memory has room for them, and :meth:`Row.keep` takes tokens back.
            owed: what the caller has the cache say between two tokens. The first token is the one that is owed.
            reads: returns what is kept of the hidden states of each part, ``(1, length, dimensions)``, in
                ``Row.outputs``; None computes no more than the prompt cache needs. The part with logits has none.
        """
        self._life.start()
        if num_guesses:
            whole = token_call(tokens, cache, checkpoints=Checkpoints(), reader=reader)  # of all its parts
            return Row(whole, [whole], 1, owed)
        given, before = tokens, 0
        if owed is None and (owed := owed_token(cache)) is not None:
            assert owed.debt is not None
            given, before = mx.concatenate([mx.array([[owed.debt.token]], tokens.dtype), tokens], axis=1), 1
        if given.shape[1] == 1 and wants_logits:
            call = token_call(given, cache, reader=reader)
            return Row(call, [call], owed=owed)
        whole = token_call(given, cache, wants_logits=False, reader=reader)
        num_together = tokens.shape[1] - wants_logits
        stretches: list[ForwardCall] = []
        if before:  # in a call of its own, as mlx-lm has computed it
            stretches.append(whole.part(0, 1))
            stretches[0].wants_logits = True
        for start, stop in pairwise([0, *ends, num_together]):
            if start < stop:
                call = token_call(given[:, before + start : before + stop], cache, wants_logits=False, reader=reader)
                call.segment_left = 0 if stop in ends else segment_left
                call.runs = None if reads is None else partial(_applied, reads, self.body)
                stretches.append(call)
        if wants_logits:
            stretches.append(token_call(given[:, -1:], cache, reader=reader))
        return Row(whole, stretches, self.prefill_step(step, num_together), owed, before)

    def prefill_step(self, step: int, num_tokens: int) -> int:
        """Return mlx-lm's ``prefill_step_size``, or the plan's if it is smaller. Warn where it cuts so many tokens."""
        self._life.start()
        limit = self.plan.prefill_step_size
        if limit < min(step, num_tokens):
            self._warn_once(step_in_words(limit, self._life.config))
        return min(step, limit)

    def advance(self, rows: Sequence[Row]) -> None:
        """Compute at least a part of each row, in as few passes over the weights as memory allows.

        What fails in one row is noted there, and leaves the others as if it had never been there.

        Args:
            rows: made by :meth:`row`; those that are done stay as they are.

        Raises:
            ReadError: weights could not be read, and no row went on. Caches that can be trimmed are put back.
        """
        life = self._life
        given = [([part.tokens for part in row.left], row.whole.cache) for row in rows]
        life.run(lambda passes: passes.advance(rows, lends=life.lends()), given)

    @property
    def body(self) -> nn.Module | None:
        """The part of the model that ends with the final norm; None where mlx-lm's code has no module for it."""
        return body_of(self._model)

    def logits_step(self, step: int) -> int:
        """Return the most tokens, a step or a half, a quarter ... of it, whose logits the plan has room for at once."""
        most = self.plan.room_bytes // (4 * self.plan.activations.logits_per_token)
        step = min(step, self.plan.prefill_step_size)
        while step > max(1, most):
            step = -(-step // 2)
            self._warn_once(step_in_words(step, self._life.config))
        return step

    def apply_head(self, heads: Sequence[tuple[mx.array, Callable[[mx.array], Any]]]) -> list[Any]:
        """Return what is made of the logits of hidden states, or the exceptions that prevented it.

        A streamed head is read once for as many of the states as memory has room for the logits of.

        Args:
            heads: hidden states from :meth:`row`, ``(1, length, dimensions)``, each with a function of their logits,
                which evaluates what it returns.

        Raises:
            ReadError: weights could not be read.
        """

        def compute(passes: Passes) -> list[Any]:
            assert self.body is not None
            head = head_of(self._model, self.body)
            runs = [partial(_applied, use, head) for _, use in heads]
            calls = [
                ForwardCall((states,), {}, states.shape[1], None, None, False, runs=run)
                for (states, _), run in zip(heads, runs, strict=True)
            ]
            rows = [Row(call, [call]) for call in calls]
            passes.advance(rows, lends=self._life.lends())
            return [row.error or row.outputs[0] for row in rows]

        return self._life.run(compute, [states for states, _ in heads])

    @property
    def is_in_memory(self) -> bool:
        """True if nothing is streamed: mlx-lm's own loops run, and tokens are calls of mlx-lm's own. It is started."""
        self._life.start()
        return self._life.passes.is_in_memory

    def has_room(self, lengths: Sequence[int]) -> bool:
        """Return whether the budget holds sequences that share passes, on every rank, until all have ended.

        Args:
            lengths: the most tokens of each, prompt and answer.
        """
        chain = self._life.prepared.chain
        has_room = together_bytes(self.plan, lengths, "exact", may_offload=True) <= self.plan.room_bytes
        return has_room if chain is None else bool(chain.least(has_room))

    def refusal(self, cache: Sequence[Any]) -> str | None:
        """Return the reason why no tokens are guessed with a prompt cache; None if they can be."""
        self.start()
        if not self._life.config.speculation:
            return "speculation is switched off"
        return self._life.passes.refusal(cache)

    def own_guesses(self, num_tokens: int | None) -> list[OwnGuesses]:
        """Return the source of guesses that is the model's own head, if that is in memory and its cache has room.

        Args:
            num_tokens: tokens of the text at most; None without a limit.
        """
        self.start()
        room = round_up(self.plan.context_length, CACHE_STEP) - sum(each.most for each in self._own_guesses)
        most = room if num_tokens is None else min(room, round_up(num_tokens, CACHE_STEP))
        if self.layout.head is None or not self._has_own_head or most < CACHE_STEP:
            return []
        step = min(CACHE_STEP, self.plan.prefill_step_size)
        source = OwnGuesses(self.layout.head, most, step, self._with_own_head)
        self._own_guesses.add(source)
        return [source]

    @property
    def prefixes(self) -> PrefixCache | None:
        """The prefix cache; None before :meth:`start`, and where the settings want none."""
        return None if self.engine is None else self.engine.prefixes

    @property
    def _has_own_head(self) -> bool:
        return self.engine is not None and self.engine.has_own_head

    def _with_own_head(self, work: Callable[[], Any]) -> Any:
        return self._life.run(lambda passes: work() if self._has_own_head else None)

    def _call(self, passes: Passes, call: ForwardCall) -> Any:
        step = call.step_within(self.plan.prefill_step_size)
        if step is not None:
            self._warn_once(step_in_words(step, self._life.config))
        row = Row(call, [call], step, joins=call.wants_logits)
        while not row.is_done:
            passes.advance([row], lends=self._life.lends())
        if row.error is not None:
            raise row.error
        return row.outputs[0] if row.outputs else DroppedResult()

    def make_cache(self) -> list[Any]:
        """A prompt cache, for mlx-lm's ``make_prompt_cache``: the model's own, its plain entries as the settings say.

        What mlx-lm was asked for with ``max_kv_size`` stays mlx-lm's.
        """
        requested = requested_kv_size(sys._getframe(1))
        if requested is not None and hasattr(self._model, "make_cache"):
            self._warn_once(_NO_LIMIT % (requested, self.name))
        stock = make_prompt_cache(self._model, requested)
        config = self._life.config
        if (most := config.kv_max_tokens) is not None:
            return [RotatingKVCache(most, config.kv_keep) if type(e) in CacheKinds.plain else e for e in stock]
        return stock if self.kv is None else make_caches(stock, self.kv.options, self.kv)

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            log.warning("%s", words)

    @property
    def is_batchable(self) -> bool:
        """True if mlx-lm's batches keep to the settings: their caches are mlx-lm's, in memory, without ``kv_keep``."""
        config = self._life.config
        if config.kv_max_tokens is not None:
            return not config.kv_keep
        return self.kv is None or not self.plan.kv.num_on_disk


def _applied(use: Callable[[mx.array], Any], run: Any, *args: Any, **kwargs: Any) -> Any:
    return use(run(*args, **kwargs))
