"""Parsers of files and settings that others may have written, fed with damaged ones.

A target is made once in a process, with valid input as seeds, and called for each case: it damages a seed and parses
it. It raises an error if anything but the expected refusals comes of it. Most targets write to one open file, so that a
case takes tens of microseconds.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jinja2
import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import KVCache, save_prompt_cache

from mlx_flash import config as config_module
from mlx_flash.errors import CheckpointError, ConfigError, FlashError, ReadError
from mlx_flash.kv.diskcache import load_saved
from mlx_flash.layout import load
from mlx_flash.layout.load import load_config, load_lazily
from mlx_flash.modelfile.parse import parse_modelfile
from mlx_flash.prefixes import store as pagefile
from mlx_flash.prefixes.store import _HEAD, _LENGTHS, MAGIC, Blob, PageFile, PageKey, encode_page, list_prefixes
from mlx_flash.storage import safetensors
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


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_QUOTE = ord('"')
_VALUE_TEXTS = [json.dumps(value).encode() for value in VALUES]


class JsonSeeds:
    """JSON texts made from a value, which are damaged token by token, so that most of them are JSON still."""

    def __init__(self, value: Any) -> None:
        dice, values = random.Random(0), [value] * 50
        for _ in range(200):
            values.append(other_json(dice.choice(values), dice))
        texts = [_TOKEN.findall(json.dumps(value).encode()) for value in values]
        placed = [(text, [i for i, token in enumerate(text) if token not in b"[]{},:"]) for text in texts]
        self._seeds = [seed for seed in placed if seed[1]]

    def damaged(self, dice: random.Random) -> bytes:
        """Return a damaged text."""
        draw = dice.random
        text, places = self._seeds[int(draw() * len(self._seeds))]
        made = text.copy()
        for _ in range(int(draw() * 4)):
            at, kind = places[int(draw() * len(places))], draw()
            is_key = text[at + 1 : at + 2] == [b":"]
            if kind < 0.85:
                new = _VALUE_TEXTS if kind < 0.7 else text
                token = new[int(draw() * len(new))]
                if token[0] == _QUOTE or (not is_key and token not in b"[]{},:"):
                    made[at] = token
            elif kind < 0.95:
                made[at] = damaged(made[at], dice)
            else:
                made[at] = b"".join(text[at : at + 12])
        joined = b"".join(made)
        return joined if draw() < 0.8 else damaged(joined, dice)


class OneFile:
    """A file that stays open while its content changes: opening one takes longer than many a case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w+b")

    def fill(self, data: bytes) -> None:
        """Replace the content."""
        os.ftruncate(self._file.fileno(), len(data))
        os.pwrite(self._file.fileno(), data, 0)

    def opened(self, *_: object) -> int:
        """Return a new descriptor, as ``os.open`` does."""
        fd = os.dup(self._file.fileno())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def __enter__(self) -> OneFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def header(folder: Path) -> Iterator[Case]:
    """The header of a safetensors file."""
    entries = {"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"format": "mlx"}}
    entries["b"] = {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}
    seeds = JsonSeeds(entries)

    def case(dice: random.Random) -> None:
        text = seeds.damaged(dice)
        data = len(text).to_bytes(8, "little") + text + bytes(16)
        data = data if dice.random() < 0.9 else damaged(data, dice)
        file.fill(data)
        with suppress(CheckpointError):
            shard = read_shard(file.path)
            assert all(0 <= t.extent.offset <= t.extent.end <= len(data) for t in shard.tensors)

    with OneFile(folder / "model.safetensors") as file, patch.object(safetensors, "open_regular", file.opened):
        yield case


@contextmanager
def index(folder: Path) -> Iterator[Case]:
    """The index of a checkpoint."""
    path = folder / "model.safetensors"
    path.touch()
    seeds = JsonSeeds({"metadata": {"total_size": 4}, "weight_map": {"a": path.name, "b": "model-2.safetensors"}})
    damaged_text = b""

    def case(dice: random.Random) -> None:
        nonlocal damaged_text
        damaged_text = seeds.damaged(dice)
        shards = absent_shards(folder)
        assert path.name not in shards and all(name.isprintable() for name in shards)

    with patch.object(safetensors, "read_regular", lambda *_: damaged_text):
        yield case


SMALL = {**LLAMA, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 32}


MLX_LM_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)


