"""Receipts of exactness: digests of what a model computes, streamed and by mlx-lm alone."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.commands.report import Json
from mlx_flash.compat.arrays import memory_of
from mlx_flash.compat.loaders import current_load_model
from mlx_flash.engine.engine import Engine
from mlx_flash.errors import CheckpointError, ReadError
from mlx_flash.layout.parts import ModelLayout, Parameter, Unit
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import own_class
from mlx_flash.memory.pagecache import drop_cached, open_buffered
from mlx_flash.model import FlashLLM
from mlx_flash.storage.blocks import COMPRESSED_SUFFIX
from mlx_flash.storage.placement import Segment
from mlx_flash.storage.ranges import DecodedFile

_CHUNK_BYTES = 4 << 20


class ByteCheck:
    """Compares every slot that is released, and every array that stays in memory, with the files.

    It reads the files through the page cache, without the reader that filled the slots.

    Attributes:
        nbytes: bytes compared so far.
        wrong: the first wrong byte of each tensor that differed, in words.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.wrong: dict[str, str] = {}
        self._fds: dict[Path, int] = {}
        self._decoded: dict[Path, DecodedFile] = {}

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Compare slots as they are released during a block."""
        stream, before = engine.stream, engine.stream.before_release

        def compare(index: int, memory: memoryview) -> None:
            self.segments(stream.units[index].placement.segments, memory)
            if before is not None:
                before(index, memory)

        stream.before_release = compare
        try:
            yield
        finally:
            stream.before_release = before

    def resident(self, engine: Engine, layout: ModelLayout) -> None:
        """Compare what stays in memory: arrays of the checkpoint that are not streamed, and experts in the pool."""
        for parameter in [*layout.resident, *(p for unit in layout.units for p in (*unit.large, *unit.small))]:
            if parameter.records and not engine.is_streamed(parameter.container, parameter.key):
                self._array(parameter)
        pool = engine.experts.pool if engine.experts is not None else None
        for number in range(len(pool.layers) if pool is not None else 0):
            assert pool is not None
            for expert in np.flatnonzero(pool.ready(number)):
                self.segments(*pool.reads((number, int(expert))))

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        for file in self._decoded.values():
            file.close()
        self._fds.clear()
        self._decoded.clear()

    def segments(self, segments: Sequence[Segment], memory: memoryview) -> None:
        """Compare a buffer with the parts of files that were read into it."""
        for segment in segments:
            for piece in segment.pieces:
                part = memory[piece.buffer_offset : piece.buffer_offset + piece.nbytes]
                self._compare(piece.name, segment.path, piece.offset, part)

    def _array(self, parameter: Parameter) -> None:
        array: mx.array = parameter.container[parameter.key]
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        mx.eval(flat)
        memory, start = memory_of(flat), 0
        for record in parameter.records:
            self._compare(record.name, record.extent.path, record.extent.offset, memory[start : start + record.nbytes])
            start += record.nbytes

    def _compare(self, name: str, path: Path, offset: int, memory: memoryview) -> None:
        for start in range(0, len(memory), _CHUNK_BYTES):
            part = np.frombuffer(memory[start : start + _CHUNK_BYTES], np.uint8)
            expected = np.frombuffer(self._read(name, path, offset + start, len(part)), np.uint8)
            if not np.array_equal(part, expected):
                at = int(np.flatnonzero(part != expected)[0]) if len(part) == len(expected) else len(expected)
                self.wrong.setdefault(name, f"byte {start + at} of '{name}' in {path.name}")
        self.nbytes += len(memory)

    def _read(self, name: str, path: Path, offset: int, nbytes: int) -> bytes | bytearray:
        """Read some bytes of a tensor again."""
        if path.suffix == COMPRESSED_SUFFIX:
            if path not in self._decoded:
                self._decoded[path] = DecodedFile(path)
            found = bytearray(nbytes)
            self._decoded[path].read(name, offset, memoryview(found))
            return found
        fd = self._fds.get(path)
        if fd is None:
            fd = self._fds[path] = open_buffered(path)
        try:
            return os.pread(fd, nbytes, offset)
        except OSError as error:
            raise ReadError(
                f"cannot read '{name}' again at offset {offset} of {path}: {error.strerror}. Hint: check the disk."
            ) from error
        finally:
            drop_cached(fd, offset, nbytes)


@contextmanager
def checked_bytes(engine: Engine, layout: ModelLayout) -> Iterator[tuple[ByteCheck, Json]]:
    """Compare the weights that a model computes with in a block. Yield the check, and what it counts, at the end."""
    check, numbers = ByteCheck(), Json()
    with closing(check):
        with check.watching(engine):
            yield check, numbers
        check.resident(engine, layout)
    numbers["bytes_read"] = engine.reader.stats.nbytes
    numbers["bytes_compared"] = check.nbytes
    numbers["wrong_bytes"] = list(check.wrong.values())


FORMAT = 1

Notice = Callable[[nn.Module, Any], None]
"""Called with a module and the evaluated result of its call."""
Report = Callable[[int, int], None]
"""Called with (steps done, steps to do)."""


@dataclass(frozen=True, slots=True)
class Call:
    """A forward call of a model.

    Attributes:
        tokens: that the model was given.
        logits: digest of its logits; empty for a part of a prompt, whose logits are dropped as mlx-lm drops them.
        layers: digest of each layer's output, by name.
    """

    tokens: list[int]
    logits: str
    layers: dict[str, str]


@dataclass(slots=True)
class Trace:
    """The calls of one generation.

    Attributes:
        calls: in order.
        next_token: the most likely token after the last one.
    """

    calls: list[Call] = field(default_factory=list)
    next_token: int = 0

    def add(
        self,
        model: Any,
        tokens: list[int],
        cache: list[Any],
        layers: dict[str, nn.Module],
        then: Notice,
        *,
        is_prompt: bool,
    ) -> None:
        """Call a model, and add the digests.

        Args:
            model: what to call.
            tokens: for the call.
            cache: the prompt cache.
            layers: modules whose outputs get a digest, by name.
            then: called after each of them.
            is_prompt: drop the logits.
        """
        logits_digest = ""
        with digests_of(layers, then) as digests:
            if is_prompt:
                model(mx.array([tokens]), cache=cache)
            else:
                logits = model(mx.array([tokens]), cache=cache)
                logits_digest, self.next_token = digest_of(logits), cast(int, mx.argmax(logits[0, -1]).item())
            mx.eval(arrays_in(cache))
        self.calls.append(Call(tokens, logits_digest, digests))


@contextmanager
def digests_of(layers: dict[str, nn.Module], then: Notice) -> Iterator[dict[str, str]]:
    """Yield the digests of what layers compute in a block, by name. Each goes on from those of earlier calls.

    Args:
        layers: modules, by name.
        then: called after each of their calls.
    """
    names = {id(module): name for name, module in layers.items()}
    digests: dict[str, str] = {}

    def note(module: nn.Module, result: Any) -> None:
        name = names[id(module)]
        digests[name] = digest_of(*arrays_in(result), before=digests.get(name, ""))
        then(module, result)

    with watching(list(layers.values()), note):
        yield digests


@contextmanager
def watching(modules: Sequence[nn.Module], notice: Notice) -> Iterator[None]:
    """Report the calls of some modules during a block. Arrays that a call can have an effect on are evaluated before.

    The classes' own ``__call__`` is replaced, so the modules may be streamed or not.
    """
    watched = {id(module) for module in modules}
    classes = {own_class(module) for module in modules}
    own = {cls: cls.__dict__.get("__call__") for cls in classes}
    active: list[int] = []
    for cls in classes:
        cls.__call__ = _watched(cls.__call__, watched, active, notice)
    try:
        yield
    finally:
        for cls, call in own.items():
            if call is None:
                del cls.__call__
            else:
                cls.__call__ = call


def _watched(call: Callable[..., Any], watched: set[int], active: list[int], notice: Notice) -> Callable[..., Any]:
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in watched or id(self) in active:  # a subclass calls its base
            return call(self, *args, **kwargs)
        active.append(id(self))
        try:
            result = call(self, *args, **kwargs)
        finally:
            active.remove(id(self))
        mx.eval(arrays_in(result, args, kwargs))
        notice(self, result)
        return result

    return wrapper


def digest_of(*arrays: mx.array, before: str = "") -> str:
    """Return a digest of arrays: bytes, shapes and dtypes. It goes on from another one."""
    found = hashlib.sha256(before.encode())
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        mx.eval(flat)
        found.update(memory_of(flat))
    return found.hexdigest()[:32]


def streamed_trace(model: FlashLLM, prompt: Sequence[int], num_tokens: int, report: Report) -> Trace:
    """Compute a prompt and further tokens, streamed.

    Args:
        model: the streamed model. It is started before, so that its layers are final.
        prompt: its first tokens. All but the last are computed in parts of the plan's prefill step.
        num_tokens: calls after these, of one token each; the first one has the last token of the prompt.
        report: progress.
    """
    model.start()
    layers = {unit.name: unit.module for unit in model.layout.layers}
    step = model.plan.prefill_step_size
    head = prompt[:-1]
    chunks = [list(head[i : i + step]) for i in range(0, len(head), step)]
    cache, found, total = make_prompt_cache(model), Trace(next_token=prompt[-1]), len(chunks) + num_tokens
    for i in range(total):
        is_prompt = i < len(chunks)
        tokens = chunks[i] if is_prompt else [found.next_token]
        found.add(model, tokens, cache, layers, lambda *_: None, is_prompt=is_prompt)
        report(i + 1, total)
    return found


def reference_trace(path: Path, layout: ModelLayout, calls: Sequence[Call], *, resident: bool, report: Report) -> Trace:
    """Repeat calls by mlx-lm alone, which reads the weights itself.

    Args:
        path: the model directory.
        layout: of the streamed model, for the names of its layers.
        calls: to repeat, with their tokens.
        resident: keep the whole model in memory. Otherwise each layer is loaded when it is called and dropped after it.
        report: progress.
    """
    found, cache, model = Trace(), None, None
    for i, call in enumerate(calls):
        if model is None or not resident:
            model = None  # before the next one is made
            model = current_load_model()(path, lazy=not resident)[0]
        cache = make_prompt_cache(model) if cache is None else cache
        modules = dict(model.named_modules())
        layers = {unit.name: modules[unit.name] for unit in layout.layers}
        then = (lambda *_: None) if resident else _dropper(model, layers, layout.layers)
        found.add(model, call.tokens, cache, layers, then, is_prompt=not call.logits)
        report(i + 1, len(calls))
    return found


def _dropper(model: nn.Module, layers: dict[str, nn.Module], units: Sequence[Unit]) -> Notice:
    """Return what frees a layer's weights after its call. A layer that the model has several times keeps them."""
    times = Counter(id(layer) for layer in model.layers)
    large = {id(layers[unit.name]): {parameter.name for parameter in unit.large} for unit in units}
    names = {id(layers[unit.name]): unit.name for unit in units}

    def drop(module: nn.Module, _: Any) -> None:
        if times[id(module)] > 1:
            return
        for name, part in module.named_modules():
            prefix = ".".join(filter(None, (names[id(module)], name)))
            for key in [key for key in part if f"{prefix}.{key}" in large[id(module)]]:
                dict.__setitem__(part, key, mx.zeros((0,)))  # another use of it fails
        mx.clear_cache()

    return drop


