"""The parts of a model that are read, kept and computed: parameters, units, stacks of experts, their layout, the cache.

The sizes of the cache are taken from the arrays that a dry run leaves in it. Nothing is evaluated.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_flash.compat.arrays import AttentionCall
from mlx_flash.compat.caches import CACHE_STEP, CacheKinds, entries_of, is_window
from mlx_flash.layout.reachable import arrays_in, nbytes_in
from mlx_flash.layout.swap import SwappedClass, restore_class, swap_class
from mlx_flash.storage.placement import PlacedRows, padded_bytes
from mlx_flash.storage.safetensors import TensorRecord

_RESHAPING = {"Squeeze", "ExpandDims", "Reshape", "Flatten", "Unflatten", "Transpose"}
"""Primitives whose result shares the memory of their input and has the same size."""

_CUTTING = {"Slice", "Split"}
"""Primitives whose result shares the memory of a longer input."""

_DONATED_BYTES = 16 << 10
"""MLX may put a result into the memory of an input that is so much larger. Whether it does depends on timing."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes of the cache of one sequence, in bytes."""

    # of recurrent states, however long the context is, with what their memory may have beyond them
    constant_bytes: int = 0
    token_bytes: int = 0  # growth by each token. Sliding windows count as if they grew for good.
    largest_row: int = 0  # the most that a token adds to the cache of a layer
    rows: tuple[int, ...] = ()  # of each plain ``KVCache``, growth by each token; part of ``token_bytes``
    # of each sliding window, growth by each token, and its length; part of ``token_bytes``
    windows: tuple[tuple[int, int], ...] = ()
    # memory that states keep for each token of the last call: a state that is a slice of an array with all tokens of
    # the call holds that array
    call_bytes: int = 0
    # the most in one layer, for each token of a call, of arrays with the states after every token
    largest_scan: int = 0
    largest_state: int = 0  # bytes of the largest state

    def nbytes(self, num_tokens: int) -> int:
        """Return the size of all caches with so many tokens."""
        return self.constant_bytes + self.token_bytes * num_tokens

    @property
    def growing(self) -> int:
        """Growth by each token of caches without a window that are in no :attr:`rows`."""
        return self.token_bytes - sum(self.rows) - sum(row for row, _ in self.windows)

    def states_bytes(self, num_new: int, num_tokens: int) -> int:
        """Return the size of windows and states with so many tokens, the newest of which came in one call."""
        windows = [row * min(num_tokens, length + num_new) for row, length in self.windows]
        return self.constant_bytes + sum(windows) + self.call_bytes * num_new

    def others_bytes(self, num_tokens: int) -> int:
        """Return the size of the caches that are in no :attr:`rows`, while one token after another comes."""
        windows = [row * min(num_tokens, length + CACHE_STEP) for row, length in self.windows]
        room = num_tokens + CACHE_STEP
        copied = max([*windows, self.largest_row * room if self.growing else 0])
        return self.constant_bytes + self.growing * room + sum(windows) + copied + self.call_bytes


