"""Which experts are popular: what is counted, what a file keeps of it, and what happens when the file is not right."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_flash import cli
from mlx_flash.errors import WriteError
from mlx_flash.experts.popularity import (
    HALF_LIFE_USES,
    Popularity,
    PopularityFile,
    list_popularity,
    load_popularity,
    popularity_directory,
    popularity_file,
    popularity_fingerprint,
    remove_popularity,
    save_popularity,
)
from mlx_flash.layout.fingerprint import state_of
from mlx_flash.storage.safetensors import read_checkpoint

SIZES = (8, 4, 8)
rng = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def counted(*rows: Sequence[int]) -> Popularity:
    """A popularity to which one call of each layer was added."""
    popularity = Popularity([len(row) for row in rows])
    for layer, row in enumerate(rows):
        popularity.add(layer, np.array(row))
    return popularity


def some(sizes: Sequence[int] = SIZES, seed: int = 0) -> Popularity:
    own = np.random.default_rng(seed)
    return counted(*(own.integers(0, 9, size) for size in sizes))


def equal(a: Popularity, b: Popularity) -> bool:
    return len(a.counts) == len(b.counts) and all(map(np.array_equal, a.counts, b.counts))


def save(popularity: Popularity, fingerprint: str = "a", model: str = "org/model") -> Path:
    path = popularity_file(fingerprint)
    save_popularity(path, popularity, model)
    return path


# --- counting --------------------------------------------------------------------------------------------------------


def test_nothing_counted() -> None:
    popularity = Popularity(SIZES)
    assert popularity.is_empty and popularity.most_popular(100) == []
    popularity.add(0, np.zeros(8, int))
    assert popularity.is_empty


def test_the_most_popular_come_first_and_equals_in_order() -> None:
    popularity = counted([0, 5, 2, 5], [9, 0, 2], [2, 0, 0])
    ranked = [(1, 0), (0, 1), (0, 3), (0, 2), (1, 2), (2, 0)]
    assert not popularity.is_empty
    assert [popularity.most_popular(limit) for limit in range(7)] == [ranked[:limit] for limit in range(7)]
    assert popularity.most_popular(1000) == ranked, "an expert that was not used is none of them"
    assert all(type(number) is int for expert in ranked for number in expert)


def test_calls_add_up() -> None:
    popularity = counted([3, 0, 0, 0])
    for _ in range(2):
        popularity.add(0, np.array([0, 0, 2, 0]))
    assert popularity.most_popular(9) == [(0, 2), (0, 0)]


def test_a_layer_takes_counts_of_its_own_experts_only() -> None:
    popularity = Popularity(SIZES)
    for counts in (np.ones(4, int), np.ones(1, int), np.ones((1, 8), int)):
        with pytest.raises(ValueError, match="layer 2 has counts of shape"):
            popularity.add(2, counts)
    with pytest.raises(IndexError):
        popularity.add(3, np.ones(8, int))
    assert popularity.is_empty


def test_less_than_none_is_refused() -> None:
    popularity = some()
    with pytest.raises(ValueError, match="limit is -1: it must be 0 or more"):
        popularity.most_popular(-1)
    with pytest.raises(ValueError, match="num_kept is -1: it must be 0 or more"):
        popularity.hit_rate(-1)


def test_what_was_counted_weighs_half_after_a_half_life() -> None:
    """Tokens of one decode step each, with 2 of 16 experts: the earlier favourite has half of its weight."""
    popularity = Popularity([16])
    popularity.add(0, np.eye(16, dtype=int)[3] * 600)
    earlier = popularity.counts[0][3]
    for _ in range(HALF_LIFE_USES * 16 // 2):
        popularity.add(0, np.bincount([5, 9], minlength=16))
    assert popularity.counts[0][3] == pytest.approx(earlier / 2)


@pytest.mark.parametrize("tokens_a_call", [1, 7, 512])
def test_weights_do_not_depend_on_how_tokens_are_divided_into_calls(tokens_a_call: int) -> None:
    chosen = np.array([rng.permutation(16)[:2] for _ in range(3584)])
    popularity = Popularity([16])
    for start in range(0, len(chosen), tokens_a_call):
        popularity.add(0, np.bincount(chosen[start : start + tokens_a_call].ravel(), minlength=16))
    ages = np.arange(len(chosen), dtype=float)[::-1] * 2 / (HALF_LIFE_USES * 16)
    exact = np.zeros(16)
    np.add.at(exact, chosen, 0.5 ** ages[:, None])
    np.testing.assert_allclose(popularity.counts[0], exact, rtol=0.05)


def test_another_subject_wins_in_time_and_counts_stay_bounded() -> None:
    popularity = counted([10**5, 0, 0, 0], [0, 10**5, 0, 0])
    calls = 0
    while popularity.most_popular(1) != [(0, 3)]:
        popularity.add(0, np.array([0, 0, 0, 64]))
        popularity.add(1, np.array([0, 0, 32, 32]))
        calls += 1
    assert 64 * calls < 20 * HALF_LIFE_USES
    assert max(counts.sum() for counts in popularity.counts) < 10**5


def test_layers_of_other_sizes_forget_equally_fast() -> None:
    """They see the same tokens; whose experts come first must not depend on how many others there are."""
    popularity = Popularity([4, 64])
    for _ in range(30):
        popularity.add(0, np.array([0, 50, 0, 50]))
        popularity.add(1, np.bincount([7, 9], weights=[50, 50], minlength=64).astype(int))
    assert popularity.counts[0][1] == popularity.counts[1][7]


# --- the share that is predicted -------------------------------------------------------------------------------------


def test_with_nothing_known_any_experts_are_as_good_as_others() -> None:
    assert [Popularity([4, 4]).hit_rate(n) for n in (0, 2, 8, 100)] == [0, 0.25, 1, 1]
    assert Popularity([]).hit_rate(3) == 0


@pytest.mark.parametrize("top_k", [1, 4])
def test_the_share_is_what_the_kept_experts_cover_later(top_k: int) -> None:
    """Routing of a known skew, counted for a while, and compared with what comes after."""
    weights = 1 / np.arange(1, 33)
    scores = np.log(weights)

    def tokens(count: int) -> np.ndarray[Any, Any]:
        noisy = scores + rng.gumbel(size=(count, 32))
        return np.argsort(-noisy, axis=-1)[:, :top_k]

    popularity = Popularity([32, 32])
    for layer, _ in itertools.product(range(2), range(40)):
        popularity.add(layer, np.bincount(tokens(200).ravel(), minlength=32))
    later = [np.bincount(tokens(4000).ravel(), minlength=32) for _ in range(2)]
    for num_kept in (1, 8, 20, 48):
        kept = popularity.most_popular(num_kept)
        covered = sum(later[layer][expert] for layer, expert in kept) / sum(counts.sum() for counts in later)
        assert popularity.hit_rate(num_kept) == pytest.approx(covered, abs=0.05)


def test_few_tokens_do_not_promise_much() -> None:
    """Of uniform routing 20 tokens choose a few by chance; keeping those would cover what any others cover."""
    popularity = Popularity([64] * 4)
    for layer in range(4):
        popularity.add(layer, np.bincount(rng.integers(0, 64, 40), minlength=64))
    assert 0.25 < popularity.hit_rate(64) < 0.35


def test_the_share_follows_what_is_added() -> None:
    popularity = Popularity([4])
    assert popularity.hit_rate(1) == 0.25
    popularity.add(0, np.array([0, 1000, 0, 0]))
    assert popularity.hit_rate(1) > 0.9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=9), min_size=1, max_size=5))
def test_shares_grow_from_nothing_to_all(rows: list[list[int]]) -> None:
    popularity = counted(*rows)
    shares = [popularity.hit_rate(n) for n in range(sum(map(len, rows)) + 1)]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0, pytest.approx(1))
    gains = np.diff(shares)
    assert np.all(gains[1:] <= gains[:-1] + 1e-9), "the best come first"


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    popularity = some()
    loaded = load_popularity(save(popularity), SIZES)
    assert equal(loaded, popularity) and not caplog.records
    loaded.add(1, np.array([0, 0, 0, 10]))
    assert loaded.most_popular(1) == [(1, 3)], "it goes on counting"


def test_the_first_run_has_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_popularity(popularity_file("none"), SIZES)
    assert loaded.is_empty and [len(counts) for counts in loaded.counts] == list(SIZES) and not caplog.records


def test_nothing_used_nothing_written() -> None:
    assert not save(Popularity(SIZES)).exists() and not popularity_directory().exists()


def test_counts_are_kept_to_six_digits() -> None:
    popularity = counted([123456, 0, 1, 7], [0, 0, 0, 2])
    for _ in range(99):
        popularity.add(0, np.array([1, 2, 3, 4]))
    loaded = load_popularity(save(popularity), (4, 4))
    for found, expected in zip(loaded.counts, popularity.counts, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert loaded.most_popular(8) == popularity.most_popular(8)


def test_a_file_of_a_large_model_is_small() -> None:
    popularity = Popularity([384] * 60)
    for layer in range(60):
        for _ in range(3):
            popularity.add(layer, rng.integers(0, 5000, 384))
    assert save(popularity).stat().st_size < 300_000


def the_warning(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("mlx_flash", logging.WARNING)
    caplog.clear()
    return record.getMessage()


GOOD = {"format": 1, "model": "m", "counts": [[1, 2.5], [0.0]]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is damaged: Expecting value"),
        (b"\x00" * 100, "it is damaged"),
        (b"\xff\xfe\x00\xd8", "it is damaged"),
        (json.dumps(GOOD)[:-3].encode(), "it is damaged: Expecting"),
        (b"[" * 100_000, "it is damaged"),
        (b"[]", "no format, model and counts"),
        (json.dumps({**GOOD, "format": 2}).encode(), "it is of format 2, not 1"),
        (json.dumps({**GOOD, "format": "1"}).encode(), "no format, model and counts"),
        (json.dumps({**GOOD, "counts": {}}).encode(), "no format, model and counts"),
        (json.dumps({**GOOD, "model": 3}).encode(), "no format, model and counts"),
        *(
            (json.dumps({**GOOD, "counts": [[1, value], [0.0]]}).encode(), "something in it is no count")
            for value in ("1", None, True, [1], -1, float("nan"), float("inf"), 1e300, 10**400)
        ),
        (json.dumps({**GOOD, "counts": [[1, 2], 3]}).encode(), "something in it is no count"),
        (json.dumps({**GOOD, "counts": [[1, 2]]}).encode(), "2 experts in 1 layers, the model has 3 in 2"),
        (json.dumps({**GOOD, "counts": [[1], [2, 3]]}).encode(), "has 3 in 2, divided otherwise"),
        (json.dumps({**GOOD, "counts": [[1, 2], []]}).encode(), "2 experts in 2 layers, the model has 3 in 2"),
    ],
)
def test_a_file_that_is_not_right_costs_one_warning(
    content: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = popularity_file("a")
    path.parent.mkdir(parents=True)
    path.write_bytes(json.dumps(GOOD).encode())
    assert load_popularity(path, (2, 1)).counts[0].tolist() == [1, 2.5] and not caplog.records
    path.write_bytes(content)
    loaded = load_popularity(path, (2, 1))
    assert loaded.is_empty and loaded.most_popular(9) == []
    message = the_warning(caplog)
    assert message.startswith(f"{path} is not used: ") and words in message and len(message) < 500
    loaded.add(0, np.array([0, 7]))
    save_popularity(path, loaded, "m")
    assert load_popularity(path, (2, 1)).most_popular(9) == [(0, 1)] and not caplog.records, "it was replaced"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(GOOD)), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({name: json_values | st.just(value) for name, value in GOOD.items()}))
@example({**GOOD, "counts": [[2, 1], [1e-300]]})
def test_no_file_breaks_a_run(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(content))
    loaded = load_popularity(path, (2, 1))
    assert [counts.shape for counts in loaded.counts] == [(2,), (1,)]
    assert 0 <= loaded.hit_rate(2) <= 1 and len(loaded.most_popular(9)) <= 3


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_flipped_byte_breaks_a_run(tmp_path_factory: pytest.TempPathFactory, place: int, bits: int) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    save_popularity(path, some(), "m")
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= bits
    path.write_bytes(data)
    loaded = load_popularity(path, SIZES)
    assert [len(counts) for counts in loaded.counts] == list(SIZES) and 0 <= loaded.hit_rate(5) <= 1


# --- disks that cannot be written ------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("in the way")
    path = save(some(), model="org/model")
    message = the_warning(caplog)
    assert message.startswith(f"cannot write {path}: ") and "org/model" in message and "expert_warm_start" in message
    assert load_popularity(path, SIZES).is_empty
    assert the_warning(caplog).startswith(f"{path} is not used: Not a directory")
    assert list_popularity() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    path = save(some())
    before = path.read_bytes()
    path.parent.chmod(0o500)
    try:
        save(some(seed=1))
        assert "Permission denied" in the_warning(caplog)
        with pytest.raises(WriteError, match="cannot remove"):
            remove_popularity(list_popularity()[0])
    finally:
        path.parent.chmod(0o700)
    assert [file.path for file in list_popularity()] == [path] and path.read_bytes() == before


PRELUDE = """
import sys
import numpy as np
from pathlib import Path
from mlx_flash.experts.popularity import *
path = Path(sys.argv[1])
popularity = Popularity([8, 4, 8])
for layer, counts in enumerate(popularity.counts):
    popularity.add(layer, np.arange(len(counts)) + int(sys.argv[2]))
