"""Tests of the settings: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import math
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_flash.commands.arguments import SETTINGS, parse_arguments
from mlx_flash.config import (
    FlashConfig,
    parse_budget,
    parse_setting,
)
from mlx_flash.errors import ConfigError, FlashError
from mlx_flash.files import settings_file

COUNTS = ("context_length", "prefill_step_size", "kv_max_tokens", "num_slots", "queue_depth")
SHARES = ("derived_cache_gb", "kv_prefix_gb", "ssd_write_gb_per_day")
NUMBERS = ("ram_budget_gb", "kv_ram_gb", "read_size_mb", *SHARES)
SWITCHES = ("enabled", "lend_reserves", "speculation", "expert_pool", "expert_lookahead", "telemetry")
WORDS = ("min", "auto", "safe", "balanced", "performance")
OR_WORDS = "or one of 'min', 'auto', 'safe', 'balanced', 'performance'"
IN_GB = "a number of GB (10**9 bytes)"


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


# --- values and their bounds -----------------------------------------------------------------------------------------

IO = "one of 'auto', 'direct', 'buffered'"
OTHER_TYPES: list[Any] = [True, False, "4", "", [4], {}, b"4", 4j]
NO_NUMBERS = [math.nan, math.inf, -math.inf, 10**400]
BOUNDS: list[tuple[tuple[str, ...], list[Any], dict[str, list[Any]]]] = [
    (COUNTS, [None, 1, 2, 64], {"a whole number": [*OTHER_TYPES, 1.0, 1.5, "auto", math.nan, math.inf, (4,)]}),
    (COUNTS[:-1], [10**9], {"at least 1": [0, -1, -(10**30)]}),
    (("queue_depth",), [1, 64], {"between 1 and 64": [0, -1, -(10**30), 65]}),
    (("read_size_mb",), [None, 1, 0.5, 16.0, 1e-3], {"a number": OTHER_TYPES}),
    (("read_size_mb",), [4], {"a finite number above 0": [0, 0.0, -0.0, -1, -0.5, *NO_NUMBERS]}),
    (SHARES, [None, 0, 0.0, 1, 0.5, 12.5, 1e6], {"a number": [*OTHER_TYPES, "auto"]}),
    (SHARES, [4], {"a finite number not below 0": [-1, -0.5, -5e-324, 1e300, *NO_NUMBERS]}),
    (("io",), ["auto", "direct", "buffered"], {IO: [None, "", "mmap", b"auto", 1, True, ["auto"], {}]}),
    (("io",), [], {f"{IO}. Did you mean 'direct'?": ["Direct"], f"{IO}. Did you mean 'buffered'?": ["bufered"]}),
    (("kv_cache",), [None, "stock", "disk"], {"one of 'stock', 'disk'": ["paged", "flat", "lazy"]}),
    (SWITCHES, [True, False], {"True or False": [None, 0, 1, "yes", "", [], math.nan]}),
    (
        ("ram_budget_gb",),
        [None, *WORDS, 2, 1.5],
        {f"{IN_GB}, such as 2 or 1.5, {OR_WORDS}": ["", "most", "2GB", True, [], [2], {}, (2,), 2j, 10**400]},
    ),
    (
        ("ram_budget_gb",),
        [],
        {"a finite number above 0, in GB (10**9 bytes)": [0, 0.0, -0.0, -1, -1.5, *NO_NUMBERS[:3]]},
    ),
]
"""Fields, values that they take, and those that they refuse, by what the refusal says that they must be."""


def test_bounds_of_every_field() -> None:
    for names, values, wrong in BOUNDS:
        for name in names:
            for value in values:
                found = getattr(FlashConfig(**{name: value}), name)
                assert found == value and isinstance(found, bool) == isinstance(value, bool)
            for words, refusals in wrong.items():
                for value in refusals:
                    assert refused(**{name: value}) == words, (name, value)


# --- the budget ------------------------------------------------------------------------------------------------------


def test_budget_in_bytes() -> None:
    for budget, nbytes in ((None, "balanced"), *zip(WORDS, WORDS, strict=True), (2, 2 * 10**9), ("0.25", 250_000_000)):
        assert FlashConfig(ram_budget_gb=budget).budget_bytes == nbytes
    for megabytes in (1001, 1003, 2003, 4007):  # whose floats are not exact
        assert FlashConfig(ram_budget_gb=float(f"{megabytes / 1000:.3f}")).budget_bytes == megabytes * 1_000_000


def test_budget_from_what_a_person_wrote() -> None:
    assert [parse_budget(value) for value in (None, *WORDS)] == [None, *WORDS]
    texts = {"2": 2.0, " 0.9 ": 0.9, "1e1": 10.0, "+3": 3.0}
    numbers = {2: 2.0, np.float32(0.5): 0.5, np.int64(4): 4.0, Decimal("1.25"): 1.25, Fraction(3, 4): 0.75}
    for value, number in (*texts.items(), *numbers.items()):
        found = parse_budget(value)
        assert type(found) is float and found == number
    nearest = {"MIN": "min", "Auto": "auto", "balancd": "balanced"}
    wrong: dict[str, list[Any]] = {
        f"{IN_GB}, such as 2 or 1.5, {OR_WORDS}": ["", "2GB", "1,5", "0x10", True, [1], {}],
        "a finite number above 0, in GB (10**9 bytes)": ["0", "-1", "nan", "1e400", 0, -3, *NO_NUMBERS[:3]],
        **{f"{IN_GB}, such as 2 or 1.5, {OR_WORDS}. Did you mean '{nearest[word]}'?": [word] for word in nearest},
    }
    for words, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError) as caught:
                parse_budget(value)
            assert str(caught.value) == f"ram_budget_gb is {value!r}: it must be {words}"
            error = caught.value
            assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


# --- where settings come from ----------------------------------------------------------------------------------------

RIGHT: dict[str, tuple[Any, ...]] = {
    "enabled": (True, False),
    "ram_budget_gb": (None, "min", "safe", 2.0, 0.75),
    "context_length": (None, 1, 4096),
    "prefill_step_size": (None, 64, 512),
    "kv_cache": (None, "stock", "disk"),
    "kv_ram_gb": (None, 0.25, 1.0),
    "kv_max_tokens": (None, 1000, 20_000),
    "kv_keep": (0, 4),
    "kv_step": (256, 64),
    "kv_directory": (None, "/tmp/kv"),
    "kv_prefixes": (None, "off", "exact"),
    "kv_prefix_tenant": (None, "alice"),
    "kv_prefix_gb": (None, 0, 12.5),
    "ssd_write_gb_per_day": (None, 0, 12.5),
    "batching": ("auto", "stock"),
    "lend_reserves": (True, False),
    "speculation": (True, False),
    "mtp": ("auto", "off"),
    "num_slots": (None, 1, 3),
    "expert_pool": (True, False),
    "expert_lookahead": (True, False),
    "io": ("auto", "direct", "buffered"),
    "read_size_mb": (None, 0.5, 4.0),
    "queue_depth": (None, 1, 64),
    "derived_cache_gb": (None, 0, 12.5),
    "telemetry": (True, False),
    "poison_released_slots": (False, True),
}
"""Values of every field; the first one is its default."""


def test_defaults() -> None:
    assert dataclasses.asdict(FlashConfig()) == {name: values[0] for name, values in RIGHT.items()}


def resolve(*given: Any, **more: Any) -> FlashConfig:
    return FlashConfig.resolve(*given, **{"environment": {}, **more})


def wrong(*given: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*given, **more)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def as_toml(values: dict[str, Any]) -> str:
    """TOML has no null: what is open is written as text."""
    lines = {name: "'none'" if value is None else str(value).lower() for name, value in values.items()}
    return "".join(
        f"{name} = {repr(values[name]) if isinstance(values[name], str) else text}\n" for name, text in lines.items()
    )


def test_the_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings_file() == tmp_path / "mlx-flash" / "config.toml"
    assert resolve() == FlashConfig()
    write(settings_file(), "ram_budget_gb = 'safe'\nio = 'direct'\n")
    assert resolve() == FlashConfig(ram_budget_gb="safe", io="direct")
    assert resolve(file=write(tmp_path / "other.toml", "")) == FlashConfig()
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_file() == tmp_path / ".config" / "mlx-flash" / "config.toml"


subsets = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in RIGHT.items()})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.tuples(subsets, subsets, subsets, subsets, subsets))
def test_the_highest_source_wins(tmp_path_factory: pytest.TempPathFactory, layers: tuple[dict[str, Any], ...]) -> None:
    toml, modelfile, environment, given_settings, keywords = layers
    file = write(tmp_path_factory.getbasetemp() / "highest.toml", as_toml(toml))
    found = resolve(
        given_settings,
        modelfile={name: str(value) for name, value in modelfile.items()},
        environment={f"MLX_FLASH_{name.upper()}": str(value) for name, value in environment.items()},
        file=file,
        **keywords,
    )
    not_given = {name for name, value in keywords.items() if value is None}
    for name, default in dataclasses.asdict(FlashConfig()).items():
        values = [layer[name] for layer in layers[:-1] if name in layer]
        values += [keywords[name]] if name in keywords and name not in not_given else []
        expected = "stock" if name == "kv_cache" and found.kv_max_tokens else values[-1] if values else default
        assert getattr(found, name) == expected, name


def test_what_does_not_win_is_checked_too() -> None:
    assert "MLX_FLASH_NUM_SLOTS" in wrong(num_slots=2, environment={"MLX_FLASH_NUM_SLOTS": "0"})


def test_none_as_a_keyword_is_not_given_but_in_settings_it_is() -> None:
    environment = {"MLX_FLASH_NUM_SLOTS": "3", "MLX_FLASH_IO": "direct"}
    assert resolve(num_slots=None, io=None, environment=environment) == FlashConfig(num_slots=3, io="direct")
    assert resolve({"num_slots": None}, environment=environment) == FlashConfig(io="direct")
    assert wrong({"io": None}).startswith("settings, key io: io is None: it must be one of")


def test_an_empty_variable_is_not_given() -> None:
    assert resolve(environment={"MLX_FLASH_NUM_SLOTS": "", "MLX_FLASH_NONSENSE": ""}) == FlashConfig()


TEXTS: list[tuple[str, str, object]] = [
    *(("telemetry", text, True) for text in ("true", "TRUE", "1", "yes", " On ")),
    *(("enabled", text, False) for text in ("false", "0", "no", "Off")),
    *((name, text, None) for name in (*COUNTS, *NUMBERS) for text in ("none", "None")),
    *((name, "AUTO", None) for name in (*COUNTS, *NUMBERS) if name != "ram_budget_gb"),
    ("ram_budget_gb", "AUTO", "auto"),
    ("io", "auto", "auto"),
    ("io", " direct ", "direct"),
    ("num_slots", "+3", 3),
    ("read_size_mb", "1e-1", 0.1),
    ("derived_cache_gb", "0", 0.0),
    ("ram_budget_gb", "1.5", 1.5),
]
NO_TEXTS = [
    *((name, text, "true or false") for name in SWITCHES for text in ("maybe", "none", "2")),
    *((name, text, "a whole number") for name in COUNTS for text in ("1.0", "many", "0x10", "1" * 5000)),
    ("read_size_mb", "big", "a number"),
    ("derived_cache_gb", "-1", "a finite number not below 0"),
    ("read_size_mb", "nan", "a finite number above 0"),
    ("io", "none", "one of 'auto', 'direct', 'buffered'"),
    ("queue_depth", "65", "between 1 and 64"),
]


def test_text_becomes_the_type_of_the_field() -> None:
    for name, text, value in TEXTS:
        found = parse_setting(name, text)
        assert found == value and type(found) is type(value), (name, text)
    for name, text, words in NO_TEXTS:
        variable = f"MLX_FLASH_{name.upper()}"
        message = wrong(environment={variable: text})
        assert re.match(rf"environment variable {variable}: {name} is .*: it must be {words}", message), message


@pytest.mark.parametrize(("given_name", "meant"), [("ram_budget", "ram_budget_gb"), ("Num_Slots", "num_slots")])
def test_an_unknown_name_suggests_the_nearest(given_name: str, meant: str, tmp_path: Path) -> None:
    end = f"{given_name}: there is no such setting. Did you mean '{meant}'?"
    assert wrong({given_name: 2}) == f"settings, key {end}"
    assert wrong(**{given_name: 2}) == f"keyword {end}"
    assert wrong(**{given_name: None}) == f"keyword {end}"
    assert wrong(modelfile={given_name: "2"}) == f"Modelfile, {end}"
    file = write(tmp_path / "a.toml", f"{given_name} = 2")
    assert wrong(file=file) == f"{file}, key {end}"


def test_an_unknown_name_that_is_near_to_none_lists_all() -> None:
    message = wrong({"xyz": 1})
    assert message.startswith("settings, key xyz: there is no such setting. There are ")
    assert all(name in message for name in RIGHT)
    assert "settings, key 3" in wrong({3: 4})


def test_environment_variables_that_are_no_settings() -> None:
    others = {"MLX_FLASH_TRACEBACK": "1", "MLX_FLASH_API_KEY": "x", "HOME": "/", "mlx_flash_x": "1"}
    assert resolve(environment=others) == FlashConfig()
    assert wrong(environment={"MLX_FLASH_RAM_BUGDET_GB": "2"}) == (
        "environment variable MLX_FLASH_RAM_BUGDET_GB: there is no such setting. "
        "Did you mean 'MLX_FLASH_RAM_BUDGET_GB'?"
    )
    assert "Did you mean 'MLX_FLASH_NUM_SLOTS'?" in wrong(environment={"MLX_FLASH_num_slots": "2"})


def from_flags(*flags: str) -> FlashConfig:
    """The settings that the command line gives."""
    args = parse_arguments(["plan", "--model", "x", *flags])
    return resolve(**{name: getattr(args, name) for name in SETTINGS})


def test_every_flag_sets_its_field() -> None:
    assert from_flags() == FlashConfig()
    for name in SETTINGS:
        flag = f"--{name.replace('_', '-')}"
        for value in RIGHT[name]:
            if isinstance(value, bool):
                assert getattr(from_flags(flag if value else f"--no-{flag[2:]}"), name) is value
            elif value is not None:
                assert getattr(from_flags(flag, str(value)), name) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_slots = \n", "the settings file is not TOML: .*line 1"),
        ("\n\nio = auto", "the settings file is not TOML: .*line 3"),
        ("num_slots = 1\nnum_slots = 2\n", "the settings file is not TOML: .*line 2"),
        ("num_slots = 1.5", "key num_slots: num_slots is 1.5: it must be a whole number"),
        ("telemetry = 1", "key telemetry: telemetry is 1: it must be True or False"),
        ("ram_budget_gb = 2020-01-01", "key ram_budget_gb: .*it must be a number of GB"),
        ("[ram_budget_gb]\nx = 1", "key ram_budget_gb: .*it must be a number of GB"),
        ("[flash]\nio = 'auto'", "key flash: there is no such setting"),
        ("x = " + "9" * 5000, "the settings file is not TOML"),
        ("x = " + "[" * 100_000, "the settings file is not TOML"),
    ],
)
def test_wrong_files(text: str, words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", text)
    message = wrong(file=file)
    assert message.startswith(f"{file}")
    assert re.search(words, message, re.DOTALL)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(file=tmp_path / "none.toml") == f"{tmp_path / 'none.toml'}: there is no such settings file"
    assert wrong(file=tmp_path).startswith(f"{tmp_path}: the settings file cannot be read: ")
    latin = tmp_path / "latin.toml"
    latin.write_bytes("io = 'é'".encode("latin-1"))
    assert wrong(file=latin).startswith(f"{latin}: the settings file is not TOML: ")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(latin))
    assert wrong().startswith(f"{latin}/mlx-flash/config.toml: the settings file cannot be read: ")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(RIGHT)), st.text())
@example("ram_budget_gb", "1e308")
def test_any_text_is_a_value_or_refused(name: str, text: str) -> None:
    try:
        config = resolve({name: text})
    except ConfigError as error:
        assert str(error).startswith(f"settings, key {name}: {name} is ")
    else:
        assert config.budget_bytes
