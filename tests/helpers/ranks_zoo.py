"""Architectures whose layers take turns between ranks of this machine, compared with stock mlx-lm, bit for bit.

Started as a program on each rank with a folder and names of configurations. Each rank prints a line of JSON for each:
its number, the name, the status and, if that is ok, a digest of the logits.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from local_ranks import Rank, join, started
from mlx_flash.engine import prepare
from mlx_flash.errors import ConfigError, PeerError, StreamedWeightsError
from models import stock
from streamed import streamed_whole
from zoo import configuration
from zoo.compare import LONGEST_CALL, find_flaw, one_line, trace
from zoo.weights import VARIANTS, save

FIRST_VARIANT, INSTEAD = "bf16", "fp32"
ENDS = ("ok", "refused", "failed", "cannot")
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The result for one architecture. ``cannot``: stock mlx-lm cannot run it here; ``refused``: its layers are no
    chain.
    """

    name: str
    status: str
    reason: str
    seconds: float


def compare_all(names: Sequence[str], num_ranks: int, timeout: float) -> Iterator[RankOutcome]:
    """Compare architectures one after another, in so many seconds each. After an error, the ranks start anew with the
    next.
    """
    left = list(names)
    while left:
        with (
            tempfile.TemporaryDirectory(prefix="zoo-ranks-") as folder,
            started(num_ranks, Path(folder), __file__, folder, *left) as ranks,
        ):
            while left:
                outcome = _wait_for(ranks, left[0], timeout)
                yield outcome
                del left[0]
                if outcome.status in ("refused", "failed"):
                    break


def _wait_for(ranks: Sequence[Rank], name: str, timeout: float) -> RankOutcome:
    """Return the outcome of an architecture, once all ranks have said it or one of them has failed."""
    began = time.monotonic()
    while True:
        codes = [rank.process.exitcode for rank in ranks]
        outcome = _judge(_said(ranks, name), len(ranks))
        if outcome is None and (any(codes) or None not in codes):  # a rank that has said all ends before the others
            outcome = _judge(_said(ranks, name), len(ranks)) or _crash(ranks)
        if outcome is None and time.monotonic() - began > timeout:
            outcome = "failed", f"no end after {timeout:g} s"
        if outcome is not None:
            return RankOutcome(name, *outcome, time.monotonic() - began)
        time.sleep(POLL_SECONDS)


def _said(ranks: Sequence[Rank], name: str) -> list[tuple[int, str, str]]:
    lines = [line for rank in ranks for line in rank.out.read_text().splitlines(True)]
    found = [json.loads(line) for line in lines if line.startswith("[") and line.endswith("\n")]
    return [(rank, word, text) for rank, of, word, text in found if of == name]


def _crash(ranks: Sequence[Rank]) -> tuple[str, str]:
    time.sleep(1.0)  # the others may say more than that a rank is lost
    errors = " ".join(rank.errors.read_text()[-200:] for rank in ranks)
    return "failed", f"a rank ended: {' '.join(errors.split())}"


def _judge(said: Sequence[tuple[int, str, str]], num_ranks: int) -> tuple[str, str] | None:
    """Return status and reason; None if ranks are not done. A refusal of one rank may end others with an error."""
    for status in ("refused", "failed"):
        for _, word, text in said:
            if word == status:
                return status, text
    ends = [(word, text) for _, word, text in said if word in ENDS]
    if len(ends) < num_ranks:
        return None
    if any(word == "cannot" for word, _ in ends):
        return "cannot", ends[0][1]
    return ("ok", "") if len({text for _, text in ends}) == 1 else ("failed", "ranks have other logits than stock")


# On each rank


def main(folder: Path, names: Sequence[str]) -> None:
    """Compare architectures on this rank, one after another."""
    group = join()
    prepare.share_layers = lambda layers, ranks: _take_turns(len(layers), len(ranks))
    for name in names:
        expected = stock_digest(folder / name.replace(":", "-"), name) if group.rank() == 0 else ""
        found = mx.distributed.all_sum(mx.array(1 if group.rank() or len(expected) == 64 else 0), group=group)
        if int(found.item()) < group.size():
            say(group.rank(), name, "cannot", expected)
            continue
        try:
            digest = streamed_digest(folder / name.replace(":", "-"), name, group)
        except (StreamedWeightsError, ConfigError) as error:
            say(group.rank(), name, "refused", one_line(error))
            raise
        except PeerError:
            raise  # another rank says why
        except Exception as error:
            say(group.rank(), name, "failed", one_line(error))
            raise
        is_same = group.rank() or digest == expected
        say(group.rank(), name, "ok" if is_same else "failed", digest if is_same else "logits differ from stock's")


def _take_turns(num_layers: int, num_ranks: int) -> list[int]:
    if num_layers < num_ranks:
        raise ConfigError(f"{num_ranks} ranks share a model of {num_layers} layers, and each needs one.")
    return [number % num_ranks for number in range(num_layers)]


def stock_digest(directory: Path, name: str) -> str:
    """Return a digest of stock's logits, or why there are none."""
    for variant in (FIRST_VARIANT, INSTEAD):
        try:
            save(directory, configuration(name), VARIANTS[variant])
            found = trace(stock(directory))
            return find_flaw(found[0]) or digest_of(found)
        except (Exception, SystemExit) as error:
            reason = one_line(error)
    return reason


def streamed_digest(directory: Path, name: str, group: mx.distributed.Group) -> str:
    """Return a digest of the logits of a model that the ranks share."""
    tile_rows = 3 * configuration(name)["vocab_size"] // 5
    with streamed_whole(directory, tile_rows=tile_rows, group=group, prefill_step_size=LONGEST_CALL) as model:
        return digest_of(trace(model))


def digest_of(found: Sequence[tuple[str, Any]]) -> str:
    """Return a digest of all logits. Caches of other ranks' layers are elsewhere."""
    digest = hashlib.sha256()
    for label, value in found:
        if label.startswith("logits"):
            digest.update(f"{label} {value.dtype} {value.shape}".encode())
            digest.update(bytes(memoryview(mx.contiguous(value).view(mx.uint8))))
    return digest.hexdigest()


def say(rank: int, name: str, word: str, text: str) -> None:
    """Print a line."""
    print(json.dumps([rank, name, word, text]), flush=True)


if __name__ == "__main__":
    try:
        with contextlib.suppress(StreamedWeightsError, ConfigError):
            main(Path(sys.argv[1]), sys.argv[2:])
    finally:
        atexit._run_exitfuncs()  # a forked child does not, and would seem to have died
