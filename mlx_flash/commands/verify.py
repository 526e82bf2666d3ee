"""``mlx-flash verify``: a receipt that streamed output equals mlx-lm's own on this machine."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.commands.common import Status, emit, labelled, make_config
from mlx_flash.commands.models import model_of
from mlx_flash.commands.report import surroundings
from mlx_flash.commands.vision import is_vision, sampled
from mlx_flash.compat.arrays import memory_of
from mlx_flash.compat.loaders import current_load_model
from mlx_flash.convert.pack import copy_buffer, pack
from mlx_flash.engine.engine import Engine
from mlx_flash.engine.lifecycle import plan_numbers
from mlx_flash.errors import FileChangedError
from mlx_flash.experts.pool import ABSENT
from mlx_flash.files import PrivateFolder, cache_directory
from mlx_flash.layout.load import load_config
from mlx_flash.layout.parts import ModelLayout, Parameter, Unit, bind
from mlx_flash.layout.reachable import arrays_in
from mlx_flash.layout.swap import own_class
from mlx_flash.loading import load_model
from mlx_flash.memory.footprint import available_memory
from mlx_flash.monitor.words import filled
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.storage.placement import Segment
from mlx_flash.storage.prefetcher import Buffer, read_pieces
from mlx_flash.storage.probe import way_of_reading
from mlx_flash.storage.safetensors import TensorRecord, identity_of, read_checkpoint
from mlx_flash.telemetry import Json

if TYPE_CHECKING:  # mlx-vlm is an extra
    from mlx_flash.vision.pictures import PicturePrompt


class ByteCheck:
    """Compares every slot that is released, and every array that stays in memory, with the files.

    It reads the files through the page cache, without the reader that filled the slots.
    """

    def __init__(self) -> None:
        self.nbytes = 0  # compared so far
        self.wrong: dict[str, str] = {}  # the first wrong byte of each tensor that differed, in words
        self._buffer = copy_buffer()

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Compare slots, and weights of towers, as they are released during a block."""
        watched = [model.engine.stream, *([model.towers] if model.layout.towers else [])]
        for each in watched:
            each.before_release = self.segments
        try:
            yield
        finally:
            for each in watched:
                each.before_release = None

    def resident(self, engine: Engine, layout: ModelLayout) -> None:
        """Compare what stays in memory: arrays of the checkpoint that are not streamed, and experts in the pool."""
        for parameter in [*layout.resident, *(p for unit in layout.units for p in (*unit.large, *unit.small))]:
            if parameter.records and not engine.is_streamed(parameter.container, parameter.key):
                self._array(parameter)
        pool = engine.experts.pool if engine.experts is not None else None
        for number in range(len(pool.layers) if pool is not None else 0):
            assert pool is not None
            for expert in np.flatnonzero(pool.ready(number) != ABSENT):
                self.segments(*pool.reads((number, int(expert))))

    def segments(self, segments: Sequence[Segment], memory: Buffer) -> None:
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
            self._compare(record.name, record.path, record.offset, memory[start : start + record.nbytes])
            start += record.nbytes

    def _compare(self, name: str, path: Path, offset: int, memory: memoryview) -> None:
        record = TensorRecord(name, "U8", (len(memory),), path, offset, len(memory))
        start = 0
        for piece in read_pieces(record, self._buffer):
            found, expected = (
                np.frombuffer(bytes_, np.uint8) for bytes_ in (memory[start : start + len(piece)], piece)
            )
            if not np.array_equal(found, expected):
                at = start + int(np.flatnonzero(found != expected)[0])
                self.wrong.setdefault(name, f"byte {at} of '{name}' in {path.name}")
            start += len(piece)
        self.nbytes += len(memory)


Computed = Iterator[tuple[list[int], mx.array | None]]
"""Tokens and logits of each call of a model. Parts of a prompt have no logits: mlx-lm does not compute them either."""
Notice = Callable[[nn.Module, Any], None]
"""Called with a module and the evaluated result of its call."""
Report = Callable[[int, int], None]
"""Called with (steps done, steps to do)."""


