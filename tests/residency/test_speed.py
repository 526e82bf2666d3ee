"""Predictions use the speeds that the last run of a model reached."""

from __future__ import annotations

import json
import platform
import time
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from machines import FIXED, LLAMA_LAYER, MB, make_machine, make_mixture, make_model, minimum_of, with_budget
from mlx_flash.config import GB, FlashConfig
from mlx_flash.engine import meter
from mlx_flash.engine.meter import MIN_PASSES, MIN_READ_BYTES, SpeedMeter
from mlx_flash.engine.prepare import prepare
from mlx_flash.folders import cache_directory
from mlx_flash.loading import load_model
from mlx_flash.memory import others
from mlx_flash.memory.others import BUSY, OtherLoad
from mlx_flash.residency import machine
from mlx_flash.residency import speed as speeds
from mlx_flash.residency.machine import compute_bytes_per_second, prompt_speedup
from mlx_flash.residency.plan import Pool, ResidencyPlan
from mlx_flash.residency.planner import make_plan
from mlx_flash.residency.sizes import ModelSizes
from mlx_flash.residency.speed import Machine, Speed, load_speed, save_speed
from mlx_flash.storage.prefetcher import ReadStats
from mlx_flash.storage.probe import PROFILES
from mlx_flash.streaming.stream import StreamStats
from models import LLAMA, run, save

MEASURED = Speed(1e9, 2e9, 1e-4, 0.01, is_measured=True)
PROBED = replace(MEASURED, prompt_seconds_per_token=0.0, is_measured=False)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(OtherLoad, "share", 0.0)  # tests run beside each other


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(meter.time, "perf_counter", lambda: self.now)


def plan_of(machine: Any = None, share: float = 0.3, config: FlashConfig = FIXED) -> ResidencyPlan:
    sizes, machine = make_model(), machine or make_machine()
    least = minimum_of(sizes, config, machine)
    return make_plan(sizes, with_budget(config, least + int(share * sizes.nbytes)), machine)


def test_speed_is_kept_for_a_model_and_a_disk() -> None:
    save_speed("one", MEASURED)
    save_speed("other", PROBED)
    assert (load_speed("one"), load_speed("other"), load_speed("third")) == (MEASURED, PROBED, None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"one": 3}', '{"one": {"time": "now"}}', "[" * 5000, "\x00\xff"],
)
def test_damaged_record_is_ignored_and_replaced(text: str) -> None:
    file = cache_directory() / "speeds.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert load_speed("one") is None
    save_speed("one", MEASURED)
    assert load_speed("one") == MEASURED


@pytest.mark.parametrize(
    ("field", "value"),
    [("disk_bytes_per_second", 0.0), ("compute_bytes_per_second", -1.0), ("barrier_seconds", 1e999), ("time", 1e12)],
)
def test_record_with_an_impossible_number_is_ignored(field: str, value: float) -> None:
    save_speed("one", MEASURED)
    file = cache_directory() / "speeds.json"
    entries = json.loads(file.read_text())
    entries["one"][field] = value
    file.write_text(json.dumps(entries))
    assert load_speed("one") is None


@pytest.mark.parametrize(("speed", "age"), [(MEASURED, speeds.MAX_AGE_SECONDS), (PROBED, speeds.MAX_PROBE_AGE_SECONDS)])
def test_old_record_is_ignored(monkeypatch: pytest.MonkeyPatch, speed: Speed, age: float) -> None:
    save_speed("one", speed)
    later = time.time() + age
    monkeypatch.setattr(speeds.time, "time", lambda: later - 60)
    assert load_speed("one") == speed
    monkeypatch.setattr(speeds.time, "time", lambda: later + 60)
    assert load_speed("one") is None


def test_record_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    save_speed("one", MEASURED)
    assert load_speed("one") is None


