"""Prompts of layers on disk in the prefix cache: right, and whole whatever ends the process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import children
from mlx_flash.kv.diskcache import make_caches
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.wear import FILE_NAME, WriteGovernor
from mlx_flash.prefixes.prefixcache import PrefixCache
from mlx_flash.prefixes.store import PrefixStore, list_prefixes

PAGE, HEADS, WIDTH, LAYERS = 32, 2, 16, 2
"""Tokens of a page, in which an array of a layer takes 4096 bytes."""

TOKEN_BYTES = 2 * 2 * HEADS * WIDTH * 4
HEAD_BYTES = 8192
"""Description of a page, with the room behind it."""

LONG = [(37 * i + 11) % 50 for i in range(8 * PAGE)]


def rows(tokens: Sequence[int], start: int, layer: int) -> mx.array:
    """Keys and values that tell token, position and layer."""
    at = np.arange(start, start + len(tokens))
    base = np.stack([np.array(tokens), at, np.full(len(tokens), layer)], axis=1) @ np.array([[1.0], [64.0], [4096.0]])
    found = (base + np.arange(HEADS * WIDTH) / 64).astype(np.float32)
    return mx.array(found.reshape(1, -1, HEADS, WIDTH)).swapaxes(1, 2)


class Talk:
    """A prompt cache, and the tokens that it was given."""

    def __init__(self, pool: KVPool, prefixes: PrefixCache) -> None:
        self._prefixes, self._tokens = prefixes, list[int]()
        self.cache = make_caches([KVCache() for _ in range(LAYERS)], pool.options, pool)

    def _compute(self, tokens: Sequence[int]) -> None:
        """Do to the prompt cache what a model would."""
        for layer, entry in enumerate(self.cache):
            new = rows(tokens, len(self._tokens), layer)
            entry.update_and_fetch(new, new + 0.5)
        mx.eval([entry.keys_and_values() for entry in self.cache])
        self._tokens += tokens

    def feed(self, tokens: Sequence[int]) -> Talk:
        found = self._prefixes.look([mx.array([tokens])], self.cache)
        done = 0 if found is None else self._prefixes.restore(found)
        self._tokens += tokens[:done]
        if done < len(tokens):
            call = self._prefixes.begin([mx.array([tokens[done:]])], self.cache, 1)
            self._compute(tokens[done:])
            if call is not None:
                self._prefixes.end(call)
        self.check()
        return self

    def empty(self) -> None:
        for entry in self.cache:
            entry.trim(entry.offset)
        self._tokens.clear()

    def check(self) -> None:
        for layer, entry in enumerate(self.cache):
            keys = rows(self._tokens, 0, layer)
            assert all(map(mx.array_equal, entry.keys_and_values(), [keys, keys + 0.5]))


class Machine:
    """A pool, a prefix cache in ``path``, and a count of all writes."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        governor = WriteGovernor(path / "wear", gb_per_day=None)
        settings: dict[str, Any] = {"page_tokens": PAGE, "free_space_floor": 0, "limit_bytes": 1 << 20}
        store = PrefixStore(path / "prefixes", model="m", settings="disk", governor=governor, **settings)
        self.prefixes = PrefixCache(store)
        options = {"always_on_disk": True, "step": PAGE, "directory": path / "kv", "direct": False, **options}
        self.pool = KVPool(KVOptions(**options), governor.count)

    def talk(self) -> Talk:
        return Talk(self.pool, self.prefixes)

    def written(self) -> int:
        assert self.prefixes.store.flush(20)
        self.pool.note()
        return int(json.loads((self.path / "wear" / FILE_NAME).read_text())["total_bytes"])

    def close(self) -> None:
        self.prefixes.close()
        self.pool.close()


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_written_once import LONG, Machine
point, number = sys.argv[2], int(sys.argv[3])
owner = os if point == "fsync" else Path
whole, calls = getattr(owner, point), []
def dies(*args):
    if point == "fsync" or args[1].suffix == ".page":
        calls.append(args)
    if len(calls) == number:
        os._exit(9)
    return whole(*args)
setattr(owner, point, dies)
machine = Machine(Path(sys.argv[1]))
machine.talk().feed(LONG[:96]).feed(LONG[96:])
machine.written()
"""


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_killed_process_leaves_whole_pages(point: str, tmp_path: Path) -> None:
    """Killed before a page is whole, and before it gets its name."""
    done = children.run("-c", KILLED, tmp_path, point, 3, Path(__file__).parent)
    assert done.returncode == 9, done.stderr.decode()
    machine = Machine(tmp_path)
    names = [path.suffix for path in (tmp_path / "prefixes" / "pages").iterdir()]
    assert set(names) == {".page"} and 1 <= len(names) <= 3
    machine.talk().feed(LONG[:96]).feed(LONG[96:])
    machine.written()
    assert machine.prefixes.store.telemetry()["damaged"] == 0
    assert list_prefixes(tmp_path / "prefixes")[0].pages == len(LONG) // PAGE
    assert len(list((tmp_path / "kv").iterdir())) == 1, "the folder of the killed process is gone"
    machine.close()


def test_pages_are_read_where_pages_of_memory_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Macs have 16 KiB. Arrays in page files begin at multiples of 4 KiB everywhere."""
    for name, module in sys.modules.items():
        if name.startswith("mlx_flash.") and hasattr(module, "DIRECT_ALIGNMENT"):
            monkeypatch.setattr(module, "DIRECT_ALIGNMENT", 16384)
    machine = Machine(tmp_path)
    talk = machine.talk().feed(LONG[:96])
    machine.written()
    machine.talk().feed(LONG[:96])
    assert machine.prefixes.counters.num_restored == 96 and not machine.prefixes.store.telemetry()["damaged"]
    talk.check()
    machine.close()
