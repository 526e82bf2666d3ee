"""The settings of the engine, validated when they are made."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

from mlx_flash.errors import ConfigError

GB = 1_000_000_000
"""Sizes that people see are decimal."""

Budget = float | Literal["min"] | None
IOMode = Literal["auto", "direct", "buffered"]

_IO_MODES = ("auto", "direct", "buffered")


@dataclass(frozen=True, kw_only=True)
class FlashConfig:
    """How a model is streamed.

    Attributes:
        ram_budget_gb: what the whole process may use at its peak, in decimal GB; ``"min"`` is the smallest workable
            budget; None takes 70 % of the memory that is free when the model is loaded.
        context_length: tokens of KV cache the plan sets memory aside for, over all sequences. None plans for 4096, or
            for less where those would take more than a quarter of the budget. A call that would need more memory than
            the budget has left is refused.
        prefill_step_size: the most new tokens in one forward call the plan sets memory aside for. None plans for
            mlx-lm's default, or for less where that would take more than a fifth of the budget.
        num_slots: buffers that the streamed units take turns in. None lets the plan choose.
        io: ``"direct"`` reads past the operating system's page cache, ``"buffered"`` through it; ``"auto"`` is direct
            where the file system can.
        read_size_mb: size of one read in MB (10**6 bytes). None takes what a probe of the disk found best.
        queue_depth: reads in flight at once. None takes what a probe of the disk found best.
        poison_released_slots: fill every released slot with NaN bytes, so that a read of stale weights shows at once.
            For tests; costs a pass over the memory.
    """

    ram_budget_gb: Budget = None
    context_length: int | None = None
    prefill_step_size: int | None = None
    num_slots: int | None = None
    io: IOMode = "auto"
    read_size_mb: float | None = None
    queue_depth: int | None = None
    poison_released_slots: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.ram_budget_gb, str) and self.ram_budget_gb != "min":
            raise ConfigError(f"ram_budget_gb is {self.ram_budget_gb!r}: it must be a number of GB, or 'min'")
        parse_budget(self.ram_budget_gb)
        _check_count("context_length", self.context_length, 1)
        _check_count("prefill_step_size", self.prefill_step_size, 1)
        _check_count("num_slots", self.num_slots, 1)
        _check_count("queue_depth", self.queue_depth, 1, 64)
        _check_positive("read_size_mb", self.read_size_mb)
        if self.io not in _IO_MODES:
            raise ConfigError(f"io is {self.io!r}: it must be one of {', '.join(map(repr, _IO_MODES))}")
        if not isinstance(self.poison_released_slots, bool):
            raise ConfigError(f"poison_released_slots is {self.poison_released_slots!r}: it must be True or False")

    @property
    def budget_bytes(self) -> int | Literal["min"] | None:
        """The budget in bytes, or the word that stands for one."""
        budget = self.ram_budget_gb
        return budget if budget is None or budget == "min" else round(budget * GB)


def parse_budget(value: object) -> Budget:
    """Turns what a person wrote for the budget into a budget.

    Args:
        value: a number of decimal GB, a string holding one, ``"min"``, or None.

    Raises:
        ConfigError: not a positive, finite number.
    """
    if value is None or value == "min":
        return value
    try:
        if isinstance(value, bool | bytes | bytearray):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"ram_budget_gb is {value!r}: it must be a number of GB (10**9 bytes), such as 2 or 1.5, or 'min'"
        ) from None
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(f"ram_budget_gb is {value!r}: it must be a finite number above 0, in GB (10**9 bytes)")
    return number


def _check_count(name: str, value: object, least: int, most: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ConfigError(f"{name} is {value}: it must be {bounds}")


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}: it must be a number")
    if not 0 < value < math.inf or value > sys.float_info.max:
        raise ConfigError(f"{name} is {value!r}: it must be a finite number above 0")
