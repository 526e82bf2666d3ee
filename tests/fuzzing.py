"""Parsers of files and settings that others may have written, fed with damaged ones.

A target makes damaged input and reads it. It raises an error if anything but the expected refusals comes of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import time
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import mlx.core as mx
from mlx_lm.models.cache import KVCache, save_prompt_cache
from rich.console import Console

from mlx_flash import FlashConfig
from mlx_flash.config import variables_of_fields
from mlx_flash.errors import CheckpointError, ConfigError, FlashError, ReadError
from mlx_flash.kv.saved import load_saved
from mlx_flash.layout.load import load_config, load_lazily
from mlx_flash.modelfile.parse import parse_modelfile
from mlx_flash.monitor.app import draw, make_parser, print_json
from mlx_flash.monitor.watch import Watcher
from mlx_flash.prefixes.folder import PageFolder
from mlx_flash.prefixes.pages import Blob, PageFile, PageKey, encode_page
from mlx_flash.storage.safetensors import read_checkpoint, read_shard
from models import LLAMA, save

Target = Callable[[Path, random.Random], None]

WORDS = (
    b"0 -1 1e999 NaN Infinity null true 9223372036854775808 1.5 \"\" [] {} [[[[[[ {{ }} {% %} \\u0000 \\ud800 ../ / .. "
    b"\x00 \xff \x1b[2J \n \" \"\"\" FROM PARAMETER TEMPLATE {{.Prompt}} {{range}} {{end}} = ["
).split(b" ")  # fmt: skip
"""Text that parsers may stumble over."""

VALUES: list[Any] = [
    *(
        0,
        -1,
        1,
        2**31,
        2**63,
        10**30,
        1.5,
        1e308,
        float("nan"),
        float("inf"),
        True,
        None,
        "",
        "x",
        "\x1b[2J\x07",
        "../../x",
    ),
    *("\ud800", [], {}, [[]], {"": None}, ["a", "b"], "a" * 5000, [0] * 500),
]


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return data with some bytes changed, removed, doubled or added."""
    made = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 3, 8))):
        at, end = sorted(dice.randrange(len(made) + 1) for _ in range(2))
        end = min(end, at + dice.choice((1, 4, 64)))
        kind = dice.randrange(5)
        if kind == 0 and at < len(made):
            made[at] = dice.choice((0, 255, dice.randrange(256), made[at] ^ 1 << dice.randrange(8)))
        elif kind == 1:
            del made[at:end]
        elif kind == 2:
            made[at:at] = made[at:end] * dice.choice((1, 2, 50))
        elif kind == 3:
            made[at:end] = dice.choice(WORDS)
        elif dice.random() < 0.2:
            del made[at:]
    return bytes(made)


def other_json(value: Any, dice: random.Random) -> Any:
    """Return a JSON value with one part replaced, removed, or put elsewhere."""
    if isinstance(value, dict | list) and value and dice.random() < 0.85:
        made: Any = value.copy()
        key = dice.choice(list(made) if isinstance(made, dict) else range(len(made)))
        if dice.random() < 0.1:
            del made[key]
        elif dice.random() < 0.1 and isinstance(made, dict):
            made[str(dice.choice(VALUES))] = made[key]
        else:
            made[key] = other_json(made[key], dice)
        return made
    return dice.choice(VALUES)


def damaged_json(value: Any, dice: random.Random) -> bytes:
    """Return a damaged JSON text, most often one that is JSON still."""
    for _ in range(dice.choice((1, 1, 2, 5))):
        value = other_json(value, dice)
    text = json.dumps(value).encode()
    return text if dice.random() < 0.7 else damaged(text, dice)