def add_sizes(sizes: Sequence[CacheSizes]) -> CacheSizes:
    """Return the sizes of several entries of a cache together."""
    return CacheSizes(
        constant_bytes=sum(each.constant_bytes for each in sizes),
        token_bytes=sum(each.token_bytes for each in sizes),
        largest_row=max((each.largest_row for each in sizes), default=0),
        rows=tuple(row for each in sizes for row in each.rows),
        windows=tuple(window for each in sizes for window in each.windows),
        call_bytes=sum(each.call_bytes for each in sizes),
        largest_scan=max((each.largest_scan for each in sizes), default=0),
        largest_state=max((each.largest_state for each in sizes), default=0),
    )


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry of a prompt cache."""

    sizes: CacheSizes  # its own
    users: frozenset[int]  # the ``id`` of every module that is given it, or a part of it, in a call


FirstSizes = dict[int, tuple[int, int]]
"""Bytes and bytes of one token of each entry of a cache with one token, by ``id``."""


def first_sizes(cache: Sequence[Any]) -> FirstSizes:
    """Return the sizes of a cache after a call with one token."""
    return {id(entry): (nbytes_in(entry), _row_bytes(entry)) for entry in entries_of(cache)}


def sizes_of(entry: Any, first: FirstSizes) -> CacheSizes:
    """Return the sizes of an entry of the same cache, after a call with two more tokens."""
    found = [_sizes_of(leaf, first) for leaf in entries_of([entry])]
    constant, row, kept, scanned = (sum(sizes[i] for sizes in found) for i in range(4))
    return CacheSizes(
        constant_bytes=constant + _DONATED_BYTES * _num_states(entry),
        token_bytes=row,
        largest_row=row,
        rows=(row,) if type(entry) in CacheKinds.plain else (),
        windows=((row, entry.max_size),) if is_window(entry) else (),
        call_bytes=kept,
        largest_scan=scanned,
        largest_state=constant,
    )


def _sizes_of(entry: Any, first: FirstSizes) -> tuple[int, int, int, int]:
    """Return the constant size, the growth by a token, and for each token of a call what is kept and scanned."""
    before, row = first[id(entry)]
    if isinstance(getattr(entry, "step", None), int):  # grows in steps
        return 0, row, 0, 0
    growth = max(0, nbytes_in(entry) - before) // 2
    kept, scanned = _kept_of_a_call(arrays_in(entry))
    return max(0, before - growth), growth, kept, scanned


def _num_states(entry: Any) -> int:
    """Return the number of arrays of an entry that does not grow in steps."""
    leaves = [leaf for leaf in entries_of([entry]) if not isinstance(getattr(leaf, "step", None), int)]
    return len({id(array) for leaf in leaves for array in arrays_in(leaf)})


def num_growing(entries: Sequence[Any]) -> int:
    """Return the number of caches that grow in steps, as keys and values do."""
    return sum(isinstance(getattr(leaf, "step", None), int) for leaf in entries_of(entries))


def _row_bytes(entry: Any) -> int:
    """Return the bytes of one token in arrays of shape (batch, heads, tokens, width)."""
    arrays = {id(array): array for array in arrays_in(entry) if array.ndim > 1 and array.size}
    return sum(array.nbytes // array.shape[-2] for array in arrays.values())


def _kept_of_a_call(states: Sequence[mx.array]) -> tuple[int, int]:
    """Return bytes for each token of the call that computed some states: of longer arrays whose memory the states
    share, and the part of it where a whole state is one token's.
    """
    names = {f"state{i}": state for i, state in enumerate(states)}
    file = io.StringIO()
    mx.export_to_dot(file, **names)
    graph = file.getvalue()
    operations = dict(re.findall(r'\{ (\d+) \[label ="(\w+)"', graph))
    inputs = {operation: name for name, operation in re.findall(r'^"(\w+)" -> (\d+)', graph, re.MULTILINE)}
    makers = {name: operation for operation, name in re.findall(r'^(\d+) -> "(\w+)"', graph, re.MULTILINE)}
    kept = scanned = 0
    for name, state in names.items():
        maker = makers.get(name, "")
        is_one_token = operations.get(maker) in _RESHAPING
        while operations.get(maker) in _RESHAPING:
            maker = makers.get(inputs[maker], "")
        if operations.get(maker) in _CUTTING:
            kept += state.nbytes if is_one_token else state.nbytes // state.shape[1]  # (batch, tokens, ...)
            scanned += state.nbytes if is_one_token else 0
    return kept, scanned


def body_of(model: nn.Module) -> nn.Module | None:
    """Return the module that a model calls for the hidden states after its final norm; None if there is no such module.

    It is the smallest one below the model that has its layers and the table of embeddings.
    """
    layers: Any = getattr(model, "layers", None) or [None]
    here, below = model, _part_with(layers[0], model)
    while below is not None:
        here, below = below, _part_with(layers[0], below)
    parameters = [*inspect.signature(type(here).__call__).parameters.values()][2:]
    needed = {each.name for each in parameters if each.default is each.empty and each.kind != each.VAR_KEYWORD}
    return here if here is not model and needed <= {"cache"} else None


def _part_with(layer: object, module: nn.Module) -> nn.Module | None:
    """Return the part of a module that has a layer and a table of embeddings."""
    for part in module.values():
        if isinstance(part, nn.Module):
            modules = part.modules()
            has_table = any(isinstance(each, nn.Embedding | nn.QuantizedEmbedding) for each in modules)
            if has_table and any(each is layer for each in modules):
                return part
    return None


class _Passing(SwappedClass):
    """A body whose next call returns states that are known."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        states: mx.array = self._flash_state
        restore_class(cast(nn.Module, self))
        return states


