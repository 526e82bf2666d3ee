"""One model on several machines: each rank computes some layers, and hands the result on to the next one.

Every rank calls the model whole, so that masks, positions and the caches of all layers are made by the model's own
code. A layer of another rank is called too, lazily and with weights that are never read: that gives the shapes of its
output and what it adds to its cache. The output is then replaced: by what the other rank sent, if the next layer is
this rank's, and else by arrays that raise when they are evaluated. A model that uses such an output elsewhere cannot
compute other tokens unnoticed.

If a rank ends, MLX loses the connection and raises in the others, and ``mlx.launch`` ends all of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlx_flash.compat.arrays import random_key, set_random_key
from mlx_flash.errors import BudgetError, CheckpointError, ConfigError, FlashError, PeerError, StreamedWeightsError
from mlx_flash.files import PrivateFolder, cache_directory
from mlx_flash.layout.load import iter_parameters
from mlx_flash.layout.parts import ModelLayout, Unit, add_sizes
from mlx_flash.layout.reachable import Opaque, arrays_in
from mlx_flash.layout.swap import mixed_class
from mlx_flash.layout.units import zeros_like
from mlx_flash.storage.safetensors import Checkpoint, read_shard

TICK_SECONDS = 1.0
PATIENCE_SECONDS = 600.0
"""A message that takes longer does not come."""

_LAUNCHED = "MLX_RANK"
"""Set by ``mlx.launch`` for the processes that it starts."""

HAND_ON, HAND_OVER, HANDED = "hand on", "hand over", "handed"
"""Points at which calls that share a pass wait: before this rank sends a layer's output; before it receives one, or
other ranks exchange one; and when it has received one. No call of a group passes the first two before all are there."""

_LARGEST = 1 << 20
"""Numbers are sent as float32, which holds integers up to here."""

_STATE = "_flash_rank"

_ELSEWHERE = "_flash_is_elsewhere"
"""Attribute of a cache entry that is True if another rank has its keys and values."""

_NO_VALUE = "without a primitive"
"""In MLX's error about an array that has no value and is not computed from anything."""

_BISECTIONS = 100
_COPY_HINT = "Hint: copy it; `mlx-flash plan --model DIR --ranks N` prints the files that each rank needs."


def launched_group() -> mx.distributed.Group | None:
    """Return the ranks that ``mlx.launch`` started; None if this process was started alone."""
    if _LAUNCHED not in os.environ:
        return None
    group = mx.distributed.init()
    return group if group.size() > 1 else None


def rank_output(group: mx.distributed.Group, out: TextIO) -> TextIO:
    """Return the stream that a rank prints its results to: they are those of rank 0."""
    return out if group.rank() == 0 else open(os.devnull, "w", encoding="utf-8")


def read_on_rank_0(file: TextIO) -> str:
    """Return the rest of a text file, which only rank 0 has to have."""
    group = launched_group()
    if group is None:
        return file.read()
    return Peers(group).data(file.read().encode() if group.rank() == 0 else b"", 0).decode()


