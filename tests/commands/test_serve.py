"""The settings of models that ``mlx-flash serve`` serves."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import children
from mlx_flash.commands import serve
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.config import FlashConfig
from mlx_flash.errors import ConfigError, RefusedError
from mlx_flash.modelfile.parse import create_model
from mlx_flash.server.catalog import Catalog


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that serves Modelfiles with some lines, and returns the settings of each model."""
    found: list[FlashConfig] = []
    monkeypatch.setattr(
        serve,
        "serve_catalog",
        lambda catalog, *_, **k: found.extend(catalog.find(n).config for n in catalog._named) or 0,
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")

    def configs_of(*modelfiles: str, flags: str = "") -> list[FlashConfig]:
        found.clear()
        words = ["serve", *flags.split()]
        for number, lines in enumerate(modelfiles):
            path = tmp_path / f"m{number}.modelfile"
            path.write_text(f"FROM ./base\n{lines}\n")
            words += ["--model", f"m{number}={path}"]
        serve.serve(parse_arguments(words), sys.stdout)
        return list(found)

    return configs_of


def test_a_single_modelfile_gives_the_budget_of_the_server(configs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert configs("FLASH_RAM_GB 3")[0].ram_budget_gb == 3
    assert configs("FLASH_RAM_GB 3", flags="--ram-budget-gb 2")[0].ram_budget_gb == 2
    monkeypatch.setenv("MLX_FLASH_RAM_BUDGET_GB", "1.5")
    assert configs("FLASH_RAM_GB 3")[0].ram_budget_gb == 1.5


def test_one_of_several_models_has_no_budget_of_its_own(configs: Any) -> None:
    with pytest.raises(ConfigError, match=r"m0\.modelfile: FLASH_RAM_GB 3\.0 .*share one budget.*--ram-budget-gb"):
        configs("FLASH_RAM_GB 3", "")
    both = configs("FLASH_RAM_GB 3", "", flags="--ram-budget-gb 2")
    assert [config.ram_budget_gb for config in both] == [2, 2]


def test_other_settings_are_each_models_own_and_flags_win(configs: Any) -> None:
    lines = ("FLASH_CONTEXT_LENGTH 512\nFLASH_KV disk", "FLASH_CONTEXT_LENGTH 1024")
    assert [(config.context_length, config.kv_cache) for config in configs(*lines)] == [(512, "disk"), (1024, None)]
    assert [config.context_length for config in configs(*lines, flags="--context-length 256")] == [256, 256]


def test_quantizing_a_cache_that_drops_tokens_is_refused_at_the_start(configs: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_max_tokens is 2048 and --kv-bits is 8: .*leave one of them unset"):
        configs("FLASH_KV_MAX_TOKENS 2048", flags="--kv-bits 8")
    (found,) = configs("FLASH_KV_MAX_TOKENS 2048", flags="--kv-bits 0")
    assert (found.kv_max_tokens, found.kv_cache) == (2048, "stock")


def test_a_modelfile_that_switches_streaming_off_is_refused(configs: Any) -> None:
    with pytest.raises(ConfigError, match=r"m1\.modelfile: FLASH false leaves the model to mlx-lm"):
        configs("", "FLASH false")


def test_models_that_create_named_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that get their names while the server runs. One whose Modelfile is wrong fails alone."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    file = tmp_path / "Modelfile"
    file.write_text(f"FROM {tmp_path}/base\nSYSTEM Be brief.\nFLASH_CONTEXT_LENGTH 512\n")
    create_model("brief", file)
    catalogs: list[Catalog] = []
    monkeypatch.setattr(serve, "serve_catalog", lambda catalog, *_, **__: catalogs.append(catalog) or 0)
    serve.serve(parse_arguments(["serve", "--model", str(tmp_path / "base")]), sys.stdout)
    serve.serve(parse_arguments(["serve", "--model", "brief", "--model", "short=brief"]), sys.stdout)
    other, own = catalogs
    assert other.find("brief") == replace(own.find("brief"), created=other.find("brief").created)
    assert other.find("brief").base == str(tmp_path / "base") and own.default is own.find("brief")
    assert (
        own.find("short").config.context_length == 512 and own.find("short").first_messages[0]["content"] == "Be brief."
    )
    file.write_text(f"FROM {tmp_path}/base\nFLASH_RAM_GB 3\n")
    create_model("large", file)
    assert other.names()[1:3] == ["brief", "large"]
    with pytest.raises(RefusedError, match="share one budget") as found:
        other.find("large")
    assert found.value.status == 400
    with pytest.raises(RefusedError, match="there is no model 'none' here"):
        other.find("none")


def test_verbose_prints_each_line_once() -> None:
    program = (
        "import logging, sys\n"
        "from mlx_flash.commands import dispatch, serve\n"
        "serve.serve_catalog = lambda *_, **__: logging.getLogger('mlx_flash').info('a line') or 0\n"
        "sys.exit(dispatch.run_command(['serve', '--verbose']))\n"
    )
    done = children.run("-c", program)
    assert done.returncode == 0 and done.stderr.decode().count("a line") == 1
