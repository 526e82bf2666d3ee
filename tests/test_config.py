"""Tests of the settings: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mlx_flash.config import FlashConfig, parse_budget
from mlx_flash.errors import ConfigError, FlashError

COUNTS = ("context_length", "prefill_step_size", "num_slots", "queue_depth")
NUMBERS = ("ram_budget_gb", "read_size_mb")


def refused(**settings: Any) -> str:
    """The message with which settings are refused; it names the field and the value that was found."""
    with pytest.raises(ConfigError) as caught:
        FlashConfig(**settings)
    message = str(caught.value)
    assert isinstance(caught.value, FlashError)
    assert isinstance(caught.value, ValueError)
    ((name, value),) = settings.items()
    assert message.startswith(f"{name} is {value!r}: it must be ")
    assert "\n" not in message
    return message.partition("it must be ")[2]


def test_defaults() -> None:
    assert dataclasses.asdict(FlashConfig()) == {
        "ram_budget_gb": None,
        "context_length": None,
        "prefill_step_size": None,
        "num_slots": None,
        "io": "auto",
        "read_size_mb": None,
        "queue_depth": None,
        "poison_released_slots": False,
    }


def test_every_field_is_tested_here() -> None:
    assert {field.name for field in dataclasses.fields(FlashConfig)} == {
        *COUNTS,
        *NUMBERS,
        "io",
        "poison_released_slots",
    }


def test_is_frozen() -> None:
    config = FlashConfig(num_slots=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_slots = 3  # type: ignore[misc]
    assert config == FlashConfig(num_slots=2)
    assert hash(config) == hash(FlashConfig(num_slots=2))
    assert dataclasses.replace(config, num_slots=3).num_slots == 3


def test_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        FlashConfig(2.0)  # type: ignore[misc]


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="ram_budget"):
        FlashConfig(ram_budget=2.0)  # type: ignore[call-arg]


def test_replacing_validates_again() -> None:
    with pytest.raises(ConfigError, match="num_slots is 0"):
        dataclasses.replace(FlashConfig(), num_slots=0)


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [None, 1, 2, 64])
def test_counts(name: str, value: int | None) -> None:
    assert getattr(FlashConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, False, 1.0, 1.5, "4", "", "auto", math.nan, math.inf, [4], (4,), {}, b"4"])
def test_counts_refuse_other_types(name: str, value: object) -> None:
    assert refused(**{name: value}) == "a whole number"


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, -(10**30)])
def test_counts_refuse_less_than_one(name: str, value: int) -> None:
    assert refused(**{name: value}) == ("between 1 and 64" if name == "queue_depth" else "at least 1")


def test_queue_depth_has_an_upper_bound() -> None:
    assert refused(queue_depth=65) == "between 1 and 64"


@pytest.mark.parametrize("name", ["context_length", "prefill_step_size", "num_slots"])
def test_other_counts_have_none(name: str) -> None:
    assert getattr(FlashConfig(**{name: 10**9}), name) == 10**9


# --- the size of one read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1, 0.5, 4, 16.0, 1e-3])
def test_read_size(value: float | None) -> None:
    assert FlashConfig(read_size_mb=value).read_size_mb == value


@pytest.mark.parametrize("value", [True, False, "4", "", [4], {}, b"4", 4j])
def test_read_size_refuses_other_types(value: object) -> None:
    assert refused(read_size_mb=value) == "a number"


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1, -0.5, math.nan, math.inf, -math.inf])
def test_read_size_refuses_what_is_not_above_zero(value: float) -> None:
    assert refused(read_size_mb=value) == "a finite number above 0"


# --- the way to read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["auto", "direct", "buffered"])
def test_io(value: Any) -> None:
    assert FlashConfig(io=value).io == value


@pytest.mark.parametrize("value", [None, "", "Direct", "mmap", b"auto", 1, True, ["auto"], {}])
def test_io_refuses_other_values(value: object) -> None:
    assert refused(io=value) == "one of 'auto', 'direct', 'buffered'"


# --- poison ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False])
def test_poison(value: bool) -> None:
    assert FlashConfig(poison_released_slots=value).poison_released_slots is value


@pytest.mark.parametrize("value", [None, 0, 1, "yes", "", [], math.nan])
def test_poison_refuses_other_values(value: object) -> None:
    assert refused(poison_released_slots=value) == "True or False"


# --- the budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "nbytes"), [(None, None), ("min", "min"), (2, 2_000_000_000), (1.5, 1_500_000_000), (0.25, 250_000_000)]
)
def test_budget_in_bytes(budget: Any, nbytes: object) -> None:
    assert FlashConfig(ram_budget_gb=budget).budget_bytes == nbytes


@pytest.mark.parametrize("megabytes", [1001, 1003, 2003, 4007])
def test_a_budget_in_whole_megabytes_is_that_many_bytes(megabytes: int) -> None:
    assert FlashConfig(ram_budget_gb=float(f"{megabytes / 1000:.3f}")).budget_bytes == megabytes * 1_000_000


@pytest.mark.parametrize("value", [True, False, [], [2], {}, (2,), object, 2j])
def test_budget_refuses_other_types(value: object) -> None:
    assert refused(ram_budget_gb=value) == "a number of GB (10**9 bytes), such as 2 or 1.5, or 'min'"


@pytest.mark.parametrize("value", ["", "max", "Min", "MIN", "auto", "2", "1.5", "2GB", "nan"])
def test_budget_refuses_other_words(value: str) -> None:
    assert refused(ram_budget_gb=value) == "a number of GB, or 'min'"


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1, -1.5, math.nan, math.inf, -math.inf])
def test_budget_refuses_what_is_not_above_zero(value: float) -> None:
    assert refused(ram_budget_gb=value) == "a finite number above 0, in GB (10**9 bytes)"


@pytest.mark.parametrize("value", [None, "min"])
def test_words_for_a_budget_stay_words(value: object) -> None:
    assert parse_budget(value) == value


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("2", 2.0),
        ("1.5", 1.5),
        (" 0.9 ", 0.9),
        ("1e1", 10.0),
        ("+3", 3.0),
        (2, 2.0),
        (1.5, 1.5),
        (np.float32(0.5), 0.5),
        (np.int64(4), 4.0),
        (Decimal("1.25"), 1.25),
        (Fraction(3, 4), 0.75),
    ],
)
def test_budget_from_what_a_person_wrote(value: object, number: float) -> None:
    found = parse_budget(value)
    assert type(found) is float
    assert found == number


@pytest.mark.parametrize(
    "value", ["", " ", "max", "MIN", "2GB", "2 GB", "1,5", "2.0.0", "0x10", True, False, [], [1], {}]
)
def test_what_is_no_budget(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_budget(value)
    assert str(caught.value) == (
        f"ram_budget_gb is {value!r}: it must be a number of GB (10**9 bytes), such as 2 or 1.5, or 'min'"
    )
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("value", ["0", "-1", "-0.5", "nan", "inf", "-inf", "1e400", 0, -3, math.nan, math.inf])
def test_budgets_out_of_range(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_budget(value)
    assert str(caught.value) == f"ram_budget_gb is {value!r}: it must be a finite number above 0, in GB (10**9 bytes)"


@pytest.mark.parametrize("value", [b"2", 10**400])
def test_what_is_no_number_of_gigabytes(value: Any) -> None:
    with pytest.raises(ConfigError, match="ram_budget_gb"):
        FlashConfig(ram_budget_gb=value)


def test_a_read_size_beyond_all_floats() -> None:
    with pytest.raises(ConfigError, match="read_size_mb"):
        FlashConfig(read_size_mb=10**400)