class Peers:
    """The ranks of a model, and what they tell each other through ``mx.distributed``."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self._can_send = not _uses_nccl()
        _patience()

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank. All ranks call it, with equally many."""
        with self.asking("every other rank", "its numbers"):
            found = mx.distributed.all_gather(mx.array([numbers], mx.float32), group=self._group)
            mx.eval(found)
        return cast(list[list[float]], found.tolist())

    def hand_on(self, arrays: Sequence[mx.array], source: int, to: int, what: str) -> list[mx.array]:
        """Return the arrays of one rank, ``source``, on another one. All ranks call it, with the same shapes and types.

        On others the result is not to be used. MLX's ring connects neighbours only: else the arrays go to all ranks.
        """
        if not self._can_send or (to - source) % self.size not in (1, self.size - 1):
            return self.broadcast(arrays, source, what)
        if source == self.rank:
            mx.eval(arrays)
            with self.asking(f"rank {to}", what):
                mx.eval([mx.distributed.send(array, to, group=self._group) for array in arrays])
        if to != self.rank:
            return list(arrays)
        with self.asking(f"rank {source}", what):
            found = [mx.distributed.recv(like.shape, like.dtype, source, group=self._group) for like in arrays]
            mx.eval(found)
        return found

    def broadcast(self, arrays: Sequence[mx.array], owner: int, what: str) -> list[mx.array]:
        """Return the arrays of one rank, bit for bit. All ranks call it; on others only shapes and types count."""
        if owner == self.rank:
            mx.eval(arrays)
        with self.asking(f"rank {owner}", what):
            found = [self._sum(array, owner) for array in arrays]
            mx.eval(found)
        return found

    def _sum(self, array: mx.array, owner: int) -> mx.array:
        """Add up bytes: the sum of floats would lose the sign of zeros."""
        mine = array.reshape(-1).view(mx.uint8) if owner == self.rank else mx.zeros((array.nbytes,), mx.uint8)
        return mx.distributed.all_sum(mine, group=self._group).view(array.dtype).reshape(array.shape)

    def data(self, data: bytes, owner: int) -> bytes:
        """Return the bytes of one rank; those of others do not count. All ranks call it."""
        (length,) = self.broadcast([mx.array(len(data), mx.int32)], owner, "the length of a text")
        if not (num_bytes := cast(int, length.item())):
            return b""
        mine = mx.array(np.frombuffer(data, np.uint8)) if owner == self.rank else mx.zeros((num_bytes,), mx.uint8)
        return np.array(self.broadcast([mine], owner, "a text")[0]).tobytes()

    def share_seed(self) -> None:
        """Make all ranks draw the same random numbers, if they do not yet. All ranks call it."""
        key = random_key()
        (shared,) = self.broadcast([key], 0, "the state of the random numbers")
        if any(row[0] for row in self.gather([float(key.tolist() != shared.tolist())])):
            set_random_key(shared)

    @contextmanager
    def asking(self, whom: str, what: str) -> Iterator[None]:
        """Name an exchange that fails or takes too long."""
        told = f"rank {self.rank} exchanges {what} with {whom}"
        patience = _patience()
        patience.since, patience.told = time.monotonic(), told
        try:
            yield
        except RuntimeError as error:
            hint = "Hint: see what the other ranks printed; start all of them again."
            raise PeerError(f"{told}: {error}. {hint}") from error
        finally:
            patience.told = None


def _uses_nccl() -> bool:
    """Return True if the ranks exchange arrays through NCCL, where MLX has sums and no messages."""
    return mx.distributed.is_available("nccl") and mx.distributed.init(backend="nccl").size() > 1


class _Patience(threading.Thread):
    """Ends the process if an exchange takes too long: nothing interrupts MLX while it waits for a rank that hangs."""

    told: str | None = None
    """The start of a sentence about the exchange under way."""

    since = 0.0

    def run(self) -> None:
        """Look every second. A process that was stopped itself looks once more."""
        num_late = 0
        while True:
            time.sleep(TICK_SECONDS)
            is_late = self.told is not None and time.monotonic() - self.since > PATIENCE_SECONDS
            num_late = num_late + 1 if is_late else 0
            if num_late > 1:
                hint = "Hint: see what that rank printed; start all of them again."
                print(f"error: {self.told}, and had no answer in {PATIENCE_SECONDS:.0f} s. {hint}", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)


@cache
def _patience() -> _Patience:
    """Return the thread, which runs. From Python 3.13 on no forked child starts one that the parent has made."""
    thread = _Patience(name="mlx-flash-ranks", daemon=True)
    thread.start()
    return thread


# --- shares: the layers of each rank, from what its machine can do ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """The machine of a rank in numbers."""

    memory_bytes: float  # weights that it can keep in memory
    disk_bytes_per_second: float  # how fast it reads the others
    compute_bytes_per_second: float  # how fast it computes with weights that it has just read
    kept_bytes_per_second: float  # how fast it computes with those in memory

    def bytes_within(self, seconds: float) -> float:
        """Return the weight bytes that it gets through in a pass of so many seconds of its own."""
        in_memory = seconds * self.kept_bytes_per_second
        if in_memory <= self.memory_bytes:
            return in_memory
        seconds_a_byte = 1 / self.disk_bytes_per_second + 1 / self.compute_bytes_per_second
        return self.memory_bytes + (seconds - self.memory_bytes / self.kept_bytes_per_second) / seconds_a_byte