"""


def python(text: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRELUDE + text, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_costs_a_warning_and_keeps_what_was_there() -> None:
    """A limit on the size of files does to a write what a full disk does."""
    path = save(some())
    full = python(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "save_popularity(path, popularity, 'org/model')\n"
        "print('mlx' in sys.modules or 'mlx.core' in sys.modules)",
        path,
        1,
    )
    out, err = full.communicate(timeout=60)
    assert full.returncode == 0 and out == "False\n", "it needs no MLX"
    assert err.startswith(f"cannot write {path}: File too large. ") and err.count("\n") == 1
    assert equal(load_popularity(path, SIZES), some())
    assert [file.path for file in list_popularity()] == [path], "nothing half written is left"


def test_an_interrupted_save_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(some())

    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(some(seed=1))
    assert [file.path for file in list_popularity()] == [path] and equal(load_popularity(path, SIZES), some())


def test_processes_that_save_at_once_leave_one_whole_file(caplog: pytest.LogCaptureFixture) -> None:
    path = popularity_file("a")
    text = "print(flush=True)\ninput()\nfor _ in range(150): save_popularity(path, popularity, sys.argv[2])"
    savers = [python(text, path, number) for number in (1, 50)]
    for saver in savers:
        assert saver.stdin and saver.stdout and saver.stdout.readline() == "\n"
    for saver in savers:
        assert saver.stdin
        print(file=saver.stdin, flush=True)
    tops = set()
    while any(saver.poll() is None for saver in savers):
        loaded = load_popularity(path, SIZES)  # a file half written would be told
        tops |= {loaded.counts[0][0]} if not loaded.is_empty else set()
    assert [saver.communicate() for saver in savers] == [("", "")] * 2
    assert not caplog.records and tops <= {1.0, 50.0} and tops
    assert load_popularity(path, SIZES).counts[0][0] in tops | {1.0, 50.0}
    assert [file.path for file in list_popularity()] == [path]


# --- which model -----------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, value: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.full((4,), value)})
    return folder


def test_a_model_keeps_its_file_and_another_has_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = state_of(read_checkpoint(save_checkpoint(tmp_path / "a")))
    config = {"model_type": "mixtral", "num_experts_per_tok": 2}
    fingerprint = popularity_fingerprint(config, first)
    assert re.fullmatch("[0-9a-f]{32}", fingerprint)
    assert popularity_file(fingerprint).parent == popularity_directory()
    again = state_of(read_checkpoint(tmp_path / "a"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    assert popularity_fingerprint(dict(reversed(config.items())), again) == fingerprint
    assert popularity_fingerprint({**config, "num_experts_per_tok": 4}, first) != fingerprint
    save_checkpoint(tmp_path / "a", 1.0)
    assert popularity_fingerprint(config, state_of(read_checkpoint(tmp_path / "a"))) != fingerprint


# --- the list, and the command ---------------------------------------------------------------------------------------


def test_files_are_listed_the_last_used_first() -> None:
    assert list_popularity() == []
    paths = [save(some(seed=seed), fingerprint=str(seed), model=f"m{seed}") for seed in range(3)]
    for path, seconds in zip(paths, (2, 3, 1), strict=True):
        os.utime(path, (seconds, seconds))
    files = list_popularity()
    assert [file.model for file in files] == ["m1", "m0", "m2"]
    assert files[0] == PopularityFile(paths[1], "m1", paths[1].stat().st_size, 3.0)
    remove_popularity(files[0])
    remove_popularity(files[0])
    assert [file.model for file in list_popularity()] == ["m0", "m2"]


def command(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["cache", *args]) == 0
    return capsys.readouterr().out


def test_the_command_lists_and_clears(capsys: pytest.CaptureFixture[str]) -> None:
    text = command("list", capsys=capsys)
    assert f"0 lists of popular experts of 0.0 kB in {popularity_directory()}; " in text
    save(Popularity(SIZES))
    path = save(some([300, 300]), model="org/model")
    damaged = popularity_file("b")
    damaged.write_text("{" * 1000)
    os.utime(damaged, (1, 1))
    size = path.stat().st_size
    text = command("list", capsys=capsys)
    assert re.search(rf"^org/model +{size / 1000:.1f} kB +used today", text, re.M)
    assert re.search(r"^\(cannot be read\) +1\.0 kB +used \d{5} days ago", text, re.M)
    assert f"2 lists of popular experts of {(size + 1000) / 1000:.1f} kB" in text
    assert "expert_warm_start=False (--no-expert-warm-start)" in text
    listed = json.loads(command("list", "--json", capsys=capsys))
    assert listed["bytes"] == size + 1000 and listed["popularity_directory"] == str(path.parent)
    assert [(file["file"], file["model"], file["bytes"]) for file in listed["popularity"]] == [
        (str(path), "org/model", size),
        (str(damaged), "", 1000),
    ]
    assert listed["popularity"][0]["last_used"] == path.stat().st_mtime

    cleared = json.loads(command("clear", "--json", capsys=capsys))
    assert (cleared["popularity"], cleared["bytes"]) == (listed["popularity"], listed["bytes"])
    assert list_popularity() == []
    path = save(some(), model="org/model")
    text = command("clear", capsys=capsys)
    assert re.search(rf"^removed 0\.\d kB of popular experts of org/model: {path}$", text, re.M)
    assert "removed 0 packed copies of 0.00 GB, 1 list of popular experts" in text and "expert_warm_start" in text
    assert "0 lists of popular experts" in command("clear", capsys=capsys)
