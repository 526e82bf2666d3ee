"""Parsers of files and settings that others may have written, fed with damaged ones.

A target is made once in a process, with valid input as seeds, and called for each case: it damages a seed and parses
it. It raises an error if anything but the expected refusals comes of it.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
from mlx_lm import utils as mlx_lm_utils

from mlx_flash.errors import CheckpointError, ConfigError, FlashError, ReadError
from mlx_flash.layout.load import load_config, load_lazily
from mlx_flash.modelfile.parse import parse_modelfile
from mlx_flash.prefixes.store import _HEAD, MAGIC, Blob, encode_page, list_prefixes, read_page
from mlx_flash.storage.safetensors import absent_shards, read_checkpoint, read_shard
from models import LLAMA, save

Case = Callable[[random.Random], None]
Target = Callable[[Path], AbstractContextManager[Case]]

CHUNK = 100
"""Cases that share a seeded generator of random numbers: seeding takes longer than many a case."""

WORDS = (
    b"0 -1 1e999 NaN Infinity null true 9223372036854775808 1.5 \"\" [] {} [[[[[[ {{ }} {% %} \\u0000 \\ud800 ../ / .. "
    b"\x00 \xff \x1b[2J \n \" \"\"\" FROM PARAMETER TEMPLATE {{.Prompt}} {{range}} {{end}} = ["
).split(b" ")  # fmt: skip
"""Text that parsers may stumble over."""

# fmt: off
VALUES: list[Any] = [
    0, -1, 1, 2**31, 2**63, 10**30, 10**400, 1.5, 5e-324, 1e308, float("nan"), float("inf"), True, None, "", "x",
    "\x1b[2J\x07", "../../x", "\ud800", [], {}, [[]], {"": None}, ["a", "b"], "a" * 5000, [0] * 500,
]
# fmt: on

TIMES = (1, 1, 2, 3, 8)


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return data with some bytes changed, removed, doubled or added."""
    made, draw = bytearray(data), dice.random
    for _ in range(TIMES[int(draw() * len(TIMES))]):
        at = int(draw() * (len(made) + 1))
        end = at + (1, 4, 64)[int(draw() * 3)]
        kind = int(draw() * 5)
        if kind == 0 and at < len(made):
            made[at] = (0, 255, int(draw() * 256), made[at] ^ 1 << int(draw() * 8))[int(draw() * 4)]
        elif kind == 1:
            del made[at:end]
        elif kind == 2:
            made[at:at] = made[at:end] * (1, 2, 50)[int(draw() * 3)]
        elif kind == 3:
            made[at:end] = WORDS[int(draw() * len(WORDS))]
        elif draw() < 0.2:
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
    """Return a JSON text with some parts changed, and at times with other damage."""
    for _ in range(dice.choice(TIMES)):
        value = other_json(value, dice)
    text = json.dumps(value).encode()
    return text if dice.random() < 0.7 else damaged(text, dice)


@contextmanager
def header(folder: Path) -> Iterator[Case]:
    """The header of a safetensors file."""
    entries = {"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"format": "mlx"}}
    entries["b"] = {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}
    path = folder / "model.safetensors"

    def case(dice: random.Random) -> None:
        text = damaged_json(entries, dice)
        data = len(text).to_bytes(8, "little") + text + bytes(16)
        data = data if dice.random() < 0.9 else damaged(data, dice)
        path.write_bytes(data)
        with suppress(CheckpointError):
            assert all(0 <= t.offset <= t.end <= len(data) for t in read_shard(path).tensors)

    yield case


@contextmanager
def index(folder: Path) -> Iterator[Case]:
    """The index of a checkpoint."""
    name = "model.safetensors"
    (folder / name).touch()
    value = {"metadata": {"total_size": 4}, "weight_map": {"a": name, "b": "model-2.safetensors"}}

    def case(dice: random.Random) -> None:
        (folder / f"{name}.index.json").write_bytes(damaged_json(value, dice))
        shards = absent_shards(folder)
        assert name not in shards and all(name.isprintable() for name in shards)

    yield case


SMALL = {**LLAMA, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 32}

MLX_LM_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)