def test_meter_finds_the_speed_of_disk_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that compute for twice as long as planned halve the speed of later plans."""
    plan, clock = plan_of(), Clock(monkeypatch)
    read, stream = ReadStats(nbytes=5 * GB, busy_seconds=1.0), StreamStats()
    found = SpeedMeter(plan, lambda: replace(read), stream)
    assert found.speed(PROBED) is None
    for num_tokens in [64] + [1] * MIN_PASSES:
        found.begin(is_comparable=True)
        stream.wait_seconds += 3.0
        clock.now += 3.0 + num_tokens * 2 * plan.streaming.compute_seconds
        read.nbytes += MIN_READ_BYTES
        read.busy_seconds += 0.5
        found.end(num_tokens, 1)
    speed = found.speed(PROBED)
    assert speed is not None and speed.is_measured
    assert speed.disk_bytes_per_second == pytest.approx(MIN_READ_BYTES / 0.5)
    assert speed.compute_bytes_per_second == pytest.approx(PROBED.compute_bytes_per_second / 2)
    assert speed.barrier_seconds == pytest.approx(PROBED.barrier_seconds * 2)
    assert speed.prompt_seconds_per_token == pytest.approx(2 * plan.streaming.compute_seconds)
    found._plan = replace(plan, pool=Pool(8, MB, 64, 0.5, MB, 0.1))
    of_mixture = replace(PROBED, prompt_seconds_per_token=speed.prompt_seconds_per_token, is_measured=True)
    assert found.speed(PROBED) == of_mixture, "experts are read as they are needed, not as fast as the disk can"


def test_prompts_compute_as_fast_as_probed_until_a_run_was_measured() -> None:
    plan, faster = plan_of(), plan_of(make_machine(prompt_speedup=2.0))
    assert plan.prompt_seconds_per_token == pytest.approx(plan.streaming.compute_seconds)
    assert faster.prompt_seconds_per_token == pytest.approx(plan.prompt_seconds_per_token / 2)
    measured = plan_of(make_machine(prompt_speedup=2.0, prompt_seconds_per_token=0.2))
    assert measured.prompt_seconds_per_token == 0.2


@pytest.mark.parametrize("bits", [None, 4])
def test_probe_of_prompts_counts_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None) -> None:
    """A processor that takes as long for each token brings nothing, one that takes as long for all 16 times as much."""
    layout = prepare(save(tmp_path / "model", LLAMA, bits=bits), FlashConfig()).layout
    monkeypatch.setattr(machine, "_seconds", lambda part, x: 0.5 * x.shape[1])
    assert prompt_speedup(layout) == 1
    monkeypatch.setattr(machine, "_seconds", lambda part, x: 0.5)
    assert prompt_speedup(layout) == 16


def test_prompts_fetch_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that takes 50 seconds to fetch what the processor wrote, and half a second for one token or many."""
    layout = prepare(save(tmp_path / "model", LLAMA), FlashConfig()).layout
    monkeypatch.setattr(machine, "way_of_reading", lambda: "in place")
    written: list[int] = []
    fill = machine.Arena.fill
    monkeypatch.setattr(machine.Arena, "fill", lambda self, byte: (written.append(byte), fill(self, byte)))
    monkeypatch.setattr(machine, "_seconds", lambda part, x: 50.5 if written and written.pop() == 0 else 0.5)
    assert prompt_speedup(layout) == 16 * 101


def test_run_of_a_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "MIN_READ_BYTES", 1)
    model, _ = load_model(save(tmp_path / "model", LLAMA), FlashConfig(ram_budget_gb="min"))
    key = model._life.prepared.machine.speed_key
    with model:
        run(model, [[1, 2, 3], *([token] for token in range(MIN_PASSES + 1))])
        assert load_speed(key) is None
    found = load_speed(key)
    assert found is not None and found.is_measured and found.prompt_seconds_per_token > 0


def measured(monkeypatch: pytest.MonkeyPatch, read: ReadStats, times: float = 0.0) -> SpeedMeter:
    """Return a meter after a run whose passes took so many times as long as planned, and read what ``read`` says."""
    plan, clock = plan_of(), Clock(monkeypatch)
    found = SpeedMeter(plan, lambda: replace(read), StreamStats())
    for _ in range(MIN_PASSES):
        found.begin(is_comparable=True)
        clock.now += times * plan.streaming.compute_seconds
        found.end(1, 1)
    return found