CALL = ("tokens", "layers", "logits")
"""A forward call: the tokens that the model was given, a digest of the output of each layer, by name, and one of the
logits, which is empty for a part of a prompt."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A computation that is done twice: with a streamed model, and with the library's own model."""

    library: str  # "mlx-lm" or "mlx-vlm"
    loader: Callable[[], Callable[..., Any]]  # returns the library's function that loads the model
    units: Sequence[Unit]  # layers, with those of towers
    compute: Callable[[Any], Computed]  # computes a prompt and further tokens with a model
    num_calls: int  # of the model in ``compute``

    def stream(self, model: Any, report: Report) -> tuple[list[Json], Json]:
        """Return the calls of a started streamed model, and the numbers of bytes that were read, compared and wrong."""
        check = ByteCheck()
        with check.watching(model):
            layers = {unit.name: unit.module for unit in self.units}
            calls = self._trace(model, layers, report)
        check.resident(model.engine, model.layout)
        numbers = {"bytes_read": model.engine.reader.stats.nbytes, "bytes_compared": check.nbytes}
        return calls, {**numbers, "wrong_bytes": list(check.wrong.values())}

    def repeat(self, path: Path, *, resident: bool, report: Report) -> list[Json]:
        """Return the same calls of the library's own model, which reads the weights itself."""
        model = self._load(path, lazy=not resident)
        modules, fresh = dict(model.named_modules()), dict[str, nn.Module]()
        layers = {unit.name: modules[unit.name] for unit in self.units}
        units = {id(layers[unit.name]): unit for unit in self.units}

        def renew(module: nn.Module) -> None:
            """Load a layer again, lazily, so that the weights in memory leave."""
            for parameter in units[id(module)].large:
                name, _, key = parameter.name.rpartition(".")
                if key not in fresh.get(name, {}):  # taken before
                    fresh.update(self._load(path, lazy=True).named_modules())
                bind(modules[name], key, dict.pop(fresh[name], key))
            mx.clear_cache()

        return self._trace(model, layers, report, None if resident else renew)

    def _load(self, path: Path, lazy: bool) -> nn.Module:
        found = self.loader()(path, lazy=lazy)
        model: nn.Module = found[0] if isinstance(found, tuple) else found  # mlx-lm adds the config
        return model

    def _trace(
        self,
        model: nn.Module,
        layers: dict[str, nn.Module],
        report: Report,
        then: Callable[[nn.Module], None] | None = None,
    ) -> list[Json]:
        """Compute with a model. Return the digests of its calls."""
        names = {id(module): name for name, module in layers.items()}
        digests: dict[str, str] = {}
        calls: list[Json] = []

        def note(module: nn.Module, result: Any) -> None:
            name = names[id(module)]
            digests[name] = digest_of(*arrays_in(result), before=digests.get(name, ""))
            if then is not None:
                then(module)

        with watching(list(layers.values()), note):
            for tokens, logits in self.compute(model):
                digest = "" if logits is None else digest_of(logits)
                calls.append(dict(zip(CALL, (tokens, dict(digests), digest), strict=True)))
                digests.clear()
                report(len(calls), self.num_calls)
        return calls


@contextmanager
def opened(args: argparse.Namespace, path: Path) -> Iterator[tuple[Any, Subject]]:
    """Yield a streamed model of mlx-lm, or of mlx-vlm if it sees. It has been started, so that its layers are final."""
    if is_vision(args, path, prefers=True):
        from mlx_flash.compat.vlm import current_vlm_load_model

        with sampled(args, path) as (seeing, prompt):
            compute = partial(_seen, prompt=prompt, num_tokens=args.max_tokens, step=seeing.plan.prefill_step_size)
            units = [*seeing.layout.towers, *seeing.layout.layers]
            yield seeing, Subject("mlx-vlm", current_vlm_load_model, units, compute, args.max_tokens)
        return
    vocabulary = min(int(load_config(path).get("vocab_size", 98)), 98)
    tokens = [1 + i * 7 % (vocabulary - 1) for i in range(args.prompt_tokens)]
    with load_model(path, make_config(args))[0] as model:
        model.start()
        yield model, of_tokens(model.layout, tokens, args.max_tokens, model.plan.prefill_step_size)


