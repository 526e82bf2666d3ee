"""Objects that load, generate and close: the same text as mlx-lm's, and errors for what they cannot take."""

from __future__ import annotations

import queue
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import children
import mlx_flash
from mlx_flash import (
    ConfigError,
    FlashConfig,
    FlashGenerationLoop,
    FlashLLM,
    FlashManager,
    parse_flash_directives,
)
from mlx_flash.cli import main
from mlx_flash.commands.arguments import parse_arguments
from mlx_flash.config import FLAGS, IDLE, warn_once
from mlx_flash.config import OTHER_NAMES as OTHERS
from mlx_flash.engine import prepare
from models import stock
from saved_models import random_model_fixture

SHAPE = "--layers 2 --hidden-size 64 --intermediate-size 96 --heads 4 --kv-heads 2 --vocab-size 600"
CONFIG = FlashConfig(ram_budget_gb=2.0, telemetry=False)

folder = random_model_fixture(SHAPE)


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    model, tokenizer, *_ = mlx_lm.load(str(folder))
    return mlx_lm.generate(model, tokenizer, "Once", max_tokens=6)


def test_a_manager_loads_and_shuts_down(folder: Path, expected: str) -> None:
    with FlashManager(CONFIG) as manager:
        model, _ = manager.load(folder)
        assert "".join(model.stream_generate("Once", max_tokens=6)) == expected
        assert "model" in [running.name for running in FlashManager.of_process().running]
    manager.shutdown()
    assert not manager.models
    with pytest.raises(mlx_flash.ClosedError):
        model(mx.array([[1]]))


def test_a_loop_takes_a_path_or_a_model(folder: Path, expected: str) -> None:
    loop = FlashGenerationLoop(folder, CONFIG)
    assert "".join(loop.stream_generate("Once", max_tokens=6)) == expected
    again = FlashGenerationLoop(loop.flash_model, loop.tokenizer)
    assert "".join(again.stream_generate("Once", max_tokens=6)) == expected
    with pytest.raises(ConfigError, match="Hint: model, tokenizer = "):
        FlashGenerationLoop(loop.flash_model)
    loop.shutdown()
    loop.shutdown()


