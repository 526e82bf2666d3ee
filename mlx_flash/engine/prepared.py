"""A model that is loaded lazily, its tokenizer and its plan: everything that is known before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError

from mlx_flash.compat import tokenizers
from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import BudgetError, CheckpointError, FlashError
from mlx_flash.layout.load import LoadedModel, ModelIdentity, load_config
from mlx_flash.layout.parts import ModelLayout
from mlx_flash.layout.units import make_layout
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint, peak_footprint, release_freed_memory
from mlx_flash.ranks import Chain, RankFolder
from mlx_flash.residency.machine import Machine, has_grown, look_at_memory
from mlx_flash.residency.plan import ResidencyPlan, for_context, in_gb, refuse_all_but
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes, measure
from mlx_flash.storage.safetensors import Checkpoint

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
