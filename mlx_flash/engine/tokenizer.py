"""Loading a tokenizer, whose memory is part of the process: it is known before a budget is accepted."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError

from mlx_flash.compat import tokenizers
from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import BudgetError, CheckpointError, FlashError
from mlx_flash.layout.load import load_config
from mlx_flash.memory.arena import active_memory
from mlx_flash.memory.footprint import footprint, peak_footprint, release_freed_memory
from mlx_flash.residency.plan import in_gb

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

    Args:
        path: the folder.
        settings: of the tokenizer. Unless they say ``trust_remote_code``, code in the folder is not run;
            transformers would ask on the terminal, and take piped input for an answer.
        config: its budget; None checks none.

    Raises:
        BudgetError: loading it would exceed the budget.
        CheckpointError: there is none, or it cannot be loaded.
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
    """Return the tokenizer of a model folder. Plans made for the folder later count what loading it took.

    Args:
        path: the folder.
        load: loads it.
        config: its budget; None checks none.

    Raises:
        BudgetError: loading it would exceed the budget.
    """
    if config is not None and config.enabled:
        _check_budget(path, config)
    before = peak_footprint()
    tokenizer = load()
    peak = peak_footprint()
    _REACHED[path.resolve()] = peak if peak > before else 0
    gc.collect()
    release_freed_memory()
    return tokenizer


def reached_bytes(path: Path) -> int:
    """Return the peak of the process while a folder's tokenizer was loaded; 0 if there was none, or a higher before."""
    return _REACHED.get(path.resolve(), 0)


def _check_budget(path: Path, config: FlashConfig) -> None:
    """Refuse a budget that loading the tokenizer would exceed: under a memory limit, the process would be killed."""
    budget, file = config.budget_bytes, path / tokenizers.TOKENIZER_FILE
    if not isinstance(budget, int) or not file.is_file() or not file.stat().st_size:
        return
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        num_values = sum(content[at : at + _CHUNK].count(b",") for at in range(0, len(content), _CHUNK))
    loading = num_values * LEAST_VALUE_BYTES
    least = footprint() - active_memory() + loading
    if least > budget and loading > SMALL_BYTES:
        raise BudgetError(
            f"ram_budget_gb is {budget / GB:g}, but loading the tokenizer takes this process to about {in_gb(least)} "
            f"GB: {file} holds {num_values} values. Hint: `mlx-flash plan` names the smallest budget.",
            least,
        )


_CHUNK = 1 << 20