def test_short_run_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ReadStats()
    found = measured(monkeypatch, read)
    read.busy_seconds, read.nbytes = 1.0, MIN_READ_BYTES - 1
    found.save("one", PROBED)
    assert load_speed("one") is None
    read.nbytes += 1
    found.save("one", PROBED)
    assert load_speed("one") is not None


def test_run_whose_reads_took_no_time_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ReadStats()
    found = measured(monkeypatch, read)
    read.nbytes = MIN_READ_BYTES
    found.save("one", PROBED)
    assert load_speed("one") is None


@pytest.mark.parametrize(("num_cached", "is_disk"), [(0, True), (1, False)])
def test_speed_of_the_disk_is_kept_unless_reads_came_from_memory(
    monkeypatch: pytest.MonkeyPatch, num_cached: int, is_disk: bool
) -> None:
    read = ReadStats(cached_bytes=7)
    found = measured(monkeypatch, read, times=2.0)
    read.busy_seconds, read.nbytes, read.cached_bytes = 0.5, MIN_READ_BYTES, 7 + num_cached
    found.save("one", PROBED)
    speed = load_speed("one")
    assert speed is not None and speed.is_measured
    expected = MIN_READ_BYTES / 0.5 if is_disk else PROBED.disk_bytes_per_second
    assert speed.disk_bytes_per_second == pytest.approx(expected)


@pytest.mark.parametrize(("planned", "is_probed_again"), [(1e15, True), (1.0, False)])
def test_disk_slower_than_half_its_planned_speed_is_probed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: float, is_probed_again: bool
) -> None:
    monkeypatch.setattr(meter, "MIN_READ_BYTES", 1)
    monkeypatch.setattr(OtherLoad, "share", 0.0)
    monkeypatch.setattr("mlx_flash.engine.session._spare_memory", lambda budget: 0)  # nothing is in the page cache
    directory = save(tmp_path / "model", LLAMA)
    machine = prepare(directory, FlashConfig()).machine
    save_speed(machine.speed_key, replace(machine.speed, disk_bytes_per_second=planned))
    profile = {"bytes_per_second": planned, "read_size": 1 << 20, "queue_depth": 4, "direct": True}
    for way in ("any", "direct"):
        key = f"{platform.node()}:{directory.stat().st_dev}:{way}"
        PROFILES.save(key, {**profile, "through_cache": False})
    with load_model(directory, FlashConfig(ram_budget_gb="min"))[0] as model:
        run(model, [[token] for token in range(MIN_PASSES + 1)])
        assert PROFILES.load()
    assert (not PROFILES.load()) == is_probed_again


@dataclass(frozen=True)
class Pass:
    """A pass of a run: seconds that the caller took before it, and what it computed, in units of a token."""

    gap: float = 0.0
    took: float = 1.0
    num_tokens: int = 1
    num_guesses: int = 0
    is_comparable: bool = True


@pytest.mark.parametrize(
    ("passes", "units"),
    [
        ([Pass()] * MIN_PASSES, 1.0),
        ([Pass(gap=0.5)] * MIN_PASSES, 1.5 - 0.5 / MIN_PASSES),  # nothing was returned before the first
        ([Pass(gap=50.0)] * MIN_PASSES, 2.0 - 1 / MIN_PASSES),  # the caller waited for its user
        ([Pass(gap=0.5, is_comparable=False)] * MIN_PASSES, 1.0),
        ([Pass(gap=0.5), Pass(gap=0.5, num_tokens=64)] * MIN_PASSES, 1.0),
        ([Pass(took=4.0, num_guesses=3)] * MIN_PASSES, 1.0),
    ],
    ids=["plain", "lazy results", "pauses", "not comparable", "after prompts", "guesses"],
)
def test_meter_counts_what_computed_a_token(monkeypatch: pytest.MonkeyPatch, passes: list[Pass], units: float) -> None:
    """Results that the caller evaluates after the pass count, pauses and prompts do not."""
    plan, clock = plan_of(), Clock(monkeypatch)
    read = ReadStats()
    found = SpeedMeter(plan, lambda: replace(read), StreamStats())
    for each in passes:
        clock.now += each.gap * plan.streaming.compute_seconds
        found.begin(is_comparable=each.is_comparable)
        clock.now += each.took * plan.streaming.compute_seconds
        found.end(each.num_tokens, 1, each.num_guesses)
    read.busy_seconds, read.nbytes = 1.0, MIN_READ_BYTES
    speed = found.speed(PROBED)
    assert speed is not None
    assert speed.compute_bytes_per_second == pytest.approx(PROBED.compute_bytes_per_second / units)


