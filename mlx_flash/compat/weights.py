"""Loading of weights into modules, observed: a model that is loaded around the patch is not streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat.require import require

_stock: Callable[..., Any] = require(nn.Module, "load_weights", "file_or_weights", "strict")


def watch_weights(seen: Callable[[nn.Module, int], None]) -> None:
    """Show every module, and the bytes of the arrays, that weights are loaded into. Replaces an earlier watch."""

    def load_weights(self: nn.Module, file_or_weights: Any, strict: bool = True) -> nn.Module:
        if isinstance(file_or_weights, list):
            seen(self, sum(int(array.nbytes) for _, array in file_or_weights if isinstance(array, mx.array)))
        loaded: nn.Module = _stock(self, file_or_weights, strict)
        return loaded

    nn.Module.load_weights = load_weights  # type: ignore[method-assign]


def stop_watching() -> None:
    """Put ``load_weights`` back as it was."""
    nn.Module.load_weights = _stock  # type: ignore[method-assign]
