"""The machine in numbers: its memory, its disk, its processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.config import FlashConfig
from mlx_flash.files import cache_directory, free_bytes
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.swap import clone_with
from mlx_flash.memory.arena import Arena, active_memory
from mlx_flash.memory.driver import clear, context_bytes, has_own_memory
from mlx_flash.memory.footprint import FREE_SHARE, available_memory, footprint, free_unused, total_memory
from mlx_flash.memory.pagecache import round_up
from mlx_flash.residency.sizes import bytes_per_pair
from mlx_flash.storage.blocks import BLOCK_BYTES, Compression, decode_speed
from mlx_flash.storage.placement import padded_bytes
from mlx_flash.storage.prefetcher import DEFAULT_QUEUE_DEPTH, Arrival
from mlx_flash.storage.probe import DiskProfile, profile_for, way_of_reading
from mlx_flash.storage.safetensors import Checkpoint

_PROBE_BYTES = {mx.cpu: 4 << 20, mx.gpu: 32 << 20}
_QUANTIZED_SHARE = 16
"""MLX's CPU back end is far slower with packed weights."""

DECODED_READ_SIZE = 2 << 20
"""Bytes of weights in a read where they are compressed, whatever size suits the disk best. Smaller reads take longer,
since threads that decode hand Python's lock to each other after each step. With larger ones the disk waits more."""


COPIED_READ_SIZE, COPIED_DEPTH = 4 << 20, 8
"""Reads where CUDA's driver copies what was read. A processor copies it from the page cache before: on an H200's host
20 GB/s with 4 threads, 33 with 8; 18 with 8 and reads of 1 MiB."""

_PROMPT_TOKENS = 16
_NUM_PRODUCTS = 16
_NUM_OPERATIONS = 256

BASE_STEP = 4_000_000
"""Slack for the footprint, which varies from run to run: a budget that an error names must work in the next run."""

RUNTIME_BYTES = {"cpu": 8_000_000, "metal": 64_000_000, "cuda": 640_000_000}
"""Seen: 3 MB on the CPU back end once a matrix product has run. CUDA loads libraries and compiles kernels as it goes:
280 to 630 MB for a dense model, and 70 to 250 MB of the GPU that neither MLX nor NVML's line for the process counts.
Metal's is a guess."""

RUNTIME_BYTES_OF_EXPERTS = {"cpu": 0, "metal": 0, "cuda": 160_000_000}
"""More of them for a mixture. Seen with CUDA: 540, 670 and 780 MB in all."""

RUNTIME_BYTES_AGAIN = 400_000_000
"""The most of them in a process that has run a model, where libraries and some kernels are loaded. Seen on an H200: 40
MB for the same model or a dense one after a mixture, 380 MB for a mixture after a dense one."""

GROWTH_BYTES = {"cpu": BASE_STEP, "metal": BASE_STEP, "cuda": 4 * BASE_STEP}
"""Bytes that earlier loads may add to the process before plans count them: Python keeps the memory of planning."""

_counted: list[int] = []
"""The footprint that plans of this process count; empty before the first one."""

CLEAN_TRIALS, MOST_TRIALS = 4, 16

CLEAN = 0.8
"""A trial on the processor is clean if this process used it for so much of the time at least."""

_FALLBACK_BYTES_PER_SECOND = 10e9

