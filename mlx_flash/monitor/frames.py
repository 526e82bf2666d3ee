"""One frame of the monitor: lines of text that fit a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from mlx_flash.facts import Facts, budget_of
from mlx_flash.monitor.glyphs import STYLES, WORDS, Glyphs, bar, chart, strip
from mlx_flash.monitor.lines import (
    Line,
    budget_words,
    expert_lines,
    limit_line,
    memory_lines,
    model_lines,
    pass_words,
    read_words,
    token_words,
)
from mlx_flash.monitor.rates import History, Shares
from mlx_flash.monitor.state import STATES, model_name, units
from mlx_flash.monitor.system import SystemMemory
from mlx_flash.monitor.words import size, speed
from mlx_flash.telemetry import SCHEMA

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
        canvas: place for the frame. Where it is too low, empty lines are dropped first, then charts; the numbers beside
            them move up, and the last lines are dropped.
    """
    lines = _frame(histories, chosen, system, canvas)
    if canvas.height is None:
        return lines
    extra = (canvas.height - len(lines)) // NUM_CHARTS if canvas.height > USUAL_HEIGHT else 0
    if extra > 0:
        lines = _frame(histories, chosen, system, replace(canvas, chart_rows=1 + min(extra, MAX_CHART_ROWS - 1)))
    if len(lines) > canvas.height:
        lines = [line for line in lines if line.plain]
    if len(lines) > canvas.height:
        lines = [part for line in _low(histories[chosen], system, canvas) for part in _fit(line, canvas)]
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


def _low(history: History, system: SystemMemory, canvas: Canvas) -> Iterator[Text]:
    """Yield the lines of a frame for a low terminal: the model, the numbers that change, then all else but charts."""
    facts = history.facts
    model, *others = _model(history)
    yield from (model, _text(("tokens/s", token_words(history))), _text(("read GB/s", read_words(history))))
    yield _text(("budget", (budget_words(facts), _over(facts))))
    yield from (*others, *_layers(history, canvas), *_times(history, canvas), *_parts(history, canvas))
    yield from map(_text, memory_lines(history, system))


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


def _text(line: Line) -> Text:
    label, *parts = line
    return Text.assemble((f"{label:<{LABEL}}", "bold"), *parts)


def _engines(histories: Sequence[History], chosen: int, canvas: Canvas) -> Iterator[Text]:
    """Yield the list of engines when there are several."""
    if len(histories) < 2:
        return
    first = max(0, min(chosen - 1, len(histories) - MAX_ENGINES))
    for i, history in list(enumerate(histories))[first : first + MAX_ENGINES]:
        marker = canvas.glyphs.marker if i == chosen else " "
        pace, memory = speed(history.rates.tokens_per_second), size(history.facts["memory.footprint"])
        name = model_name(history.latest.state) + ("" if history.ended is None else " (ended)")
        text = f"{marker} {history.latest.pid:<8} {pace:>16}  {memory:>8}  {name}"
        yield Text(text, "bold" if i == chosen else "")
    if len(histories) > MAX_ENGINES:
        yield Text(f"  {len(histories)} engines", "dim")


def _model(history: History) -> Iterator[Text]:
    yield from map(_text, model_lines(history))
    if history.latest.is_newer:
        words = f"A newer mlx-flash runs there (schema {history.latest.schema}, known here: {SCHEMA}): update."
        yield Text(words, "bold red")


