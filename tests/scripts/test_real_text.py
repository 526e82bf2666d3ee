"""Tests of the benchmarks on real text: their counts and comparisons, but no speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_modules import ROOT, load_benchmark

PAIR = ROOT / "examples" / "pair"

real_text = load_benchmark("real_text")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded answers of the small trained model, with the guesses of its draft."""
    folder = tmp_path_factory.mktemp("answers")
    tasks = [{"kind": "count", "prompt": "a b c d a b c d a b"}, {"kind": "tell", "prompt": "import os\n\ndef "}]
    (folder / "tasks.json").write_text(json.dumps(tasks))
    words = ["--model", PAIR / "target", "--draft", PAIR / "draft", "--tasks", folder / "tasks.json", "--tokens", 40]
    assert real_text.main(["record", *map(str, words), "--json", str(folder / "answers.json")]) == 0
    return folder / "answers.json"


def test_replay_counts_passes_of_each_source(answers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["replay", str(answers), "--read-gb", "1", "--disk-mb-per-second", "100", "1000", "--row-seconds", "0.01"]
    assert real_text.main([*words, "--guess-seconds", "0.001", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["summary"]
    assert {(row["disk_mb_per_second"], row["way"]) for row in rows} == {
        (disk, way) for disk in (100, 1000) for way in ("none", "lookup", "draft", "lookup and draft")
    }
    for row in rows:
        assert row["tokens"] == row["passes"] + row["right"] == 39
        assert (row["passes"] == 39) == (row["way"] == "none") or row["right"] == 0
        reading = row["passes"] * 1e3 / row["disk_mb_per_second"]
        drafted = row["guessed"] * 0.001 if row["way"] == "draft" else 0
        if row["way"] != "lookup and draft":
            assert row["seconds"] == pytest.approx(reading + drafted)


def test_a_streamed_model_takes_the_passes_of_the_replay(answers: Path, tmp_path: Path) -> None:
    words = ["stream", str(answers), "--model", str(PAIR / "target"), "--budget", "min", "--ways", "none", "lookup"]
    clock = ["--read-gb", "1", "--disk-mb-per-second", "100", "--row-seconds", "0.01"]
    assert real_text.main([*words, *clock, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert sum(row["right"] for row in rows) > 0


def test_other_tokens_and_other_logits_are_found(answers: Path, tmp_path: Path) -> None:
    recorded = json.loads(answers.read_text())
    words = ["--model", str(PAIR / "target"), "--budget", "min", "--ways", "none", "--tokens", "4"]
    for name, value in (("tokens", 1), ("digests", "00000000")):
        changed = json.loads(json.dumps(recorded))
        changed["answers"][1][name][2] = value
        (tmp_path / "changed.json").write_text(json.dumps(changed))
        with pytest.raises(SystemExit, match="tell: other tokens or logits"):
            real_text.main(["stream", str(tmp_path / "changed.json"), *words])