CACHED_BYTES_PER_SECOND = 10e9
"""Bytes that the page cache delivers while layers compute. Seen: 9.8 GB/s on two cores, more on an H200's host."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a plan is made for."""

    has_run: ClassVar[bool] = False  # whether this process has run a model
    total_memory: int  # bytes this process could ever have
    available_memory: int  # bytes that are free now
    base_bytes: int  # footprint of the process before any weight
    active_bytes: int  # the part of it that MLX arrays of others take
    # what a running model adds to it beside its arrays: code pages touched first, thread stacks, heap
    runtime_bytes: int
    disk: DiskProfile  # how the checkpoint's disk reads
    compute_bytes_per_second: float  # weight bytes the processor works through when decoding, fresh from the reader
    barrier_seconds: float  # what it costs to wait for a layer's result before the next layer is begun
    has_buffer_cache: bool  # whether MLX keeps freed buffers (GPU back ends do)
    # whether some rows of a matrix product are, bit for bit, those rows of the whole product. If not, a head that is
    # streamed passes through a slot whole.
    exact_tiles: bool
    # how bytes get to MLX's memory, as the self-test found. If not in place, reads need bounce buffers.
    arrival: Arrival = "in place"
    kv_disk_bytes: int = 1 << 62  # free where files of the KV cache are put
    # the most bytes of one array: Metal's buffers have a limit below the memory of the machine
    largest_array: int = 1 << 62
    prompt_speedup: float = 1.0  # time to compute a token that is decoded, over that of a token in a call of many
    # as ``compute_bytes_per_second``, for weights that stay in a GPU's own memory; 0 where the processor and MLX's
    # device share memory, so that all weights compute equally fast
    resident_bytes_per_second: float = 0.0
    operation_seconds: float = 0.0  # starting an operation on a GPU with memory of its own; 0 elsewhere
    reached_bytes: int = 0  # the peak of the process while it loaded the tokenizer; 0 for none that counts
    compression: Compression | None = None  # of the checkpoint; None where nothing is compressed
    context_bytes: int = 0  # the part of it that CUDA takes on a GPU with memory of its own: its context, and kernels
    may_cache: bool = False  # whether reads go through the page cache as far as free memory holds the files
    cached_share: float = 0.0  # share of the files that it holds beside the budget of a plan

    def beside(self, budget: int, nbytes: int) -> Machine:
        """Return the machine with what free memory caches of files of so many bytes, beside a budget."""
        spare = self.available_memory - max(0, budget - self.base_bytes) - int(FREE_SHARE * self.total_memory)
        return replace(self, cached_share=min(1.0, max(0.0, spare / nbytes))) if self.may_cache and nbytes else self

    @property
    def read_bytes_per_second(self) -> float:
        """Weight bytes that the disk and the page cache deliver."""
        disk = self.disk.bytes_per_second
        return 1 / ((1 - self.cached_share) / disk + self.cached_share / max(disk, CACHED_BYTES_PER_SECOND))

    @property
    def kept_bytes_per_second(self) -> float:
        """Weight bytes that it works through when they stay in memory."""
        return self.resident_bytes_per_second or self.compute_bytes_per_second


def look_at_machine(
    shard: Path, layout: ModelLayout, config: FlashConfig, checkpoint: Checkpoint | None = None
) -> Machine:
    """Measure the machine: the disk of a shard, and the kind of matrix product of the layout.

    ``io``, ``read_size_mb`` and ``queue_depth`` of the config replace what the probe finds best. Of a checkpoint that
    may be compressed, the disk's speed is that of reading and decoding.
    """
    disk = profile_for(shard, config.io)
    compute_speed, compression = read_products(largest_linear(layout)), None
    if checkpoint is not None and checkpoint.is_compressed:
        cores = computes_on_cores()
        compression = Compression(checkpoint.ratio, decode_speed(), disk.bytes_per_second, compute_speed, cores)
        disk = replace(disk, bytes_per_second=compression.weight_bytes_per_second)
    read_size, queue_depth = _reads(config, disk, compression)
    speeds = prompt_speedup(layout), kept_products(largest_linear(layout)), operation_seconds()
    bytes_per_pair(layout.trace.attention)  # before the footprint: on a GPU, kernels that have run take memory
    runtime = RUNTIME_BYTES[_back_end()] + bool(layout.experts) * RUNTIME_BYTES_OF_EXPERTS[_back_end()]
    return Machine(
        total_memory=total_memory(),
        available_memory=available_memory(),
        base_bytes=_counted_base(),
        active_bytes=active_memory(),
        context_bytes=context_bytes(),
        runtime_bytes=min(runtime, RUNTIME_BYTES_AGAIN) if Machine.has_run else runtime,
        disk=replace(disk, read_size=read_size, queue_depth=queue_depth),
        compute_bytes_per_second=compute_speed,
        barrier_seconds=barrier_seconds(),
        has_buffer_cache=mx.default_device() == mx.gpu,
        exact_tiles=mx.default_device() == mx.cpu,  # tests show it there; CUDA chooses kernels by the number of rows
        arrival=way_of_reading(),
        kv_disk_bytes=free_bytes(Path(config.kv_directory or cache_directory()).expanduser()),
        largest_array=int(mx.device_info().get("max_buffer_length", 1 << 62)),
        prompt_speedup=speeds[0],
        resident_bytes_per_second=speeds[1],
        operation_seconds=speeds[2],
        compression=compression,
        may_cache=config.io == "auto" and disk.direct and compression is None,
    )


