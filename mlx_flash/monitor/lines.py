"""The lines of text about a running engine: a label, and words, of which some have a style."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from mlx_flash.facts import Facts, budget_of, checked
from mlx_flash.monitor.rates import ExpertRates, History, Shares
from mlx_flash.monitor.state import Unit, entries, model_name, printable, section, units
from mlx_flash.monitor.system import SystemMemory
from mlx_flash.monitor.words import (
    ALL_CACHED,
    DISK_LIMITS,
    amount,
    duration,
    layer_runs,
    percent,
    rate,
    size,
)
from mlx_flash.telemetry import SILENT_SECONDS, Json

Line = tuple[str | tuple[str, str], ...]
"""A label, then parts: words, or words and their style."""

SHORT_SHARE = 0.05
"""Calls that took a smaller share of the time say little."""

MAX_RUNS = 2
MAX_RANKS = 8
MAX_LAYERS = 10_000


def model_lines(history: History) -> Iterator[Line]:
    """Yield the model, what its engine does, and its ranks."""
    published, facts = history.latest, history.facts
    yield "model", (model_name(published.state), "bold")
    silent = time.time() - published.written
    total, streamed = facts["model.bytes"], sum(unit.streamed_bytes for unit in units(published.state))
    share = f", {streamed / total:.0%} streamed" if total else ""
    given, made = facts["passes.num_tokens_in"], facts["passes.num_tokens_out"]
    words = f"pid {published.pid}, {size(total)}{share}; tokens: {max(0.0, given - made):.0f} in, {made:.0f} out"
    if history.ended is not None:
        yield "engine", f"{words}; ", (f"ended {duration(time.time() - history.ended)} ago", "bold magenta")
    elif silent > SILENT_SECONDS:
        yield "engine", (f"silent for {duration(silent)}: stopped?", "bold red"), f"; {words}"
    else:
        yield "engine", f"{words}; ", ("idle", "dim") if history.is_idle() else ("running", "bold green")
    for i, words in enumerate(_ranks(published.state)):
        yield "" if i else "ranks", words


def _ranks(state: Json) -> Iterator[str]:
    """Yield words on each rank: its layers."""
    ranks = entries(section(state, "ranks").get("each"))
    for rank, entry in enumerate(ranks[:MAX_RANKS]):
        yield f"{rank}: layers {_layers(entry.get('layers'))}"
    if len(ranks) > MAX_RANKS:
        yield f"and {len(ranks) - MAX_RANKS} more"


def _layers(runs: object) -> str:
    """Return the first runs of layers, as first and last one."""
    pairs = [run for run in runs if isinstance(run, list) and len(run) == 2] if isinstance(runs, list) else []
    found = [(a, b) for a, b in pairs if _is_layer(a) and _is_layer(b)]
    words, total = layer_runs(found[:MAX_RUNS]), sum(b - a for a, b in found)
    return f"{words}, ... ({total})" if len(found) > MAX_RUNS else words or "-"


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MAX_LAYERS


def pass_words(facts: Facts, clock: float, tokens_per_second: float | None, units: Sequence[Unit]) -> str:
    """Return what the pass under way computes, and how far it is; the number of passes if there is none."""
    passes, began = facts["passes.num_passes"], facts.get("passes.began")
    guessed, right = facts["passes.num_guessed"], facts["passes.num_right"]
    guesses = f", {right:.0f} of {guessed:.0f} guesses right" if guessed else ""
    if began is None:
        return f"{passes:.0f} done{guesses}"
    streamed = [unit.state for unit in units if unit.streamed_bytes]
    done = f"{streamed.count('done')} of {len(streamed)}"
    new, batch, seconds = facts["passes.num_tokens"], facts["passes.batch_size"], facts["passes.last_seconds"]
    kind = "decode" if new == batch else "mixed" if facts["passes.num_decoding"] else "prefill"
    head = f"{passes + facts['passes.num_failed'] + 1:.0f}: {kind}, "
    if batch > 1 and seconds:
        shared = f"{batch:.0f} sequences, 1 pass {duration(seconds)}, {rate(tokens_per_second)} tok/s"
        return f"{head}{shared}; {done} layers"
    tokens = f"{new:.0f} {'token' if new == 1 else 'tokens'}, {duration(max(0.0, clock - began))}"
    return f"{head}{tokens}{guesses}; {done} streamed layers done"


def token_words(history: History) -> str:
    """Return the numbers beside the chart of tokens/s."""
    rates = history.rates
    words = f"{rate(rates.tokens_per_second)} now, mean {rate(rates.mean_tokens_per_second)}"
    return f"{words}, prompt {rate(rates.mean_prompt_tokens_per_second)}"


def read_words(history: History) -> str:
    """Return the numbers beside the chart of read speeds."""
    disk, rates = history.facts["plan.disk_bytes_per_second"], history.rates
    speed, reading = rates.read_bytes_per_second, rates.reading_bytes_per_second
    words = f"{'-' if speed is None else f'{speed / 1e9:.2f}'} of {disk / 1e9:.2f} probed"
    words += f" ({speed / disk:.0%})" if speed is not None and disk > 0 else ""
    return words + ("" if reading is None else f", {reading / 1e9:.2f} busy")


def limit_line(history: History, shares: Shares) -> Iterator[Line]:
    """Yield what limits the speed now; nothing while the engine is idle."""
    rates, in_calls = history.rates, 1 - shares.between
    if rates.reading_share is None or in_calls < SHORT_SHARE:
        return
    source = "page cache" if (rates.cached_share or 0.0) >= ALL_CACHED else "disk"
    limit = source if shares.disk >= DISK_LIMITS * in_calls else "computing"
    yield "limit", f"{limit}; the {source} is busy {rates.reading_share:.0%} of the time"


def expert_lines(facts: Facts, rates: ExpertRates) -> Iterator[Line]:
    """Yield what the pool of experts holds, and what it does for a token."""
    slots, each = facts.get("experts.num_slots"), facts.get("experts.slot_bytes")
    nbytes = None if slots is None or each is None else slots * each
    experts = f"{_whole(facts.get('experts.num_resident'))} of {_whole(facts.get('experts.num_experts'))} experts"
    hits, right = percent(rates.hit_rate), percent(rates.predicted_right)
    yield "pool", f"{experts} in {_size(nbytes)}; hits {hits}, predicted right {right}"
    words = f"per token {amount(rates.read_per_token)} read ({_size(rates.read_bytes_per_token)}), "
    words += f"{amount(rates.reused_per_token)} reused; waited {percent(rates.wait_share)} of the time"
    yield "experts", words


def budget_words(facts: Facts) -> str:
    """Return the numbers beside the chart of memory."""
    budget, used = budget_of(facts), facts["memory.footprint"]
    share = f" ({used / budget:.0%})" if budget > 0 else ""
    return f"{size(used)} of {size(budget)}{share}, peak {size(facts['memory.peak_footprint'])}"


def memory_lines(history: History, system: SystemMemory) -> Iterator[Line]:
    """Yield the last change of the budget, what is on disk, and the memory of MLX and of the machine."""
    facts = history.facts
    yield from budget_change(history.latest.state)
    yield from _kv(facts)
    yield from _prompts(facts)
    yield from _writes(facts)
    active, cache, peak = (size(facts[f"memory.{key}"]) for key in ("active", "cache", "peak"))
    yield "MLX", f"active {active}, cache {cache}, peak {peak}"
    if cached := facts["read.cached_file_bytes"]:
        share = percent(history.rates.cached_share)
        yield "cached", f"{size(cached)} of the files in free memory; {share} of reads now"
    used = system.total - system.available
    words = f"{used / 1e9:.1f} of {system.total / 1e9:.1f} GB used ({used / system.total:.0%})"
    words += f", swap {size(system.swap_used)}" if system.swap_total else ", no swap"
    yield "system", words + (f", pressure {system.pressure}" if system.pressure is not None else "")


def budget_change(state: Json) -> Iterator[Line]:
    """Yield the last change of the budget and its reason, if there was one."""
    changes = section(state, "budget").get("changes")
    if isinstance(changes, list) and changes and isinstance(last := changes[-1], dict):
        at, before, after = (checked(last.get(key)) or 0.0 for key in ("at", "before", "after"))
        words = f"{size(before)} to {size(after)} {duration(max(0.0, time.time() - at))} ago"
        yield "", f"{words}: {printable(str(last.get('reason')))}"


def _kv(facts: Facts) -> Iterator[Line]:
    """Yield a line about keys and values when some are or were on disk."""
    if facts["kv.disk_bytes"] or facts["kv.written_bytes"]:
        memory, disk, read, written = (size(facts[f"kv.{key}_bytes"]) for key in ("memory", "disk", "read", "written"))
        yield "KV cache", f"{memory} in memory, {disk} on disk; read {read}, written {written}"


def _prompts(facts: Facts) -> Iterator[Line]:
    """Yield the line of the prefix cache, when the engine has one."""
    restored, computed = facts.get("prefixes.num_restored"), facts.get("prefixes.num_computed")
    if restored is not None and computed is not None:
        nbytes, stored = _size(facts.get("prefixes.restored_bytes")), _whole(facts.get("prefixes.stored"))
        yield "prompts", f"{restored:.0f} tokens restored ({nbytes}), {computed:.0f} computed; {stored} pages stored"


def _writes(facts: Facts) -> Iterator[Line]:
    """Yield a line about writes when something was written, or nothing may be."""
    session, day, total, cap = (facts.get(f"writes.{key}_bytes") for key in ("session", "day", "total", "day_limit"))
    if cap == 0:
        yield "written", "nothing: zero-write mode"
    elif session is not None and (session or day):
        limit = "" if cap is None else f" of {size(cap)}"
        over = "bold red" if cap is not None and day is not None and day >= cap else ""
        yield "written", f"{size(session)} now, ", (f"{_size(day)} today{limit}", over), f", {_size(total)} ever"


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


def _size(nbytes: float | None) -> str:
    return "-" if nbytes is None else size(nbytes)
