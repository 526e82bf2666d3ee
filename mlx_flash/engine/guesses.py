"""Tokens that follow each other and share a pass over the weights, each in a call of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_flash.engine.call import parse_call
from mlx_flash.engine.pending import Pending
from mlx_flash.engine.row import Row
from mlx_flash.engine.status import PassCounters
from mlx_flash.kv.checkpoints import Checkpoints


def guessed_row(
    tokens: Sequence[int], cache: list[Any], owed: Pending | None = None, checkpoints: Checkpoints | None = None
) -> Row:
    """Return the next token, and guesses at the tokens after it, as a row whose parts can be taken back.

    Args:
        tokens: the tokens.
        cache: the prompt cache.
        owed: what the next token makes up for.
        checkpoints: gets those of the cache.
    """
    checkpoints = checkpoints or Checkpoints()
    call = parse_call((mx.array([tokens]),), {"cache": cache})
    parts = [replace(part, checkpoints=checkpoints) for part in call.parts(1)]
    return Row(parts[0] if len(parts) == 1 else call, parts, owed)


@dataclass(frozen=True, slots=True)
class GuessedRows:
    """Tokens that follow each other, each computed in a call of its own. All but the first are guesses.

    Attributes:
        row: made by :func:`guessed_row`, and computed as far as memory had room.
        counters: of the model's calls.
    """

    row: Row
    counters: PassCounters

    @property
    def outputs(self) -> Sequence[mx.array]:
        """The logits of the first ones, as many as memory had room for: ``(1, 1, vocabulary)`` each."""
        return self.row.outputs

    def keep(self, number: int) -> None:
        """Keep the first tokens in the prompt cache, and take the others back."""
        checkpoints = self.row.parts[0].checkpoints
        assert checkpoints is not None
        checkpoints.take_back(number)
        self.counters.end_guess(len(self.outputs) - 1, number - 1)
