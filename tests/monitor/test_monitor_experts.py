"""The monitor shows what a pool of experts holds and does, and is silent where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from mlx_flash.monitor.frames import PARTS, REST
from mlx_flash.monitor.rates import MINUTE, History
from mlx_flash.telemetry import Json
from monitored import SLOT, canvas, pool, published, runtime, state, text_of

__all__ = ["runtime"]  # a fixture that pytest finds by its name here

GB = 1_000_000_000
LAYERS, TOP_K = 8, 4


def told(clock: float, tokens: float, ended: float, experts: Any, **sections: Any) -> Any:
    passes = {"num_tokens_in": tokens, "num_tokens_out": tokens, "last_ended": ended, "began": ended}
    return published(state(experts=experts, passes=passes, **sections), clock)


def history_of(first: Any, *others: Any) -> History:
    history = History(first)
    for other in others:
        history.add(other)
    return history


def two_looks() -> History:
    """Four tokens in a second: 128 experts needed, 96 in the pool, of which 20 of 25 predicted."""
    before = pool(num_routed=1000, num_hits=100, num_predicted=50, num_predicted_right=5, read_bytes=7 * GB)
    after = pool(num_routed=1128, num_hits=196, num_predicted=75, num_predicted_right=25, read_bytes=7_285_000_000)
    before["wait_seconds"], after["wait_seconds"] = 3.0, 3.25
    return history_of(told(100.0, 30, 99.9, before), told(101.0, 34, 100.9, after))


def lines_of(history: History, width: int = 80, height: int | None = 24) -> list[str]:
    return text_of(history, on=canvas(width, height))


def line_of(history: History, label: str) -> str:
    (line,) = [line for line in lines_of(history) if line.startswith(label)]
    return line


# Rates


def test_two_looks_a_second_apart() -> None:
    rates = two_looks().rates.experts
    assert rates is not None
    assert rates.hit_rate == pytest.approx(96 / 128)
    assert rates.predicted_right == pytest.approx(20 / 25)
    assert rates.read_per_token == pytest.approx((32 + 25) / 4)
    assert rates.reused_per_token == pytest.approx((96 - 20) / 4)
    assert rates.read_bytes_per_token == pytest.approx(285_000_000 / 4)
    assert rates.wait_share == pytest.approx(0.25)


def looks(seconds_per_token: float, until: float) -> Iterator[Any]:
    """An engine at work, looked at four times a second: every layer needs four experts, and reads the odd ones."""
    for i in range(int(until / 0.25)):
        clock = 10.1 + i * 0.25
        done, under_way = divmod((clock - 10.0) / seconds_per_token, 1)
        calls = int(done) * LAYERS + int(under_way * LAYERS)
        layers = [call % LAYERS for call in range(calls)]
        hits = sum(TOP_K if layer < LAYERS // 2 else 1 for layer in layers)
        numbers = pool(num_routed=TOP_K * calls, num_hits=hits, read_bytes=(TOP_K * calls - hits) * SLOT)
        yield told(clock, int(done), 10.0 + done * seconds_per_token if done else 0.0, numbers)


@pytest.mark.parametrize("seconds_per_token", [0.04, 1.3, 7.3])
def test_rates_are_those_of_whole_tokens_however_seldom_they_come(seconds_per_token: float) -> None:
    """The second half of the layers hits seldom: rates over parts of a token would go up and down."""
    first, *others = looks(seconds_per_token, 50)
    history, seen = History(first), 0
    for other in others:
        history.add(other)
        rates = history.rates.experts
        assert rates is not None
        if other.state["passes"]["num_tokens_in"] >= 2 and other.clock > 20:
            seen += 1
            close = 0.06 if seconds_per_token < 1.3 else 0.3 / seconds_per_token
            assert rates.hit_rate == pytest.approx(20 / 32, rel=close)
            assert rates.read_per_token is None or rates.read_per_token == pytest.approx(12, rel=close)
            assert rates.read_bytes_per_token == pytest.approx(12 * SLOT, rel=close)
    assert seen > 50


def test_a_slow_model_seen_only_twice() -> None:
    """A call took 7 s, and the second before its end is all that was seen: the bytes of a call are 7 times those."""
    before, after = pool(read_bytes=6 * GB), pool(read_bytes=7 * GB)
    rates = history_of(told(100.0, 4, 93.5, before), told(101.0, 5, 100.5, after)).rates.experts
    assert rates is not None and rates.read_bytes_per_token == pytest.approx(7 * GB)


def test_before_the_first_call_has_ended() -> None:
    """A long prompt: shares are known, what a token costs is not."""
    before, after = pool(num_routed=10, num_hits=1), pool(num_routed=30, num_hits=6, read_bytes=GB, wait_seconds=1.5)
    history = history_of(told(100.0, 0, 0.0, before), told(102.0, 0, 0.0, after))
    rates = history.rates.experts
    assert rates is not None
    assert (rates.hit_rate, rates.wait_share) == (0.25, 0.75)
    assert rates.read_per_token is rates.reused_per_token is rates.read_bytes_per_token is None
    assert line_of(history, "experts") == "experts    per token - read (-), - reused; waited 75% of the time"


def test_a_change_is_seen_within_seconds() -> None:
    """Half a minute in which nothing is in the pool, then everything."""
    history = History(told(100.0, 1, 99.9, pool()))
    for i in range(1, 160):
        routed, hits = i * 32, max(0, i - 120) * 32
        history.add(told(100.0 + i * 0.25, 1 + i, 99.9 + i * 0.25, pool(num_routed=routed, num_hits=hits)))
        rates = history.rates.experts
        assert rates is not None
        assert rates.hit_rate == (0 if i <= 120 else pytest.approx(1 if i > 136 else (i - 120) / 16))


def test_one_look_tells_no_rates() -> None:
    rates = History(told(101.0, 34, 100.9, pool(num_routed=1000, num_hits=100))).rates.experts
    assert rates is not None and set(asdict(rates).values()) == {None}


def test_counters_that_are_read_one_after_another() -> None:
    """Parts moved after the whole was looked at, and less than a token is none."""
    after = pool(num_routed=32, num_hits=33, num_predicted=4, num_predicted_right=5, wait_seconds=1.1)
    rates = history_of(told(100.0, 30, 99.9, pool()), told(101.0, 34, 100.9, after)).rates.experts
    assert rates is not None and rates.hit_rate == rates.predicted_right == rates.wait_share == 1
    after = pool(num_routed=32, read_bytes=GB)
    rates = history_of(told(100.0, 0, 99.9, pool()), told(101.0, 1e-300, 100.9, after)).rates.experts
    assert rates is not None and rates.read_per_token is rates.read_bytes_per_token is None


def test_an_idle_engine_keeps_the_last_tokens_and_then_forgets_them() -> None:
    history = two_looks()
    latest = dict(history.latest.state["experts"])
    for i in range(1, 300):
        history.add(told(101.0 + i * 0.25, 34, 100.9, latest))
        rates = history.rates.experts
        assert rates is not None
        assert rates.hit_rate == (pytest.approx(0.75) if i * 0.25 <= MINUTE - 1 else None)
        assert i < 20 or rates.wait_share == 0


def test_waits_for_experts_are_waits_for_the_disk() -> None:
    """They lie within the time in which a layer's other weights are held."""
    shares = []
    for waited in (0.0, 0.5, 0.9):
        sections = [{"stream": {"wait_seconds": 1.0 + i / 10, "held_seconds": 2.0 + i * 0.8}} for i in range(2)]
        looks = [told(100.0 + i, 4, 99.5, pool(wait_seconds=i * waited), **sections[i]) for i in range(2)]
        found = history_of(*looks).rates.shares
        assert found is not None
        shares.append((found.disk, found.compute, found.calls + found.between))
    assert shares == [pytest.approx(share) for share in ((0.1, 0.8, 0.1), (0.6, 0.3, 0.1), (1.0, 0.0, 0.0))]