def _reads(config: FlashConfig, disk: DiskProfile, compression: Compression | None) -> tuple[int, int]:
    """Return read size and queue depth.

    Where weights are compressed, as many threads decode as keep up with the disk. More would only wait for each other.
    """
    read_size, depth = disk.read_size, disk.queue_depth
    if way_of_reading() == "copied by the driver":
        read_size, depth = max(read_size, COPIED_READ_SIZE), max(depth, COPIED_DEPTH)
    if compression is not None:
        read_size, depth = DECODED_READ_SIZE, DEFAULT_QUEUE_DEPTH + compression.num_decoding
    read_size = int(config.read_size_mb * 1e6) if config.read_size_mb else read_size
    return (read_size if compression is None else max(read_size, BLOCK_BYTES)), config.queue_depth or depth


def computes_on_cores() -> bool:
    """Return whether MLX computes on the cores that read and decode."""
    return bool(mx.default_device() == mx.cpu)


def _base_bytes() -> int:
    """Return the footprint of this process without freed buffers, which loading and measuring leave."""
    free_unused()
    return footprint()


def _counted_base() -> int:
    """Return the footprint for a plan: the one of the plan before, unless it has changed by more than a little.

    So a budget that one load has named is enough for the next.
    """
    now, step = _base_bytes(), GROWTH_BYTES[_back_end()]
    if not _counted or not _counted[0] - BASE_STEP < now <= _counted[0] + step:
        _counted[:] = [round_up(now, BASE_STEP)]
    return _counted[0]


def look_at_memory(machine: Machine, promised_bytes: int) -> Machine:
    """Return the machine with its memory as it is now, less what others in this process were promised."""
    grown = _base_bytes() - machine.base_bytes
    step = GROWTH_BYTES[_back_end()]
    base = machine.base_bytes if grown <= step else machine.base_bytes + round_up(grown, BASE_STEP)
    return replace(
        machine,
        available_memory=available_memory(),
        base_bytes=base + promised_bytes,
        runtime_bytes=min(machine.runtime_bytes, RUNTIME_BYTES_AGAIN) if Machine.has_run else machine.runtime_bytes,
        active_bytes=active_memory() + promised_bytes,
    )


def has_grown(before: Machine, now: Machine) -> bool:
    """Return whether this process has taken, or promised, more memory than a plan allows for."""
    return now.base_bytes > before.base_bytes or now.active_bytes > before.active_bytes + BASE_STEP


def read_products(linear: nn.Module | None) -> float:
    """Return weight bytes a second in matrix-vector products of a linear layer, or any, whose weights were just read.

    The weights are written before each run, as the reader writes them: a GPU with memory of its own has to fetch those
    that the processor wrote.
    """
    if linear is None:
        return _FALLBACK_BYTES_PER_SECOND
    part, arena = _some_rows(linear)
    x = _inputs(linear, part, 1)
    return _nbytes(part) / _least(lambda: _seconds_after_writing(part, x, arena))


def _seconds_after_writing(part: nn.Module, x: mx.array, arena: Arena) -> float:
    if way_of_reading() == "copied by the driver":
        clear(arena.memory)
    else:
        arena.fill(0)
    return _seconds(part, x)


def _nbytes(part: nn.Module) -> int:
    return sum(array.nbytes for array in part.values() if isinstance(array, mx.array))


def kept_products(linear: nn.Module | None) -> float:
    """Return the same as :func:`read_products`, for weights that a GPU's own memory holds; 0 on other devices.

    On other devices nothing has to be fetched, and :func:`read_products` holds for all weights.
    """
    if linear is None or not has_own_memory():
        return 0.0
    part, arena = _some_rows(linear)
    arena.fill(0)
    x = _inputs(linear, part, 1)

    def products(x: mx.array) -> list[mx.array]:  # nothing is waited for in between, as in a call of a model
        return [part(x) for _ in range(_NUM_PRODUCTS)]

    return _NUM_PRODUCTS * _nbytes(part) / _least(lambda: _seconds(products, x))