def test_a_lazily_loaded_model_is_wrapped(folder: Path, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, *_ = mlx_lm.load(str(folder), lazy=True)
    for path in (None, folder):
        if path is None:  # other tests have shards open too
            mine = [file for file in prepare._open_files() if file.parent == folder]
            assert mine
            monkeypatch.setattr(prepare, "_open_files", lambda mine=mine: mine)
        with FlashLLM(model, CONFIG, model_path=path) as flash:
            assert flash.name == "model"
            assert "".join(FlashGenerationLoop(flash, tokenizer).stream_generate("Once", max_tokens=6)) == expected
            with pytest.raises(ConfigError, match="loaded without a tokenizer"):
                next(flash.stream_generate("Once"))
    monkeypatch.setattr(prepare, "_open_files", list)
    with pytest.raises(ConfigError, match=r"is not known: .* none. Hint: .*model_path"):
        FlashLLM(model, CONFIG)


def test_a_model_that_was_changed_is_not_wrapped(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"in memory. Hint: load it with mlx_flash.load"):
        FlashLLM(stock(folder), CONFIG, model_path=folder)
    model, *_ = mlx_lm.load(str(folder), lazy=True)
    model.update({"model": {"norm": {"weight": model.model.norm.weight * 2}}})
    with pytest.raises(ConfigError, match=r"'model.norm.weight' is not as mlx-lm loads it .* 1 parameters"):
        FlashLLM(model, CONFIG, model_path=folder)


OTHER_NAMES = [
    ("max_kv_size", 512, "kv_max_tokens", 512),
    ("prefill_chunk_size", 64, "prefill_step_size", 64),
    ("disk_kv_enabled", True, "kv_cache", "disk"),
    ("disk_kv_enabled", False, "kv_cache", None),
    ("disk_kv_dir", "keys", "kv_directory", "keys"),
    ("disk_kv_max_tokens", 512, "kv_max_tokens", 512),
    ("threads", 6, "queue_depth", 6),
]


def test_other_names_mean_the_same_everywhere(tmp_path: Path) -> None:
    for name, value, ours, expected in OTHER_NAMES:
        wanted = FlashConfig(**{ours: expected})  # type: ignore[arg-type]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        file = tmp_path / "config.toml"
        file.write_text(f"{name} = {text if not isinstance(value, str) else repr(value)}\n")
        assert FlashConfig(**{name: value}) == wanted  # type: ignore[arg-type]
        assert FlashConfig.resolve(file=file, environment={}) == wanted
        assert FlashConfig.resolve({name: value}, environment={}) == wanted
        assert FlashConfig.resolve(environment={f"MLX_FLASH_{name.upper()}": text}) == wanted
        assert FlashConfig.resolve(environment={}, **{name: value}) == wanted
        assert parse_flash_directives(f"FLASH_{name.upper()} {text}") == wanted


THEIRS = {
    "enabled": True,
    "ram_budget_gb": 2.0,
    "eviction_strategy": "free",
    "metal_kernels": True,
    "expert_cache_size": 8,
    "strict_guardrails": True,
    "debug": True,
    "pipeline_depth": 2,
    "max_kv_size": None,
    "kv_keep": 250,
    "prefill_chunk_size": 0,
    "moe_top_k_override": 2,
    "disk_kv_enabled": True,
    "disk_kv_dir": "",
    "disk_kv_max_tokens": 4096,
    "kv_cache_quantized": True,
    "kv_cache_bits": 8,
    "kv_cache_local_window_size": 128,
    "tiled_execution": True,
    "tile_size": 512,
    "pipelined_execution": True,
    "enable_profiling": True,
    "monitor_queue": queue.Queue(),
}
"""The 23 fields of another program's ``FlashConfig``."""


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return texts


def test_all_fields_of_another_program_are_taken_and_one_warning_names_the_idle_ones(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    warn_once.cache_clear()
    ours = FlashConfig(ram_budget_gb=2.0, kv_keep=250, kv_cache="disk", kv_max_tokens=4096)
    assert FlashConfig(**THEIRS) == FlashConfig(**THEIRS) == ours
    (text,) = warnings_of(caplog)
    named = {
        name: why for names, why in re.findall(r"(?:: |; )([\w, ]+) \(([^)]+)\)", text) for name in names.split(", ")
    }
    assert named == {name: IDLE[name] for name in THEIRS if name in IDLE} and len(named) == 15
    assert FlashConfig(debug=False, moe_top_k_override=None) == FlashConfig()  # type: ignore[call-arg]
    (tmp_path / "config.toml").write_text("tile_size = 3\n")
    found = FlashConfig.resolve(
        file=tmp_path / "config.toml", environment={"MLX_FLASH_EVICTION": "free"}, pipeline_depth=2
    )
    assert found == FlashConfig()
    assert [text.split(" (")[0] for text in warnings_of(caplog)] == [
        f"without effect: {tmp_path / 'config.toml'}, key tile_size",
        "without effect: environment variable MLX_FLASH_EVICTION",
        "without effect: keyword pipeline_depth",
    ]


DIRECTIVES = """FLASH true
FLASH_RAM_GB 3
FLASH_THREADS 4
FLASH_PREFETCH_LAYERS 2
FLASH_QUANT_WARN_BELOW 4
FLASH_TOP_K 2
FLASH_EVICTION free
FLASH_EXPERT_POOL_GB 0
"""


def test_directives_of_another_program_are_taken_and_idle_ones_noted(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    assert parse_flash_directives(DIRECTIVES) == FlashConfig(ram_budget_gb=3, queue_depth=4)
    (text,) = warnings_of(caplog)
    idle = ("PREFETCH_LAYERS", "QUANT_WARN_BELOW", "TOP_K", "EVICTION", "EXPERT_POOL_GB")
    found = re.findall(r"line (\d): FLASH_(\w+) has no effect", text)
    assert found == [(str(number), name) for number, name in enumerate(idle, 4)]
    assert parse_flash_directives("FROM /models/x\nSYSTEM hello\n") == FlashConfig(enabled=False)
    with pytest.raises(ConfigError, match="FLASH_RAM"):
        parse_flash_directives("FLASH_RAMGB 3")


def test_the_docs_list_every_other_name() -> None:
    table = (children.ROOT / "docs" / "settings.md").read_text().split("| name elsewhere |")[1].split("\n\n")[0]
    names = "".join(line.split("|")[1] for line in table.splitlines()[1:])
    assert set(re.findall(r"`([a-z_]+)`", names)) == set(OTHERS)
    assert set(re.findall(r"`(--[a-z-]+)`", names)) == {*FLAGS, "--tile-size", "--no-pipeline", "--expert-pool-gb"}


def test_another_programs_imports_and_script_run(folder: Path) -> None:
    """A script of our own that makes the calls of another program's README and quick start."""
    stock, tokenizer, *_ = mlx_lm.load(str(folder))
    expected = mlx_lm.generate(stock, tokenizer, "Once", max_tokens=8)
    done = children.run("-c", SCRIPT.format(path=str(folder)))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == expected
    assert done.stderr.decode().count("without effect") == 1


SCRIPT = """
import mlx_lm
from mlx_flash import FlashConfig, FlashGenerationLoop, FlashLLM
flash = FlashLLM(mlx_lm.load({path!r}, lazy=True)[0], FlashConfig(ram_budget_gb=2))  # found from the open files
assert flash.name == "model" and FlashGenerationLoop({path!r}, FlashConfig(ram_budget_gb=2)).shutdown() is None
flash.close()
from mlx_flash.disk_kv_cache import DiskKVCache
from mlx_flash.generation import FlashGenerationLoop, FlashLLM
from mlx_flash import FlashConfig
from mlx_flash.integration.lmstudio import apply_flash_patch
apply_flash_patch(FlashConfig(enabled=True, ram_budget_gb=1.5, debug=True))
import mlx_lm
model, tokenizer = mlx_lm.load({path!r})
assert isinstance(model, FlashLLM)
cache = [DiskKVCache(layer_idx=i, cache_dir={path!r} + "/kv") for i in range(len(model.layers))]
cache[1] = DiskKVCache(1, {path!r} + "/kv", None)
for token in mlx_lm.stream_generate(model, tokenizer, prompt="Once", max_tokens=8, prompt_cache=cache):
    print(token.text, end="")
"""


def test_flags_without_a_command_are_those_of_generate_or_run(folder: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "Modelfile").write_text(f"FROM {folder}\nPARAMETER num_predict 4\n{DIRECTIVES}")
    warn_once.cache_clear()
    for command in ("generate", "serve", "plan", "verify"):
        assert parse_arguments([command, "m", "--expert-pool-gb", "2", "--tile-size", "9"]).expert_pool_gb == 2
    for command, bits in (
        (["--model", str(folder), "--ram", "1.5", "--kv-quant", "8", "--max-tokens", "4", "--tile-size", "9"], 8),
        (["--model", str(folder), "--prompt", "hi", "--kv-quant", "0", "--debug", "--no-pipeline"], None),
        (["--modelfile", str(tmp_path / "Modelfile"), "--prompt", "hi", "--ram", "1.5"], ()),
    ):
        args = parse_arguments(command)
        assert (args.command, vars(args).get("kv_bits", ())) == ("run" if bits == () else "generate", bits)
        assert args.prompt == ("hi" if "--prompt" in command else None)
    assert args.file == str(tmp_path / "Modelfile") and args.ram_budget_gb == 1.5
    assert (
        main(["--model", str(folder), "--ram", "1.5", "--kv-quant", "8", "--max-tokens", "4", "--prompt", "Once"]) == 0
    )
    printed = capfd.readouterr().out
    assert main(["generate", str(folder), "--kv-bits", "8", "--max-tokens", "4", "--prompt", "Once"]) == 0
    assert printed == capfd.readouterr().out and printed
    assert main(["--modelfile", str(tmp_path / "Modelfile"), "--prompt", "hi"]) == 0
    assert capfd.readouterr().err.count("has no effect") == 5


def test_two_names_of_a_setting_must_agree(tmp_path: Path) -> None:
    assert FlashConfig(max_kv_size=8, kv_max_tokens=8).kv_max_tokens == 8  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"max_kv_size is kv_max_tokens, which is 9 and 8"):
        FlashConfig(kv_max_tokens=9, max_kv_size=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="'perhaps': it must be true or false"):
        FlashConfig(disk_kv_enabled="perhaps")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword"):
        FlashConfig(max_kv_sise=8)  # type: ignore[call-arg]
