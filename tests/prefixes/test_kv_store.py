"""Prefixes on disk: what is found is right, whoever wrote it, whatever happened to the disk meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from children import HELPERS
from mlx_flash.errors import WriteError
from mlx_flash.files import HeldLock
from mlx_flash.kv.disk import WriteGovernor
from mlx_flash.prefixes import store as page_folder
from mlx_flash.prefixes.store import _HEAD, MAGIC, Blob, PrefixStore, clear_prefixes, list_prefixes
from stored_pages import PAGE_BYTES, STEP, TOKENS, Opener, blobs, found, page_of, put, read, read_all, stats
from waiting import eventually


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path / "store")
    yield opener
    opener.close()


def corrupt(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# --- finding and reading ---------------------------------------------------------------------------------------------


def test_what_begins_alike_is_stored_once(opened: Opener) -> None:
    system = TOKENS[: 4 * STEP]
    one, two = [*system, *[7] * STEP], [*system, *[8] * STEP]
    store = opened()
    put(store, one)
    put(opened(), two)
    a, b = store.find(one), store.find(two)
    assert a.pages[:4] == b.pages[:4] and a.pages[4] != b.pages[4]
    assert stats(store)["pages"] == 6 == len(opened.files())
    assert put(store, two) == [True] * 5 and stats(store)["writes"]["session_bytes"] == 5 * PAGE_BYTES
    assert stats(store)["stored"] == 5 and stats(store)["bytes"] == 6 * PAGE_BYTES
    assert sum(path.stat().st_size for path in opened.files()) == 6 * PAGE_BYTES
    changed = [0, *TOKENS[1:]]
    assert store.find(changed).num_tokens == 0, "a page stands for all tokens before it as well"


@pytest.mark.parametrize(
    "other", [{"model": "n"}, {"settings": "q4"}, {"tenant": "bob"}, {"settings": "fp1", "tenant": "6alice"}]
)
def test_nothing_else_is_found(opened: Opener, other: dict[str, Any]) -> None:
    mine = opened(tenant="alice")
    put(mine, TOKENS)
    theirs = opened(**({"tenant": "alice"} | other))
    assert theirs.find(TOKENS).num_tokens == 0
    assert theirs.put(TOKENS, 0, blobs([1]))
    assert read(theirs, theirs.find(TOKENS).pages[0]) == {name: blob.data for name, blob in blobs([1]).items()}
    assert found(mine, TOKENS) == 6, "and what they store changes nothing"


def test_any_number_and_size_of_blobs(opened: Opener) -> None:
    store = opened()
    sizes = [0, 1, 4095, 4096, 4097, 300_000]
    many = {f"layer {i} é {'k' * i}": Blob(os.urandom(size), "uint8", (size,)) for i, size in enumerate(sizes * 120)}
    assert store.put(TOKENS, 0, many) and store.put(TOKENS, 1, {})
    pages = store.find(TOKENS).pages
    assert read(store, pages[0]) == {name: blob.data for name, blob in many.items()}
    assert read(store, pages[1]) == {}
    store.close()
    assert opened().find(TOKENS).num_tokens == 2 * STEP, "a long description is read as well"


def test_the_callers_memory_may_change_at_once(opened: Opener) -> None:
    store = opened()
    array = np.arange(100_000, dtype=np.float32)
    strided = np.arange(64, dtype=np.uint16).reshape(8, 8)[:, ::2]
    expected = array.tobytes(), strided.tobytes()
    given = {"a": Blob(memoryview(array), "float32", array.shape), "s": Blob(memoryview(strided), "uint16", (8, 4))}
    assert store.put(TOKENS, 0, given)
    array[:] = 0
    strided[:] = 0
    store.flush()
    data = read(store, store.find(TOKENS).pages[0])
    assert data is not None and (data["a"], data["s"]) == expected


def test_a_closed_store_stores_nothing(opened: Opener) -> None:
    store = opened()
    for i in range(6):
        assert store.put(TOKENS, i, blobs(TOKENS[: (i + 1) * STEP])), "what waits is written"
    store.close()
    store.close()
    assert put(store, [1] * STEP) == [False] and found(store, TOKENS) == 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mlx-flash-prefixes")]


# --- keeping and evicting --------------------------------------------------------------------------------------------


def test_the_limit_is_kept_and_the_longest_unused_goes_first(opened: Opener) -> None:
    store = opened(limit_bytes=6 * PAGE_BYTES)
    a, b, c = ([n] * 2 * STEP for n in (1, 2, 3))
    for tokens in (a, b, c):
        put(store, tokens)
    store.touch(store.find(a))  # used again
    put(store, [4] * STEP)
    assert [found(store, tokens) for tokens in (a, b, c)] == [2, 1, 2], "a page goes before the one it follows"
    put(store, [5] * STEP)
    assert [found(store, tokens) for tokens in (a, b, c)] == [2, 0, 2]
    assert stats(store)["bytes"] == 6 * PAGE_BYTES == sum(path.stat().st_size for path in opened.files())


def test_a_prompt_longer_than_the_limit_keeps_its_beginning(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(limit_bytes=3 * PAGE_BYTES + 5)
    with caplog.at_level(logging.WARNING):
        put(store, [1] * STEP)
        for i in [*range(6)] * 2:
            put(store, TOKENS, [i])
    assert found(store, TOKENS) == 3 and found(store, [1] * STEP) == 0
    assert stats(store)["refused_room"] == 2
    assert len(caplog.records) == 1 and "full" in caplog.text


def test_free_space_is_left(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = 20 * PAGE_BYTES

    def usage(_: Path) -> Any:
        used = sum(path.stat().st_size for path in opened.files())
        return shutil._ntuple_diskusage(disk, used + others, disk - used - others)  # type: ignore[attr-defined]

    others = 0
    monkeypatch.setattr(shutil, "disk_usage", usage)
    store = opened(leaves_free=16 * PAGE_BYTES)
    put(store, TOKENS[: 3 * STEP])
    put(store, [1] * 3 * STEP)
    assert found(store, TOKENS) == 1 and found(store, [1] * 3 * STEP) == 3
    others = PAGE_BYTES  # somebody else fills the disk
    put(store, [2] * STEP)
    assert found(store, TOKENS) == 0 and found(store, [1] * 3 * STEP) == 2 and found(store, [2] * STEP) == 1
    others = 18 * PAGE_BYTES
    put(store, [3] * STEP)
    assert found(store, [3] * STEP) == 0 and found(store, [2] * STEP) == 1, "evicting all would not be enough"
    by_default = opened(leaves_free=None)
    others = 14 * PAGE_BYTES
    put(by_default, [4] * STEP)
    assert disk - others - len(opened.files()) * PAGE_BYTES >= disk / 10 and found(by_default, [4] * STEP) == 1


def test_bytes_that_wait_are_bounded(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    add, queued = PrefixStore._add, []
    monkeypatch.setattr(PrefixStore, "_add", lambda *args: (queued.append(stats(store)["queued_bytes"]), add(*args))[1])
    store = opened(queue_bytes=3 * 2000)
    assert all(store.put(TOKENS, i, blobs(TOKENS[: (i + 1) * STEP])) for i in range(6))
    store.flush()
    assert max(queued) <= 6000
    large = blobs([1] * STEP, 9000)
    assert store.put([1] * STEP, 0, large) and not stats(store)["queued_bytes"], "the call waits for it"
    assert found(store, TOKENS) == 6 and store.find([1] * STEP).pages


def test_a_page_that_is_written_meanwhile_has_followers(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, has, lock = opened(), PrefixStore._has, HeldLock(opened.directory / "lock", create=0o600)
    first, _ = page_folder.page_names(store._root, TOKENS, [STEP, 2 * STEP])
    assert store.put(TOKENS, 0, blobs(TOKENS[:STEP])), "it waits for the lock"

    def look(store: PrefixStore, page: str) -> bool:
        is_there = has(store, page)
        if page == first and threading.current_thread() is threading.main_thread():
            lock.release()
            store.flush()
        return is_there

    monkeypatch.setattr(PrefixStore, "_has", look)
    assert store.put(TOKENS, 1, blobs(TOKENS[: 2 * STEP]))
    lock.release()
    assert found(store, TOKENS) == 2


def test_unexpected_error_of_the_writer_blocks_nobody(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(PrefixStore, "_add", lambda *_: 1 / 0)
        store = opened()
        store.put(TOKENS, 0, blobs(TOKENS[:STEP]))
        store.flush()
    eventually(lambda: "ZeroDivisionError" in caplog.text)
    assert [record.name for record in caplog.records] == ["mlx_flash"], "the error is logged"
    put(store, TOKENS)
    assert found(store, TOKENS) == 6 == stats(store)["stored"]


def test_listing_and_clearing(opened: Opener) -> None:
    directory = opened.directory
    clear_prefixes(directory)
    assert list_prefixes(directory) == [] and not directory.exists()
    one, two = opened(title="org/one"), opened(model="n", title="org/two", tenant="t")
    put(one, TOKENS)
    put(two, TOKENS[: 2 * STEP])
    listed = list_prefixes(directory)
    assert [(m.model, m.title, m.pages, m.nbytes) for m in listed] == [
        ("n", "org/two", 2, 2 * (PAGE_BYTES + len("org/two"))),
        ("m", "org/one", 6, 6 * (PAGE_BYTES + len("org/one"))),
    ]
    assert all(0 <= time.time() - model.last_used < 60 for model in listed)
    clear_prefixes(directory)
    assert found(one, TOKENS) == 0 == found(two, TOKENS) and list_prefixes(directory) == opened.files() == []
    put(one, TOKENS)
    assert found(one, TOKENS) == 6, "a store that was cleared goes on"


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 9, 17, 21, 25, 40, PAGE_BYTES - 1000, PAGE_BYTES - 1])
def test_a_damaged_page_is_dropped(opened: Opener, caplog: pytest.LogCaptureFixture, offset: int) -> None:
    store, other = opened(), opened()
    put(store, TOKENS)
    prefix = store.find(TOKENS)
    corrupt(opened.path(prefix.pages[2]), offset)
    with caplog.at_level(logging.WARNING):
        assert read_all(store, TOKENS, prefix) == 2
    assert len(caplog.records) == 1 and "damaged" in caplog.text
    for user in (store, other):
        assert found(user, TOKENS) == 2
    assert len(opened.files()) == 5 and stats(store)["damaged"] == 1
    put(store, TOKENS)
    assert found(other, TOKENS) == 6, "it is computed and stored again"


def test_a_page_in_the_place_of_another_is_not_taken_for_it(opened: Opener) -> None:
    store = opened()
    put(store, TOKENS)
    pages = store.find(TOKENS).pages
    shutil.copyfile(opened.path(pages[1]), opened.path(pages[3]))
    assert read_all(store, TOKENS, store.find(TOKENS)) == 3
    data = bytearray(opened.path(pages[2]).read_bytes())
    data[-2000:-1000], data[-1000:] = data[-1000:], data[-2000:-1000]
    opened.path(pages[2]).write_bytes(data)
    assert read_all(store, TOKENS, store.find(TOKENS)) == 2, "nor a blob in the place of another"


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_in_place_of_a_page_is_not_waited_for(opened: Opener, make: Callable[[Path], None]) -> None:
    """Nor is a folder removed."""
    store = opened()
    put(store, TOKENS)
    path, descriptors = opened.path(store.find(TOKENS).pages[1]), len([*Path("/dev/fd").iterdir()])
    path.unlink()
    make(path)
    with closing(os.fdopen(os.open(path, os.O_RDWR))) if path.is_fifo() else nullcontext():  # somebody may write to it
        assert list_prefixes(opened.directory)[0].pages == 5
        assert read_all(store, TOKENS, store.find(TOKENS)) == 1
    assert len([*Path("/dev/fd").iterdir()]) == descriptors
    clear_prefixes(opened.directory)
    assert not [each for each in path.parent.iterdir() if not each.is_dir()]
    assert path.is_dir() == (make is Path.mkdir)


def described(text: bytes) -> bytes:
    """Return a page file of a description, with right checksums."""
    return _HEAD.pack(MAGIC, _HEAD.size + len(text), len(text), zlib.crc32(text), 0) + text


NESTED = b"[" * 100_000
GARBAGE = {
    "empty": b"",
    "text": b"not a page",
    "random": os.urandom(PAGE_BYTES),
    "zeros": bytes(PAGE_BYTES),
    "old version": b"MLXFKV\x00\x04" + bytes(PAGE_BYTES),
    "deeply nested": described(NESTED),
    "no JSON": described(b"{}x"),
    "another type": described(b"[1, 2]"),
    "incomplete": described(b'{"page": "1"}'),
    "another kind of title": page_of("1" * 64, {}, title=5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_the_folder_is_no_page(opened: Opener, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    store = opened(title="org/model")
    put(store, TOKENS)
    put(store, [3] * STEP)
    (opened.directory / "pages" / f"{'1' * 64}.page").write_bytes(data)
    (opened.directory / "pages" / "notes.txt").write_text("kept")
    listed = [(model.title, model.pages, model.tokens > 0) for model in list_prefixes(opened.directory)]
    assert listed == [("org/model", 7, True), ("", 1, False)]
    assert read(store, "1" * 64) is None
    with caplog.at_level(logging.WARNING):
        again = opened()
        assert found(again, TOKENS) == 6 and found(again, [3] * STEP) == 1
    assert [(model.title, model.pages) for model in list_prefixes(opened.directory)] == [("org/model", 7)]
    put(again, [5] * STEP)
    assert again.is_writable and found(opened(), [5] * STEP) == 1
    assert sorted({path.suffix for path in opened.files()}) == [".page", ".txt"] and len(opened.files()) == 9


# --- disks that cannot be written ------------------------------------------------------------------------------------


def test_a_days_writes_end_storing_for_the_day(
    opened: Opener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WriteGovernor, "written", Counter())
    now = [1e9]
    capped = WriteGovernor(4 * PAGE_BYTES / 1e9, lambda: now[0])
    store = opened(governor=capped)
    with caplog.at_level(logging.WARNING):
        assert [put(store, TOKENS, [i]) for i in range(6)] == [[True]] * 5 + [[False]]
    assert len(caplog.records) == 1 and "gb_per_day" in caplog.text
    assert found(store, TOKENS) == 4 and stats(store)["refused_wear"] == 1
    other = WriteGovernor(5 * PAGE_BYTES / 1e9, lambda: now[0])
    other.count(PAGE_BYTES - 1)
    assert not other.claim(2) and other.claim(1), "models of a process share the day"
    told = {"session_bytes": PAGE_BYTES, "day_bytes": 5 * PAGE_BYTES, "day_limit_bytes": 5 * PAGE_BYTES}
    assert other.telemetry() == told | {"refused_bytes": 2}
    now[0] += 24 * 3600
    assert put(store, TOKENS) == [True] * 6 and found(store, TOKENS) == 6


def test_a_directory_that_cannot_be_written_is_read(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    put(opened(), TOKENS)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13))

    for name in ("HeldLock", "make_private"):  # tests may run as root
        with monkeypatch.context() as patch:
            patch.setattr(page_folder, name, refuse)
            store = opened()
            assert found(store, TOKENS) == 6
            put(store, [1] * STEP)
            assert not store.is_writable and put(store, [1] * STEP) == [False]
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WriteError, match="cannot clear"):
        clear_prefixes(opened.directory)


def test_lock_held_by_a_stopped_process_ends_storing_only(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_folder, "LOCK_SECONDS", 0.1)
    store = opened()
    put(store, TOKENS)
    with HeldLock(opened.directory / "lock", create=0o600):
        assert found(store, TOKENS) == 6 and store.is_writable, "lookups take no lock"
        put(store, [1] * STEP)
        assert not store.is_writable and found(store, TOKENS) == 6
    assert opened().is_writable


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "fsync"])
def test_a_disk_that_is_full_ends_storing_only(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = opened()
    put(store, TOKENS)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, fail)
        put(store, [1] * STEP)
    assert caplog.text.count("nothing more is stored") == 1 and "quota" in caplog.text
    assert not store.is_writable and put(store, [2] * STEP) == [False]
    assert found(store, TOKENS) == 6 == len(opened.files()), "nothing is left of what did not fit"
    assert found(opened(), TOKENS) == 6


def test_processes_share_a_store(opened: Opener) -> None:
    """Three at a time write and evict with common beginnings; nobody ever reads a wrong byte."""
    command = [sys.executable, "-c", SHARE, opened.directory, HELPERS]
    children = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(3)]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert all(int(output) > 0 for output in outputs), "each found pages"
    store = opened()
    assert stats(store)["bytes"] <= 30 * PAGE_BYTES and stats(store)["pages"] == len(opened.files()) > 20
    assert all(path.suffix == ".page" for path in opened.files())


SHARE = """
import random, sys
sys.path[:0] = sys.argv[2:3]
import stored_pages as t
from mlx_flash.errors import WriteError
from mlx_flash.files import HeldLock
from pathlib import Path
rng = random.Random(int(sys.argv[3]))
opener = t.Opener(Path(sys.argv[1]))
store = opener(limit_bytes=30 * t.PAGE_BYTES)
hits = 0
for _ in range(60):
    tokens = [rng.randrange(2) for _ in range(4)] * 2 + [rng.randrange(3) for _ in range(8)]
    prefix = store.find(tokens)
    store.touch(prefix)
    hits += t.read_all(store, tokens, prefix)
    t.put(store, tokens)
    t.read_all(store, tokens, store.find(tokens))
    with HeldLock(store.folder.parent / "lock", create=0o600):  # otherwise pages may come and go while they are counted
        assert t.stats(store)["bytes"] <= 30 * t.PAGE_BYTES