# Drawing


def test_two_lines() -> None:
    history = two_looks()
    assert line_of(history, "pool") == "pool       412 of 3072 experts in 2.10 GB; hits 75%, predicted right 80%"
    words = "experts    per token 14.2 read (71 MB), 19.0 reused; waited 25% of the time"
    assert line_of(history, "experts") == words
    labels = [line.split(" ")[0] for line in lines_of(history)]
    assert [label for label in labels if label in ("time", "pool", "experts", "budget")] == [
        "time", "pool", "experts", "budget"
    ]  # fmt: skip


@pytest.mark.parametrize("experts", [{}, {"experts": None}])
def test_nothing_without_a_pool(experts: Json) -> None:
    plain = history_of(published(state(), 100.0), published(state(), 101.0))
    memory = {"memory": {"pool": 0}} if experts else {}
    history = history_of(*(published(state(**experts, **memory), clock) for clock in (100.0, 101.0)))
    assert history.rates == plain.rates and history.rates.experts is None
    assert lines_of(history) == lines_of(plain)
    assert "experts" not in "\n".join(lines_of(history))


def test_the_pool_is_a_part_of_the_budget() -> None:
    plain = lines_of(two_looks())
    told_plan = {"budget_bytes": 4 * GB}
    memory = {"footprint": 3_000_000_000, "active": 2_700_000_000, "lent": 0, "pool": 2_100_000_000}
    history = History(published(state(experts=pool(), plan=told_plan, memory=memory)))
    lines = lines_of(history)
    glyph = PARTS[5]
    at = next(i for i, line in enumerate(lines) if line.startswith("budget"))
    cells = lines[at + 1][11:]
    assert cells.count(glyph) == pytest.approx(len(cells) * 2.1 / 4, abs=1.5)
    in_order = [PARTS[i] for i in (0, 1, 2, 5, 3, 4)]
    assert [key for key in dict.fromkeys(cells) if key != REST] == in_order
    assert f"{PARTS[2]} slots 200 MB  {glyph} experts 2.10 GB" in lines[at + 2]
    assert not any(f"{glyph} experts" in line for line in plain)