def first_difference(expected: Sequence[Call], found: Sequence[Call]) -> str | None:
    """Return where two traces part, in words; None where they are equal."""
    if [call.tokens for call in expected] != [call.tokens for call in found]:
        return "the calls have other tokens"
    for number, (one, other) in enumerate(zip(expected, found, strict=True), 1):
        layers = [name for name in one.layers if one.layers[name] != other.layers.get(name)]
        if layers or one.layers.keys() != other.layers.keys():
            return f"call {number} of {len(found)}: output of {layers[0] if layers else 'other layers'}"
        if one.logits != other.logits:
            return f"call {number} of {len(found)}: logits"
    return None


def file_digests(paths: Sequence[Path], report: Report) -> dict[str, str]:
    """Return the SHA-256 of whole files by name. Their pages do not stay in the page cache.

    Raises:
        ReadError: a file cannot be read.
    """
    total, done, found = sum(path.stat().st_size for path in paths), 0, {}
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for path in paths:
        digest = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    done += count
                    report(done, total)
                drop_cached(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise ReadError(f"cannot read {path}: {error.strerror}. Hint: check the disk.") from error
        found[path.name] = digest.hexdigest()
    return found


def calls_to_json(calls: Sequence[Call]) -> list[Json]:
    """Return calls for a receipt."""
    return [asdict(call) for call in calls]


def calls_of(receipt: object, path: Path) -> list[Call]:
    """Return the calls of a receipt.

    Raises:
        CheckpointError: it is no receipt.
    """
    try:
        if isinstance(receipt, dict) and receipt["format"] == FORMAT:
            return [Call(**call) for call in receipt["calls"]]
    except (KeyError, TypeError):
        pass  # said below
    raise CheckpointError(f"{path} is no receipt of this version of mlx-flash. Hint: make one with mlx-flash verify.")
