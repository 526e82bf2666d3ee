"""Everything that comes before weights are read: a model is loaded lazily, shared among ranks, and planned."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import psutil
from huggingface_hub.errors import StrictDataclassError
from mlx.utils import tree_flatten

from mlx_flash.compat import loaders, tokenizers
from mlx_flash.compat.arrays import num_nodes
from mlx_flash.compat.expertstacks import StackKinds, multiplies_experts
from mlx_flash.config import GB, FlashConfig
from mlx_flash.convert.derived import adopt_derived
from mlx_flash.enginethread import Progress
from mlx_flash.errors import BudgetError, CheckpointError, CheckpointNotFoundError, ConfigError, FlashError
from mlx_flash.layout import hub
from mlx_flash.layout.load import (
    LoadedModel,
    ModelIdentity,
    check_direct,
    fingerprint_of,
    iter_parameters,
    load_config,
    load_lazily,
    state_of,
)
from mlx_flash.layout.mtp import find_head
from mlx_flash.layout.names import repository_of
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import layers_of, make_layout
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint, free_unused, map_large_blocks, peak_footprint, release_freed_memory
from mlx_flash.ranks import (
    Chain,
    Peers,
    RankFolder,
    RankSpeed,
    complete_folder,
    follow_files,
    needed_files,
    share_layers,
)
from mlx_flash.residency.machine import Machine, has_grown, look_at_machine, look_at_memory
from mlx_flash.residency.plan import ResidencyPlan, for_context, in_gb, refuse_all_but
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes, measure
from mlx_flash.storage.safetensors import Checkpoint, read_checkpoint

T = TypeVar("T")

LEAST_VALUE_BYTES = 250
"""Memory that each value of ``tokenizer.json`` takes at least while it is loaded. Measured: 262 (Gemma 3) to 360."""

SMALL_BYTES = 16_000_000
"""Below it, the plan refuses the budget, and names the smallest one."""

_OTHER_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, StrictDataclassError, TypeError)
_LOADING_ERRORS = (OSError, ValueError, *_OTHER_ERRORS)
"""Errors of mlx-lm and transformers for files that they do not expect."""

_REACHED: dict[Path, int] = {}
"""The peak of the process while the tokenizer of a folder was loaded, if that was its highest so far."""


def load_tokenizer(path: Path, settings: dict[str, Any] | None = None, config: FlashConfig | None = None) -> Any:
    """Return mlx-lm's tokenizer of a model folder. Plans made for the folder later count what loading it took.

    Unless the ``settings`` say ``trust_remote_code``, code in the folder is not run; transformers would ask on the
    terminal, and take piped input for an answer. ``config`` has the budget; None checks none.

    Raises: BudgetError: loading it would exceed the budget. CheckpointError: there is none, or it cannot be loaded.
    """
    settings = {"trust_remote_code": False, **(settings or {})}
    eos_token_ids = load_config(path).get("eos_token_id")
    load = partial(tokenizers.load_tokenizer, path, settings, eos_token_ids=eos_token_ids)
    try:
        return counted(path, load, config)
    except FlashError:
        raise
    except _LOADING_ERRORS as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        found = sorted(file.name for file in path.iterdir() if "token" in file.name or "vocab" in file.name)
        raise CheckpointError(
            f"cannot load the tokenizer of {path}, which holds {', '.join(found) or 'no tokenizer files'}. Hint: copy "
            "tokenizer.json, tokenizer_config.json and config.json from the model's repository. "
            f"({kind}{' '.join(str(error).split())})"
        ) from error


def counted(path: Path, load: Callable[[], T], config: FlashConfig | None = None) -> T:
    """Return what loads a tokenizer, within the budget of a config. Plans made for the folder count what that took.

    Raises: BudgetError: loading it would exceed the budget.
    """
    if config is not None and config.enabled:
        _check_budget(path, config)
    before = peak_footprint()
    tokenizer = load()
    peak = peak_footprint()
    _REACHED[path.resolve()] = peak if peak > before else 0
    release_freed_memory()
    return tokenizer


def reached_bytes(path: Path) -> int:
    """Return the peak of the process while a folder's tokenizer was loaded; 0 if there was none, or a higher before."""
    return _REACHED.get(path.resolve(), 0)