def test_prediction_is_a_range_until_a_run_was_measured() -> None:
    low, high = plan_of().seconds_range
    assert high > 2 * low
    plan = plan_of(make_machine(is_measured=True))
    assert plan.is_measured and plan.seconds_range == (plan.opening_seconds, plan.opening_seconds)


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 2])
def test_time_to_first_token_is_at_least_that_of_reading_and_of_computing(share: float) -> None:
    plan = plan_of(make_machine(prompt_seconds_per_token=0.2, is_measured=True), share)
    for num_tokens in (1, 64, 65, 1315):
        passes = plan.prompt_passes(num_tokens)
        assert 1 <= passes <= -(-num_tokens // plan.prefill_step_size)
        assert plan.prompt_read_bytes(num_tokens) == passes * plan.read_bytes
        seconds = plan.seconds_to_first_token(num_tokens)
        assert seconds >= plan.prompt_read_bytes(num_tokens) / plan.disk_bytes_per_second
        assert seconds >= 0.2 * num_tokens
        assert seconds >= plan.seconds
    assert plan.seconds_to_first_token(1315) > 10 * plan.seconds_to_first_token(64)


@pytest.mark.parametrize("sizes", [make_model((LLAMA_LAYER,) * 12), make_mixture(6, 16, 2)])
@pytest.mark.parametrize(
    "machine",
    [make_machine(), make_machine(compute_bytes_per_second=1e12), make_machine(barrier_seconds=5e-3)],
)
def test_predictions_do_not_fall_as_the_budget_rises(sizes: ModelSizes, machine: Machine) -> None:
    least = minimum_of(sizes, FIXED, machine)
    plans = [make_plan(sizes, with_budget(FIXED, least + 13 * MB * i), machine) for i in range(100)]
    close = 1.0 / 0.99 + 1e-9  # plans that are this close count as equally fast
    assert worst_fall([plan.seconds for plan in plans]) <= close
    assert worst_fall([plan.opening_seconds for plan in plans]) <= 1.05  # it is not what plans are chosen by


def worst_fall(seconds: list[float]) -> float:
    return max(more / min(seconds[: i + 1]) for i, more in enumerate(seconds))


def test_lent_memory_saves_reading_at_the_beginning() -> None:
    machine = make_machine(is_measured=True)
    short, long = (replace(FIXED, context_length=length) for length in (256, 16 * 1024))
    sizes = make_model()
    budget = minimum_of(sizes, long, machine) + int(0.2 * sizes.nbytes)
    plans = [make_plan(sizes, with_budget(config, budget), machine) for config in (short, long)]
    assert plans[1].seconds > 1.1 * plans[0].seconds, "the longer context leaves fewer weights in memory"
    assert plans[1].opening_seconds == pytest.approx(plans[0].opening_seconds, rel=0.1)
    assert plans[0].streaming.compute_seconds < plans[0].opening_seconds <= plans[0].seconds


def test_lent_memory_holds_experts_at_the_beginning() -> None:
    machine = make_machine(is_measured=True, compute_bytes_per_second=50e9)
    short, long = (replace(FIXED, context_length=length) for length in (256, 16 * 1024))
    sizes = make_mixture(12, 64, 4)
    budget = minimum_of(sizes, long, machine) + int(0.3 * sizes.nbytes)
    plans = [make_plan(sizes, with_budget(config, budget), machine) for config in (short, long)]
    few, many = (plan.pool.num_slots if plan.pool else 0 for plan in (plans[1], plans[0]))
    assert 0 < few < 0.9 * many
    assert plans[1].seconds > 1.1 * plans[0].seconds
    assert plans[1].opening_seconds == pytest.approx(plans[0].opening_seconds, rel=0.05)


def test_sequences_that_share_passes_are_faster_while_the_disk_limits() -> None:
    plan = plan_of(share=0.3)
    assert plan.streaming.num_slots > 1
    reading = plan.streaming.read_bytes / plan.disk_bytes_per_second

    def speeds(compute_seconds: float) -> list[float]:
        seconds = max(reading, compute_seconds)
        times = replace(plan.streaming, seconds=seconds, compute_seconds=compute_seconds)
        return [replace(plan, streaming=times).tokens_per_second(n) or 0.0 for n in (1, 8, 16)]

    alone, eight, _ = speeds(reading / 20)  # computing takes a twentieth of reading
    assert eight == pytest.approx(8 * alone)
    alone, _, sixteen = speeds(2 * reading)
    assert sixteen == pytest.approx(alone)


def test_parts_of_a_prompt_share_passes_as_far_as_memory_allows() -> None:
    plan = replace(plan_of(share=0.3), prefill_step_size=16)
    per_part = plan.activations.waiting_bytes(16)
    free = plan.cache.nbytes(160) - plan.kv_bytes - plan.spare_bytes + plan.peak_bytes
    assert replace(plan, budget_bytes=free).prompt_passes(160) == 10
    assert replace(plan, budget_bytes=free + 4 * per_part).prompt_passes(160) == 2
    assert replace(plan, budget_bytes=free + 9 * per_part).prompt_passes(160) == 1
    cached = replace(plan, budget_bytes=free + 9 * per_part + 1, prefix_bytes=1, kept_every=1)
    assert cached.prompt_passes(160) == 1
    kept = replace(cached, cache=replace(cached.cache, windows=((per_part // 80, 64),)))  # 64 tokens of it and 16 more
    assert kept.prompt_passes(160) == 2
    assert replace(kept, kept_every=256).prompt_passes(160) == 2 and replace(kept, kept_every=0).prompt_passes(160) == 1


# --- other processes ------------------------------------------------------------------------------------------------


def test_load_is_the_time_that_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors for 4 s: others take 3 s, a host 1 s, this process 2 s. Guests count as users already."""
    monkeypatch.undo()
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    clock, times, own = [10.0], [dict.fromkeys(("user", "idle", "iowait", "steal", "guest"), 0.0)], [(0.0, 0.0)]
    monkeypatch.setattr(others.time, "monotonic", lambda: clock[0])
    kind = namedtuple("kind", times[0])  # type: ignore[misc]
    monkeypatch.setattr(others.psutil, "cpu_times", lambda: kind(**times[0]))
    monkeypatch.setattr(others.os, "times", lambda: (*own[0], 0.0, 0.0, clock[0]))
    load = OtherLoad()
    assert load.share == 0 and not load.is_high
    clock[0], own[0] = 14.0, (1.5, 0.5)
    times[0] = {"user": 5.0, "idle": 1.5, "iowait": 0.5, "steal": 1.0, "guest": 2.0}
    assert load.share == pytest.approx(0.5) and load.is_high


@pytest.mark.parametrize("share", [0.0, BUSY + 0.01])
def test_probe_beside_busy_processes_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(OtherLoad, "share", share)
    monkeypatch.setattr(machine, "MIN_PROBED_BYTES", 0)
    found = prepare(save(tmp_path / "model", LLAMA), FlashConfig()).machine
    assert load_speed(found.speed_key) == (None if share else found.speed)


@pytest.mark.parametrize(("used", "num_trials"), [(1.0, 4), (0.5, 16)])
def test_trials_go_on_while_others_have_the_processor(
    monkeypatch: pytest.MonkeyPatch, used: float, num_trials: int
) -> None:
    clock, times = [0.0], []
    monkeypatch.setattr(others.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(others.time, "process_time", lambda: used * clock[0])

    def trial() -> float:
        times.append(3.0 - 0.1 * len(times))
        clock[0] += times[-1]
        return times[-1]

    assert others.least(trial, on_cores=True) == min(times)
    assert len(times) == num_trials


@pytest.mark.parametrize(("num_passes", "share"), [(2, 0.0), (MIN_PASSES, BUSY + 0.01)])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_short_or_disturbed_run_only_shows_that_the_machine_is_faster(
    monkeypatch: pytest.MonkeyPatch, num_passes: int, share: float, factor: float
) -> None:
    plan, clock = plan_of(), Clock(monkeypatch)
    read = ReadStats()
    found = SpeedMeter(plan, lambda: replace(read), StreamStats())
    for _ in range(num_passes):
        found.begin(is_comparable=True)
        clock.now += factor * plan.streaming.compute_seconds
        found.end(1, 1)
    read.busy_seconds, read.nbytes = 1.0, MIN_READ_BYTES
    monkeypatch.setattr(OtherLoad, "share", share)
    found.save("one", PROBED)
    speed = load_speed("one")
    if factor > 1:
        assert speed is None, "a slow run says nothing"
    else:
        assert speed is not None and not speed.is_measured
        assert speed.compute_bytes_per_second == pytest.approx(10 * PROBED.compute_bytes_per_second)
        assert speed.disk_bytes_per_second == PROBED.disk_bytes_per_second


# --- weights that stay in a GPU's own memory --------------------------------------------------------------------------


def test_record_of_an_older_form_is_ignored_and_replaced() -> None:
    save_speed("one", MEASURED)
    file = cache_directory() / "speeds.json"
    entries = json.loads(file.read_text())
    del entries["one"]["resident_bytes_per_second"], entries["one"]["operation_seconds"]
    file.write_text(json.dumps(entries))
    assert load_speed("one") is None
    on_gpu = replace(MEASURED, resident_bytes_per_second=2e12, operation_seconds=4e-6)
    save_speed("one", on_gpu)
    assert load_speed("one") == on_gpu


def test_pinned_weights_compute_at_the_speed_of_memory() -> None:
    sizes, shared = make_model(), make_machine(barrier_seconds=0.0)
    gpu = replace(shared, resident_bytes_per_second=100 * shared.compute_bytes_per_second)
    computed = sum(unit.computed_bytes for unit in [*sizes.layers, *sizes.heads])
    everything = [make_plan(sizes, replace(FIXED, ram_budget_gb=100), machine) for machine in (shared, gpu)]
    assert not everything[1].read_bytes
    assert everything[0].opening_seconds == pytest.approx(computed / shared.compute_bytes_per_second)
    assert everything[1].opening_seconds == pytest.approx(computed / gpu.resident_bytes_per_second)
    budget = minimum_of(sizes, FIXED, gpu) + sizes.nbytes // 2
    plan = make_plan(sizes, with_budget(FIXED, budget), gpu)
    streamed = plan.streaming.read_bytes
    seconds = streamed / gpu.compute_bytes_per_second + (computed - streamed) / gpu.resident_bytes_per_second
    assert 0 < streamed < computed
    assert plan.streaming.compute_seconds == pytest.approx(seconds)
    prompts = [each.prompt_seconds_per_token for each in (*everything, plan)]
    assert prompts == pytest.approx([prompts[0]] * 3), "weights are fetched once for many tokens"


def test_experts_in_the_pool_compute_at_the_speed_of_memory() -> None:
    sizes, shared = make_mixture(12, 64, 4), make_machine(barrier_seconds=0.0, compute_bytes_per_second=1e9)
    gpu = replace(shared, resident_bytes_per_second=1e12, disk=replace(shared.disk, bytes_per_second=1e15))
    budget = minimum_of(sizes, FIXED, gpu) + sizes.nbytes // 2
    plan = make_plan(sizes, with_budget(FIXED, budget), gpu)
    experts = sizes.trunk.experts if sizes.trunk else None
    assert plan.pool is not None and experts is not None
    hits = experts.token_bytes - plan.pool.read_bytes
    assert 0 < hits < experts.token_bytes
    late = plan.pool.read_bytes / gpu.compute_bytes_per_second
    assert plan.pool.seconds == pytest.approx(hits / gpu.resident_bytes_per_second + late, rel=1e-3)


def test_token_takes_as_long_as_its_operations_take_to_start() -> None:
    sizes = replace(make_model(), num_operations=1000)
    gpu = make_machine(resident_bytes_per_second=1e15, operation_seconds=1e-5)
    plan = make_plan(sizes, replace(FIXED, ram_budget_gb=100), gpu)
    assert plan.opening_seconds == pytest.approx(1000 * 1e-5)
    assert plan.tokens_per_second(4) == pytest.approx(100), "rows compute one after another"


def test_probe_of_memory_leaves_weights_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that takes 5 seconds to fetch what the processor wrote, and half a second for a product."""
    layout = prepare(save(tmp_path / "model", LLAMA), FlashConfig()).layout
    written: list[int] = []
    fill = machine.Arena.fill

    def noted(self: Any, byte: int) -> None:
        written.append(byte)
        fill(self, byte)

    monkeypatch.setattr(machine.Arena, "fill", noted)

    def seconds(function: Any, x: Any) -> float:
        found = function(x)
        return (5.0 if written and written.pop() == 0 else 0.0) + 0.5 * (len(found) if isinstance(found, list) else 1)

    monkeypatch.setattr(machine, "way_of_reading", lambda: "in place")
    monkeypatch.setattr(machine, "_seconds", seconds)
    monkeypatch.setattr(machine, "has_own_memory", lambda: False)
    assert machine.resident_bytes_per_second(layout) == machine.operation_seconds() == 0.0, "memory is shared"
    monkeypatch.setattr(machine, "has_own_memory", lambda: True)
    streamed, resident = compute_bytes_per_second(layout), machine.resident_bytes_per_second(layout)
    assert resident == pytest.approx(11 * streamed)
    assert machine.operation_seconds() == 0.5 / machine._NUM_OPERATIONS


def test_probe_writes_as_the_reader_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = prepare(save(tmp_path / "model", LLAMA), FlashConfig()).layout
    written: list[int] = []
    monkeypatch.setattr(machine, "way_of_reading", lambda: "in place")
    monkeypatch.setattr(machine, "write_zeros", lambda memory: written.append(len(memory)))
    compute_bytes_per_second(layout)
    assert not written
    monkeypatch.setattr(machine, "way_of_reading", lambda: "copied by the driver")
    compute_bytes_per_second(layout)
    assert len(written) >= others.CLEAN_TRIALS


def test_operations_of_a_token_are_counted_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path / "model", LLAMA)
    monkeypatch.setattr("mlx_flash.layout.trace.has_own_memory", lambda: False)
    assert prepare(directory, FlashConfig()).sizes.num_operations == 0
    monkeypatch.setattr("mlx_flash.layout.trace.has_own_memory", lambda: True)
    assert 10 * LLAMA["num_hidden_layers"] < prepare(directory, FlashConfig()).sizes.num_operations < 2000


@pytest.mark.parametrize("is_known", [False, True])
def test_kernels_of_the_probes_belong_to_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A GPU's kernels take memory once they have run: the smallest budget must not grow from load to load."""
    directory = save(tmp_path / "model", LLAMA)
    ran: list[str] = []
    if is_known:
        monkeypatch.setattr(machine, "load_speed", lambda key: MEASURED)
    monkeypatch.setattr(machine, "has_own_memory", lambda: True)
    for name in ("prompt_speedup", "bytes_per_pair"):
        probe = getattr(machine, name)

        def noted(of: Any, name: str = name, probe: Any = probe) -> Any:
            ran.append(name)
            return probe(of)

        monkeypatch.setattr(machine, name, noted)

    def footprint() -> int:
        ran.append("footprint")
        return 10**8

    monkeypatch.setattr(machine, "footprint", footprint)
    prepare(directory, FlashConfig())
    assert ran == ["prompt_speedup", "bytes_per_pair", "footprint"]


def test_named_budget_is_enough_for_the_next_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning leaves some memory with the process, which the next load must not add to the budget."""
    directory, grown = save(tmp_path / "model", LLAMA), 0
    monkeypatch.setattr(machine, "footprint", lambda: 99_999_999 + grown)
    monkeypatch.setattr(machine, "_counted", [])
    step = machine.GROWTH_BYTES[machine._back_end()]
    least = FlashConfig(ram_budget_gb="min", context_length=260)

    def named() -> int:
        return prepare(directory, least).plan.minimum_bytes

    first = named()
    grown = step
    assert named() == first
    grown = step + 10
    assert named() > first
    grown = 0
    assert named() == first
