"""The patch: with one attribute of mlx-lm replaced, everything that loads through it streams.

``mlx_lm.load`` is imported by name into the server, the commands and other programs, so replacing it would miss them.
All of them end in ``mlx_lm.utils.load_model``, which nobody imports by name.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat import tokenizers
from mlx_flash.compat.callers import calling_modules, refuse_writers
from mlx_flash.compat.generation import StockBatchGenerator, stock_generate_step, stock_speculative_generate_step
from mlx_flash.compat.loaders import WRITERS, Change, LoadModel, current_load_model, stock_sharded_load
from mlx_flash.config import FlashConfig
from mlx_flash.engine.prepare import counted, load_tokenizer, prepare, resolve
from mlx_flash.errors import ConfigError
from mlx_flash.generation import SharingGenerator, generate_step, speculative_generate_step
from mlx_flash.integration.mlx_vlm import patch_vlm, restore_vlm
from mlx_flash.layout.load import model_name
from mlx_flash.loading import load_model
from mlx_flash.logs import log
from mlx_flash.model import FlashLLM
from mlx_flash.ranks import launched_group

_lock = threading.RLock()


class _State:
    """The patch of this process, changed under the lock."""

    config: FlashConfig | None = None
    changes: tuple[Change, ...] = ()


class FlashPatch:
    """The result of :func:`apply_flash_patch`. As a context manager it restores the previous state at its end."""

    def __init__(self, previous: FlashConfig | None) -> None:
        self._previous = previous

    def __enter__(self) -> FlashPatch:
        return self

    def __exit__(self, *_: object) -> None:
        _put_in_force(self._previous)


def apply_flash_patch(config: FlashConfig | None = None) -> FlashPatch:
    """Make mlx-lm stream the models that it loads from now on.

    ``mlx_lm.load`` and with it ``generate``, ``stream_generate``, ``batch_generate``, mlx-lm's commands and its server
    get a :class:`~mlx_flash.model.FlashLLM`. Its weights are read when it is first called, so adapters can be applied
    before. All models of the process share the budget.

    Applying it again replaces the settings; models that are loaded already keep theirs. Safe from any thread.

    Args:
        config: how to stream; None takes what environment and settings file say (:meth:`FlashConfig.resolve`). With
            ``enabled=False`` mlx-lm is left, or put back, as it was.

    Returns:
        A context manager, for those who want one: ``with apply_flash_patch(config): ...``.
    """
    config = config or FlashConfig.resolve()
    with _lock:
        previous = _State.config
        _put_in_force(config if config.enabled else None)
    return FlashPatch(previous)


def remove_flash_patch() -> None:
    """Put mlx-lm back exactly as it was. Models that are loaded already go on streaming. Harmless when repeated."""
    _put_in_force(None)


def _put_in_force(config: FlashConfig | None) -> None:
    with _lock:
        _State.config = config
        if config is None:
            _restore()
            return
        if not _State.changes:
            stock = current_load_model()
            _State.changes = (Change("mlx_lm.utils", "load_model", stock, _make_replacement(stock)), *_CHANGES)
        patch_vlm(lambda: _State.config)
        for change in _State.changes:
            change.apply()


def _restore() -> None:
    restore_vlm()
    for change in _State.changes:
        change.undo()
    found = current_load_model()
    if _State.changes and found is not _State.changes[0].stock:  # another patch calls ours, which calls the stock one
        name = f"{getattr(found, '__module__', '?')}.{getattr(found, '__qualname__', found)}"
        log.warning(
            "mlx_lm.utils.load_model was replaced again after mlx-flash replaced it, by %r: left as it is", name
        )
    else:
        _State.changes = ()


def _make_replacement(original: LoadModel) -> LoadModel:
    @functools.wraps(original)
    def load_model(
        model_path: Path | str,
        lazy: bool = False,
        strict: bool = True,
        model_config: dict[str, Any] | None = None,
        **loading: Any,
    ) -> tuple[nn.Module, dict[str, Any]]:
        config = _State.config
        if config is None:
            return original(model_path, lazy, strict, model_config, **loading)
        refuse_writers(WRITERS)
        # Of mlx_lm.evaluate, each rank has its own tasks.
        group = None if "mlx_lm.evaluate" in calling_modules() else launched_group()
        prepared = prepare(model_path, config, model_config, load_model=original, strict=strict, group=group, **loading)
        return FlashLLM(prepared, config, model_name(model_path)), prepared.loaded.config

    return load_model


def _load_tokenizer(model_path: Path | str, *args: Any, **kwargs: Any) -> Any:
    """Load a tokenizer, like ``mlx_lm.utils.load_tokenizer``. The plan of its model counts what that takes."""
    load = functools.partial(tokenizers.load_tokenizer, model_path, *args, **kwargs)
    return counted(Path(model_path), load, _State.config)


def _sharded_load(
    repo: str,
    pipeline_group: mx.distributed.Group | None = None,
    tensor_group: mx.distributed.Group | None = None,
    return_config: bool = False,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, ...]:
    """Load a model that the ranks share, like ``mlx_lm.utils.sharded_load``.

    Each rank has some layers, with a ``tensor_group`` too.
    """
    if trust_remote_code:
        raise ConfigError(
            "trust_remote_code runs code of the model's folder, which a streamed model does not. Hint: leave it."
        )
    group = pipeline_group or tensor_group or mx.distributed.init()
    path = resolve(repo)
    settings = _State.config
    tokenizer = load_tokenizer(path, tokenizer_config, settings)
    model, config = load_model(path, settings, group=group)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


_CHANGES = (
    Change("mlx_lm.utils", "load_tokenizer", tokenizers.stock_load_tokenizer, _load_tokenizer),
    Change("mlx_lm.utils", "sharded_load", stock_sharded_load, _sharded_load),
    Change("mlx_lm.server", "sharded_load", stock_sharded_load, _sharded_load),  # imported by name
    Change("mlx_lm.generate", "generate_step", stock_generate_step, generate_step),
    Change("mlx_lm.generate", "speculative_generate_step", stock_speculative_generate_step, speculative_generate_step),
    Change("mlx_lm.generate", "BatchGenerator", StockBatchGenerator, SharingGenerator),
)
"""Attributes that the patch changes besides ``load_model``."""