opener.close()
print(hits)
"""


# --- any order of all of it ------------------------------------------------------------------------------------------

SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda ns: [n for n in ns for _ in range(STEP)])
USERS = st.integers(0, 1)


class AnyOrder(RuleBasedStateMachine):
    """A store beside a dict. Two users take turns, one with its own tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.opener = Opener(Path(tempfile.mkdtemp()) / "store")
        self.stores: list[PrefixStore] = []
        # for each tenant: page tokens -> whether the file was damaged
        self.pages: list[dict[tuple[int, ...], bool]] = [{}, {}]

    @initialize()
    def open(self) -> None:
        self.stores = [self.opener(tenant=tenant) for tenant in ("", "other")]

    def whole(self, user: int, tokens: list[int]) -> int:
        """How many leading pages are there and undamaged."""
        ends = range(STEP, len(tokens) + 1, STEP)
        return next(
            (i for i, end in enumerate(ends) if self.pages[user].get(tuple(tokens[:end])) is not False), len(ends)
        )

    def check(self, user: int, tokens: list[int], stored: int, right: int) -> None:
        assert right >= self.whole(user, tokens), "what is whole is found"
        assert all(tuple(tokens[: (i + 1) * STEP]) in self.pages[user] for i in range(stored)), "nothing else is"
        if right < stored:
            assert right == self.whole(user, tokens), "what is damaged is not used"
            del self.pages[user][tuple(tokens[: (right + 1) * STEP])]

    @rule(user=USERS, tokens=SEQUENCES)
    def put(self, user: int, tokens: list[int]) -> None:
        assert put(self.stores[user], tokens) == [True] * (len(tokens) // STEP)
        for end in range(STEP, len(tokens) + 1, STEP):
            self.pages[user].setdefault(tuple(tokens[:end]), False)

    @rule(user=USERS, tokens=SEQUENCES)
    def read(self, user: int, tokens: list[int]) -> None:
        prefix = self.stores[user].find(tokens)
        right = read_all(self.stores[user], tokens, prefix)
        self.check(user, tokens, len(prefix.pages), right)
        assert len(self.stores[user].find(tokens).pages) <= max(right, self.whole(user, tokens))

    @rule(user=USERS, tokens=SEQUENCES, offset=st.integers(0, 2), how=st.sampled_from(["byte", "cut", "gone"]))
    def damage(self, user: int, tokens: list[int], offset: int, how: str) -> None:
        prefix = self.stores[user].find(tokens)
        if not prefix.pages or not self.opener.path(prefix.pages[-1]).exists():
            return
        path = self.opener.path(prefix.pages[-1])
        if how == "byte" and path.stat().st_size == PAGE_BYTES:
            corrupt(path, offset * 1000 + 20)
        elif how == "cut":
            os.truncate(path, offset * 1000)
        elif how == "gone":
            path.unlink()
        self.pages[user][tuple(tokens[: prefix.num_tokens])] = True

    @rule()
    def clear(self) -> None:
        clear_prefixes(self.opener.directory)
        self.pages = [{}, {}]

    @rule(leftover=st.sampled_from(["", "partial", "no lock"]))
    def reopen(self, leftover: str) -> None:
        for store in self.stores:
            store.close()
        if leftover == "partial":
            (self.opener.directory / "pages" / f"{'1' * 64}.0.partial").write_bytes(os.urandom(PAGE_BYTES))
        elif leftover == "no lock":
            (self.opener.directory / "lock").unlink(missing_ok=True)
        self.open()
        assert not [path for path in self.opener.files() if path.stem.startswith("1" * 64)]

    @invariant()
    def files_are_those_of_the_index(self) -> None:
        if self.stores:
            assert self.stores[0].is_writable and self.stores[1].is_writable

    def teardown(self) -> None:
        self.opener.close()
        shutil.rmtree(self.opener.directory.parent)


def test_any_order() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))


# --- pages of any length ---------------------------------------------------------------------------------------------


def test_pages_end_where_they_are_said_to(opened: Opener) -> None:
    store = opened()
    labels = np.stack([np.array(TOKENS), np.repeat([5, 9], 12)], axis=1)
    ends = [4, 5, 12, 24]
    for i, end in enumerate(ends):
        assert store.put(labels, i, blobs(TOKENS[:end]), ends=ends)
    store.flush()
    found = store.find(labels, ends=ends)
    assert found.ends == tuple(ends) and found.num_tokens == 24
    assert store.find(labels, ends=[4, 12, 24]).num_tokens == 4 and store.find(labels, ends=[24]).num_tokens == 0
    assert store.find(TOKENS, ends=ends).num_tokens == 0, "labels beside the tokens decide too"
    labels[6, 1] += 1
    assert store.find(labels, ends=ends).num_tokens == 5
    assert list_prefixes(opened.directory)[0].tokens == 24
