"""Everything that comes before weights are read: the lazily loaded model, its layout and its plan."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_flash.compat import loaders
from mlx_flash.compat.expertstacks import has_kernel
from mlx_flash.config import FlashConfig
from mlx_flash.convert.derived import adopt_derived
from mlx_flash.engine.engine import Progress
from mlx_flash.engine.layershares import make_chain
from mlx_flash.engine.modelmanager import make_room
from mlx_flash.engine.tokenizer import reached_bytes
from mlx_flash.errors import BudgetError, CheckpointError, CheckpointNotFoundError
from mlx_flash.layout import hub
from mlx_flash.layout.fingerprint import ModelIdentity, fingerprint_of, state_of
from mlx_flash.layout.load import LoadedModel, check_direct, load_lazily
from mlx_flash.layout.mtp import find_head
from mlx_flash.layout.names import repository_of
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import layers_of, make_layout
from mlx_flash.memory.footprint import free_unused, map_large_blocks
from mlx_flash.ranks import Chain, Peers, RankFolder, complete_folder, needed_files
from mlx_flash.residency.kv import for_context, with_stock_caches
from mlx_flash.residency.machine import Machine, has_grown, look_at_machine, look_at_memory
from mlx_flash.residency.plan import ResidencyPlan
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes, measure
from mlx_flash.storage.safetensors import Checkpoint, read_checkpoint


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before weights are read.

    Attributes:
        loaded: mlx-lm's model, every weight a lazily loaded array.
        layout: the model's units.
        sizes: the model in numbers.
        machine: the machine in numbers.
        plan: what will be in memory.
        identity: the modules and arrays that were loaded.
        checkpoint: the tensors on disk.
        fingerprint: of what decides their output; None where there is no prefix cache.
        chain: what each rank computes; None where there is one rank.
        folder: the model's folder on this rank; None where there is one rank.
        needed_context: tokens that the caller is going to compute at most; None where it is unknown.
    """

    loaded: LoadedModel
    layout: ModelLayout
    sizes: ModelSizes
    machine: Machine
    plan: ResidencyPlan
    identity: ModelIdentity
    checkpoint: Checkpoint
    fingerprint: str | None = None
    chain: Chain | None = None
    folder: RankFolder | None = None
    needed_context: int | None = None

    def renewed(self, config: FlashConfig, promised_bytes: int) -> Prepared:
        """Return it as of now: adapters may have changed modules, and other models may have taken memory, or will."""
        config = self._settings(config)
        machine = look_at_memory(self.machine, promised_bytes)
        machine = replace(machine, reached_bytes=reached_bytes(self.checkpoint.directory))
        is_unchanged = self.identity.is_unchanged
        has_reached_more = machine.reached_bytes > self.machine.reached_bytes  # a tokenizer was loaded
        if is_unchanged and not has_reached_more and not has_grown(self.machine, machine):
            return replace(self, plan=_agreed(self.plan, self.sizes, config, machine, self.chain))
        layout, sizes = self.layout, self.sizes
        if not is_unchanged:
            layout = replace(make_layout(self.loaded), head=self.layout.head)
            layout = layout if self.chain is None else self.chain.own_part(layout)
            sizes = measure(layout, self.loaded.config)
        plan = _agreed(make_plan(sizes, config, machine), sizes, config, machine, self.chain)
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
        """Return it with a plan for a prompt that is known now, and memory as it is now.

        Args:
            config: how to stream.
            num_tokens: of prompt and answer; None if the answer has no limit.
            extra_bytes: what is computed before the prompt takes so much, while its caches are empty.

        Raises:
            BudgetError: the budget has no room for them.
        """
        found = replace(self, machine=look_at_memory(self.machine, 0), needed_context=num_tokens)
        settings = found._settings(config)
        plan = make_plan(found.sizes, settings, found.machine)
        if (more := extra_bytes - plan.kv_bytes - plan.activation_bytes) > 0:
            found = replace(found, machine=replace(found.machine, runtime_bytes=found.machine.runtime_bytes + more))
            plan = make_plan(found.sizes, settings, found.machine)
        return replace(found, plan=plan)

    def _settings(self, config: FlashConfig) -> FlashConfig:
        config = config if self.chain is None else _settings_of_ranks(config)
        return for_context(self.sizes, config, self.needed_context)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: planning makes many objects, and all of them stay."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
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
        model_path: the model directory.
        config: how to stream.
        model_config: entries that replace those of ``config.json``.
        progress: called with (bytes done, bytes to do) while large derived parameters are written to the cache.
        writes: whether they may be written; if not, the plan is that of when they are.
        group: the ranks that share the model's layers; None for a model of this process alone.
        probe: a file to probe the disk with; None takes the largest shard.
        needed_context: tokens of prompt and answer, if the caller knows them.
        loader: loads the model lazily.
        loading: further arguments of ``mlx_lm.utils.load_model``.
    """
    map_large_blocks()
    make_room()
    free_unused()  # it would count beside what loading takes
    peers = Peers(group) if group is not None and group.size() > 1 else None
    config = config if peers is None else _settings_of_ranks(config)
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
    machine = look_at_machine(probe or max(shards, key=lambda shard: shard.nbytes).path, layout, config, checkpoint)
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
    plan = _agreed(make_plan(sizes, config, machine), sizes, config, machine, chain)
    identity = ModelIdentity(loaded.model)  # with the classes that the chain gives layers
    return Prepared(
        loaded, layout, sizes, machine, plan, identity, checkpoint, fingerprint, chain, folder, needed_context
    )


def _settings_of_ranks(config: FlashConfig) -> FlashConfig:
    return with_stock_caches(config, "when several ranks share a model")


def _agreed(
    plan: ResidencyPlan, sizes: ModelSizes, config: FlashConfig, machine: Machine, chain: Chain | None
) -> ResidencyPlan:
    """Return a plan with the smallest prefill step of all ranks: they have to cut prompts at the same tokens."""
    step = plan.prefill_step_size
    if chain is not None:
        step = chain.least(step)
    return (
        plan if step == plan.prefill_step_size else make_plan(sizes, replace(config, prefill_step_size=step), machine)
    )


def resolve(path_or_hf_repo: str, revision: str | None = None) -> Path:
    """Return the directory of a model; one with a Hugging Face repository or a short name is downloaded.

    Raises:
        CheckpointNotFoundError: there is neither.
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
    for name, module in model.named_modules():
        if not has_kernel(module) and id(module) not in layout.trace.widened:
            raise CheckpointError(
                f"MLX's back end on this machine computes experts in float32 only; {name}.weight of {path} is "
                f"{str(module.weight.dtype).removeprefix('mlx.core.')}. Hint: convert the model with "
                "`mlx_lm.convert --dtype float32`, or quantize it (`mlx_lm.convert -q`), or use a GPU."
            )
