"""``FlashLLM`` and ``load``: where everything meets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from mlx_flash.checkpoint.layout import ModelLayout, load_config, load_lazily, make_layout
from mlx_flash.checkpoint.safetensors import read_checkpoint
from mlx_flash.config import FlashConfig
from mlx_flash.errors import CheckpointNotFoundError, ClosedError, StreamedWeightsError
from mlx_flash.residency.headroom import check_headroom
from mlx_flash.residency.machine import look_at_machine
from mlx_flash.residency.plan import ResidencyPlan, make_plan
from mlx_flash.residency.sizes import measure
from mlx_flash.storage.reader import Reader
from mlx_flash.streaming.engine import Engine, Progress
from mlx_flash.streaming.slots import kernel_alignment


class FlashLLM(nn.Module):
    """A model of mlx-lm whose weights are streamed. Made by :func:`load` or :func:`load_model`.

    It is called as mlx-lm's model is, and answers to every attribute of it (``layers``, ``make_cache``, ``args`` …).
    Its own module tree is empty, so that what sums up arrays does not count a slot once for each layer in it.
    Forward calls from several threads run one after another.

    Args:
        model: mlx-lm's model.
        engine: the engine that streams its weights.
        plan: the plan the engine carries out.

    Attributes:
        plan: what is in memory, and what is not.
        engine: the engine; its ``stream.stats`` and ``reader.stats`` count.
    """

    def __init__(self, model: nn.Module, engine: Engine, plan: ResidencyPlan) -> None:
        nn.Module.__init__(self)
        # nn.Module would put the model into the module tree if it were set as usual.
        object.__setattr__(self, "_model", model)
        self.engine = engine
        self.plan = plan
        self._lock = threading.RLock()
        self._closed = False
        self._cache_limit = mx.set_cache_limit(plan.cache_limit) if plan.cache_limit else None
        weakref.finalize(self, engine.reader.close)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass, with the arguments and the result of mlx-lm's model.

        Raises:
            ReadError: weights could not be read. The model can be called again; give it a fresh prompt cache, since
                the layers before the failure have added to the one given.
            BudgetError: the call would need more memory than the budget has left.
            ClosedError: the model was closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the model was closed. Hint: load it again.")
            num_tokens = args[0].size if args and isinstance(args[0], mx.array) else 1
            check_headroom(self.plan, num_tokens, kwargs.get("cache", args[1] if len(args) > 1 else None))
            return self._model(*args, **kwargs)

    def __getattr__(self, key: str) -> Any:
        if key == "_model":  # not there yet: being made by copy or pickle
            raise AttributeError(key)
        return getattr(self._model, key)

    def parameters(self) -> dict[str, Any]:
        """The parameters that are in memory all the time, as a tree."""

        def in_memory(module: nn.Module, key: str, value: Any) -> bool:
            return nn.Module.valid_parameter_filter(module, key, value) and not self.engine.is_streamed(module, key)

        return cast(dict[str, Any], self._model.filter_and_map(in_memory))

    def trainable_parameters(self) -> dict[str, Any]:
        """None: weights that are read again on every pass cannot be trained."""
        return {}

    def close(self) -> nn.Module:
        """Ends streaming: restores classes and lazily loaded weights, closes the files, joins the threads.

        Returns:
            mlx-lm's model, lazily loaded, as if it had never been streamed.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self.engine.close()
                if self._cache_limit is not None:
                    mx.set_cache_limit(self._cache_limit)
            return cast(nn.Module, self._model)

    def __enter__(self) -> FlashLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlashLLM:
        raise StreamedWeightsError("a streamed model cannot be copied: its weights are on disk. Hint: load it again.")

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise StreamedWeightsError("a streamed model cannot be pickled: its weights are on disk. Hint: load it again.")


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: FlashLLM, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._model, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, f"As ``nn.Module.{name}``, on mlx-lm's model."
    return method


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: FlashLLM, *args: Any, **kwargs: Any) -> Any:
        raise StreamedWeightsError(
            f"{name}() on a streamed model would take what happens to be in the slots for its weights. "
            "Hint: load the model with mlx_lm, or call close() and use the model that it returns."
        )

    method.__name__, method.__doc__ = name, "Refused: it would see slot contents."
    return method