def head_of(model: Any, body: nn.Module) -> Callable[[mx.array], Any]:
    """Return a function that makes the logits of hidden states, as the model's own code makes them of its body's."""

    def head(states: mx.array) -> Any:
        swap_class(body, _Passing, states)  # it is called before anything waits, and another call begins
        try:
            return model(mx.zeros(states.shape[:2], mx.int32))
        finally:
            restore_class(body)

    return head


@dataclass(slots=True, eq=False)
class Parameter:
    """One array of the module tree."""

    name: str  # its path in the model, such as ``model.layers.3.mlp.down_proj.weight``
    container: dict[str, Any] | list[Any]  # the module, dict or list that holds the array
    key: Any  # under which key or index
    array: mx.array  # the lazily loaded array; never evaluated while its bytes are streamed
    nbytes: int  # of the array
    # where its bytes lie, one after another: several for a stack, none when mlx-lm computed it
    records: tuple[TensorRecord, ...] = ()

    @property
    def record(self) -> TensorRecord | None:
        """Place of its bytes, if that is one run of bytes of a file."""
        return self.records[0] if len(self.records) == 1 else None

    def bind(self, array: mx.array) -> None:
        """Make the module use another array of the same shape and dtype."""
        bind(self.container, self.key, array)


def bind(container: dict[Any, Any] | list[Any], key: Any, array: mx.array) -> None:
    """Put an array into a module, dict or list; a module does not look at it."""
    if isinstance(container, dict):
        dict.__setitem__(container, key, array)
    else:
        container[key] = array


def bind_all(parameters: Iterable[Parameter], arrays: Iterable[mx.array]) -> None:
    """Make modules use other arrays for some parameters, as many as there are arrays."""
    for parameter, array in zip(parameters, arrays, strict=True):
        if isinstance(parameter.container, dict):
            dict.__setitem__(parameter.container, parameter.key, array)
        else:
            parameter.container[parameter.key] = array


