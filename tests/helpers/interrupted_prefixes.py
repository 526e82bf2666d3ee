from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from interrupt_points import Program
from mlx_flash.kv.checkpoints import trim_all_to, trimmable
from mlx_flash.kv.diskcache import make_caches
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.options import KVOptions
from mlx_flash.kv.wear import WriteGovernor
from mlx_flash.prefixes.folder import clear_prefixes
from mlx_flash.prefixes.prefixcache import PrefixCache
from mlx_flash.prefixes.store import PrefixStore

PAGE, HEADS, WIDTH = 8, 2, 16


TOKENS = [(37 * i + 11) % 50 for i in range(33)]


OTHER = [*TOKENS[:20], *([7] * 13)]


Run = Callable[[Callable[[], object]], bool]


def rows(tokens: Sequence[int], start: int, layer: int) -> mx.array:
    """Keys and values that tell token, position and layer."""
    at = np.arange(start, start + len(tokens))
    base = np.stack([np.array(tokens), at, np.full(len(tokens), layer)], axis=1) @ np.array([[1.0], [64.0], [4096.0]])
    return mx.array((base + np.arange(HEADS * WIDTH) / 64).astype(np.float32).reshape(1, -1, HEADS, WIDTH)).swapaxes(
        1, 2
    )


def compute(cache: Sequence[Any], tokens: Sequence[int], start: int) -> None:
    """Do to a prompt cache what a model would."""
    for layer, entry in enumerate(cache):
        new = rows(tokens, start, layer)
        if isinstance(entry, ArraysCache):
            entry[0] = new[:, :, -1] + 1
        else:
            entry.update_and_fetch(new, new + 0.5)
    mx.eval([entry.state for entry in cache])


def stock(kind: str) -> list[Any]:
    return [KVCache(), ArraysCache(1), RotatingKVCache(max_size=PAGE)] if kind == "hybrid" else [KVCache(), KVCache()]


def caches(kind: str, pool: KVPool) -> list[Any]:
    return stock(kind) if kind == "stock" else make_caches(stock(kind), pool.options, pool)


def contents(cache: Sequence[Any]) -> list[mx.array]:
    found = []
    for entry in cache:
        arrays = [array for array in entry.state if isinstance(array, mx.array)]
        if isinstance(entry, KVCache):
            arrays = [array[..., : entry.offset, :] for array in arrays]
        elif isinstance(entry, RotatingKVCache):
            arrays = [array[..., 1 - PAGE :, :] for array in arrays]  # what the next token sees
        found += [array for array in arrays if array.size]
    return found


class Talk:
    """A prompt cache and its tokens, with the calls of which one may be interrupted."""

    def __init__(self, kind: str, pool: KVPool, prefixes: PrefixCache, run: Run) -> None:
        self._kind, self._pool, self._prefixes, self._run = kind, pool, prefixes, run
        self.chunks: list[Sequence[int]] = []
        self.cache = caches(kind, pool)

    def _call(self, tokens: Sequence[int]) -> None:
        start = sum(map(len, self.chunks))
        found = self._prefixes.look([mx.array([tokens])], self.cache)
        done = 0 if found is None else self._prefixes.restore(found)
        if done < len(tokens):
            call = self._prefixes.begin([mx.array([tokens[done:]])], self.cache, 1)
            compute(self.cache, tokens[done:], start + done)
            if call is not None:
                self._prefixes.end(call)

    def _call_together(self, parts: Sequence[Sequence[int]]) -> None:
        """Compute parts as in one pass over the weights."""
        start = sum(map(len, self.chunks))
        call = self._prefixes.begin([mx.array([part]) for part in parts], self.cache, len(parts))
        for number, part in enumerate(parts):
            compute(self.cache, part, start + sum(map(len, parts[:number])))
        if call is not None:
            self._prefixes.end(call)

    def feed_together(self, *parts: Sequence[int]) -> None:
        offsets = trimmable(self.cache)
        assert offsets is not None
        if self._run(lambda: self._call_together(parts)):
            trim_all_to(self.cache, offsets)
            self.check()
            self._call_together(parts)
        self.chunks += parts
        self.check()

    def feed(self, tokens: Sequence[int]) -> Talk:
        offsets = trimmable(self.cache)
        if self._run(lambda: self._call(tokens)):
            if offsets is not None:
                trim_all_to(self.cache, offsets)
            else:  # states cannot be trimmed: who is interrupted begins again
                self.cache = caches(self._kind, self._pool)
                for number, chunk in enumerate(self.chunks):
                    compute(self.cache, chunk, sum(map(len, self.chunks[:number])))
            self.check()
            self._call(tokens)
        self.chunks.append(tokens)
        self.check()
        return self

    def check(self) -> None:
        expected = stock(self._kind)
        for number, chunk in enumerate(self.chunks):
            compute(expected, chunk, sum(map(len, self.chunks[:number])))
        left, right = contents(self.cache), contents(expected)
        assert [a.shape for a in left] == [a.shape for a in right]
        assert all(bool(mx.array_equal(a, b)) for a, b in zip(left, right, strict=True))


KINDS = ("stock", "memory", "disk", "hybrid")


MODES = ("exact", "longest")


def program(kind: str, mode: str, tmp_path: Path) -> Program:
    """Return what fills a prefix cache, uses it, and checks what it leaves."""
    governor, numbers = WriteGovernor(tmp_path / "wear", gb_per_day=None), iter(range(1 << 20))

    def opened(folder: Path) -> PrefixCache:
        settings: dict[str, Any] = {
            "page_tokens": PAGE,
            "free_space_floor": 0,
            "limit_bytes": 120_000 if kind == "memory" else 900_000,
        }
        store = PrefixStore(folder, model="m", settings=kind, governor=governor, queue_bytes=50_000, **settings)
        return PrefixCache(store, is_exact=mode == "exact")

    def talks(folder: Path, run: Run) -> int:
        pool = KVPool(KVOptions(step=16, directory=tmp_path / "kv", direct=False, always_on_disk=kind == "disk"))
        prefixes = opened(folder)
        new = lambda: Talk(kind, pool, prefixes, run)  # noqa: E731
        new().feed(TOKENS[:16]).feed(TOKENS[16:])
        assert prefixes.store.flush(20)
        new().feed(TOKENS[:16]).feed(TOKENS[16:])
        new().feed(TOKENS[:12]).feed(TOKENS[12:])
        new().feed(OTHER)
        if kind != "hybrid":
            new().feed_together(OTHER[::-1][:10], OTHER[::-1][10:21], OTHER[::-1][21:])
        assert prefixes.store.flush(20)
        if run(prefixes.close):
            prefixes.close()
        assert prefixes.store.telemetry()["pinned_pages"] == prefixes.store.telemetry()["queued_bytes"] == 0
        if run(pool.close):
            pool.close()
        del new
        gc.collect()
        assert not (tmp_path / "kv").exists() or not list((tmp_path / "kv").iterdir())
        return prefixes.counters.num_restored

    def run_all(run: Run) -> None:
        folder = tmp_path / str(next(numbers))
        talks(folder, run)
        # as in another process, which nobody interrupts
        num_restored = talks(folder, lambda operation: bool(operation()))
        may_lack_states = kind == "hybrid" and mode == "longest"  # pages that have no state, whose names are taken
        least = len(TOKENS) if kind != "memory" else 0  # pages leave where there is room for few
        assert num_restored > least or may_lack_states
        assert not clear_prefixes(folder), "nothing is locked"
        assert not list((folder / "pages").iterdir())
        if num_restored <= least:
            assert talks(folder, lambda operation: bool(operation())) > 0

    return run_all
