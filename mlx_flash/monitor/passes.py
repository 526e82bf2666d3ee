"""The pass under way, in words."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_flash.monitor.state import Unit, number, optional
from mlx_flash.monitor.words import duration, rate
from mlx_flash.telemetry import Json


def pass_words(state: Json, clock: float, tokens_per_second: float | None, units: Sequence[Unit]) -> str:
    """Return what the pass under way computes, and how far it is; the number of passes if there is none."""
    passes, began = number(state, "passes", "num_passes"), optional(state, "passes", "began")
    if began is None:
        return f"{passes:.0f} done{_guesses(state)}"
    streamed = [unit.state for unit in units if unit.streamed_bytes]
    done = f"{streamed.count('done')} of {len(streamed)}"
    head = f"{passes + number(state, 'passes', 'num_failed') + 1:.0f}: {_kind(state)}, "
    batch, seconds = number(state, "passes", "batch_size"), number(state, "passes", "last_seconds")
    if batch > 1 and seconds:
        shared = f"{batch:.0f} sequences, 1 pass {duration(seconds)}, {rate(tokens_per_second)} tok/s"
        return f"{head}{shared}; {done} layers"
    new = number(state, "passes", "num_tokens")
    tokens = f"{new:.0f} {'token' if new == 1 else 'tokens'}, {duration(max(0.0, clock - began))}"
    return f"{head}{tokens}{_guesses(state)}; {done} streamed layers done"


def _guesses(state: Json) -> str:
    guessed, right = number(state, "passes", "num_guessed"), number(state, "passes", "num_right")
    return f", {right:.0f} of {guessed:.0f} guesses right" if guessed else ""


def _kind(state: Json) -> str:
    if number(state, "passes", "num_tokens") == number(state, "passes", "batch_size"):
        return "decode"
    return "mixed" if number(state, "passes", "num_decoding") else "prefill"