def of_tokens(layout: ModelLayout, prompt: Sequence[int], num_tokens: int, step: int) -> Subject:
    """Return a model of mlx-lm with a prompt of which all but the last token are computed in parts of ``step``."""
    compute = partial(_read, prompt=prompt, num_tokens=num_tokens, step=step)
    num_calls = -(-(len(prompt) - 1) // step) + num_tokens
    return Subject("mlx-lm", current_load_model, layout.layers, compute, num_calls)


def _read(model: Any, prompt: Sequence[int], num_tokens: int, step: int) -> Computed:
    """Compute a prompt and the most likely tokens after it."""
    cache, head, tokens = make_prompt_cache(model), prompt[:-1], [prompt[-1]]
    for start in range(0, len(head), step):
        part = list(head[start : start + step])
        model(mx.array([part]), cache=cache)  # whose logits nobody computes
        mx.eval(arrays_in(cache))
        yield part, None
    for _ in range(num_tokens):
        logits = model(mx.array([tokens]), cache=cache)
        mx.eval(logits, arrays_in(cache))
        yield tokens, logits
        tokens = [cast(int, mx.argmax(logits[0, -1]).item())]


def _seen(model: Any, prompt: PicturePrompt, num_tokens: int, step: int) -> Computed:
    """Compute a prompt with pictures by mlx-vlm's loop, which returns log probabilities in place of logits."""
    tokens = prompt.tokens
    for token, logprobs in prompt.steps(model, max_tokens=num_tokens, temperature=0.0, prefill_step_size=step):
        yield tokens, logprobs
        tokens = [token]


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


def first_difference(expected: Sequence[Json], found: Sequence[Json]) -> str | None:
    """Return where two traces part, in words; None where they are equal."""
    if len(expected) != len(found):
        return f"the number of calls, {len(expected)} and {len(found)},"
    for number, (one, other) in enumerate(zip(expected, found, strict=True), 1):
        if differs := [name for name in CALL if one[name] != other[name]]:
            layers = [name for name, digest in one["layers"].items() if digest != other["layers"].get(name)]
            output = f"output of {layers[0] if layers else 'other layers'}"
            return f"call {number} of {len(found)}: {output if differs[0] == 'layers' else differs[0]}"
    return None


VERIFICATION = """
Model: {model}, {plan.model_bytes:size}, {files:file}
Streamed: in {plan.budget_bytes:size}, {bytes_read:size} read {way_of_reading}
Weights: {bytes_compared:size} in memory compared with the files, {is_equal:equal}, \
{wrong_bytes:tensor} WRONG, such as {wrong}
Compared: with {library}, {compared}, {calls:call}, {layers:layer}, all logits
Result: {result}
Digest: {digest}
Took: {seconds:duration}
"""
"""A receipt in words."""

EXIT_DIFFERS = 3
RESIDENT_SHARE = 0.7
"""A model with at most this share of the free memory is compared in memory, others layer by layer."""


def verify(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash verify``. Return ``EXIT_DIFFERS`` where anything differs."""
    path = model_of(args)
    files = [shard.path for shard in read_checkpoint(path).shards]
    identities = [identity_of(file) for file in files]
    began = time.perf_counter()
    with opened(args, path) as (model, subject), Status("Streamed", args.verbose) as status:
        plan: ResidencyPlan = model.plan
        calls, numbers = subject.stream(model, status.show)
    del model  # it would take memory beside the reference
    resident = args.reference == "resident"
    if args.reference is None:
        resident = plan.model_bytes <= RESIDENT_SHARE * available_memory()
    with _stock_copy(path) as stock, Status(subject.library, args.verbose) as status:
        expected = subject.repeat(stock, resident=resident, report=status.show)
    if changed := [file.name for file, before in zip(files, identities, strict=True) if identity_of(file) != before]:
        raise FileChangedError(f"{changed[0]} was written to while it was verified. Hint: verify again.")
    difference, wrong = first_difference(expected, calls), numbers["wrong_bytes"]
    receipt: Json = {
        "model": path.name,
        "is_exact": expected == calls and not wrong,
        "difference": difference,
        **numbers,
        "library": subject.library,
        "reference": "resident" if resident else "layers",
        "seconds": time.perf_counter() - began,
        "files": {file.name: file.stat().st_size for file in files},
        "calls": calls,
        "plan": {"model_bytes": plan.model_bytes, **plan_numbers(plan)},
        "way_of_reading": way_of_reading(),
        **surroundings(),
    }
    more = {
        "is_equal": not wrong,
        "wrong": next(iter(wrong), None),
        "compared": "the model in memory" if resident else "one layer in memory at a time",
        "layers": calls[0]["layers"],
        "result": f"DIFFERENT from {difference} on" if difference else "identical",
        "digest": calls[-1]["logits"],
    }
    emit(args, receipt, labelled(filled(VERIFICATION, {**receipt, **more})), out)
    return 0 if receipt["is_exact"] else EXIT_DIFFERS


@contextmanager
def _stock_copy(path: Path) -> Iterator[Path]:
    """Yield a folder that stock mlx-lm can load: the model's own, or an uncompressed copy for the moment."""
    if not read_checkpoint(path).is_compressed:
        yield path
        return
    with closing(PrivateFolder(cache_directory() / "verify", "an uncompressed copy")) as private:
        yield pack(path, private.path / path.name).target