@contextmanager
def config(folder: Path) -> Iterator[Case]:
    """``config.json``, up to the lazily loaded model. mlx-lm's errors are its own; it opens the folder's files only."""
    save(folder, SMALL)
    checkpoint = read_checkpoint(folder)
    more = ({}, {"model_file": "model.py"}, {"quantization": {"group_size": 32, "bits": 4}})
    rope = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    seeds = [JsonSeeds({**SMALL, **extra, **rope}) for extra in more]

    def case(dice: random.Random) -> None:
        file.fill(dice.choice(seeds).damaged(dice))
        try:
            found = load_config(folder)
        except CheckpointError:
            return
        with patch.object(load, "load_config", lambda _: found), suppress(FlashError, *MLX_LM_ERRORS):
            load_lazily(folder, checkpoint)

    def opened(path: Path, *args: Any) -> Any:
        assert path.parent == folder, f"{path} is opened"
        return open(path, *args)

    weights = [str(path) for path in folder.glob("model*.safetensors")]
    arrays = mx.load(weights[0])
    with (
        OneFile(folder / "config.json") as file,
        patch.object(inspect, "signature", cache(inspect.signature)),  # mlx-lm wants it for each key
        patch.object(mlx_lm_utils, "open", opened, create=True),
        patch.object(mlx_lm_utils.glob, "glob", lambda _: weights),
        patch.object(mx, "load", lambda _: dict(arrays)),
    ):
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
    first, *lines = data.splitlines(keepends=True)
    parts = [b"".join(lines[:2]), b"".join(lines[2:4]), lines[4], b"".join(lines[5:])]
    seeds = [data, *(first + part for part in parts)]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()

    @cache
    def render(template: str) -> None:
        with suppress(jinja2.TemplateError, TypeError, RecursionError):
            environment.from_string(template).render(messages=[{"role": "user", "content": "x"}])

    def case(dice: random.Random) -> None:
        text = damaged(seeds[int(dice.random() * len(seeds))], dice).decode(
            errors=("replace", "surrogateescape")[int(dice.random() * 2)]
        )
        with suppress(ConfigError):
            found = parse_modelfile(text, path)
            if found.chat_template:
                render(found.chat_template)

    with few_suggestions():
        yield case


@contextmanager
def few_suggestions() -> Iterator[None]:
    """Search for similar words, which takes most of the time of an error, in one of 50 errors only."""
    real, count = config_module.difflib.get_close_matches, iter(range(1 << 62))
    with patch.object(
        config_module.difflib, "get_close_matches", lambda *a, **k: [] if next(count) % 50 else real(*a, **k)
    ):
        yield


@contextmanager
def page(folder: Path) -> Iterator[Case]:
    """A page of the prefix cache."""
    name = "ab" * 32
    (folder / "pages").mkdir()
    key = PageKey(name, "", 0, 16, "m", "title")
    encoded = encode_page(key, {"k": Blob(bytes(100), "uint8", (100,)), "v": Blob(b"", "uint8", (0,))})
    with OneFile(folder / "valid") as file:
        file.fill(bytes(encoded.nbytes))
        encoded.write(file._file.fileno())
    valid = (folder / "valid").read_bytes()
    line, _, table = valid[_HEAD.size : 4096].rstrip(b"\0").partition(b"\n")
    seeds = JsonSeeds(json.loads(line)), JsonSeeds(json.loads(table))
    shim = SimpleNamespace(**vars(os))

    def case(dice: random.Random) -> None:
        data = _with_description(*(seed.damaged(dice) for seed in seeds), valid[4096:])
        file.fill(data if dice.random() < 0.8 else damaged(valid, dice))
        with suppress(ReadError), PageFile(file.path.parent, name) as opened:
            for blob, info in opened.blobs.items():
                read = bytearray(info.nbytes)
                opened.read_into(blob, memoryview(read))
                assert not any(read), "another content has the right checksum"
        if dice.random() < 0.01:
            list_prefixes(folder)

    with OneFile(folder / "pages" / f"{name}.page") as file, patch.object(pagefile, "os", shim):
        shim.open = file.opened
        yield case


def _with_description(line: bytes, table: bytes, rest: bytes) -> bytes:
    """Return a page with checksums that are right: someone made it."""
    text = line + b"\n" + table
    start = -(-(_HEAD.size + len(text)) // 4096) * 4096
    nbytes = start + len(rest)
    head = _HEAD.pack(MAGIC, nbytes, len(text), zlib.crc32(_LENGTHS.pack(nbytes, len(text)) + text))
    return (head + text).ljust(start, b"\0") + rest


@contextmanager
def prompt_cache(folder: Path) -> Iterator[Case]:
    """A prompt cache of mlx-lm, which is continued if it can be loaded."""
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 4, 8)), mx.ones((1, 1, 4, 8)))
    save_prompt_cache(str(folder / "valid.safetensors"), [cache], {"model": "m"})
    data = (folder / "valid.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    seeds = JsonSeeds(json.loads(data[8 : 8 + length]))

    def case(dice: random.Random) -> None:
        text = seeds.damaged(dice)
        made = len(text).to_bytes(8, "little") + text + data[8 + length :]
        file.fill(made if dice.random() < 0.7 else damaged(data, dice))
        with suppress(FlashError):
            for entry in load_saved(file.path)[0]:
                mx.eval(entry.state)

    with OneFile(folder / "cache.safetensors") as file, patch.object(safetensors, "open_regular", file.opened):
        yield case


TARGETS: dict[str, Target] = {
    "header": header,
    "index": index,
    "config": config,
    "modelfile": modelfile,
    "page": page,
    "prompt_cache": prompt_cache,
}


def run(name: str, folder: Path, seed: int, numbers: range, before_chunk: Callable[[], object] = bool) -> None:
    """Run some cases of a target. A case depends on the seed and on those before it in its chunk of ``CHUNK``.

    Args:
        name: the target.
        folder: an empty folder.
        seed: of all random numbers.
        numbers: of the cases; the first one begins a chunk.
        before_chunk: called before each chunk.
    """
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
