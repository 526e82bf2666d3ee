"""The KV cache in a plan: its place and its memory. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_flash.config import GB, FlashConfig
from mlx_flash.errors import ConfigError
from mlx_flash.kv.options import PAGE_TOKENS, QUEUED_PAGES, KVOptions
from mlx_flash.layout.cachesizes import CacheSizes
from mlx_flash.residency.ledger import Ledger
from mlx_flash.residency.sizes import ModelSizes

KV_SHARE = 0.25
"""Share of the budget that the KV cache may take in memory when the plan chooses."""

PROMISED_CONTEXT = 20_480
"""Every budget has room for a context of so many tokens, with keys and values on disk, if its length is unset."""

PROMISED_LOGITS = 80
"""Every such budget has room for the logits of so many tokens of one call, computed one after another."""

DENSE_PAGE_BYTES = 32 << 20
"""Keys and values of a page of tokens, in 16 bits, of a dense model of 8 billion weights, such as Llama 3."""

PROMPT_TOKEN_BYTES = 16
"""Bytes of a token of a prompt itself: four copies of 32 bits, of the caller and on the way into the model."""


@dataclass(frozen=True, slots=True)
class KVShare:
    """The KV cache of a plan. Sizes in bytes, at the planned length of the context.

    Attributes:
        options: how keys and values are kept; None leaves caches to mlx-lm.
        rows: what a token adds to each cache that can be on disk.
        nbytes: set aside in memory, for every kind of cache.
        limit: the most that those in ``rows`` may take of it, what is under way to the disk and back included; None
            for as much as a call finds free.
        is_fixed: whether that is so though more may be free.
        disk_bytes: what is in files; all of it is read for each token.
        num_on_disk: layers of which that is so.
    """

    options: KVOptions | None
    rows: tuple[int, ...]
    nbytes: int
    limit: int | None = None
    is_fixed: bool = False
    disk_bytes: int = 0
    num_on_disk: int = 0


def check_kv(config: FlashConfig) -> None:
    """Refuse settings that contradict each other. Raises: ConfigError."""
    directory = None if config.kv_directory is None else Path(config.kv_directory).expanduser()
    if directory is not None:
        _check_directory(directory)
    if config.kv_ram_gb is not None and config.kv_cache in ("stock", "preallocated"):
        raise ConfigError(
            f"kv_ram_gb is {config.kv_ram_gb:g}, but nothing goes to disk with kv_cache={config.kv_cache!r}. "
            "Hint: kv_cache='disk'."
        )
    if config.writes_nothing and (config.kv_cache == "disk" or config.kv_ram_gb is not None):
        raise ConfigError(
            "ssd_write_gb_per_day is 0, so that no keys and values can go to disk. Hint: raise it, or leave kv_cache "
            "and kv_ram_gb open."
        )


def with_stock_caches(config: FlashConfig, where: str) -> FlashConfig:
    """Return settings with mlx-lm's or mlx-vlm's own caches; ``where`` says in the error why there are no others.

    Raises:
        ConfigError: others are asked for.
    """
    refuse_all_but(config, where, kv_cache="stock", kv_ram_gb=None, kv_max_tokens=None, kv_prefixes="off")
    return replace(config, kv_cache="stock", kv_prefixes="off")


def refuse_all_but(config: FlashConfig, where: str, **allowed: object) -> None:
    """Refuse (ConfigError) settings that are neither unset nor have the value that is allowed for them."""
    for name, value in allowed.items():
        if (found := getattr(config, name)) not in (None, value):
            raise ConfigError(f"{name}={found!r} is not available {where}. Hint: leave {name} unset.")


def ledger_of(
    sizes: ModelSizes,
    config: FlashConfig,
    context_length: int,
    prefill_step_size: int = 1,
    *,
    cut: int = 0,
    is_tiled: bool = False,
) -> Ledger:
    """Return the memory of tokens in a plan."""
    options = None
    if sizes.cache.rows and config.kv_cache != "stock":
        options = KVOptions(
            form="preallocated" if config.kv_cache == "preallocated" else "step",
            step=config.kv_step,
            max_context_length=context_length or None if config.kv_cache is not None else None,
            budget_bytes=0 if config.kv_cache in (None, "disk") and not config.writes_nothing else None,
            directory=None if config.kv_directory is None else Path(config.kv_directory).expanduser(),
            direct=config.io != "buffered",
        )
    keeps = config.caches_prefixes
    return Ledger(sizes.cache, sizes.activations, options, prefill_step_size, cut, is_tiled, keeps)


def in_memory(ledger: Ledger, context_length: int) -> KVShare:
    """Return the share with all of it in memory. A cache that grows beyond the plan may go to disk."""
    nbytes = ledger.of_a_sequence(context_length) + ledger.states(ledger.step)
    return KVShare(ledger.options, ledger.cache.rows, nbytes)


def on_disk(ledger: Ledger, context_length: int, room: int, kv_ram_gb: float | None = None) -> KVShare:
    """Return the share with as much of it in memory as there is room for, the rest on disk.

    Raises:
        ConfigError: ``kv_ram_gb`` is below what is needed at least.
    """
    assert ledger.options is not None
    rows = ledger.cache.rows
    whole, least = ledger.rows_in_memory(context_length), ledger.least_rows(context_length, ledger.step)
    limit = max(least, min(room, whole)) if kv_ram_gb is None else round(kv_ram_gb * GB)
    if limit < least:
        raise ConfigError(
            f"kv_ram_gb is {kv_ram_gb:g}, but a context of {context_length} tokens needs at least "
            f"{-(-least // 1000) / 1e6:.6f}: two slots of a layer each, the last tokens of every layer, and what is "
            "under way to the disk and back. Hint: give more, or set a smaller context_length."
        )
    offloaded = _offloaded(rows, context_length, limit - least) if limit < whole else []
    return KVShare(
        options=replace(ledger.options, budget_bytes=limit),
        rows=rows,
        nbytes=limit + ledger.others.nbytes(context_length) + ledger.states(ledger.step),
        limit=limit,
        is_fixed=kv_ram_gb is not None,
        disk_bytes=sum(offloaded) * context_length,
        num_on_disk=len(offloaded),
    )


def _check_directory(directory: Path) -> None:
    """Refuse a folder that is no folder, or that cannot be made or written to."""
    at = directory.absolute()
    while not os.path.lexists(at):
        at = at.parent
    if not at.is_dir():
        what = "which" if at == directory.absolute() else f"and {at}"
        raise ConfigError(
            f"kv_directory is {directory}, {what} is not a directory. Hint: name another one, or remove it."
        )
    if not os.access(at, os.W_OK | os.X_OK):
        raise ConfigError(f"kv_directory is {directory}: this user cannot write to {at}. Hint: name another one.")


def prefix_bytes(cache: CacheSizes, config: FlashConfig, context_length: int) -> int:
    """Return the bytes of pages of the prefix cache on their way to disk and back.

    Some wait to be written while one is copied. Those with large windows and states are written while the call waits.
    """
    if not config.caches_prefixes:
        return 0
    page, largest = sum(cache.rows) * PAGE_TOKENS, largest_page(cache, context_length)
    return largest + QUEUED_PAGES * (largest if largest <= DENSE_PAGE_BYTES else page)


def largest_page(cache: CacheSizes, context_length: int) -> int:
    """Return the bytes of the largest page of the prefix cache, with windows and states."""
    return sum(cache.rows) * PAGE_TOKENS + cache.states_bytes(0, context_length)


def promised_bytes(sizes: ModelSizes, config: FlashConfig) -> int:
    """Return the memory in which a context of :data:`PROMISED_CONTEXT` is computed, token by token if need be.

    The same memory holds the logits of a call with :data:`PROMISED_LOGITS` tokens. It is 0
    where a setting limits the context or the KV cache, and where caches that grow cannot be on disk.
    """
    is_limited = config.context_length is not None or config.kv_ram_gb is not None or config.writes_nothing
    if is_limited or config.kv_cache in ("stock", "preallocated") or sizes.cache.grows_in_memory:
        return 0
    ledger, logits = ledger_of(sizes, config, 0), PROMISED_LOGITS * sizes.activations.returned_per_token
    long, short = (
        ledger.one_by_one(context, context) + context * PROMPT_TOKEN_BYTES
        for context in (PROMISED_CONTEXT, PROMISED_LOGITS)
    )
    return max(long, short + logits)


def for_context(sizes: ModelSizes, config: FlashConfig, num_tokens: int | None) -> FlashConfig:
    """Return settings with room for so many tokens, prompt and answer. Where it is promised anyway, they stay."""
    if num_tokens is None or config.context_length is not None:
        return config
    if num_tokens <= PROMISED_CONTEXT and promised_bytes(sizes, config):
        return config
    return replace(config, context_length=num_tokens)


def _offloaded(rows: Sequence[int], tokens: int, room: int) -> list[int]:
    """Return the rows of layers on disk: all but as many as there is room for."""
    room //= max(1, tokens)
    left = sorted(rows)
    while left and left[0] <= room:
        room -= left.pop(0)
    return left