@dataclass(slots=True, eq=False)
class Unit:
    """A module whose large parameters are made resident together."""

    name: str  # the module's path in the model
    module: nn.Module  # the module
    large: list[Parameter] = field(default_factory=list)  # the parameters worth streaming: direct and not small
    small: list[Parameter] = field(default_factory=list)  # the rest, always resident

    @property
    def nbytes(self) -> int:
        """Bytes of the large parameters."""
        return sum(map(attrgetter("nbytes"), self.large))

    @property
    def num_rows(self) -> int | None:
        """Output rows, for a module that can be computed row tile by row tile."""
        is_matrix = _computes_as(type(self.module), nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
        if not is_matrix or False in [len(parameter.records) == 1 for parameter in self.large]:
            return None
        return int(self.module["weight"].shape[0])

    @property
    def itemsize(self) -> int:
        """Item size of the floating-point dtype that the module computes in; packed weights are integers."""
        dtypes = {parameter.array.dtype for parameter in (*self.large, *self.small)}
        return max([int(dtype.size) for dtype in dtypes if mx.issubdtype(dtype, mx.floating)], default=2)


def is_linear(module: nn.Module) -> bool:
    """Return True if a module computes what mlx's linear layers do; other classes may compute something else."""
    return _computes_as(type(module), nn.Linear, nn.QuantizedLinear)


def is_embedding(module: nn.Module) -> bool:
    """Return True if a module looks rows up as mlx's embeddings do."""
    return _computes_as(type(module), nn.Embedding, nn.QuantizedEmbedding)


@cache
def _computes_as(kind: Any, *others: Any) -> bool:
    return issubclass(kind, others) and any(kind.__call__ is other.__call__ for other in others)


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Places of an expert's arrays in a slot, the same for all experts of a stack."""

    read: PlacedRows  # the tensors that are read, and the reads
    kept: tuple[int, ...]  # where the rows go of arrays that are in memory always
    nbytes: int  # size of the slot; one page of it is room for alignment


@dataclass(slots=True, eq=False)
class ExpertStack:
    """A module that computes each token with the experts that its caller chose."""

    unit: Unit  # the module; every array below it has one row an expert
    num_experts: int  # how many experts there are
    top_k: int  # how many of them compute each token
    block: nn.Module | None  # calls it, and its router chooses, if it is given nothing but tokens
    norm: nn.Module | None  # the module that makes the input of ``block``
    router: list[Parameter]  # what ``block`` uses before it calls the experts
    gate: nn.Module | None  # the module in ``block`` that returns the scores, if one does
    is_widened: bool = False  # whether MLX copies their weights in a wider type in each call
    placement: ExpertPlacement | None = None  # of its experts, once it was found

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert that are not in memory always."""
        return self.unit.nbytes // self.num_experts


@dataclass(frozen=True, slots=True)
class Held:
    """The memory that a call holds while it waits for a unit."""

    # bytes for each of its tokens, of whole layers and of each finer cut. Empty where that is unknown.
    per_token: tuple[int, ...] = ()
    # whether it holds keys and values between layers, since later ones use those of others. Then MLX copies them for
    # the next part of a prompt, instead of writing in place.
    has_keys: bool = False


Place = tuple[int, Any]
"""An array in a module tree: ``id`` of the module that holds it, and the key."""


@dataclass(frozen=True, slots=True)
class Route:
    """The origin of a call of experts."""

    top_k: int  # experts of each token
    block: nn.Module | None = None  # calls them, given one array, and its router chooses; else None
    norm: nn.Module | None = None  # the module that makes the block's input, if there is one
    router: frozenset[Place] = frozenset()  # the arrays that the block uses before it calls the experts
    gate: nn.Module | None = None  # the module in the block that returns their scores, if there is one


@dataclass(slots=True)
class CallTrace:
    """The traces that a model's calls left on its modules."""

    called: dict[int, nn.Module]  # the modules that were called, each once, in the order of their first calls
    # of each array that was used, the ``id`` of every module that was being called at all of its uses
    users: dict[Place, frozenset[int]]
    # entries of the model's cache, and the modules that were given each of them
    cache_entries: list[CacheEntry] = field(default_factory=list)
    # of each module that was called with tokens and the experts for them, what came before
    routes: dict[int, Route] = field(default_factory=dict)
    attention: tuple[AttentionCall, ...] = ()  # the calls of MLX's attention for two tokens
    # whether layers compute scores themselves: there are fewer calls than growing caches, or masks that differ by head
    has_own_attention: bool = False
    # operations that a call records for each token before any is computed: those of a loop over tokens, in recurrent
    # layers
    nodes_per_token: int = 0
    num_operations: int = 0  # operations of a call for one token; 0 where the time to start them does not matter
    logits_bytes: int = 0  # the logits of a token, as the model returns them; 0 if it returns something else
    heads: set[int] = field(default_factory=set)  # the ``id`` of each embedding that was called as the output head
    # bytes of the copy of a weight that MLX makes in the wider type of its input, by the module's ``id``
    widened: dict[int, int] = field(default_factory=dict)

    def covers(self, module: nn.Module, places: Iterable[Place]) -> bool:
        """Return True if a module is called, and arrays are used during its calls only."""
        return id(module) in self.called and self.encloses(module, places)

    def encloses(self, module: nn.Module, places: Iterable[Place]) -> bool:
        """Return True if nothing but a module's calls uses arrays, if anything does."""
        for place in places:
            users = self.users.get(place)
            if users is not None and id(module) not in users:
                return False
        return True


class OwnHead:
    """A model's own head for guesses, as mlx-lm's model of one layer. Its arrays are in memory where a plan says so.

    ``parameters`` are the arrays that no other part of the model has, ``nbytes`` is memory for them, and ``row_bytes``
    are keys and values of a token. ``logits`` returns the logits of hidden states.
    """

    def __init__(self, model: nn.Module, body: nn.Module, parameters: list[Parameter]) -> None:
        self._model, self._body, self.parameters = model, body, parameters
        self.nbytes = sum([padded_bytes(parameter.nbytes) for parameter in parameters])
        self.logits = head_of(model, body)
        cache, tokens = self.make_cache(CACHE_STEP), mx.zeros((1, 1), mx.int32)
        self.states(tokens, body["embed_tokens"].table(tokens), cache)  # not evaluated
        self.row_bytes = nbytes_in(cache) // CACHE_STEP

    def make_cache(self, num_tokens: int) -> list[Any]:
        """Return an empty cache, which takes room for so many tokens when it gets the first one."""
        cache = cast("list[Any]", make_prompt_cache(self._model))
        for entry in entries_of(cache):
            entry.step = num_tokens
        return cache

    def states(self, tokens: mx.array, before: mx.array, cache: list[Any]) -> mx.array:
        """Return its hidden states of tokens ``(1, length)``, given those of the tokens before each of them."""
        return cast(mx.array, cast(Any, self._body)((tokens, before), cache=cache))


@dataclass(slots=True, eq=False)
class ModelLayout:
    """A model, split into what can be streamed and how."""

    layers: list[Unit]  # one unit a layer, in the order of ``model.layers``; called whole
    heads: list[Unit]  # linear layers outside of them, such as ``lm_head``; can be computed row tile by row tile
    embeddings: list[Unit]  # tables outside of them; a lookup needs a few rows
    resident: list[Parameter]  # every other array of the model, constants such as RoPE tables included
    tied: set[str]  # names of the embeddings that serve as the head too
    trace: CallTrace  # what its calls do
    # ways to cut the layers into smaller units, each finer than the one before: attention and MLP, then their parts.
    # What a cut leaves over stays in memory. In calling order; parameters are those of the layers.
    finer: list[list[Unit]] = field(default_factory=list)
    cache: CacheSizes = field(default_factory=CacheSizes)  # sizes of its cache
    experts: list[ExpertStack] = field(default_factory=list)  # the stacks of experts in the layers, in calling order
    held: Held = field(default_factory=Held)  # the memory that a call holds while it waits for a unit
    # the adapters that make whole matrices in each call. They are computed one after another.
    adapted: tuple[nn.Module, ...] = ()
    # the memory of matrices that a call makes: of one adapter, and copies of the weights of one layer in the type of
    # their input
    made_bytes: int = 0
    # units beside the language model, such as the layers of a vision tower. They are in memory while they compute, one
    # after another.
    towers: list[Unit] = field(default_factory=list)
    head: OwnHead | None = None  # guesses tokens, if the checkpoint has a head for that
    lacks_head: bool = False  # whether ``config.json`` promises one that the checkpoint does not have

    @property
    def tower_bytes(self) -> int:
        """Most bytes of units of towers that are in memory together: a layer, and what is left of its tower."""
        outer = [[o.nbytes for o in self.towers if f"{u.name}.".startswith(f"{o.name}.")] for u in self.towers]
        return max(map(sum, outer), default=0)

    @property
    def units(self) -> list[Unit]:
        """All units."""
        return [*self.layers, *self.heads, *self.embeddings]

    def cut(self, number: int) -> list[Unit]:
        """Return the units of a cut: 0 for whole layers, ``i`` for ``finer[i - 1]``."""
        return (self.layers, *self.finer)[number]
