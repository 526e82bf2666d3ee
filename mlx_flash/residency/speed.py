"""The machine in numbers that plans use, and the speeds that runs reached on it, kept in the cache folder."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace

from mlx_flash.storage.blocks import Compression
from mlx_flash.storage.measured import Measurements
from mlx_flash.storage.probe import DiskProfile
from mlx_flash.storage.ranges import Arrival

MAX_AGE_SECONDS = 30 * 24 * 3600
MAX_PROBE_AGE_SECONDS = 24 * 3600

SPEEDS = Measurements("speeds.json", MAX_AGE_SECONDS)


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds of a model on one disk of this machine.

    Attributes:
        disk_bytes_per_second: reading while streaming.
        compute_bytes_per_second: weight bytes that the processor works through when it decodes.
        barrier_seconds: waiting for the result of a unit before the next one begins.
        prompt_seconds_per_token: computing one token of a prompt, without reading; 0 while unknown.
        is_measured: True when a run reached these speeds, False when a short probe found them.
        prompt_speedup: time to compute a token that is decoded, over that of a token in a call of many; probed.
        resident_bytes_per_second: as ``compute_bytes_per_second``, for weights that stay in a GPU's own memory; 0 where
            the processor and MLX's device share memory, so that all weights compute equally fast.
        operation_seconds: starting an operation on a GPU with memory of its own; 0 elsewhere.
    """

    disk_bytes_per_second: float
    compute_bytes_per_second: float
    barrier_seconds: float
    prompt_seconds_per_token: float = 0.0
    is_measured: bool = False
    prompt_speedup: float = 1.0
    resident_bytes_per_second: float = 0.0
    operation_seconds: float = 0.0

    @property
    def is_usable(self) -> bool:
        """True when a plan can be made with these numbers."""
        speeds = (self.disk_bytes_per_second, self.compute_bytes_per_second, self.prompt_speedup)
        others = (self.barrier_seconds, self.prompt_seconds_per_token, self.resident_bytes_per_second)
        return all(0 < value < math.inf for value in speeds) and all(
            0 <= value < math.inf for value in (*others, self.operation_seconds)
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a plan is made for.

    Attributes:
        total_memory: bytes this process could ever have.
        available_memory: bytes that are free now.
        base_bytes: footprint of the process before any weight.
        active_bytes: the part of it that MLX arrays of others take.
        context_bytes: the part of it that CUDA takes on a GPU with memory of its own: its context, and kernels.
        runtime_bytes: what a running model adds to it beside its arrays: code pages touched first, thread stacks, heap.
        disk: how the checkpoint's disk reads.
        compute_bytes_per_second: weight bytes the processor works through when decoding, fresh from the reader.
        barrier_seconds: what it costs to wait for a layer's result before the next layer is begun.
        has_buffer_cache: whether MLX keeps freed buffers (GPU back ends do).
        exact_tiles: whether some rows of a matrix product are, bit for bit, those rows of the whole product. If not, a
            head that is streamed passes through a slot whole.
        arrival: how bytes get to MLX's memory, as the self-test found. If not in place, reads need bounce buffers.
        kv_disk_bytes: free where files of the KV cache are put.
        largest_array: the most bytes of one array: Metal's buffers have a limit below the memory of the machine.
        prompt_seconds_per_token: computing one token of a prompt, as a run measured it; 0 while unknown.
        is_measured: True when the speeds are those of a run, False when a short probe found them.
        prompt_speedup: time to compute a token that is decoded, over that of a token in a call of many.
        speed_key: the name under which the speeds of this model on this disk are kept.
        resident_bytes_per_second, operation_seconds: as in :class:`Speed`.
        reached_bytes: the peak of the process while it loaded the tokenizer; 0 for none that counts.
        compression: of the checkpoint; None where nothing is compressed.
    """

    total_memory: int
    available_memory: int
    base_bytes: int
    active_bytes: int
    runtime_bytes: int
    disk: DiskProfile
    compute_bytes_per_second: float
    barrier_seconds: float
    has_buffer_cache: bool
    exact_tiles: bool
    arrival: Arrival = "in place"
    kv_disk_bytes: int = 1 << 62
    largest_array: int = 1 << 62
    prompt_seconds_per_token: float = 0.0
    is_measured: bool = False
    prompt_speedup: float = 1.0
    speed_key: str = ""
    resident_bytes_per_second: float = 0.0
    operation_seconds: float = 0.0
    reached_bytes: int = 0
    compression: Compression | None = None
    context_bytes: int = 0

    @property
    def kept_bytes_per_second(self) -> float:
        """Weight bytes that it works through when they stay in memory."""
        return self.resident_bytes_per_second or self.compute_bytes_per_second

    @property
    def speed(self) -> Speed:
        """The speeds that plans are made with."""
        return Speed(
            self.disk.bytes_per_second,
            self.compute_bytes_per_second,
            self.barrier_seconds,
            self.prompt_seconds_per_token,
            self.is_measured,
            self.prompt_speedup,
            self.resident_bytes_per_second,
            self.operation_seconds,
        )

    def at_speed(self, speed: Speed) -> Machine:
        """Return the machine with other speeds."""
        speeds = asdict(speed)
        disk = replace(self.disk, bytes_per_second=speeds.pop("disk_bytes_per_second"))
        return replace(self, disk=disk, **speeds)


def faster(one: Speed, other: Speed) -> Speed:
    """Return the first speed, with everything that is faster in the other. Prompts count where both are known."""
    prompts = [s for s in (one.prompt_seconds_per_token, other.prompt_seconds_per_token) if s]
    return replace(
        one,
        disk_bytes_per_second=max(one.disk_bytes_per_second, other.disk_bytes_per_second),
        compute_bytes_per_second=max(one.compute_bytes_per_second, other.compute_bytes_per_second),
        barrier_seconds=min(one.barrier_seconds, other.barrier_seconds),
        prompt_seconds_per_token=min(prompts) if one.prompt_seconds_per_token else 0.0,
    )


def load_speed(key: str) -> Speed | None:
    """Return what is known of a model on a disk; None when nothing is, or it is too old, damaged or in an old form."""
    match SPEEDS.load().get(key):
        case {
            "time": float(written),
            "disk_bytes_per_second": float(disk),
            "compute_bytes_per_second": float(compute),
            "barrier_seconds": float(barrier),
            "prompt_seconds_per_token": float(prompt),
            "is_measured": bool(is_measured),
            "prompt_speedup": float(speedup),
            "resident_bytes_per_second": float(resident),
            "operation_seconds": float(operation),
        } if 0 <= time.time() - written <= (MAX_AGE_SECONDS if is_measured else MAX_PROBE_AGE_SECONDS):
            speed = Speed(disk, compute, barrier, prompt, is_measured, speedup, resident, operation)
            return speed if speed.is_usable else None
    return None


def save_speed(key: str, speed: Speed) -> None:
    """Keep the speed of a model on a disk for later plans."""
    SPEEDS.save(key, asdict(speed))
