"""Layers in a chain of ranks: the output of one rank's layer is the input of the next rank's.

Every rank calls the model whole, so that masks, positions and the caches of all layers are made by the model's own
code. A layer of another rank is called too, lazily and with weights that are never read: that gives the shapes of its
output and what it adds to its cache. The output is then replaced: by what the other rank sent, if the next layer is
this rank's, and else by arrays that raise when they are evaluated. A model that uses such an output elsewhere cannot
compute other tokens unnoticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlx_flash.errors import BudgetError, FlashError, PeerError, StreamedWeightsError
from mlx_flash.layout.cachesizes import add_sizes
from mlx_flash.layout.load import iter_parameters
from mlx_flash.layout.parts import ModelLayout, Unit
from mlx_flash.layout.reachable import Opaque, arrays_in
from mlx_flash.layout.swap import mixed_class
from mlx_flash.ranks.peers import Peers
from mlx_flash.ranks.shares import runs

NUM_SPEEDS = 3
"""Numbers that each rank tells the others with each pass."""

HAND_ON, HAND_OVER, HANDED = "hand on", "hand over", "handed"
"""Points at which calls that share a pass wait: before this rank sends a layer's output; before it receives one, or
other ranks exchange one; and when it has received one. No call of a group passes the first two before all are there."""

_NUM_DIGESTS = 4

_LARGEST = 1 << 20
"""Numbers are sent as float32, which holds integers up to here."""

_STATE = "_flash_rank"

_ELSEWHERE = "_flash_is_elsewhere"
"""Attribute of a cache entry that is True if another rank has its keys and values."""

_NO_VALUE = "without a primitive"
"""In MLX's error about an array that has no value and is not computed from anything."""


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
    """The layers of a model, each on one rank. All ranks call the model with the same tokens.

    Args:
        layers: the model's layers, in calling order.
        owners: the rank of each layer.
        peers: the ranks.

    Attributes:
        peers: the ranks.
        owners: the rank of each layer.
        measure: returns the speeds of this rank, for the others; as many numbers on all of them.
        measured: the speeds of each rank before the last pass; empty before the first one.
    """

    def __init__(self, layers: Sequence[nn.Module], owners: Sequence[int], peers: Peers) -> None:
        self.peers = peers
        self.measure: Callable[[], list[float]] = lambda: [0.0] * NUM_SPEEDS
        self.measured: list[list[float]] = []
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
        """Give the layers their own classes back."""
        for layer in self._layers:
            if _STATE in vars(layer):
                if isinstance(layer, RankLayer):
                    object.__setattr__(layer, "__class__", type(layer).__bases__[1])
                object.__delattr__(layer, _STATE)  # last: an interrupt before it does this again
        self._layers.clear()

    def runs_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the runs of layers that a rank computes: the first of each, and the one after its last."""
        return runs(self.owners, rank)

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

        Args:
            tokens: of each call.
            caches: the prompt caches that they add to.
            wait_turn: called with ``HAND_ON``, ``HAND_OVER`` or ``HANDED`` and the number of a layer, whose output is
                evaluated then. Returns when it is the turn of this call. None for one call alone.

        Raises:
            PeerError: the ranks were called differently, or a connection was lost.
        """
        self._check_equal(tokens)
        entries = list(_entries([cache for cache in caches if cache is not None]))
        self._users, self._wait_turn = {}, wait_turn
        self._fill_others(entries, _trap)
        try:
            yield
        finally:
            self._users = self._wait_turn = None
            self._fill_others(entries, _nothing)

    @contextmanager
    def computing(self, cache: Sequence[Any] | None) -> Iterator[None]:
        """Compute one of these calls.

        Args:
            cache: what the call takes for its prompt cache.

        Raises:
            StreamedWeightsError: the model cannot be shared in this way.
        """
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
        """Return the smallest of the numbers of all ranks."""
        return int(min(numbers[0] for numbers in self.peers.gather([number])))

    def worst(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the largest of each number over all ranks, and the first rank that has it."""
        found = list(zip(*self.peers.gather(numbers), strict=True))
        return [(int(max(each)), each.index(max(each))) for each in found]

    @contextmanager
    def all_have_room(self) -> Iterator[None]:
        """Let the errors of a check of memory be those of all ranks, so that all cut or refuse a call, or none.

        Raises:
            FlashError: the one that was raised here, or another rank has raised one.
        """
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
        """Check that all ranks compute the same tokens in a pass, and exchange speeds.

        Raises:
            PeerError: they do not.
        """
        self._num_passes += 1
        told = self.peers.gather([self._num_passes % _LARGEST, *_digest(tokens), *self.measure()])
        found = [numbers[:_NUM_DIGESTS] for numbers in told]
        self.measured = [numbers[_NUM_DIGESTS:] for numbers in told]
        for rank, numbers in enumerate(found):
            if numbers != found[self.peers.rank]:
                raise PeerError(
                    f"pass {self._num_passes} of rank {self.peers.rank} is {found[self.peers.rank]} (number, calls, "
                    f"tokens, digest of tokens), that of rank {rank} is {numbers}. Hint: start the same program with "
                    "the same arguments and seed on all ranks."
                )

    def _fill_others(self, entries: Sequence[Any], make: Callable[[mx.array], mx.array]) -> None:
        """Replace what entries of other ranks' layers hold: by traps in calls, and else by nothing, to be evaluated."""
        for entry in entries:
            if is_elsewhere(entry):
                _fill(entry, make)

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
        """Note the rank of the cache entries of a layer.

        Raises:
            StreamedWeightsError: layers of several ranks use one entry.
        """
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
            self._fill_others([entry], _trap)


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


def _fill(entry: Any, make: Callable[[mx.array], mx.array]) -> None:
    """Replace keys, values and states of a cache entry. Offsets and paddings, which are vectors, stay."""

    def replaced(value: Any) -> Any:
        return make(value) if isinstance(value, mx.array) and value.ndim > 1 else value

    for name, value in vars(entry).items():
        if isinstance(value, mx.array | list | tuple | dict):
            vars(entry)[name] = tree_map(replaced, value)


def _nothing(like: mx.array) -> mx.array:
    """Return zeros that take no memory."""
    return mx.broadcast_to(mx.zeros((), like.dtype), like.shape)


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
    entries = [entry for entry in layout.cache_entries if not entry.users or entry.users - modules]

    def keep(units: Sequence[Unit]) -> list[Unit]:
        return [unit for unit in units if id(unit.module) not in modules]

    return replace(
        layout,
        layers=keep(layout.layers),
        finer=[keep(cut) for cut in layout.finer],
        resident=[parameter for parameter in layout.resident if id(parameter.container) not in containers],
        experts=[stack for stack in layout.experts if id(stack.unit.module) not in modules],
        cache=add_sizes([entry.sizes for entry in entries]),
        cache_entries=entries,
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
