"""One frame of the monitor: lines of text that fit a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from mlx_flash.monitor.experts import ExpertRates
from mlx_flash.monitor.glyphs import STYLES, WORDS, Glyphs, bar, chart, strip
from mlx_flash.monitor.history import History, Shares
from mlx_flash.monitor.lines import budget_bytes, cached_words, change_words, limit_words, pass_words, rank_words
from mlx_flash.monitor.state import STATES, Unit, count, model_name, number, units
from mlx_flash.monitor.system import SystemMemory
from mlx_flash.monitor.words import amount, duration, percent, rate, size, tokens_rate
from mlx_flash.telemetry import SCHEMA, SILENT_SECONDS, Json

LABEL = 11
"""Columns before the text of a line."""

NARROWEST = 40
"""Columns below which lines are cut instead of wrapped."""

MAX_ENGINES = 4
MAX_STRIP_ROWS = 3
NUM_CHARTS = 3
MAX_CHART_ROWS = 12
USUAL_HEIGHT = 24
"""Lines above which charts grow."""

CHART_WORDS = 40
"""Columns beside a chart for its numbers."""

PART_STYLES = ("magenta", "blue", "cyan", "bright_magenta", "yellow", "green", "dim")
SHARE_STYLES = ("yellow", "green", "cyan", "dim")


@dataclass(frozen=True, slots=True)
class Canvas:
    """Place for a frame.

    Attributes:
        width, height: columns and lines of the terminal. A height of None is a print-out of any length, without keys.
        glyphs: characters that the terminal has.
        chart_rows: lines of each chart.
    """

    width: int
    height: int | None
    glyphs: Glyphs
    chart_rows: int = 1

    @property
    def columns(self) -> int:
        """Columns beside the label."""
        return max(1, self.width - LABEL - 1)


def frame(histories: Sequence[History], chosen: int, system: SystemMemory, canvas: Canvas) -> list[Text]:
    """Return the lines of a frame. Charts grow into the lines that the terminal has left.

    Args:
        histories: at least one engine.
        chosen: index of the one to show in detail.
        system: memory of the machine.
        canvas: place for the frame. Where it is too low, empty lines are dropped first, then the last lines.
    """
    lines = _frame(histories, chosen, system, canvas)
    if canvas.height is None:
        return lines
    extra = (canvas.height - len(lines)) // NUM_CHARTS if canvas.height > USUAL_HEIGHT else 0
    if extra > 0:
        lines = _frame(histories, chosen, system, replace(canvas, chart_rows=1 + min(extra, MAX_CHART_ROWS - 1)))
    if len(lines) > canvas.height:
        lines = [line for line in lines if line.plain]
    return lines[: canvas.height]


def _frame(histories: Sequence[History], chosen: int, system: SystemMemory, canvas: Canvas) -> list[Text]:
    history = histories[chosen]
    keys = "q quits" + ", Tab shows the next engine" * (sum(each.ended is None for each in histories) > 1)
    sections = [
        [*_engines(histories, chosen, canvas), *_model(history)],
        list(_layers(history, canvas)),
        list(_speeds(history, canvas)),
        list(_memory(history, system, canvas)),
        [] if canvas.height is None else [Text(keys, "dim")],
    ]
    lines = [line for section in sections if section for line in [*section, Text()]][:-1]
    return [part for line in lines for part in _fit(line, canvas)]


def message(words: str, hint: str, canvas: Canvas) -> list[Text]:
    """Return a frame without an engine."""
    return [*_fit(Text(words, "bold"), canvas), *_fit(Text(hint), canvas)][: canvas.height]


def _fit(line: Text, canvas: Canvas) -> Iterator[Text]:
    """Yield the line as lines that fit: wrapped at spaces, indented by the label. Where that is too narrow, cut."""
    rest, indent = line.copy(), 0
    while canvas.width >= NARROWEST and len(rest) > canvas.width:
        cut = rest.plain.rfind(" ", indent + 1, canvas.width + 1)
        if cut <= indent or not rest.plain[indent:cut].strip():
            break
        yield rest[:cut]
        rest, indent = Text(" " * LABEL).append_text(rest[cut + 1 :]), LABEL
        if not rest.plain.strip():
            return
    rest.no_wrap, rest.overflow = True, "crop"
    rest.truncate(max(1, canvas.width))
    yield rest


def _line(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{LABEL}}", "bold"), *parts)


# Engine and model


def _engines(histories: Sequence[History], chosen: int, canvas: Canvas) -> Iterator[Text]:
    """Yield the list of engines when there are several."""
    if len(histories) < 2:
        return
    first = max(0, min(chosen - 1, len(histories) - MAX_ENGINES))
    for i in range(first, min(first + MAX_ENGINES, len(histories))):
        history = histories[i]
        marker = canvas.glyphs.marker if i == chosen else " "
        speed = tokens_rate(history.rates.tokens_per_second)
        memory = size(number(history.latest.state, "memory", "footprint"))
        ended = "" if history.ended is None else " (ended)"
        name = f"{model_name(history.latest.state)}{ended}"
        text = f"{marker} {history.latest.pid:<8} {speed:>16}  {memory:>8}  {name}"
        yield Text(text, "bold" if i == chosen else "")
    if len(histories) > MAX_ENGINES:
        yield Text(f"  {len(histories)} engines", "dim")


def _model(history: History) -> Iterator[Text]:
    published = history.latest
    yield _line("model", (model_name(published.state), "bold"))
    silent = time.time() - published.written
    doing: tuple[str, str] = ("idle", "dim") if history.is_idle() else ("running", "bold green")
    if history.ended is not None:
        doing = (f"ended {duration(time.time() - history.ended)} ago", "bold magenta")
    elif silent > SILENT_SECONDS:
        doing = (f"silent for {duration(silent)}: stopped?", "bold red")
    total = number(published.state, "model", "bytes")
    streamed = sum(unit.streamed_bytes for unit in units(published.state))
    share = f", {streamed / total:.0%} streamed" if total else ""
    given, made = (number(published.state, "passes", key) for key in ("num_tokens_in", "num_tokens_out"))
    words = f"pid {published.pid}, {size(total)}{share}; tokens: {max(0.0, given - made):.0f} in, {made:.0f} out; "
    is_silent = history.ended is None and silent > SILENT_SECONDS
    yield _line("engine", *((doing, f"; {words[:-2]}") if is_silent else (words, doing)))
    for i, words in enumerate(rank_words(published.state)):
        yield _line("" if i else "ranks", words)
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
    legend = [(f"{canvas.glyphs.states[state]} {WORDS.get(state, state)}", STYLES[state]) for state in STATES]
    yield from _legend(legend, canvas)


def _pass(history: History, found: Sequence[Unit]) -> Text:
    state, failed = history.latest.state, number(history.latest.state, "passes", "num_failed")
    words = pass_words(state, history.latest.clock, history.rates.tokens_per_second, found)
    return _line("pass", words, (f"; {failed:.0f} failed" if failed else "", "bold red"))


# Speeds


def _speeds(history: History, canvas: Canvas) -> Iterator[Text]:
    state, rates = history.latest.state, history.rates
    words = f"{rate(rates.tokens_per_second)} now, mean {rate(rates.mean_tokens_per_second)}"
    words += f", prompt {rate(rates.mean_prompt_tokens_per_second)}"
    yield from _chart("tokens/s", history, ("tokens", None, "green"), canvas, words)
    disk = number(state, "plan", "disk_bytes_per_second")
    speed, reading = rates.read_bytes_per_second, rates.reading_bytes_per_second
    words = f"{'-' if speed is None else f'{speed / 1e9:.2f}'} of {disk / 1e9:.2f} probed"
    if speed is not None and disk > 0:
        words += f" ({speed / disk:.0%})"
    words += "" if reading is None else f", {reading / 1e9:.2f} busy"
    yield from _chart("read GB/s", history, ("read", disk, "yellow"), canvas, words)
    if rates.shares is not None:
        yield from _time(rates.shares, canvas)
        if words := limit_words(history, rates.shares):
            yield _line("limit", words)
    if rates.experts is not None:
        yield from _experts(state, rates.experts)


def _chart(
    label: str, history: History, series: tuple[str, float | None, str], canvas: Canvas, words: str, style: str = ""
) -> Iterator[Text]:
    """Yield the chart of a series (its name, the top of its scale, its style) with numbers beside the first line."""
    name, top, colour = series
    values = history.series(name, max(1, canvas.columns - CHART_WORDS))
    highest = max((value for value in values if value is not None), default=0.0)
    first, *others = chart(values, max(highest, top or 0.0), canvas.chart_rows, canvas.glyphs)
    yield _line(label, (first, colour), (f" {words}", style))
    for row in others:
        yield _line("", (row, colour))


def _time(shares: Shares, canvas: Canvas) -> Iterator[Text]:
    names = ("disk wait", "compute", "other", "between calls")
    values = (shares.disk, shares.compute, shares.calls, shares.between)
    glyphs = (*canvas.glyphs.parts[: len(values) - 1], canvas.glyphs.rest)
    columns = bar(values, 1.0, canvas.columns)
    yield _line("time", *((g * n, style) for g, n, style in zip(glyphs, columns, SHARE_STYLES, strict=True)))
    words = (f"{g} {name} {v:.0%}" for g, name, v in zip(glyphs, names, values, strict=True))
    yield from _legend(list(zip(words, SHARE_STYLES, strict=True)), canvas)


def _experts(state: Json, rates: ExpertRates) -> Iterator[Text]:
    resident, total, slots, each = (
        count(state, "experts", key) for key in ("num_resident", "num_experts", "num_slots", "slot_bytes")
    )
    nbytes = None if slots is None or each is None else slots * each
    words = f"{_whole(resident)} of {_whole(total)} experts in {_size(nbytes)}; "
    yield _line("pool", words + f"hits {percent(rates.hit_rate)}, predicted right {percent(rates.predicted_right)}")
    words = f"per token {amount(rates.read_per_token)} read ({_size(rates.read_bytes_per_token)}), "
    words += f"{amount(rates.reused_per_token)} reused; waited {percent(rates.wait_share)} of the time"
    yield _line("experts", words)


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


def _size(nbytes: float | None) -> str:
    return "-" if nbytes is None else size(nbytes)


# Memory


def _memory(history: History, system: SystemMemory, canvas: Canvas) -> Iterator[Text]:
    state = history.latest.state
    budget, used = budget_bytes(state), number(state, "memory", "footprint")
    share = f" ({used / budget:.0%})" if budget > 0 else ""
    peak = size(number(state, "memory", "peak_footprint"))
    words = f"{size(used)} of {size(budget)}{share}, peak {peak}"
    over = "bold red" if used > budget else ""
    yield from _chart("budget", history, ("footprint", budget, "magenta"), canvas, words, over)
    yield from _parts(history, budget, used, canvas)
    yield from [_line("", words) for words in change_words(state)]
    for lines in (_kv, _prompts, _writes):
        yield from lines(history)
    active, cache, peak = (size(number(state, "memory", key)) for key in ("active", "cache", "peak"))
    yield _line("MLX", f"active {active}, cache {cache}, peak {peak}")
    if words := cached_words(history):
        yield _line("cached", words)
    used = system.total - system.available
    words = f"{used / 1e9:.1f} of {system.total / 1e9:.1f} GB used ({used / system.total:.0%})"
    words += f", swap {size(system.swap_used)}" if system.swap_total else ", no swap"
    yield _line("system", words + (f", pressure {system.pressure}" if system.pressure is not None else ""))


def _kv(history: History) -> Iterator[Text]:
    """Yield a line about keys and values when some are or were on disk."""
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
        yield _line("prompts", words + f"{_whole(stored)} pages stored")


def _writes(history: History) -> Iterator[Text]:
    """Yield a line about writes when something was written, or nothing may be."""
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
    """Yield the budget as a bar of its parts now, and their sizes."""
    state = history.latest.state
    pinned = number(state, "plan", "pinned_bytes") + number(state, "plan", "resident_bytes")
    lent = count(state, "memory", "lent") or 0.0
    slots, tokens = number(state, "plan", "slots_bytes"), number(state, "memory", "kv_and_activations")
    cache = number(state, "memory", "cache")
    base = max(0.0, used - number(state, "memory", "active") - cache)
    reserved = sum(count(state, "plan", f"{part}_bytes") or 0.0 for part in ("kv", "activation", "spare"))
    pool = count(state, "memory", "pool") or 0.0
    names = ("base", "pinned", "slots", "experts", "MLX cache", "KV + activations", "free")
    values = (base, pinned + lent, slots, pool, cache, tokens, max(0.0, budget - used))
    glyphs = (*canvas.glyphs.parts[:3], canvas.glyphs.parts[5], *canvas.glyphs.parts[3:5], canvas.glyphs.rest)
    columns = bar(values, max(budget, sum(values)), canvas.columns)
    yield _line("", *((g * n, style) for g, n, style in zip(glyphs, columns, PART_STYLES, strict=True)))
    words = [f"{glyph} {name} {size(value)}" for glyph, name, value in zip(glyphs, names, values, strict=True)]
    words[1] += f" ({size(lent)} lent)" if lent else ""
    words[5] += f" of {size(reserved)}"
    shown = [part for part in zip(words, PART_STYLES, strict=True) if part[0] != words[3] or pool > 0]
    yield from _legend(shown, canvas)


def _legend(parts: Sequence[tuple[str, str]], canvas: Canvas) -> Iterator[Text]:
    """Yield lines of as many parts as fit."""
    line = _line("")
    for words, style in parts:
        if len(line) > LABEL and len(line) + len(words) > canvas.width:
            yield line
            line = _line("")
        line.append(f"{words}  ", style)
    yield line