def header(folder: Path, dice: random.Random) -> None:
    """The header of a safetensors file."""
    entries = {"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"format": "mlx"}}
    entries["b"] = {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}
    text = damaged_json(entries, dice)
    path = folder / "model.safetensors"
    data = len(text).to_bytes(8, "little") + text + bytes(16)
    path.write_bytes(data if dice.random() < 0.7 else damaged(data, dice))
    with contextlib.suppress(CheckpointError):
        shard = read_shard(path)
        assert all(0 <= t.extent.offset <= t.extent.end <= path.stat().st_size for t in shard.tensors)


def index(folder: Path, dice: random.Random) -> None:
    """The index of a checkpoint."""
    path = folder / "model.safetensors"
    if not path.exists():
        text = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    table = {"metadata": {"total_size": 4}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_bytes(damaged_json(table, dice))
    with contextlib.suppress(CheckpointError):
        assert [shard.path for shard in read_checkpoint(folder).shards] == [path]


SMALL = {**LLAMA, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 32}


MLX_LM_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)


def config(folder: Path, dice: random.Random) -> None:
    """``config.json``, up to the lazily loaded model. What mlx-lm raises is its own."""
    if not (folder / "model.safetensors").exists():
        save(folder, SMALL)
    extra = {"quantization": {"group_size": 32, "bits": 4}, "rope_scaling": {"type": "linear", "factor": 2.0}}
    known = {**SMALL, **dice.choice(({}, extra, {"model_file": "model.py"}))}
    (folder / "config.json").write_bytes(damaged_json(known, dice))
    try:
        load_config(folder)
    except CheckpointError:
        return
    with contextlib.suppress(FlashError, *MLX_LM_ERRORS):
        load_lazily(folder, read_checkpoint(folder))


MODELFILE = '''FROM ./model
PARAMETER temperature 0.7
PARAMETER stop "<|end|>"
SYSTEM """Answer in
one sentence."""
TEMPLATE """{{ if .System }}<s>{{ .System }}{{ end }}{{ range .Messages }}{{ .Role }}: {{ .Content }}{{ end }}"""
MESSAGE user Hello
FLASH_RAM_GB 4
'''


def modelfile(folder: Path, dice: random.Random) -> None:
    """A Modelfile, and its template applied to a conversation."""
    text = damaged(MODELFILE.encode(), dice).decode(errors=dice.choice(("replace", "surrogateescape")))
    (folder / "model").mkdir(exist_ok=True)
    with contextlib.suppress(ConfigError):
        found = parse_modelfile(text, folder / "Modelfile")
        if found.chat_template:
            with contextlib.suppress(jinja2.TemplateError, TypeError):
                template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(found.chat_template)
                template.render(messages=[{"role": "user", "content": "x"}])


def settings(folder: Path, dice: random.Random) -> None:
    """The TOML file and environment variables."""
    file = folder / "config.toml"
    lines = [
        f"{name} = {json.dumps(dice.choice(VALUES))}" for name in dice.sample(sorted(variables_of_fields().values()), 3)
    ]
    file.write_bytes(damaged("\n".join(lines).encode(errors="replace"), dice))
    names = dice.sample(sorted(variables_of_fields()), 2)
    values = [dice.choice((*map(str, VALUES), "min", "4", "off")) for _ in names]
    with contextlib.suppress(ConfigError):
        FlashConfig.resolve(
            file=dice.choice((file, Path("/dev/null"))), environment=dict(zip(names, values, strict=True))
        )


def state(folder: Path, dice: random.Random) -> None:
    """A file of telemetry, shown by the monitor."""
    folder = folder / "mlx-flash"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{os.getpid()}-0.json"
    now = time.time()
    entry = {"schema": 1, "pid": os.getpid(), "number": 0, "started": now, "written": now, "clock": 1.0, "ended": False}
    entry["state"] = STATE
    file.write_bytes(damaged_json(entry, dice))
    watcher = Watcher()
    watcher.look()
    console = Console(file=io.StringIO(), width=dice.choice((20, 80, 200)), legacy_windows=False)
    lines = draw(watcher, make_parser().parse_args([]), console, dice.choice((None, 8, 60)))
    text = "\n".join(line.plain for line in lines)
    assert not [c for c in text if unicodedata.category(c) == "Cc" and c != "\n"], "control characters are shown"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_json(watcher)
    for line in out.getvalue().splitlines():
        json.loads(line)


STATE: dict[str, Any] = {
    "model": {"name": "m", "nbytes": 100},
    "passes": {"num_passes": 3, "pass_seconds": 0.5, "began": 0.1, "num_tokens": 3},
    "stream": {"wait_seconds": 0.1, "held_seconds": 0.2},
    "memory": {"budget_bytes": 10**9, "footprint": 10**8},
    "units": [{"name": "layer", "nbytes": 5, "state": "waiting"}],
    "writes": {"session_bytes": 1, "day_bytes": 2},
}


def page(folder: Path, dice: random.Random) -> None:
    """A page or snapshot of the prefix cache."""
    name = "ab" * 32
    key = PageKey(name, "", dice.choice(("", "state")), 0, 16, "m", "title")
    encoded = encode_page(key, {"k": Blob(bytes(100), "uint8", (100,)), "v": Blob(b"", "uint8", (0,))})
    path = folder / "pages" / f"{name}.page"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(encoded.nbytes)
        encoded.write(file.fileno())
    path.write_bytes(
        _with_other_description(path.read_bytes(), dice) if dice.random() < 0.5 else damaged(path.read_bytes(), dice)
    )
    with contextlib.suppress(ReadError), PageFile(path.parent, name) as opened:
        for blob, info in opened.blobs.items():
            if info.nbytes < 10**6:
                data = bytearray(info.nbytes)
                opened.read_into(blob, memoryview(data))
                assert not any(data), "another content has the right checksum"
    PageFolder(folder).models()


def _with_other_description(data: bytes, dice: random.Random) -> bytes:
    """Return a page whose description is damaged, with checksums that are right: someone made it."""
    from mlx_flash.prefixes.pages import _HEAD, _LENGTHS, MAGIC, zlib

    _, nbytes, length, _ = _HEAD.unpack_from(data)
    line, _, table = data[_HEAD.size : _HEAD.size + length].partition(b"\n")
    text = damaged_json(json.loads(line), dice) + b"\n" + damaged_json(json.loads(table), dice)
    rest = data[4096:]
    start = -(-(_HEAD.size + len(text)) // 4096) * 4096
    nbytes = start + len(rest)
    head = _HEAD.pack(MAGIC, nbytes, len(text), zlib.crc32(_LENGTHS.pack(nbytes, len(text)) + text))
    return (head + text).ljust(start, b"\0") + rest


def prompt_cache(folder: Path, dice: random.Random) -> None:
    """A prompt cache of mlx-lm, which is continued if it can be loaded."""
    path = folder / "cache.safetensors"
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 4, 8)), mx.ones((1, 1, 4, 8)))
    save_prompt_cache(str(path), [cache], {"model": "m"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if dice.random() < 0.6:
        text = damaged_json(json.loads(data[8 : 8 + length]), dice)
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    else:
        data = damaged(data, dice)
    path.write_bytes(data)
    with contextlib.suppress(FlashError):
        for entry in load_saved(path)[0]:
            mx.eval(entry.state)


TARGETS: dict[str, Target] = {
    function.__name__: function for function in (header, index, config, modelfile, settings, state, page, prompt_cache)
}


def run(name: str, folder: Path, seed: int, numbers: Sequence[int]) -> None:
    """Run some cases of a target, each of which depends on the seed and its number only."""
    for number in numbers:
        try:
            TARGETS[name](folder, random.Random(f"{seed} {number}"))
        except BaseException as error:
            error.add_note(f"case {number} of {name} with seed {seed}")
            raise