@contextmanager
def config(folder: Path) -> Iterator[Case]:
    """``config.json``, up to the lazily loaded model. mlx-lm's errors are its own; it opens the folder's files only."""
    save(folder, SMALL)
    checkpoint = read_checkpoint(folder)
    more = ({}, {"model_file": "model.py"}, {"quantization": {"group_size": 32, "bits": 4}})
    seeds = [{**SMALL, **extra, "rope_scaling": {"type": "linear", "factor": 2.0}} for extra in more]

    def case(dice: random.Random) -> None:
        (folder / "config.json").write_bytes(damaged_json(dice.choice(seeds), dice))
        try:
            load_config(folder)
        except CheckpointError:
            return
        with suppress(FlashError, *MLX_LM_ERRORS):
            load_lazily(folder, checkpoint)

    def opened(path: Path, *args: Any) -> Any:
        assert path.parent == folder, f"{path} is opened"
        return open(path, *args)

    with patch.object(mlx_lm_utils, "open", opened, create=True):
        yield case


MODELFILE = '''FROM ./model
PARAMETER temperature 0.7
PARAMETER stop "<|end|>"
SYSTEM """Answer in
one sentence."""
TEMPLATE """{{ if .System }}<s>{{ .System }}{{ end }}{{ range .Messages }}{{ .Role }}: {{ .Content }}{{ end }}"""
MESSAGE user Hello
FLASH_RAM_GB 4
'''


@contextmanager
def modelfile(folder: Path) -> Iterator[Case]:
    """A Modelfile, and its template applied to a conversation."""
    (folder / "model").mkdir(exist_ok=True)
    path, data = folder / "Modelfile", MODELFILE.encode()
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()

    def case(dice: random.Random) -> None:
        text = damaged(data, dice).decode(errors=dice.choice(("replace", "surrogateescape")))
        with suppress(ConfigError):
            template = parse_modelfile(text, path).chat_template
            if template:
                with suppress(jinja2.TemplateError, TypeError, RecursionError):
                    environment.from_string(template).render(messages=[{"role": "user", "content": "x"}])

    yield case


@contextmanager
def page(folder: Path) -> Iterator[Case]:
    """A page of the prefix cache."""
    name = "ab" * 32
    (folder / "pages").mkdir()
    key = {"page": name, "tokens": 16, "model": "m", "title": "title"}
    head, text, *arrays = encode_page(key, {"k": Blob(bytes(100), "uint8", (100,)), "v": Blob(b"", "uint8", (0,))})
    valid, seed, path = b"".join([head, text, *arrays]), json.loads(bytes(text)), folder / "pages" / f"{name}.page"

    def case(dice: random.Random) -> None:
        data = _with_description(damaged_json(seed, dice), b"".join(arrays))
        path.write_bytes(data if dice.random() < 0.8 else damaged(valid, dice))
        with suppress(ReadError):
            for blob in read_page(path.parent, name).values():
                assert not any(blob.data), "another content has the right checksum"
        if dice.random() < 0.01:
            list_prefixes(folder)

    yield case


def _with_description(text: bytes, arrays: bytes) -> bytes:
    """Return a page with checksums that are right: someone made it."""
    nbytes = _HEAD.size + len(text) + len(arrays)
    return _HEAD.pack(MAGIC, nbytes, len(text), zlib.crc32(text), zlib.crc32(arrays)) + text + arrays


TARGETS: dict[str, Target] = {target.__name__: target for target in (header, index, config, modelfile, page)}


def run(name: str, folder: Path, seed: int, numbers: range, before_chunk: Callable[[], object] = bool) -> None:
    """Run some cases of a target. A case depends on the seed and on those before it in its chunk of ``CHUNK``."""
    assert numbers.start % CHUNK == 0
    dice = random.Random()
    with TARGETS[name](folder) as case:
        for number in numbers:
            if number % CHUNK == 0:
                before_chunk()
                dice.seed(f"{seed} {number}")
            try:
                case(dice)
            except BaseException as error:
                error.add_note(f"case {number} of {name} with seed {seed}")
                raise
