"""Parts of MLX that its documentation does not promise: array memory, module internals, functions that are wrapped."""

from __future__ import annotations

import ctypes
import io
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat.require import require, require_that
from mlx_flash.errors import CompilerError
from mlx_flash.forks import finalize

TRAINING_FLAG = "_training"
"""Attribute of a module that ``train()`` and ``eval()`` set; no part of a model's identity."""

require_that(issubclass(nn.Module, dict), "mlx.nn.Module is no dict")  # arrays are exchanged without its __setattr__
require(mx, "export_to_dot")
require(nn.Module(), TRAINING_FLAG)
require(nn.Module, "valid_parameter_filter", "module", "key", "value")  # tells parameters from private constants

CHANGING = ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")))
"""Methods after which an array is the same object with other contents."""

_WRAPPED = {
    **dict.fromkeys(("stack", "concatenate", "split", "contiguous"), mx),
    **dict.fromkeys(("view", "reshape", "flatten", *CHANGING), mx.array),
}
"""Functions with which mlx-lm's ``sanitize`` rearranges tensors, and what they are attributes of."""

for _name, _owner in _WRAPPED.items():
    require(_owner, _name)


@contextmanager
def wrapped_functions(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the functions of MLX that rearrange arrays while a block runs."""
    originals = [(owner, name, getattr(owner, name)) for name, owner in _WRAPPED.items()]
    try:
        for owner, name, original in originals:
            setattr(owner, name, wrap(name, original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def num_nodes(*outputs: mx.array) -> int:
    """Return the number of operations that are recorded for some arrays and not computed yet."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return text.getvalue().count("shape=rectangle")


def memory_of(array: mx.array) -> memoryview:
    """Return the bytes of an array, writable and shared with it, for which MLX's stubs lack the buffer protocol.

    Nothing promises that the memory is the array's own: :mod:`mlx_flash.memory.arena` checks that for its views.
    """
    return memoryview(cast(Any, array)).cast("B") if array.size else memoryview(bytearray())


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of memory that is writable and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def array_over(memory: memoryview, shape: tuple[int, int]) -> mx.array:
    """Return an array of bytes over memory that MLX has not allocated. It must stay mapped for good.

    MLX copies memory of others on the CPU, ``from_dlpack`` included. But its strided views have no bounds.
    """
    anchor = mx.zeros((1,), mx.uint8)
    mx.eval(anchor)
    start = address_of(memory)
    array = mx.as_strided(anchor, shape, (shape[1], 1), (start - address_of(memory_of(anchor))) % 2**64)
    mx.eval(array)
    if address_of(memory_of(array)) != start:
        raise AssertionError("MLX copied a strided view: it does not share the memory")
    return array


# --- attention, observed while a model is called: models look it up when they run, so it can be replaced in its module

require(mx.fast, "scaled_dot_product_attention")
_replacing = threading.Lock()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The kind of a call of attention."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype
    mask: str | tuple[mx.Dtype, tuple[int, ...]] | None = None
    has_sinks: bool = False

    @property
    def has_own_scores(self) -> bool:
        """True if the mask differs by head or sequence: the model computed a part of the scores, or cut the tokens."""
        return isinstance(self.mask, tuple) and max(self.mask[1], default=1) > 1


@contextmanager
def observed_attention() -> Iterator[list[AttentionCall]]:
    """Yield a list of the calls that this thread makes in the block."""
    calls: list[AttentionCall] = []
    thread = threading.get_ident()

    def observed(q: mx.array, k: mx.array, v: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if threading.get_ident() == thread:
            mask, sinks = kwargs.get("mask"), kwargs.get("sinks")
            kind = (mask.dtype, tuple(mask.shape[:-2])) if isinstance(mask, mx.array) else mask
            sizes = (q.shape[1], k.shape[1], k.shape[-1], v.shape[-1])
            calls.append(AttentionCall(*sizes, q.dtype, kind, sinks is not None))
        return stock(q, k, v, *args, **kwargs)

    with _replacing:
        stock = mx.fast.scaled_dot_product_attention
        mx.fast.scaled_dot_product_attention = observed
        try:
            yield calls
        finally:
            mx.fast.scaled_dot_product_attention = stock


# --- streams that any thread may use: what one thread recorded on those of its own, another one cannot evaluate -------

require(mx, "new_thread_unsafe_stream")

_idle: list[list[mx.Stream]] = []
"""Streams of models that are gone. MLX keeps a stream, and its system thread, until the process ends."""

os.register_at_fork(after_in_child=_idle.clear)  # a forked child lacks their system threads


class LoadingStreams:
    """The streams of one model. Arrays that are made :meth:`in_force` can be evaluated by one thread after another.

    Each model has its own, since MLX does not serialize threads that evaluate on such a stream at once.

    Attributes:
        has_failed: MLX could not read a file. It takes arrays whose evaluation failed for evaluated ones.
    """

    def __init__(self) -> None:
        self.has_failed = False
        try:
            self._streams = _idle.pop()
        except IndexError:
            devices = [mx.cpu] if mx.default_device() == mx.cpu else [mx.cpu, mx.gpu]  # tensors are loaded on the CPU
            self._streams = [mx.new_thread_unsafe_stream(device) for device in devices]

    def fail(self) -> None:
        """Note that MLX could not read a file, and take its error off the streams: it would come again elsewhere."""
        self.has_failed = True
        for stream in self._streams:
            with suppress(RuntimeError):
                mx.synchronize(stream)

    def belong_to(self, model: Any) -> None:
        """Leave the streams to other models after the end of this one."""
        finalize(model, _idle.append, self._streams)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Make them the default streams of this thread while a block runs.

        Keys of random numbers are computed at the end: this thread goes on with them, the model perhaps in another.
        """
        with ExitStack() as stack:
            for stream in self._streams:  # the last one decides on the default device
                stack.enter_context(mx.stream(stream))
            try:
                yield
            finally:
                mx.eval(mx.random.state)


# --- the key of random numbers, which every number that is drawn replaces; each thread has its own -------------------

_random: Any = mx.random  # whose type stubs lack the state

_MOST_NUMBERS = 8
"""The most random numbers that a sampler is expected to draw for a token. mlx-lm's draw one or two."""


def random_key() -> mx.array:
    """Return the key; the same object until a number is drawn."""
    key: mx.array = _random.state[0]
    return key


def set_random_key(key: mx.array) -> None:
    """Have the next numbers follow from a key."""
    high, low = cast(list[int], key.tolist())
    mx.random.seed(high << 32 | low)


def draw_as_between(before: mx.array, after: mx.array) -> bool:
    """Draw as many numbers as led from one key to another. Return whether their number was found.

    This waits for the three keys, and for nothing that the device computes after them.
    """
    with mx.stream(mx.cpu):
        for number in range(1, _MOST_NUMBERS + 1):
            before = _next(before)
            if mx.array_equal(before, after).item():
                key = random_key()
                for _ in range(number):
                    key = _next(key)
                set_random_key(key)
                return True
    return False


def _next(key: mx.array) -> mx.array:
    """Return the key after a number was drawn, as MLX computes it."""
    return mx.random.split(key)[0]


# --- the memory that a computation takes, from MLX's record of its operations; nothing is computed --------------------

require(mx, "export_function")

_VIEWS = frozenset({"Broadcast", "BroadcastAxes", "ExpandDims", "Slice", "Split", "Squeeze", "StopGradient"})
"""Primitives whose results share the memory of their input."""

_ORDERS = frozenset({"AsStrided", "Slice", "Split", "Transpose"})
"""Primitives whose results share the memory of their input in another order."""

_RESHAPES = frozenset({"Flatten", "Reshape", "Unflatten"})
"""Primitives whose results share the memory of their input where its order allows it."""

_INTO_NEW = frozenset({"Concatenate", "Convolution", "Gather", "GatherAxis", "Matmul", "AddMM", "QuantizedMatmul"})
"""Primitives that never write into the memory of an input."""

_CONVOLUTION_BYTES = 4


def tape_of(function: Callable[..., Any], inputs: Sequence[mx.array]) -> list[Mapping[str, Any]]:
    """Return MLX's record of a function of arrays: inputs, outputs, and operations in an order in which they can run.

    Raises: ValueError, if the function looks at their numbers.
    """
    events: list[Mapping[str, Any]] = []
    mx.export_function(events.append, function, *inputs)
    return events


def result_bytes(tape: Sequence[Mapping[str, Any]]) -> int:
    """Return the most bytes that the results of a record's operations take, inputs and constants not counted.

    MLX runs ahead of its devices, so a result may be there until all are computed. Only the one use of a result lets
    the next operation write into its memory.
    """
    steps = [event for event in tape if event["type"] == "primitive"]
    uses = Counter(name for step in steps for name, _, _ in step["inputs"])
    sizes: dict[str, int] = {}  # of results that the next operation may write into
    in_order: dict[str, bool] = {}
    total = scratch = 0
    for step in steps:
        kind, names = step["name"], [name for name, _, _ in step["inputs"]]
        was_in_order = all(in_order.get(name, True) for name in names[:1])
        is_view = kind in _VIEWS | _ORDERS or (kind in _RESHAPES and was_in_order)
        free = [] if kind in _INTO_NEW else [sizes.get(name, 0) for name in names if uses[name] == 1]
        for name, shape, dtype in step["outputs"]:
            nbytes = math.prod(shape) * dtype.size
            in_order[name] = kind not in _ORDERS and (was_in_order or kind not in _VIEWS)
            if is_view:
                sizes[name] = sizes.get(names[0], 0) if names and uses[names[0]] == 1 else 0
                continue
            sizes[name] = nbytes
            if nbytes in free:
                free.remove(nbytes)
            else:
                total += nbytes
        scratch = max(scratch, _scratch_bytes(step))
    return total + scratch


def _scratch_bytes(step: Mapping[str, Any]) -> int:
    """Return what an operation takes beside its result: a convolution copies its input and all windows of it.

    The CPU back end computes it in 32 bits.
    """
    if step["name"] != "Convolution":
        return 0
    (_, given, dtype), (_, weight, _) = step["inputs"][:2]
    [(_, result, _)] = step["outputs"]
    windows = math.prod(result[:-1]) * math.prod(weight[1:])
    converted = math.prod(result) + math.prod(weight) if dtype.size < _CONVOLUTION_BYTES else 0
    return int((windows + math.prod(given) + converted) * _CONVOLUTION_BYTES)


# --- the C++ compiler that MLX's CPU back end starts when it meets a compiled function for the first time -------------

COMPILER_MB = 115
"""Peak of ``g++`` for a kernel of mlx-lm's models. Measured: 112 to 114 MB, 1.2 s."""

_FAILED = re.compile(
    r"\[Compile::eval_cpu\] Failed to compile|Could not load C\+\+ shared library"
    r"|filesystem error: (temp_directory_path|cannot create director)"
)
"""Reports that the compiler failed, or that the folder for its kernels cannot be made."""


def explained(error: Exception) -> Exception:
    """Return an error of MLX's compiler as a :class:`CompilerError` with a hint, any other error as it is."""
    if type(error) is not RuntimeError or not _FAILED.search(str(error)):
        return error
    found = CompilerError(
        "MLX compiles kernels of this model with g++ at their first use, and keeps them in a folder mlx of "
        f"{os.environ.get('TMPDIR', '/tmp')}; one failed, or the compiler was killed: {error}. Hint: each takes about "
        f"{COMPILER_MB} MB beside the budget, which a limit on memory must leave room for, and some room on the disk: "
        "run the model once without the limit, or set TMPDIR to a folder that exists and can be written."
    )
    found.__cause__ = error
    return found


def evaluate(*arrays: Any, waits: bool = True) -> None:
    """Evaluate arrays, or begin to. Raise errors of MLX's compiler as :func:`explained`."""
    try:
        (mx.eval if waits else mx.async_eval)(*arrays)
    except RuntimeError as error:
        if (found := explained(error)) is error:
            raise
        raise found from error
