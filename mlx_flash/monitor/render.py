"""One frame of the monitor: lines of text that fit a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from mlx_flash.monitor.experts import ExpertRates, Pool
from mlx_flash.monitor.glyphs import STYLES, WORDS, Glyphs, amount, bar, duration, percent, rate, size, sparkline, strip
from mlx_flash.monitor.history import History, Shares
from mlx_flash.monitor.state import STATES, Unit, count, model_name, number, optional, units
from mlx_flash.monitor.system import SystemMemory
from mlx_flash.telemetry import SCHEMA, SILENT_SECONDS

LABEL = 11
"""Columns before the text of a line."""

MAX_WIDTH = 120
MAX_ENGINES = 4
MAX_STRIP_ROWS = 3
SPARK_CELLS = 30
LEGEND_WIDTH = 80

PART_STYLES = ("magenta", "blue", "cyan", "bright_magenta", "yellow", "green", "dim")
SHARE_STYLES = ("yellow", "green", "cyan", "dim")


@dataclass(frozen=True, slots=True)
class Canvas:
    """Where a frame is drawn.

    Attributes:
        width, height: columns and lines of the terminal; a height of None is a print-out of any length, without keys.
        glyphs: what it can show.
    """

    width: int
    height: int | None
    glyphs: Glyphs

    @property
    def columns(self) -> int:
        """Columns beside the label."""
        return max(1, min(self.width, MAX_WIDTH) - LABEL - 1)


def frame(histories: Sequence[History], chosen: int, system: SystemMemory, canvas: Canvas) -> list[Text]:
    """The lines of a frame.

    Args:
        histories: of the running engines, at least one.
        chosen: index of the one to show in detail.
        system: memory of the machine.
        canvas: where it is drawn. Where it is too low, empty lines go first, then the last lines.
    """
    history = histories[chosen]
    sections = [
        [*_engines(histories, chosen, canvas), *_model(history)],
        list(_layers(history, canvas)),
        list(_speeds(history, canvas)),
        list(_memory(history, system, canvas)),
        []
        if canvas.height is None
        else [Text("q quits" + ", Tab shows the next engine" * (len(histories) > 1), "dim")],
    ]
    lines = [line for section in sections if section for line in [*section, Text()]][:-1]
    excess = 0 if canvas.height is None else max(0, len(lines) - canvas.height)
    kept = [line for line in lines if line.plain] if excess else lines
    return [_fit(line, canvas) for line in (kept if canvas.height is None else kept[: canvas.height])]


def message(words: str, hint: str, canvas: Canvas) -> list[Text]:
    """A frame without an engine."""
    return [_fit(Text(words, "bold"), canvas), _fit(Text(hint), canvas)]


def _fit(line: Text, canvas: Canvas) -> Text:
    text = line.copy()
    text.no_wrap, text.overflow = True, "crop"
    text.truncate(max(1, canvas.width))
    return text


def _line(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{LABEL}}", "bold"), *parts)


# Engine and model


def _engines(histories: Sequence[History], chosen: int, canvas: Canvas) -> Iterator[Text]:
    """The list, when there are several."""
    if len(histories) < 2:
        return
    first = max(0, min(chosen - 1, len(histories) - MAX_ENGINES))
    for i in range(first, min(first + MAX_ENGINES, len(histories))):
        history = histories[i]
        marker = canvas.glyphs.marker if i == chosen else " "
        speed = rate(history.rates.tokens_per_second)
        memory = size(number(history.latest.state, "memory", "footprint"))
        text = f"{marker} {history.latest.pid:<8} {speed:>7} tokens/s  {memory:>8}  {model_name(history.latest.state)}"
        yield Text(text, "bold" if i == chosen else "")
    if len(histories) > MAX_ENGINES:
        yield Text(f"  {len(histories)} engines", "dim")


def _model(history: History) -> Iterator[Text]:
    published = history.latest
    yield _line("model", (model_name(published.state), "bold"))
    silent = time.time() - published.written
    doing: tuple[str, str] = ("idle", "dim") if history.is_idle() else ("running", "bold green")
    if silent > SILENT_SECONDS:
        doing = (f"silent for {duration(silent)}: stopped?", "bold red")
    total = number(published.state, "model", "bytes")
    streamed = sum(unit.streamed_bytes for unit in units(published.state))
    share = f", {streamed / total:.0%} streamed" if total else ""
    given, made = (number(published.state, "passes", key) for key in ("num_tokens_in", "num_tokens_out"))
    words = f"pid {published.pid}, {size(total)}{share}; tokens: {given:.0f} in, {made:.0f} out; "
    yield _line("engine", words, doing)
    if published.is_newer:
        words = f"A newer mlx-flash runs there (schema {published.schema}, known here: {SCHEMA}): update."
        yield Text(words, "bold red")


# The pass


def _layers(history: History, canvas: Canvas) -> Iterator[Text]:
    found = units(history.latest.state)
    yield _pass(history, found)
    rows = strip(found, canvas.columns, MAX_STRIP_ROWS)
    repeat = max(1, min(3, canvas.columns // len(rows[0]))) if len(rows) == 1 else 1
    for i, row in enumerate(rows):
        label = f"{sum(unit.kind == 'layer' for unit in found)} layers" if i == 0 else ""
        yield _line(label, *((canvas.glyphs.states[state] * repeat, STYLES[state]) for state in row))
    legend = [(f"{canvas.glyphs.states[state]} {WORDS.get(state, state)}  ", STYLES[state]) for state in STATES]
    yield _line("", *legend)


def _pass(history: History, found: Sequence[Unit]) -> Text:
    state, clock = history.latest.state, history.latest.clock
    passes, began = number(state, "passes", "num_passes"), optional(state, "passes", "began")
    failed = number(state, "passes", "num_failed")
    words = f"{passes:.0f} done"
    if began is not None:
        new, batch = number(state, "passes", "num_tokens"), number(state, "passes", "batch_size")
        kind = "decode" if new == batch else "prefill"
        streamed = [unit.state for unit in found if unit.streamed_bytes]
        words = f"{passes + failed + 1:.0f}: {kind}, {new:.0f} {'token' if new == 1 else 'tokens'}, "
        words += (
            f"{duration(max(0.0, clock - began))}; {streamed.count('done')} of {len(streamed)} streamed layers done"
        )
    return _line("pass", words, (f"; {failed:.0f} failed" if failed else "", "bold red"))


# Speeds


def _speeds(history: History, canvas: Canvas) -> Iterator[Text]:
    state, rates = history.latest.state, history.rates
    words = f" {rate(rates.tokens_per_second)} now, mean {rate(rates.mean_tokens_per_second)}"
    words += f", prompt {rate(rates.mean_prompt_tokens_per_second)}"
    yield _line("tokens/s", *_spark(history, "tokens", None, "green", canvas), words)
    disk = number(state, "plan", "disk_bytes_per_second")
    speed = rates.read_bytes_per_second
    words = f" {'-' if speed is None else f'{speed / 1e9:.2f}'} of {disk / 1e9:.2f} probed"
    if speed is not None and disk > 0:
        words += f" ({speed / disk:.0%})"
    yield _line("read GB/s", *_spark(history, "read", disk, "yellow", canvas), words)
    if rates.shares is not None:
        yield from _time(rates.shares, canvas)
    pool = Pool.of(state)
    if pool is not None:
        yield from _experts(pool, rates.experts or ExpertRates())


def _spark(history: History, name: str, top: float | None, style: str, canvas: Canvas) -> list[tuple[str, str]]:
    cells = max(1, min(SPARK_CELLS, canvas.columns - 40))
    values = history.series(name, cells)
    highest = max((value for value in values if value is not None), default=0.0)
    return [(sparkline(values, max(highest, top or 0.0), canvas.glyphs), style)]


def _time(shares: Shares, canvas: Canvas) -> Iterator[Text]:
    names = ("disk wait", "compute", "other", "between calls")
    values = (shares.disk, shares.compute, shares.calls, shares.between)
    glyphs = (*canvas.glyphs.parts[: len(values) - 1], canvas.glyphs.rest)
    columns = bar(values, 1.0, canvas.columns)
    yield _line("time", *((g * n, style) for g, n, style in zip(glyphs, columns, SHARE_STYLES, strict=True)))
    words = (f"{g} {name} {v:.0%}  " for g, name, v in zip(glyphs, names, values, strict=True))
    yield _line("", *zip(words, SHARE_STYLES, strict=True))


def _experts(pool: Pool, rates: ExpertRates) -> Iterator[Text]:
    resident, total = ("-" if number is None else f"{number:.0f}" for number in (pool.num_resident, pool.num_experts))
    words = f"{resident} of {total} experts in {_size(pool.nbytes)}; "
    yield _line("pool", words + f"hits {percent(rates.hit_rate)}, predicted right {percent(rates.predicted_right)}")
    words = f"per token {amount(rates.read_per_token)} read ({_size(rates.read_bytes_per_token)}), "
    words += f"{amount(rates.reused_per_token)} reused; waited {percent(rates.wait_share)} of the time"
    yield _line("experts", words)


def _size(nbytes: float | None) -> str:
    return "-" if nbytes is None else size(nbytes)


# Memory


def _memory(history: History, system: SystemMemory, canvas: Canvas) -> Iterator[Text]:
    state = history.latest.state
    budget, used = number(state, "plan", "budget_bytes"), number(state, "memory", "footprint")
    share = f" ({used / budget:.0%})" if budget > 0 else ""
    peak = size(number(state, "memory", "peak_footprint"))
    words = f" {size(used)} of {size(budget)}{share}, peak {peak}"
    over = "bold red" if used > budget else ""
    yield _line("budget", *_spark(history, "footprint", budget, "magenta", canvas), (words, over))
    yield from _parts(history, budget, used, canvas)
    yield from _kv(history)
    yield from _prompts(history)
    yield from _writes(history)
    active, cache, peak = (size(number(state, "memory", key)) for key in ("active", "cache", "peak"))
    yield _line("MLX", f"active {active}, cache {cache}, peak {peak}")
    yield _line("system", *_system(system))


def _kv(history: History) -> Iterator[Text]:
    """Keys and values, when some of them are on disk or were."""
    memory, disk, read, written = (
        count(history.latest.state, "kv", f"{name}_bytes") or 0.0 for name in ("memory", "disk", "read", "written")
    )
    if disk or written:
        yield _line(
            "KV cache", f"{size(memory)} in memory, {size(disk)} on disk; read {size(read)}, written {size(written)}"
        )


def _prompts(history: History) -> Iterator[Text]:
    """Yield the line of the prefix cache, when the engine has one."""
    restored, computed, nbytes, stored = (
        count(history.latest.state, "prefixes", name)
        for name in ("num_restored", "num_computed", "restored_bytes", "stored")
    )
    if restored is not None and computed is not None:
        words = f"{restored:.0f} tokens restored ({_size(nbytes)}), {computed:.0f} computed; "
        yield _line("prompts", words + f"{'-' if stored is None else f'{stored:.0f}'} pages stored")


def _writes(history: History) -> Iterator[Text]:
    """What was written to the disk, when something was, or nothing may be."""
    state = history.latest.state
    session, day, total, cap = (
        count(state, "writes", f"{name}_bytes") for name in ("session", "day", "total", "day_limit")
    )
    if cap == 0:
        yield _line("written", "nothing: zero-write mode")
    elif session is not None and (session or day):
        limit = "" if cap is None else f" of {size(cap)}"
        over = "bold red" if cap is not None and day is not None and day >= cap else ""
        yield _line("written", f"{size(session)} now, ", (f"{_size(day)} today{limit}", over), f", {_size(total)} ever")


def _parts(history: History, budget: float, used: float, canvas: Canvas) -> Iterator[Text]:
    """The budget as a bar of what fills it now, and what it is in numbers."""
    state = history.latest.state
    weights = number(state, "plan", "pinned_bytes") + number(state, "plan", "resident_bytes")
    slots, tokens = number(state, "plan", "slots_bytes"), number(state, "memory", "kv_and_activations")
    cache = number(state, "memory", "cache")
    base = max(0.0, used - number(state, "memory", "active") - cache)
    reserved = number(state, "plan", "kv_bytes") + number(state, "plan", "activation_bytes")
    pool = count(state, "plan", "pool_bytes") or 0.0
    names = ("base", "pinned", "slots", "experts", "MLX cache", "KV + activations", "free")
    values = (base, weights, slots, pool, cache, tokens, max(0.0, budget - used))
    glyphs = (*canvas.glyphs.parts[:3], canvas.glyphs.parts[5], *canvas.glyphs.parts[3:5], canvas.glyphs.rest)
    columns = bar(values, max(budget, sum(values)), canvas.columns)
    yield _line("", *((g * n, style) for g, n, style in zip(glyphs, columns, PART_STYLES, strict=True)))
    words = [f"{glyph} {name} {size(value)}" for glyph, name, value in zip(glyphs, names, values, strict=True)]
    words[5] += f" of {size(reserved)}"
    shown = [part for part in zip(words, PART_STYLES, strict=True) if part[0] != words[3] or pool > 0]
    yield from _legend(shown)


def _legend(parts: Sequence[tuple[str, str]]) -> Iterator[Text]:
    """As many in a line as fit 80 columns. A wider terminal changes nothing, a narrower one cuts."""
    line = _line("")
    for words, style in parts:
        if len(line) > LABEL and len(line) + len(words) > LEGEND_WIDTH:
            yield line
            line = _line("")
        line.append(f"{words}  ", style)
    yield line


def _system(system: SystemMemory) -> Iterator[str | tuple[str, str]]:
    used = system.total - system.available
    yield f"{used / 1e9:.1f} of {system.total / 1e9:.1f} GB used ({used / system.total:.0%})"
    yield f", swap {size(system.swap_used)}" if system.swap_total else ", no swap"
    if system.pressure is not None:
        yield f", pressure {system.pressure}"
