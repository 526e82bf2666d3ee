from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from interrupt_points import Program
from mlx_flash.kv.diskcache import DiskKVCache
from mlx_flash.kv.kvpool import KVPool
from mlx_flash.kv.options import KVOptions

STEP, HEADS, WIDTH, LAYERS = 16, 2, 32, 3


@dataclass
class Conversation:
    """Caches of some layers, and every row that they were given."""

    pool: KVPool
    mine: list[Any] = field(default_factory=list)
    given: list[mx.array] = field(default_factory=list)

    def __post_init__(self) -> None:
        group = self.pool.new_group()
        self.mine = [DiskKVCache(rows=self.pool.new_rows(group, index)) for index in range(LAYERS)]
        self.given = [mx.zeros((1, 2 * HEADS, 0, WIDTH)) for _ in range(LAYERS)]

    @property
    def length(self) -> int:
        return int(self.given[0].shape[2])

    def feed(self, new: Sequence[mx.array]) -> None:
        for entry, rows in zip(self.mine, new, strict=True):
            mx.eval(entry.update_and_fetch(rows[:, :HEADS], rows[:, HEADS:]))

    def took(self, new: Sequence[mx.array]) -> None:
        self.given = [mx.concatenate(pair, axis=2) for pair in zip(self.given, new, strict=True)]

    def trim_to(self, length: int) -> None:
        for entry in self.mine:
            entry.trim(entry.offset - length)

    def check(self) -> None:
        kept = self.pool.options.kept_tokens
        for entry, given in zip(self.mine, self.given, strict=True):
            assert entry.offset == given.shape[2]
            rows = mx.concatenate([given[:, :, :kept], given[:, :, kept + entry.num_forgotten :]], axis=2)
            if entry.empty():
                assert not rows.size
                continue
            wanted = [rows[:, :HEADS], rows[:, HEADS:]]
            if hasattr(entry, "bits"):
                wanted = [part for array in wanted for part in mx.quantize(array, entry.group_size, entry.bits)]
            found = [part for array in entry.keys_and_values() for part in (array if type(array) is tuple else [array])]
            assert all(bool(mx.array_equal(a, b)) for a, b in zip(found, wanted, strict=True))


class Script:
    """Operations on conversations, each of which may be interrupted, is undone then, and done again."""

    def __init__(self, pool: KVPool, run: Callable[[Callable[[], object]], bool]) -> None:
        self.pool = pool
        self.all = [Conversation(pool)]
        self._run = run
        self._seed = 0

    def feed(self, number: int, num_tokens: int) -> None:
        one, length = self.all[number], self.all[number].length
        self._seed += 1
        keys = mx.random.split(mx.random.key(self._seed), LAYERS)
        new = [mx.random.normal((1, 2 * HEADS, num_tokens, WIDTH), key=key) for key in keys]
        mx.eval(new)
        if self._run(lambda: one.feed(new)):
            one.trim_to(length)
            one.check()
            one.feed(new)
        one.took(new)
        one.check()

    def trim(self, number: int, num_tokens: int) -> None:
        one, length = self.all[number], self.all[number].length - num_tokens
        if self._run(lambda: one.trim_to(length)):
            one.trim_to(length)
        one.given = [rows[:, :, :length] for rows in one.given]
        one.check()

    def copy(self, number: int) -> None:
        one, copies = self.all[number], list[Any]()
        if self._run(lambda: copies.append(copy.deepcopy(one.mine))):
            one.check()
            copies.append(copy.deepcopy(one.mine))
        other = Conversation(self.pool)
        other.mine, other.given = copies[-1], one.given
        self.all.append(other)

    def quantize(self, number: int) -> None:
        one = self.all[number]

        def convert() -> None:
            for index, entry in enumerate(one.mine):
                if type(entry) is DiskKVCache:
                    one.mine[index] = entry.to_quantized(32, 8)

        if self._run(convert):
            one.check()
            convert()
        one.check()

    def set_state(self, number: int) -> None:
        one = self.all[number]
        states = [[mx.array(part) if isinstance(part, mx.array) else part for part in e.state] for e in one.mine]
        mx.eval(states)

        def put() -> None:
            for entry, state in zip(one.mine, states, strict=True):
                entry.state = state

        if self._run(put):
            one.check()
            put()
        one.check()

    def end(self, number: int) -> None:
        del self.all[number]


def talk(script: Script) -> None:
    script.feed(0, 40)
    script.feed(0, 1)
    script.feed(0, 1)
    script.trim(0, 12)
    script.feed(0, 20)
    script.copy(0)
    script.feed(1, 9)
    script.feed(0, 1)
    script.set_state(1)
    script.feed(1, 2)
    script.end(1)
    script.copy(0)
    script.trim(1, 30)
    script.feed(1, 33)


def quantized(script: Script) -> None:
    script.feed(0, 70)
    script.quantize(0)
    script.feed(0, 12)
    script.trim(0, 20)
    script.feed(0, 1)


def forgetful(script: Script) -> None:
    for num_tokens in (40, 30, 1, 1, 40, 17, 1):
        script.feed(0, num_tokens)


SCENARIOS: dict[str, tuple[dict[str, Any], Callable[[Script], None]]] = {
    "memory": ({}, talk),
    "preallocated": ({"form": "preallocated", "max_context_length": 64}, talk),
    "disk": ({"always_on_disk": True}, talk),
    "offloaded": ({"budget_bytes": 200_000}, talk),
    "quantized": ({}, quantized),
    "quantized, offloaded": ({"budget_bytes": 100_000}, quantized),
    "forgetful": ({"max_tokens": 80, "keep": 5}, forgetful),
    "forgetful on disk": ({"max_tokens": 80, "keep": 5, "always_on_disk": True}, forgetful),
}


def program(name: str, folder: Path) -> Program:
    """Return what plays a scenario and checks everything that it leaves."""
    changes, play = SCENARIOS[name]
    options = KVOptions(step=STEP, directory=folder, direct=False, **changes)

    def run_all(run: Callable[[Callable[[], object]], bool]) -> None:
        pool = KVPool(options)
        script = Script(pool, run)
        play(script)
        for conversation in script.all:
            conversation.check()
        fresh = Script(pool, lambda operation: bool(operation()))
        fresh.feed(0, 40)
        del fresh, conversation
        script.all.clear()
        gc.collect()
        pool.ring.release()
        assert bool(pool.stats.num_offloaded) == ("budget_bytes" in changes or "always_on_disk" in changes)
        assert pool.memory_bytes == pool.note().reserved_bytes == pool.note().disk_bytes == 0
        pool.close()
        assert not list(folder.iterdir())

    return run_all