for _name in ("children", "leaf_modules", "modules", "named_modules", "train", "eval", "freeze", "unfreeze"):
    setattr(FlashLLM, _name, _delegate(_name))
for _name in ("load_weights", "save_weights", "update", "update_modules", "apply", "apply_to_modules", "set_dtype"):
    setattr(FlashLLM, _name, _refuse(_name))


def load(
    path_or_hf_repo: str,
    config: FlashConfig | None = None,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> tuple[FlashLLM, Any]:
    """Loads a model and its tokenizer, like ``mlx_lm.load``.

    Args:
        path_or_hf_repo: a model directory, or a Hugging Face repository that is downloaded first.
        config: how to stream; None is ``FlashConfig()``.
        tokenizer_config: settings of the tokenizer.
        model_config: entries that replace those of ``config.json``.
        revision: of the repository.
        progress: called with (bytes read, bytes to read) while pinned weights are loaded.

    Returns:
        The model and mlx-lm's tokenizer wrapper; ``mlx_lm.stream_generate`` and its kin take both as they are.

    Raises:
        CheckpointError: the model directory is not a usable checkpoint.
        ConfigError: a setting is wrong; BudgetError when the budget is too small.
    """
    path = resolve(path_or_hf_repo, revision)
    tokenizer = mlx_lm_utils.load_tokenizer(path, tokenizer_config, eos_token_ids=load_config(path).get("eos_token_id"))
    model, _ = load_model(path, config, model_config=model_config, progress=progress)
    return model, tokenizer


def resolve(path_or_hf_repo: str, revision: str | None = None) -> Path:
    """The directory of a model; one that is named by its Hugging Face repository is downloaded.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    try:
        return Path(mlx_lm_utils._download(path_or_hf_repo, revision=revision))
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"there is no directory {path_or_hf_repo!r}, and it cannot be had from Hugging Face: {error}"
        ) from error


def load_model(
    model_path: Path | str,
    config: FlashConfig | None = None,
    *,
    model_config: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[FlashLLM, dict[str, Any]]:
    """Loads a model from a directory, like ``mlx_lm.utils.load_model``; no tokenizer is needed.

    Args, Raises: as :func:`load`.

    Returns:
        The model and its configuration.
    """
    config = config or FlashConfig()
    model, full_config, layout, plan = prepare(model_path, config, model_config)
    return start(model, layout, plan, config, progress), full_config


def prepare(
    model_path: Path | str, config: FlashConfig, model_config: dict[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any], ModelLayout, ResidencyPlan]:
    """Everything that comes before weights are read: the lazily loaded model, its configuration, layout and plan."""
    checkpoint = read_checkpoint(Path(model_path))
    loaded = load_lazily(Path(model_path), model_config)
    layout = make_layout(loaded, checkpoint)
    sizes = measure(layout, loaded.config, kernel_alignment())
    largest = max(checkpoint.shards, key=lambda shard: shard.nbytes)
    machine = look_at_machine(largest.path, layout, config)
    return loaded.model, loaded.config, layout, make_plan(sizes, config, machine)


def start(
    model: nn.Module, layout: ModelLayout, plan: ResidencyPlan, config: FlashConfig, progress: Progress | None = None
) -> FlashLLM:
    """Carries a plan out: reads what is pinned, and begins to stream the rest."""
    reader = Reader(
        _files(layout), direct=config.io != "buffered", read_size=plan.read_size, queue_depth=plan.queue_depth
    )
    engine = Engine(layout, plan, reader, kernel_alignment(), config.poison_released_slots, progress)
    return FlashLLM(model, engine, plan)


def _files(layout: ModelLayout) -> list[Path]:
    paths = {parameter.record.extent.path for unit in layout.units for parameter in unit.large if parameter.record}
    return sorted(paths)