def _check_budget(path: Path, config: FlashConfig) -> None:
    """Refuse a budget that loading the tokenizer would exceed: under a memory limit, the process would be killed."""
    budget, file = config.budget_bytes, path / tokenizers.TOKENIZER_FILE
    if not isinstance(budget, int) or not file.is_file():
        return
    with file.open("rb") as opened:
        num_values = sum(block.count(b",") for block in iter(partial(opened.read, 1 << 20), b""))
    loading = num_values * LEAST_VALUE_BYTES
    least = footprint() - active_memory() + loading
    if least > budget and loading > SMALL_BYTES:
        raise BudgetError(
            f"ram_budget_gb is {budget / GB:g}, but loading the tokenizer takes this process to about {in_gb(least)} "
            f"GB: {file} holds {num_values} values. Hint: `mlx-flash plan` names the smallest budget.",
            least,
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before weights are read."""

    loaded: LoadedModel  # mlx-lm's model, every weight a lazily loaded array
    layout: ModelLayout
    sizes: ModelSizes
    machine: Machine
    plan: ResidencyPlan
    identity: ModelIdentity  # the modules and arrays that were loaded
    checkpoint: Checkpoint  # the tensors on disk
    fingerprint: str | None = None  # of what decides their output; None where there is no prefix cache
    chain: Chain | None = None  # what each rank computes; None where there is one rank
    folder: RankFolder | None = None  # the model's folder on this rank; None where there is one rank
    needed_context: int | None = None  # tokens that the caller is going to compute at most; None where it is unknown

    def renewed(self, config: FlashConfig, promised_bytes: int) -> Prepared:
        """Return it as of now: adapters may have changed modules, and other models may have taken memory, or will."""
        config = self._settings(config)
        machine = look_at_memory(self.machine, promised_bytes)
        machine = replace(machine, reached_bytes=reached_bytes(self.checkpoint.directory))
        is_unchanged = self.identity.is_unchanged
        has_reached_more = machine.reached_bytes > self.machine.reached_bytes  # a tokenizer was loaded
        if is_unchanged and not has_reached_more and not has_grown(self.machine, machine):
            return replace(self, plan=agreed(self.plan, self.sizes, config, machine, self.chain))
        layout, sizes = self.layout, self.sizes
        if not is_unchanged:
            layout = replace(make_layout(self.loaded), head=self.layout.head)
            layout = layout if self.chain is None else self.chain.own_part(layout)
            sizes = measure(layout, self.loaded.config)
        plan = agreed(make_plan(sizes, config, machine), sizes, config, machine, self.chain)
        return replace(self, layout=layout, sizes=sizes, plan=plan)

    def planned(self, config: FlashConfig, base_bytes: int) -> Prepared:
        """Return it with a plan for other settings. It keeps the prefill step, on which last bits depend, if it can.

        The process without models, and what running adds to it, takes ``base_bytes``.
        """
        config = self._settings(config)
        others = max(0, self.machine.base_bytes - (base_bytes - self.machine.runtime_bytes))
        machine = replace(
            self.machine,
            base_bytes=base_bytes,
            runtime_bytes=0,  # else what running has added would seem to be growth
            active_bytes=max(0, self.machine.active_bytes - others),
        )
        plan = make_plan(self.sizes, config, machine)
        with suppress(BudgetError):
            same = replace(config, prefill_step_size=self.plan.prefill_step_size)
            plan = replace(make_plan(self.sizes, same, machine), minimum_bytes=plan.minimum_bytes)
        return replace(self, plan=plan, machine=machine)

    def expecting(self, config: FlashConfig, num_tokens: int | None, extra_bytes: int) -> Prepared:
        """Return it with a plan for a prompt of so many tokens, answer included, and memory as it is now.

        ``num_tokens`` is None if the answer has no limit. What is computed before the prompt takes ``extra_bytes``,
        while its caches are empty. Raises: BudgetError: the budget has no room for them.
        """
        found = replace(self, machine=look_at_memory(self.machine, 0), needed_context=num_tokens)
        settings = found._settings(config)
        plan = make_plan(found.sizes, settings, found.machine)
        if (more := extra_bytes - plan.kv_bytes - plan.activation_bytes) > 0:
            found = replace(found, machine=replace(found.machine, runtime_bytes=found.machine.runtime_bytes + more))
            plan = make_plan(found.sizes, settings, found.machine)
        return replace(found, plan=plan)

    def _settings(self, config: FlashConfig) -> FlashConfig:
        config = config if self.chain is None else settings_of_ranks(config)
        return for_context(self.sizes, config, self.needed_context)


def settings_of_ranks(config: FlashConfig) -> FlashConfig:
    """Return settings with mlx-lm's own caches. Raises: ConfigError: others are asked for."""
    where = "when several ranks share a model"
    refuse_all_but(config, where, kv_cache="stock", kv_ram_gb=None, kv_max_tokens=None, kv_prefixes="off")
    return replace(config, kv_cache="stock", kv_prefixes="off")


def agreed(
    plan: ResidencyPlan, sizes: ModelSizes, config: FlashConfig, machine: Machine, chain: Chain | None
) -> ResidencyPlan:
    """Return a plan with the smallest prefill step of all ranks: they have to cut prompts at the same tokens."""
    step = plan.prefill_step_size
    if chain is not None:
        step = chain.least(step)
    return (
        plan if step == plan.prefill_step_size else make_plan(sizes, replace(config, prefill_step_size=step), machine)
    )


BEFORE_LOADING: list[Callable[[], object]] = []
"""Functions that free what other models of this process need not keep while one is planned."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: planning makes many objects, and all of them stay."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def prepare(
    model_path: Path | str,
    config: FlashConfig,
    model_config: dict[str, Any] | None = None,
    *,
    progress: Progress | None = None,
    writes: bool = True,
    group: mx.distributed.Group | None = None,
    probe: Path | None = None,
    needed_context: int | None = None,
    loader: Callable[..., LoadedModel] = load_lazily,
    **loading: Any,
) -> Prepared:
    """Load a model lazily, find its units, and plan. Reads headers, no weights.

    Args:
        model_config: entries that replace those of ``config.json``.
        progress: called with (bytes done, bytes to do) while large derived parameters are written to the cache.
        writes: whether they may be written; if not, the plan is that of when they are.
        group: the ranks that share the model's layers; None for a model of this process alone.
        probe: a file to probe the disk with; None takes the largest shard.
        needed_context: tokens of prompt and answer, if the caller knows them.
    """
    map_large_blocks()
    for free in BEFORE_LOADING:
        free()
    free_unused()  # it would count beside what loading takes
    peers = Peers(group) if group is not None and group.size() > 1 else None
    config = config if peers is None else settings_of_ranks(config)
    path = Path(model_path)
    _check_folder(path)
    folder = None if peers is None else complete_folder(path, peers)
    path = path if folder is None else folder.path
    checkpoint = read_checkpoint(path)

    def load() -> LoadedModel:
        loaded = loader(path, checkpoint, model_config, **loading)
        check_direct(path, checkpoint, (record for records in loaded.sources.values() for record in records))
        return loaded

    loaded = load()
    if folder is None or folder.is_complete:
        adopt_derived(loaded, load, checkpoint, path, config.derived_cache_gb, progress, write=writes)
    layout = make_layout(loaded)
    can_guess = config.speculation and config.mtp != "off" and config.kv_max_tokens is None
    if can_guess and peers is None and loader is load_lazily:
        find_head(layout, loaded, checkpoint)
    _check_kernels(loaded.model, layout, path)
    check_direct(path, checkpoint, (record for unit in layout.units for p in unit.large for record in p.records))
    shards = [shard for shard in checkpoint.shards if folder is None or folder.has(shard.path)]
    probe = probe or max(shards, key=lambda shard: shard.nbytes).path
    machine = look_at_machine(probe, layout, config, checkpoint)
    machine = replace(machine, reached_bytes=reached_bytes(Path(model_path)))
    fingerprint = fingerprint_of(loaded, state_of(checkpoint)) if config.caches_prefixes else None
    chain: Chain | None = None
    if folder is not None and peers is not None:
        folder.let_go()
        peers.share_seed()
        able = folder.able_ranks(needed_files(len(layers_of(loaded.model)), checkpoint))
        chain = make_chain(loaded, measure(layout, loaded.config), config, machine, able, peers)
        layout = chain.own_part(layout)
    sizes = measure(layout, loaded.config)
    config = for_context(sizes, config, needed_context)
    plan = agreed(make_plan(sizes, config, machine), sizes, config, machine, chain)
    identity = ModelIdentity(loaded.model)  # with the classes that the chain gives layers
    return Prepared(
        loaded, layout, sizes, machine, plan, identity, checkpoint, fingerprint, chain, folder, needed_context
    )


def resolve(path_or_hf_repo: str, revision: str | None = None) -> Path:
    """Return the directory of a model; one with a Hugging Face repository or a short name is downloaded.

    Raises: CheckpointNotFoundError: there is neither.
    """
    path_or_hf_repo = repository_of(os.path.expanduser(path_or_hf_repo))  # noqa: PTH111 - no repository becomes a path
    path = Path(path_or_hf_repo)
    _check_folder(path)
    if not path.exists() and (len(path.parts) > 2 or path_or_hf_repo.startswith(("/", ".", "~"))):
        raise CheckpointNotFoundError(
            f"there is no directory {path_or_hf_repo!r}. Hint: check the path; name one on Hugging Face NAMESPACE/NAME."
        )
    if not path.exists():
        hub.check_name(path_or_hf_repo)
    try:
        return loaders.download(path_or_hf_repo, revision)
    except hub.NOT_FOUND_ERRORS as error:
        raise hub.not_found(path_or_hf_repo, error) from error


def _check_folder(path: Path) -> None:
    """Refuse (CheckpointError) a file, and a folder with GGUF files and no ``config.json``."""
    if (path / "config.json").is_file():
        return
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if files and files[0].suffix == ".gguf":
        raise CheckpointError(
            f"{files[0]} is a GGUF file, which mlx-lm does not run. Hint: use the repository that it was made from, "
            "with config.json and model*.safetensors."
        )
    if files:
        raise CheckpointError(
            f"{path} is a file. Hint: name the folder of the model, with config.json and model*.safetensors."
        )


def _check_kernels(model: nn.Module, layout: ModelLayout, path: Path) -> None:
    """Refuse (CheckpointError) a model that MLX cannot compute here. Otherwise the first call would fail half-way."""
    experts = [(name, each) for name, each in model.named_modules() if isinstance(each, StackKinds.linears)]
    for name, module in experts:
        if id(module) not in layout.trace.widened and not multiplies_experts(module.weight.dtype):
            raise CheckpointError(
                f"MLX's back end on this machine computes experts in float32 only; {name}.weight of {path} is "
                f"{str(module.weight.dtype).removeprefix('mlx.core.')}. Hint: convert the model with "
                "`mlx_lm.convert --dtype float32`, or quantize it (`mlx_lm.convert -q`), or use a GPU."
            )


def make_chain(
    loaded: LoadedModel,
    sizes: ModelSizes,
    config: FlashConfig,
    machine: Machine,
    able: Sequence[Sequence[int]],
    peers: Peers,
) -> Chain:
    """Give every rank layers that it has the files of, from what all ranks can keep in memory, and their speeds.

    ``able`` are for each layer the ranks that have its files. A plan for the whole model shows how much this machine
    can keep in memory.
    """
    try:
        plan = make_plan(sizes, config, machine)
    except BudgetError:  # the whole model may be too much for a budget that has room for a part
        plan = None
    ranks = [RankSpeed(*numbers) for numbers in peers.gather(astuple(_speed(machine, plan)))]
    nbytes = layer_bytes(loaded)
    owners = follow_files(share_layers(nbytes, ranks), nbytes, able)
    return Chain(layers_of(loaded.model), owners, peers)


def share_equally(loaded: LoadedModel, plan: ResidencyPlan, machine: Machine, num_ranks: int) -> list[int]:
    """Return the rank of each layer, if a model is shared by some machines like this one."""
    return share_layers(layer_bytes(loaded), [_speed(machine, plan)] * num_ranks)


def layer_bytes(loaded: LoadedModel) -> list[int]:
    """Return the bytes of each layer."""
    layers = layers_of(loaded.model)
    return [sum(array.nbytes for _, _, _, array in iter_parameters(layer)) for layer in layers]


def _speed(machine: Machine, plan: ResidencyPlan | None) -> RankSpeed:
    """Return a machine in numbers. Without a plan it keeps nothing in memory."""
    return RankSpeed(
        0.0 if plan is None else plan.resident_bytes + plan.pinned_bytes + plan.pool_bytes,
        machine.disk.bytes_per_second,
        machine.compute_bytes_per_second,
        machine.kept_bytes_per_second,
    )


_HINT = "Hint: load it with mlx_flash.load(path, config), then change it."


def prepare_loaded(model: nn.Module, config: FlashConfig, path: Path | None) -> Prepared:
    """Plan for a model that mlx-lm loaded lazily. Its files are read again: nothing of the given model is used.

    ``path`` is its folder; None finds it from the files that this process has open. Raises: ConfigError: the folder is
    unknown, or the model is not as mlx-lm loads it from there.
    """
    given = _recorded(model)
    if not any(operations for *_, operations in given.values()):
        raise ConfigError(f"FlashLLM takes a lazily loaded model, and the weights of this one are in memory. {_HINT}")
    folder = path or _folder_of_open_files()
    prepared = prepare(folder, config)
    fresh = _recorded(prepared.loaded.model)
    changed = [name for name in given.keys() | fresh.keys() if given.get(name) != fresh.get(name)]
    if changed:
        raise ConfigError(
            f"FlashLLM was given a model whose {min(changed)!r} is not as mlx-lm loads it from {folder}: "
            f"{len(changed)} parameters were changed or computed. {_HINT}"
        )
    return prepared


def _recorded(model: nn.Module) -> dict[str, tuple[Any, mx.Dtype, int]]:
    """Return the shape, the dtype and the number of recorded operations of each parameter."""
    named = {id(array) for _, array in cast(Any, tree_flatten(model.parameters()))}
    found = [(name, array) for name, _, _, array in iter_parameters(model) if id(array) in named]
    return {name: (array.shape, array.dtype, num_nodes(array)) for name, array in found}


def _folder_of_open_files() -> Path:
    folders = {path.parent for path in _open_files() if path.match("model*.safetensors")}
    if len(folders) != 1:
        names = ", ".join(sorted(map(str, folders))) or "none"
        raise ConfigError(
            f"the folder of a lazily loaded model is not known: this process has shards open in {names}. "
            "Hint: FlashLLM(model, config, model_path=...)"
        )
    return folders.pop()


def _open_files() -> list[Path]:
    return [Path(file.path) for file in psutil.Process().open_files()]