def share_layers(layer_bytes: Sequence[int], ranks: Sequence[RankSpeed]) -> list[int]:
    """Return the rank of each layer, so that all ranks take the same time.

    If all weights stay in memory, a rank has one run of layers, so that little is sent. If not, ranks take turns as
    often as they can: while one computes, the others read their next layers.
    """
    num_layers, total = len(layer_bytes), sum(layer_bytes)
    if num_layers < len(ranks):
        raise ConfigError(
            f"{len(ranks)} ranks share a model of {num_layers} layers, and each needs one. Hint: start fewer."
        )
    slowest = min(min(r.compute_bytes_per_second, r.kept_bytes_per_second) for r in ranks)
    low, high = 0.0, total * (1 / min(r.disk_bytes_per_second for r in ranks) + 1 / slowest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(rank.bytes_within(middle) for rank in ranks) >= total else (middle, high)
    shares = [rank.bytes_within(high) for rank in ranks]
    counts = [1] * len(ranks)
    for _ in range(num_layers - len(ranks)):
        counts[max(range(len(ranks)), key=lambda rank: shares[rank] / total * num_layers - counts[rank])] += 1
    fits = all(share <= rank.memory_bytes for share, rank in zip(shares, ranks, strict=True))
    owners, num_rounds = list[int](), 1 if fits else min(counts)
    for number in range(num_rounds):
        for rank, count in enumerate(counts):
            owners += [rank] * (count * (number + 1) // num_rounds - count * number // num_rounds)
    return owners


def follow_files(owners: Sequence[int], layer_bytes: Sequence[int], able: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank of each layer: the given one, if it has the layer's files, and else the one with least to do.

    ``able`` has for each layer the ranks that have its files, at least one.
    """
    found = list(owners)
    done: Counter[int] = Counter()
    for owner, nbytes, ranks in zip(owners, layer_bytes, able, strict=True):
        done[owner] += nbytes if owner in ranks else 0
    for number, nbytes in enumerate(layer_bytes):
        if owners[number] not in able[number]:
            found[number] = min(able[number], key=lambda rank: done[rank])
            done[found[number]] += nbytes
    return found


def runs(owners: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return the runs of layers of a rank: the first of each, and the one after its last."""
    borders = [i for i in range(1, len(owners)) if owners[i] != owners[i - 1]]
    return [(a, b) for a, b in zip([0, *borders], [*borders, len(owners)], strict=True) if owners[a] == rank]


# --- files: a rank needs those with weights of its own layers, and of what every rank computes ------------------------


@dataclass(frozen=True, slots=True)
class NeededFiles:
    """The files of a checkpoint by the layers whose weights they hold."""

    layers: list[set[str]]
    all_ranks: set[str]

    def of(self, numbers: Iterable[int]) -> list[str]:
        return sorted(self.all_ranks.union(*(self.layers[number] for number in numbers)))


def needed_files(num_layers: int, checkpoint: Checkpoint) -> NeededFiles:
    """Return the files that each layer needs. The first number in the name of a tensor is that of its layer."""
    needed = NeededFiles([set() for _ in range(num_layers)], set())
    for name, record in checkpoint.tensors.items():
        number = next((int(part) for part in name.split(".") if part.isdecimal()), num_layers)
        files = needed.layers[number] if number < num_layers else needed.all_ranks
        files.add(record.path.name)
    return needed


@dataclass(slots=True, weakref_slot=True, eq=False)
class RankFolder:
    """A model folder on a rank, completed by headers of the shards that it lacks.

    A rank loads mlx-lm's model whole, so that the model's own code makes all shapes. For a shard that it lacks, another
    rank sends the header. Reading weights from such a stand-in raises an error.
    """

    path: Path  # the folder to load from
    missing: list[set[str]]  # for each rank the names of the shards that it lacks
    rank: int
    private: PrivateFolder | None = None  # the folder of the stand-ins

    @property
    def is_complete(self) -> bool:
        return not self.missing[self.rank]

    def has(self, path: Path) -> bool:
        return path.name not in self.missing[self.rank]

    def let_go(self) -> None:
        """Cut the weights off the stand-ins, once the model is loaded lazily: reading them raises from now on."""
        for name in self.missing[self.rank]:
            os.truncate(self.path / name, 0)

    def able_ranks(self, needed: NeededFiles) -> list[list[int]]:
        """Return for each layer the ranks that have its files."""
        for rank, missing in enumerate(self.missing):
            if lacking := ", ".join(sorted(missing & needed.all_ranks)):
                raise CheckpointError(
                    f"the folder of rank {rank} lacks {lacking}, with weights that every rank computes. {_COPY_HINT}"
                )
        able = [[rank for rank, missing in enumerate(self.missing) if not missing & files] for files in needed.layers]
        if [] in able:
            names = ", ".join(sorted(needed.layers[number := able.index([])]))
            raise CheckpointError(f"no rank has all files of layer {number}: {names}. {_COPY_HINT}")
        return able


def complete_folder(directory: Path, peers: Peers) -> RankFolder:
    """Return the model folder, with headers for shards that it lacks and another rank has. All ranks call it."""
    own = {path.name: path.stat().st_size for path in directory.glob("model*.safetensors")}
    told: list[dict[str, int]] = [json.loads(peers.data(json.dumps(own).encode(), rank)) for rank in range(peers.size)]
    sizes: dict[str, int] = {}
    for rank, shards in enumerate(told):
        for name, nbytes in shards.items():
            if sizes.setdefault(name, nbytes) != nbytes:
                raise CheckpointError(
                    f"{name} has {nbytes} bytes on rank {rank} and {sizes[name]} on one before it. Hint: copy "
                    "the model's folder again."
                )
    missing = [sizes.keys() - shards.keys() for shards in told]
    headers = {}
    for name in sorted(set().union(*missing)):
        owner = next(rank for rank, lacking in enumerate(missing) if name not in lacking)
        head = b""
        if owner == peers.rank:
            with (directory / name).open("rb") as file:
                head = file.read(read_shard(directory / name).data_offset)
        headers[name] = peers.data(head, owner)
    found = RankFolder(directory, missing, peers.rank)
    if not found.is_complete:
        found.private = PrivateFolder(cache_directory() / "ranks", "headers of other ranks")
        found.path = found.private.path
        for path in directory.iterdir():
            if found.has(path):
                (found.path / path.name).symlink_to(path.resolve())
        for name in missing[peers.rank]:
            (found.path / name).write_bytes(headers[name])
            os.truncate(found.path / name, sizes[name])  # a hole, which takes no space
    return found


# --- the chain: the output of one rank's layer is the input of the next rank's ----------------------------------------


class RankLayer:
    """A layer in a chain; other ranks' layers are not computed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        link: _Link = vars(self)[_STATE]
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return link.chain.leave(link, result, (args, kwargs))


@dataclass(frozen=True, slots=True)
class _Link:
    """A layer's number, its rank, and the rank of the next one; None after the last layer."""

    number: int
    owner: int
    next_owner: int | None
    chain: Chain


class Chain:
    """The layers of a model, each on one rank. All ranks call the model with the same tokens."""

    def __init__(self, layers: Sequence[nn.Module], owners: Sequence[int], peers: Peers) -> None:
        self.peers = peers
        self._num_passes = 0
        self.owners = tuple(owners)
        self._layers = list(layers)
        self._users: dict[int, int] | None = None
        self._wait_turn: Callable[[tuple[str, int]], None] | None = None
        for number, layer in enumerate(layers):
            following = owners[number + 1] if number + 1 < len(owners) else None
            object.__setattr__(layer, _STATE, _Link(number, owners[number], following, self))
            object.__setattr__(layer, "__class__", mixed_class(cast(Hashable, type(layer)), cast(Hashable, RankLayer)))

    def close(self) -> None:
        for layer in self._layers:
            if _STATE in vars(layer):
                if isinstance(layer, RankLayer):
                    object.__setattr__(layer, "__class__", type(layer).__bases__[1])
                object.__delattr__(layer, _STATE)  # last: an interrupt before it does this again
        self._layers.clear()

    def telemetry(self) -> dict[str, Any]:
        each = [{"layers": runs(self.owners, rank)} for rank in range(self.peers.size)]
        return {"rank": self.peers.rank, "each": each}

    def own_part(self, layout: ModelLayout) -> ModelLayout:
        """Return the layout of this rank's layers and of everything outside of layers."""
        own: list[nn.Module] = []
        others: list[nn.Module] = []
        for layer, owner in zip(self._layers, self.owners, strict=True):
            (own if owner == self.peers.rank else others).append(layer)
        return _part(layout, own, others)

    @contextmanager
    def calls(
        self,
        tokens: Sequence[mx.array | None],
        caches: Sequence[Sequence[Any] | None],
        wait_turn: Callable[[tuple[str, int]], None] | None = None,
    ) -> Iterator[None]:
        """Compute calls of the model on all ranks, one alone or several that share a pass.

        ``wait_turn`` is called with ``HAND_ON``, ``HAND_OVER`` or ``HANDED`` and the number of a layer, whose output is
        evaluated then. It returns when it is the turn of this call.
        """
        self._check_equal(tokens)
        entries = list(_entries([cache for cache in caches if cache is not None]))
        self._users, self._wait_turn = {}, wait_turn
        _fill(entries, _trap)
        try:
            yield
        finally:
            self._users = self._wait_turn = None
            _fill(entries, zeros_like)

    @contextmanager
    def computing(self, cache: Sequence[Any] | None) -> Iterator[None]:
        assert self._users is not None
        self._users |= {id(entry): -1 for entry in _entries(cache or ())}
        try:
            yield
        except RuntimeError as error:
            if _NO_VALUE not in str(error):
                raise
            raise StreamedWeightsError(
                "the model uses the output of a layer in other places than the next layer, or looks at numbers within "
                "a layer: it cannot be spread over ranks. Hint: run it on one machine."
            ) from error

    def least(self, number: int) -> int:
        return int(min(numbers[0] for numbers in self.peers.gather([number])))

    def worst(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the largest of each number over all ranks, and the first rank that has it."""
        found = list(zip(*self.peers.gather(numbers), strict=True))
        return [(int(max(each)), each.index(max(each))) for each in found]

    @contextmanager
    def all_have_room(self) -> Iterator[None]:
        """Let the errors of a check of memory be those of all ranks, so that all cut or refuse a call, or none."""
        try:
            yield
        except FlashError as error:
            self._agree(error)
            raise
        self._agree(None)

    def _agree(self, error: FlashError | None) -> None:
        own = 0.0 if error is None else 1.0 if isinstance(error, BudgetError) else 2.0
        found = [numbers[0] for numbers in self.peers.gather([own])]
        rank = found.index(max(found))
        if own < found[rank]:
            told = (
                f"rank {rank} has no room for the call, or cannot compute it. Hint: see its budget, and what it prints."
            )
            raise (BudgetError(told, 0) if found[rank] == 1.0 else PeerError(told)) from error

    def _check_equal(self, tokens: Sequence[mx.array | None]) -> None:
        """Check that all ranks compute the same tokens in a pass."""
        self._num_passes += 1
        found = self.peers.gather([self._num_passes % _LARGEST, *_digest(tokens)])
        for rank, numbers in enumerate(found):
            if numbers != found[self.peers.rank]:
                raise PeerError(
                    f"pass {self._num_passes} of rank {self.peers.rank} is {found[self.peers.rank]} (number, calls, "
                    f"tokens, digest of tokens), that of rank {rank} is {numbers}. Hint: start the same program with "
                    "the same arguments and seed on all ranks."
                )

    def leave(self, link: _Link, result: Any, given: tuple[Any, Any]) -> Any:
        """Return the result of a layer as this rank is to see it."""
        if self._users is None:  # a dry run
            return result
        mine, what = self.peers.rank, f"the output of layer {link.number}"
        self._note_entries(link, given)
        arrays = _arrays_of(result)
        if self._wait_turn is not None and link.owner != link.next_owner:
            if link.owner == mine:  # what it is computed from leaves memory while others compute
                mx.eval(arrays_in(result, given))
            self._wait_turn((HAND_ON if link.owner == mine else HAND_OVER, link.number))
        if link.next_owner is None:
            return _replaced(result, self.peers.broadcast(arrays, link.owner, what))
        if link.owner != link.next_owner:
            arrays = self.peers.hand_on(arrays, link.owner, link.next_owner, what)
            if self._wait_turn is not None and link.next_owner == mine:
                self._wait_turn((HANDED, link.number))
        if link.owner == mine:
            return result
        if link.next_owner != mine:
            arrays = [_trap(array) for array in arrays]
        return _replaced(result, arrays)

    def _note_entries(self, link: _Link, given: tuple[Any, Any]) -> None:
        assert self._users is not None
        for entry in [entry for value in (*given[0], *given[1].values()) for entry in _entries([value])]:
            if id(entry) not in self._users:
                continue
            before = self._users[id(entry)]
            if before not in (-1, link.owner):
                raise StreamedWeightsError(
                    f"layer {link.number} uses the cache of a layer of rank {before}: the model cannot be spread over "
                    "ranks. Hint: run it on one machine."
                )
            self._users[id(entry)] = link.owner
            vars(entry)[_ELSEWHERE] = link.owner != self.peers.rank
            _fill([entry], _trap)


def is_elsewhere(entry: Any) -> bool:
    """Return True if an entry of a prompt cache takes no memory here, since its layer is another rank's."""
    return bool(getattr(entry, _ELSEWHERE, False))


def _entries(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the objects in a prompt cache that hold arrays, those inside others included."""
    for value in values:
        if isinstance(value, Opaque):
            continue
        if isinstance(value, list | tuple):
            yield from _entries(value)
        elif hasattr(value, "__dict__") and not isinstance(value, mx.array | nn.Module):
            yield value
            yield from _entries(list(vars(value).values()))


def _fill(entries: Sequence[Any], make: Callable[[mx.array], mx.array]) -> None:
    """Replace keys, values and states of other ranks' layers: by traps in calls, and else by nothing, to be evaluated.

    Offsets and paddings, which are vectors, stay.
    """

    def replaced(value: Any) -> Any:
        return make(value) if isinstance(value, mx.array) and value.ndim > 1 else value

    for entry in entries:
        for name, value in vars(entry).items() if is_elsewhere(entry) else ():
            if isinstance(value, mx.array | list | tuple | dict):
                vars(entry)[name] = tree_map(replaced, value)


def _arrays_of(result: Any) -> list[mx.array]:
    found: list[mx.array] = []

    def note(value: Any) -> Any:
        if isinstance(value, mx.array):
            found.append(value)
        elif value is not None and not isinstance(value, bool | int | float | str):
            raise StreamedWeightsError(
                f"a layer returns a {type(value).__name__}, which cannot be sent to another rank. "
                "Hint: run the model on one machine."
            )
        return value

    tree_map(note, result)
    return found


def _replaced(result: Any, arrays: Sequence[mx.array]) -> Any:
    remaining = iter(arrays)
    return tree_map(lambda value: next(remaining) if isinstance(value, mx.array) else value, result)


@cache
def _placeholder() -> mx.array:
    """Return a number without a value: what a function is called with while MLX compiles it.

    MLX refuses it before it computes anything. An operation that fails while others run, such as reading a file that is
    too short, would raise once only, and MLX 0.32 has crashed after it.
    """
    found: list[mx.array] = []

    def note(number: mx.array) -> mx.array:
        found.append(number)
        return number + 1

    mx.compile(note)(mx.zeros(()))
    return found[0]


def _trap(like: mx.array) -> mx.array:
    """Return an array that raises whenever it is evaluated."""
    return mx.broadcast_to(_placeholder().astype(like.dtype), like.shape)


def _part(layout: ModelLayout, own: Sequence[nn.Module], others: Sequence[nn.Module]) -> ModelLayout:
    """Return a layout without the modules, arrays and cache entries that only other ranks' layers use."""
    modules = {id(m) for layer in others for m in layer.modules()} - {id(m) for layer in own for m in layer.modules()}
    containers = _containers(others) - _containers(own)
    entries = [entry for entry in layout.trace.cache_entries if not entry.users or entry.users - modules]

    def keep(units: Sequence[Unit]) -> list[Unit]:
        return [unit for unit in units if id(unit.module) not in modules]

    return replace(
        layout,
        layers=keep(layout.layers),
        finer=[keep(cut) for cut in layout.finer],
        resident=[parameter for parameter in layout.resident if id(parameter.container) not in containers],
        experts=[stack for stack in layout.experts if id(stack.unit.module) not in modules],
        cache=add_sizes([entry.sizes for entry in entries]),
        trace=replace(layout.trace, cache_entries=entries),
    )


def _digest(calls: Sequence[mx.array | None]) -> list[float]:
    """Return how many calls and tokens there are, and a number that other tokens are unlikely to have."""
    known = [tokens for tokens in calls if tokens is not None]
    crc = 0
    for tokens in known:
        crc = zlib.crc32(repr(tokens.shape).encode(), crc)
        crc = zlib.crc32(np.array(tokens).astype(np.int64).tobytes(), crc)
    return [float(len(calls)), float(sum(tokens.size for tokens in known) % _LARGEST), float(crc % _LARGEST)]


def _containers(layers: Sequence[nn.Module]) -> set[int]:
    return {id(container) for layer in layers for _, container, _, _ in iter_parameters(layer)}
