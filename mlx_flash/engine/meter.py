"""A meter of the speed that a running model reaches, for the predictions of later plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_flash.memory.others import OtherLoad
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.speed import Speed, faster, save_speed
from mlx_flash.storage.prefetcher import ReadStats
from mlx_flash.streaming.stream import StreamStats

MIN_PASSES = 8
"""Fewer decoding passes say little: the first one reads what later ones find in memory."""

LEAST_PASSES = 2
"""Passes after which a probe is corrected that found the machine slower than it is."""

MIN_READ_BYTES = 64 << 20
"""Less that was read says little of a disk."""

_PROBED_AGAIN = 0.5
"""Share of the planned speed below which a disk is probed again."""


@dataclass(slots=True)
class _Passes:
    num_passes: int = 0
    num_tokens: int = 0
    compute_seconds: float = 0.0


class SpeedMeter:
    """A stopwatch for the passes of a model. Called by the thread that calls the model.

    Args:
        plan: the plan that is carried out.
        read: returns the counters of its reader.
        stream: counters of its ring.
    """

    def __init__(self, plan: ResidencyPlan, read: Callable[[], ReadStats], stream: StreamStats) -> None:
        self._plan = plan
        self._read = read
        self._stream = stream
        self._read_before = read()
        self._others = OtherLoad()
        self._began = self._waited = 0.0
        self._decode_ended: float | None = None
        self._decode = _Passes()
        self._prompt = _Passes()

    def begin(self, *, is_comparable: bool) -> None:
        """Note that a pass begins. It is comparable with others if it decodes one token of each sequence."""
        self._decode_ended = self._decode_ended if is_comparable else None
        self._began, self._waited = time.perf_counter(), self._stream.wait_seconds

    def end(self, num_tokens: int, num_sequences: int, num_guesses: int = 0) -> None:
        """Note that the pass ended well. Not called for passes of several sequences with caches of their own.

        Args:
            num_tokens: new tokens in it, over all sequences.
            num_sequences: sequences.
            num_guesses: further tokens that were guessed; each was computed as the one before them.
        """
        now = time.perf_counter()
        seconds, waited = now - self._began, self._stream.wait_seconds - self._waited
        is_decode = num_tokens == num_sequences
        passes = self._decode if is_decode else self._prompt
        passes.num_passes += 1
        passes.num_tokens += num_tokens
        passes.compute_seconds += (seconds - waited) / (1 + num_guesses)
        if is_decode and self._decode_ended is not None:  # the caller evaluates what the pass returned lazily
            passes.compute_seconds += min(self._began - self._decode_ended, seconds)
        self._decode_ended = now if is_decode else None

    def save(self, key: str, planned: Speed) -> bool:
        """Keep the speed that the run reached for later plans. Return True if the disk should be probed again.

        That is so if it read at less than half of the planned speed. A run that was short, or beside busy processes,
        only shows that the machine is faster than planned.
        """
        speed, reached = self.speed(planned), self._reached(planned, LEAST_PASSES)
        if reached is None:
            return False
        if speed is None or self._others.is_high:
            speed = faster(planned, reached)
        if self._read().cached_bytes > self._read_before.cached_bytes:
            speed = replace(speed, disk_bytes_per_second=planned.disk_bytes_per_second)  # it is memory's in part
        if speed != planned:
            save_speed(key, speed)
        return speed.disk_bytes_per_second < planned.disk_bytes_per_second * _PROBED_AGAIN

    def speed(self, planned: Speed) -> Speed | None:
        """Return the speed that the run reached, else as planned; None when it was too short to tell."""
        return self._reached(planned, MIN_PASSES)

    def _reached(self, planned: Speed, least_passes: int) -> Speed | None:
        decode, prompt, plan = self._decode, self._prompt, self._plan
        read = self._read()
        nbytes = read.nbytes - self._read_before.nbytes
        seconds = read.busy_seconds - self._read_before.busy_seconds
        if decode.num_passes < least_passes or nbytes < MIN_READ_BYTES or seconds <= 0:
            return None
        found = replace(planned, is_measured=True)
        if plan.pool is None:  # experts come one by one, and as fast as calls need them, not as the disk can
            found = replace(found, disk_bytes_per_second=nbytes / seconds)
        if plan.pool is None and not plan.kv.num_on_disk and plan.streaming.compute_seconds > 0:
            times = decode.compute_seconds / decode.num_passes / plan.streaming.compute_seconds
            found = replace(
                found,
                compute_bytes_per_second=planned.compute_bytes_per_second / max(times, 1e-9),
                barrier_seconds=planned.barrier_seconds * times,
            )
        if prompt.num_tokens:
            found = replace(found, prompt_seconds_per_token=prompt.compute_seconds / prompt.num_tokens)
        return found if found.is_usable else None
