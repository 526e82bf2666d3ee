"""Tensor mode: every rank computes a part of each layer, as mlx-lm's ``shard()`` divides them.

Rows of a tensor are a range of its file, which the rank reads. Columns are not; each rank writes its own once to a
packed copy in the cache folder, as other weights that mlx-lm rearranges.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat.arrays import collectives
from mlx_flash.errors import ConfigError, StreamedWeightsError
from mlx_flash.layout.load import LoadedModel, direct_arrays
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.sources import Sources
from mlx_flash.ranks.peers import Peers
from mlx_flash.ranks.spread import Spread
from mlx_flash.storage.safetensors import Checkpoint


def divide(loaded: LoadedModel, checkpoint: Checkpoint, peers: Peers) -> LoadedModel:
    """Return a model with this rank's part of each layer. The given one is changed.

    Raises:
        ConfigError: mlx-lm cannot divide it, or not by so many ranks.
    """
    shard = getattr(loaded.model, "shard", None)
    if shard is None:
        raise ConfigError(
            f"ranks_mode='tensor' needs shard() of mlx-lm's model, which {type(loaded.model).__module__} lacks. "
            "Hint: leave ranks_mode unset, which gives each rank some layers."
        )
    sources = Sources(checkpoint)
    sources.adopt(loaded.keep_alive, loaded.sources)
    try:
        with sources.watching({}), loaded.streams.in_force():
            shard(peers.group)
    except ValueError as error:
        raise ConfigError(
            f"mlx-lm cannot divide the layers by {peers.size}: {error}. Hint: start another number of ranks, or leave "
            "ranks_mode unset, which gives each rank some layers."
        ) from error
    gc.collect()  # the class that watched sanitize() is in a cycle, and holds whole tensors
    found, arrays = direct_arrays(loaded.model, sources)
    return replace(loaded, sources=found, keep_alive=arrays)


class Shards(Spread):
    """A model of which each rank computes a part of every layer.

    Args:
        layers: the model's layers.
        peers: the ranks.
    """

    def __init__(self, layers: Sequence[nn.Module], peers: Peers) -> None:
        super().__init__(peers)
        self._num_layers = len(layers)

    def runs_of(self, rank: int) -> list[tuple[int, int]]:
        """Return all layers."""
        return [(0, self._num_layers)]

    def own_part(self, layout: ModelLayout) -> ModelLayout:
        """Return the layout as it is: its tensors are this rank's parts."""
        return layout

    @contextmanager
    def calls(
        self,
        tokens: Sequence[mx.array | None],
        caches: Sequence[Sequence[Any] | None],
        wait_turn: Callable[[tuple[str, int]], None] | None = None,
    ) -> Iterator[None]:
        """Compute one call on all ranks. Sums over ranks are evaluated one by one, in the order of calls.

        MLX would evaluate them in an order that depends on how each rank's plan cuts the layers.
        """
        self._check_equal(tokens)
        with collectives(self._evaluated):
            yield

    def _evaluated(self, exchange: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def exchange_now(array: mx.array, *args: Any, **options: Any) -> mx.array:
            try:
                mx.eval(array)
            except (RuntimeError, ValueError) as error:
                if "transformations" not in str(error):
                    raise
                raise StreamedWeightsError(
                    "the model exchanges results in a compiled function: ranks_mode='tensor' cannot run it. "
                    "Hint: leave ranks_mode unset."
                ) from error
            with self.peers.asking("every other rank", "its part of a layer"):
                result = exchange(array, *args, **options)
                mx.eval(result)
            return result

        return exchange_now

    def close(self) -> None:
        """Leave the layers divided: they are no layers of a whole model any more."""