def operation_seconds() -> float:
    """Return the time to start an operation on a GPU with memory of its own; 0 elsewhere.

    There a token of a model with small matrices takes as long as it takes to start its operations.
    """
    if not has_own_memory():
        return 0.0
    x = mx.zeros((1,))
    mx.eval(x)
    return _least(lambda: _seconds(_operations, x)) / _NUM_OPERATIONS


def _operations(x: mx.array) -> mx.array:
    for _ in range(_NUM_OPERATIONS):
        x = mx.negative(x)
    return x


def prompt_speedup(layout: ModelLayout) -> float:
    """Return how many times faster a token computes in a call of many than in a call of its own.

    It is near 1 where the processor computes one token after another, and 16 where it waits for weights. A GPU with
    memory of its own fetches weights once for all tokens, so there it is more: the call of one token fetches them.
    """
    linear = largest_linear(layout)
    if linear is None:
        return 1.0
    # fewer rows on the processor, which takes up to 16 times as long for 16 tokens
    part, arena = _some_rows(linear, _PROMPT_TOKENS // 2 if computes_on_cores() else 1)
    one, many = (_inputs(linear, part, num_tokens) for num_tokens in (1, _PROMPT_TOKENS))
    first, second = _least(lambda: _seconds_after_writing(part, one, arena)), _least(lambda: _seconds(part, many))
    return _PROMPT_TOKENS * first / second


def barrier_seconds() -> float:
    """Return the time to compute next to nothing and wait for it."""
    x = mx.zeros((1,))
    mx.eval(x)
    return _least(lambda: _seconds(mx.negative, x))


def _back_end() -> str:
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "cuda" if has_own_memory() else "metal"


def largest_linear(layout: ModelLayout) -> nn.Module | None:
    """Return the largest linear layer of the first layer."""
    modules = [
        (parameter.nbytes, parameter.container)
        for unit in layout.layers[:1]
        for parameter in unit.large
        if isinstance(parameter.container, nn.Linear | nn.QuantizedLinear)
    ]
    return max(modules, key=lambda entry: entry[0])[1] if modules else None


def _some_rows(linear: nn.Module, divisor: int = 1) -> tuple[nn.Module, Arena]:
    """Return the first rows of a linear layer, fewer with a divisor, in memory of their own instead of weights."""
    weight = linear["weight"]
    limit = _PROBE_BYTES[mx.DeviceType(mx.default_device().type)] // divisor
    limit //= _QUANTIZED_SHARE if "scales" in linear and mx.default_device() == mx.cpu else 1
    num_rows = weight.shape[0]
    rows = max(1, min(num_rows, limit * num_rows // max(1, weight.nbytes)))
    likes = {key: a for key, a in linear.items() if isinstance(a, mx.array) and a.ndim and a.shape[0] == num_rows}
    sizes = [padded_bytes(array.nbytes * rows // num_rows) for array in likes.values()]
    arena = Arena(sum(sizes))
    starts = accumulate([0, *sizes])
    views = {
        key: arena.view(at, (rows, *a.shape[1:]), a.dtype) for at, (key, a) in zip(starts, likes.items(), strict=False)
    }
    return clone_with(linear, views), arena


def _inputs(linear: nn.Module, part: nn.Module, num_tokens: int) -> mx.array:
    """Return what a linear layer, of which there are some rows, computes with."""
    columns = int(linear["weight"].shape[1])
    columns = columns * 32 // linear.bits if isinstance(linear, nn.QuantizedLinear) else columns
    dtype = part["scales"].dtype if "scales" in part else part["weight"].dtype
    dtype = dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16  # the scales of some kinds are integers
    x = mx.ones((1, num_tokens, columns), dtype=dtype)
    mx.eval(x)
    return x


def _least(trial: Callable[[], float]) -> float:
    """Return the least of several times. Trials go on while other processes take the processor in between."""
    times: list[float] = []
    num_clean = 0
    while num_clean < CLEAN_TRIALS and len(times) < MOST_TRIALS:
        began, used = time.perf_counter(), time.process_time()
        times.append(trial())
        num_clean += not computes_on_cores() or time.process_time() - used >= CLEAN * (time.perf_counter() - began)
    return min(times)


def _seconds(function: Callable[[mx.array], mx.array | list[mx.array]], x: mx.array) -> float:
    began = time.perf_counter()
    mx.eval(function(x))
    return time.perf_counter() - began
