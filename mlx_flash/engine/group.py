"""Calls of a model that share one prompt cache and one pass over the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_flash.engine.call import ForwardCall
from mlx_flash.engine.engine import Engine
from mlx_flash.errors import StreamedWeightsError
from mlx_flash.kv.base import PooledCache
from mlx_flash.kv.views import CacheViews, SharedEntryError, can_be_viewed, snapshot, trimmer
from mlx_flash.layout.arrays import arrays_in
from mlx_flash.streaming.lockstep import Lockstep


class CallGroup:
    """Runs the parts of a prompt in lockstep: the output is that of the parts one after another, bit for bit.

    A model may use an entry of the cache again in a later layer. The parts of its prompts must run in order. The first
    group of a model starts with an empty cache, so that it can be undone. Until one group has succeeded, prompts that
    start with a filled cache run in order.

    Args:
        model: mlx-lm's model.
        engine: its weights.
    """

    def __init__(self, model: Any, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._is_proven = False
        self._needs_order = False

    def fits(self, cache: Sequence[Any]) -> bool:
        """Return whether calls with a prompt cache can share a pass, and gain by it."""
        engine = self._engine
        if self._needs_order or not engine.stream.units or not can_be_viewed(cache):
            return False
        if engine.experts is not None and engine.experts.listeners:  # they count passes
            return False
        pooled = [entry for entry in cache if isinstance(entry, PooledCache)]
        if any(entry.is_on_disk or entry.pool.options.max_tokens is not None for entry in pooled):
            return False
        return self._is_proven or snapshot(cache) is not None

    def run(self, calls: Sequence[ForwardCall], progress: Callable[[float], None]) -> list[Any] | None:
        """Return the outputs of calls that share a prompt cache; None if the model needs them in order.

        Args:
            calls: the calls.
            progress: called with the part of the pass that is done, if the cache can be put back. What it raises ends
                the pass.

        Raises:
            ReadError: weights could not be read. A cache that can be trimmed is put back.
            StreamedWeightsError: a model that was proven needs an order after all.
        """
        cache = calls[0].cache or ()
        put_back = None if self._is_proven else snapshot(cache)
        trim = trimmer(cache)
        num_units = len(self._engine.stream.units)
        views = CacheViews(cache, [call.num_tokens // call.batch_size for call in calls])
        lockstep = Lockstep(
            self._engine.stream,
            before=lambda number: self._engine.drop_logits(not calls[number].wants_logits),
            after=views.after,
            progress=lambda done: progress(min(1.0, done / num_units)) if trim is not None else None,
        )
        try:
            outputs = lockstep.run(
                [partial(self._call, call, view, cache) for call, view in zip(calls, views.views, strict=True)]
            )
        except SharedEntryError as error:
            undo = put_back or trim
            if undo is not None:
                undo()
            if put_back is None:
                raise StreamedWeightsError(
                    "the parts of a prompt shared a pass, and one used the prompt cache out of order. "
                    "Hint: start again with a new prompt cache."
                ) from error
            self._needs_order = True
            return None
        except BaseException:
            if trim is not None:
                trim()
            raise
        self._is_proven = True
        return outputs

    def _call(self, call: ForwardCall, view: list[Any], cache: Sequence[Any]) -> Any:
        output = self._model(call.tokens, cache=view)
        if not call.wants_logits:
            mx.eval(arrays_in(cache))
        return output