def _layers(history: History, canvas: Canvas) -> Iterator[Text]:
    """Yield the pass under way, and where the weights of each layer are."""
    found, failed = units(history.latest.state), history.facts["passes.num_failed"]
    words = pass_words(history.facts, history.latest.clock, history.rates.tokens_per_second, found)
    yield _text(("pass", words, (f"; {failed:.0f} failed" if failed else "", "bold red")))
    rows = strip(found, canvas.columns, MAX_STRIP_ROWS)
    repeat = max(1, min(3, canvas.columns // len(rows[0]))) if len(rows) == 1 else 1
    for i, row in enumerate(rows):
        label = f"{sum(unit.kind == 'layer' for unit in found)} layers" if i == 0 else ""
        yield _text((label, *((canvas.glyphs.states[state] * repeat, STYLES[state]) for state in row)))
    yield from _legend([(f"{canvas.glyphs.states[s]} {WORDS.get(s, s)}", STYLES[s]) for s in STATES], canvas)


def _speeds(history: History, canvas: Canvas) -> Iterator[Text]:
    disk = history.facts["plan.disk_bytes_per_second"]
    yield from _chart("tokens/s", history, ("tokens", 0.0, "green"), canvas, token_words(history))
    yield from _chart("read GB/s", history, ("read", disk, "yellow"), canvas, read_words(history))
    yield from _times(history, canvas)


def _times(history: History, canvas: Canvas) -> Iterator[Text]:
    """Yield the shares of the time, the limit of the speed, and the rates of the expert pool."""
    shares, experts = history.rates.shares, history.rates.experts
    if shares is not None:
        yield from _time(shares, canvas)
        yield from map(_text, limit_line(history, shares))
    if experts is not None:
        yield from map(_text, expert_lines(history.facts, experts))


def _memory(history: History, system: SystemMemory, canvas: Canvas) -> Iterator[Text]:
    facts, budget = history.facts, budget_of(history.facts)
    yield from _chart("budget", history, ("footprint", budget, "magenta"), canvas, budget_words(facts), _over(facts))
    yield from _parts(history, canvas)
    yield from map(_text, memory_lines(history, system))


def _over(facts: Facts) -> str:
    """Return the style of a budget that is broken."""
    return "bold red" if facts["memory.footprint"] > budget_of(facts) else ""


def _chart(
    label: str, history: History, series: tuple[str, float, str], canvas: Canvas, words: str, style: str = ""
) -> Iterator[Text]:
    """Yield the chart of a series (its name, the top of its scale, its style) with numbers beside the first line.

    Empty lines at its top are left out.
    """
    name, top, colour = series
    values = history.series(name, max(1, canvas.columns - CHART_WORDS))
    highest = max([top, *(value for value in values if value is not None)])
    rows = chart(values, highest, canvas.chart_rows, canvas.glyphs)
    first, *others = rows[next((i for i, row in enumerate(rows) if row.strip()), -1) :]
    yield _text((label, (first, colour), (f" {words}", style)))
    yield from (_text(("", (row, colour))) for row in others)


def _time(shares: Shares, canvas: Canvas) -> Iterator[Text]:
    """Yield the time as a bar of its shares, and these in per cent."""
    parts = canvas.glyphs.parts
    shown = [
        (parts[0], "disk wait", shares.disk, "yellow"),
        (parts[1], "compute", shares.compute, "green"),
        (parts[2], "other", shares.calls, "cyan"),
        (canvas.glyphs.rest, "between calls", shares.between, "dim"),
    ]
    yield _bar("time", [(glyph, value, style) for glyph, _, value, style in shown], 1.0, canvas)
    yield from _legend([(f"{glyph} {name} {value:.0%}", style) for glyph, name, value, style in shown], canvas)


def _parts(history: History, canvas: Canvas) -> Iterator[Text]:
    """Yield the budget as a bar of its parts now, and their sizes."""
    facts, parts = history.facts, canvas.glyphs.parts
    budget, (used, cache, lent) = budget_of(facts), (facts[f"memory.{key}"] for key in ("footprint", "cache", "lent"))
    pinned = facts["plan.pinned_bytes"] + facts["plan.resident_bytes"] + lent
    reserved = sum(facts[f"plan.{part}_bytes"] for part in ("kv", "activation", "spare"))
    pool, tokens, others = (facts[f"memory.{key}"] for key in ("pool", "kv_and_activations", "others"))
    shown = [
        (parts[0], "base", max(0.0, used - facts["memory.active"] - cache), "magenta", ""),
        (parts[1], "pinned", pinned, "blue", f" ({size(lent)} lent)" if lent else ""),
        (parts[2], "slots", facts["plan.slots_bytes"], "cyan", ""),
        *([(parts[5], "experts", pool, "bright_magenta", "")] if pool else []),
        (parts[3], "MLX cache", cache, "yellow", ""),
        (parts[4], "KV + activations", tokens, "green", f" of {size(reserved)}"),
        *([(parts[6], "other models", others, "red", "")] if others else []),
        (canvas.glyphs.rest, "free", max(0.0, budget - used), "dim", ""),
    ]
    whole = max(budget, sum(value for _, _, value, _, _ in shown))
    yield _bar("", [(glyph, value, style) for glyph, _, value, style, _ in shown], whole, canvas)
    words = [(f"{glyph} {name} {size(value)}{more}", style) for glyph, name, value, style, more in shown]
    yield from _legend(words, canvas)


def _bar(label: str, parts: Sequence[tuple[str, float, str]], whole: float, canvas: Canvas) -> Text:
    columns = bar([value for _, value, _ in parts], whole, canvas.columns)
    return _text((label, *((glyph * n, style) for (glyph, _, style), n in zip(parts, columns, strict=True))))


def _legend(parts: Sequence[tuple[str, str]], canvas: Canvas) -> Iterator[Text]:
    """Yield lines of as many parts as fit."""
    line = _text(("",))
    for words, style in parts:
        if len(line) > LABEL and len(line) + len(words) > canvas.width:
            yield line
            line = _text(("",))
        line.append(f"{words}  ", style)
    yield line
