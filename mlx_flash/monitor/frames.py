"""One frame of the monitor: lines of text that fit a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from rich.text import Text

from mlx_flash.monitor.rates import History, SystemMemory
from mlx_flash.monitor.words import (
    duration,
    formatted,
    layer_runs,
    limit,
    model_name,
    rate,
    size,
    speed,
)
from mlx_flash.telemetry import SCHEMA, SILENT_SECONDS, Facts, Json, budget_of

STATES = {
    "pinned": ("█", "blue", "pinned"),
    "waiting": ("·", "dim", "waiting"),
    "reading": ("░", "yellow", "reading"),
    "resident": ("▒", "cyan", "in slot"),
    "computing": ("▶", "bold green", "computing"),
    "done": ("─", "green", "done"),
}
"""Character, style and name of each state of a layer or head, as engines publish them."""

_MOST_TO_SEE = ("computing", "reading", "resident", "waiting", "done", "pinned")
"""A cell of several layers shows the first of these states."""


PARTS, REST = "█▓▒░◆▚▞", "·"
"""Characters of the parts of a bar, and of its rest."""

LEVELS = "▁▂▃▄▅▆▇█"
"""Characters of a chart, the lowest first."""

PLAIN = str.maketrans("·░▒▶─▓◆▚▞▁▂▃▄▅▆▇█", ".:=>-%*&+_,~!ioO#")
"""Characters for terminals whose encoding lacks those."""


def chart(values: Sequence[float | None], top: float, num_rows: int) -> list[str]:
    """Return a bar chart of several rows, the highest first. Values are clamped to 0 and ``top``."""
    last = len(LEVELS) - 1

    def cell(value: float | None, row: int) -> str:
        height = (min(max(value or 0.0, 0.0), top) / top * num_rows if top > 0 else 0.0) - row
        if value is None or (row and height <= 0):
            return " "
        return LEVELS[min(last, max(0, round(height * last)))]

    return ["".join(cell(value, row) for value in values) for row in reversed(range(num_rows))]


def bar(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Return the columns of each part of a bar."""
    columns, done, passed = [], 0, 0.0
    for part in parts:
        passed += max(part, 0.0)
        end = min(width, round(width * passed / whole)) if whole > 0 else 0
        columns.append(end - done)
        done = end
    return columns


def strip(states: Sequence[str], width: int, max_rows: int) -> list[list[str]]:
    """Return the states of units as rows of cells, one for each unit or, when there are too many, for several."""
    per_cell = max(1, -(-len(states) // max(1, width * max_rows)))
    cells = [min(states[i : i + per_cell], key=_MOST_TO_SEE.index) for i in range(0, len(states), per_cell)]
    num_rows = max(1, -(-len(cells) // max(1, width)))
    in_row = -(-len(cells) // num_rows)
    return [cells[i : i + in_row] for i in range(0, len(cells), in_row)] if cells else []


SHORT_SHARE = 0.05
"""Calls that took a smaller share of the time say little."""

MAX_RUNS = 2
MAX_RANKS = 8

LINES = {
    "KV cache": "{kv.memory_bytes:size} in memory, {kv.disk_bytes:size} on disk; read {kv.read_bytes:size}, "
    "written {kv.written_bytes:size}",
    "prompts": "{prefixes.num_restored:whole} tokens restored ({prefixes.restored_bytes:size}), "
    "{prefixes.num_computed:whole} computed; {prefixes.stored:whole} pages stored",
    "MLX": "active {memory.active:size}, cache {memory.cache:size}, peak {memory.peak:size}",
    "cached": "{read.cached_file_bytes:size} of the files in free memory; {cached_share:percent} of reads now",
    "pool": "{experts.num_resident:whole} of {experts.num_experts:whole} experts in {pool_bytes:size}; "
    "hits {hit_rate:percent}, predicted right {predicted_right:percent}",
    "experts": "per token {read_per_token:amount} read ({read_bytes_per_token:size}), "
    "{reused_per_token:amount} reused; waited {wait_share:percent} of the time",
}
"""Templates of the lines without a chart or bar, by label."""


def model_lines(history: History) -> Iterator[Text]:
    """Yield the model, what its engine does, and its ranks."""
    published, facts = history.latest, history.facts
    yield _line("model", (model_name(published.state), "bold"))
    silent = time.time() - published.written
    total, streamed = facts["model.bytes"], sum(unit["streamed_bytes"] for unit in published.state.get("units", ()))
    share = f", {streamed / total:.0%} streamed" if total else ""
    given, made = facts["passes.num_tokens_in"], facts["passes.num_tokens_out"]
    words = f"pid {published.pid}, {size(total)}{share}; tokens: {max(0.0, given - made):.0f} in, {made:.0f} out"
    if history.ended is not None:
        yield _line("engine", f"{words}; ", (f"ended {duration(time.time() - history.ended)} ago", "bold magenta"))
    elif silent > SILENT_SECONDS:
        yield _line("engine", (f"silent for {duration(silent)}: stopped?", "bold red"), f"; {words}")
    else:
        yield _line("engine", f"{words}; ", ("idle", "dim") if history.is_idle() else ("running", "bold green"))
    for i, words in enumerate(_ranks(published.state)):
        yield _line("" if i else "ranks", words)
    if published.is_foreign:
        words = f"Another mlx-flash runs there (schema {published.schema}, known here: {SCHEMA}): update."
        yield Text(words, "bold red")


def _ranks(state: Json) -> Iterator[str]:
    """Yield words on each rank: the first runs of its layers."""
    ranks = state.get("ranks", {}).get("each", [])
    for rank, entry in enumerate(ranks[:MAX_RANKS]):
        runs = entry["layers"]
        words, total = layer_runs(runs[:MAX_RUNS]), sum(b - a for a, b in runs)
        yield f"{rank}: layers {f'{words}, ... ({total})' if len(runs) > MAX_RUNS else words or '-'}"
    if len(ranks) > MAX_RANKS:
        yield f"and {len(ranks) - MAX_RANKS} more"


def pass_words(facts: Facts, clock: float, tokens_per_second: float | None, units: Sequence[Json]) -> str:
    """Return what the pass under way computes, and how far it is; the number of passes if there is none."""
    passes, began = facts["passes.num_passes"], facts.get("passes.began")
    guessed, right = facts["passes.num_guessed"], facts["passes.num_right"]
    guesses = f", {right:.0f} of {guessed:.0f} guesses right" if guessed else ""
    if began is None:
        return f"{passes:.0f} done{guesses}"
    streamed = [unit["state"] for unit in units if unit["streamed_bytes"]]
    done = f"{streamed.count('done')} of {len(streamed)}"
    new, batch, seconds = facts["passes.num_tokens"], facts["passes.batch_size"], facts["passes.last_seconds"]
    kind = "decode" if new == batch else "mixed" if facts["passes.num_decoding"] else "prefill"
    head = f"{passes + facts['passes.num_failed'] + 1:.0f}: {kind}, "
    if batch > 1 and seconds:
        shared = f"{batch:.0f} sequences, 1 pass {duration(seconds)}, {rate(tokens_per_second)} tok/s"
        return f"{head}{shared}; {done} layers"
    tokens = f"{new:.0f} {'token' if new == 1 else 'tokens'}, {duration(max(0.0, clock - began))}"
    return f"{head}{tokens}{guesses}; {done} streamed layers done"


def memory_lines(history: History, system: SystemMemory) -> Iterator[Text]:
    """Yield the last change of the budget, what is on disk, and the memory of MLX and of the machine."""
    facts = history.facts
    if changed := budget_change(history.latest.state):
        yield _line("", changed)
    if facts["kv.disk_bytes"] or facts["kv.written_bytes"]:
        yield _facts_line("KV cache", facts)
    if "prefixes.num_restored" in facts and "prefixes.num_computed" in facts:
        yield _facts_line("prompts", facts)
    yield from _writes(facts)
    yield _facts_line("MLX", facts)
    if facts["read.cached_file_bytes"]:
        yield _facts_line("cached", {**facts, "cached_share": history.rates.cached_share})
    used = system.total - system.available
    words = f"{used / 1e9:.1f} of {system.total / 1e9:.1f} GB used ({used / system.total:.0%})"
    words += f", swap {size(system.swap_used)}" if system.swap_total else ", no swap"
    yield _line("system", words + (f", pressure {system.pressure:.0%}" if system.pressure else ""))


def budget_change(state: Json) -> str:
    """Return the last change of the budget and its reason; an empty string if there was none."""
    if not (changes := state.get("budget", {}).get("changes")):
        return ""
    last = changes[-1]
    ago = duration(max(0.0, time.time() - last["at"]))
    return f"{size(last['before'])} to {size(last['after'])} {ago} ago: {last['reason']}"


def _writes(facts: Facts) -> Iterator[Text]:
    """Yield a line about writes when something was written, or nothing may be."""
    day, cap = facts["writes.day_bytes"], facts["writes.day_limit_bytes"]
    if cap == 0:
        yield _line("written", "nothing: zero-write mode")
    elif facts["writes.session_bytes"] or day:
        today = f"{size(day)} today of {size(cap)}", "bold red" if day >= cap else ""
        yield _line("written", f"{size(facts['writes.session_bytes'])} now, ", today)


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
    """Place for a frame."""

    width: int
    height: int | None  # None is a print-out of any length, without keys
    chart_rows: int = 1

    @property
    def columns(self) -> int:
        """Columns beside the label."""
        return max(1, self.width - LABEL - 1)


def frame(histories: Sequence[History], chosen: int, system: SystemMemory, canvas: Canvas) -> list[Text]:
    """Return the lines of a frame, with one of at least one engine in detail.

    Charts grow into the lines that the terminal has left. Where it is too low, empty lines are dropped first, then
    charts; the numbers beside them move up, and the last lines are dropped.
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
    tokens, read, budget = (_chart(*numbers, history, canvas) for numbers in _numbers(history))
    keys = "q quits" + ", Tab shows the next engine" * (sum(each.ended is None for each in histories) > 1)
    sections = [
        [*_engines(histories, chosen, canvas), *model_lines(history)],
        [*_layers(history, canvas)],
        [*tokens, *read, *_times(history, canvas)],
        [*budget, *_parts(history, canvas), *memory_lines(history, system)],
        [] if canvas.height is None else [Text(keys, "dim")],
    ]
    lines = [line for section in sections if section for line in [*section, Text()]][:-1]
    return [part for line in lines for part in _fit(line, canvas)]


def _low(history: History, system: SystemMemory, canvas: Canvas) -> Iterator[Text]:
    """Yield the lines of a frame for a low terminal: the model, the numbers that change, then all else but charts."""
    model, *others = model_lines(history)
    yield from (model, *(_line(label, words) for label, words, _ in _numbers(history)))
    yield from (*others, *_layers(history, canvas), *_times(history, canvas), *_parts(history, canvas))
    yield from memory_lines(history, system)


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
    """Return a label, then words, or words and their style."""
    return Text.assemble((f"{label:<{LABEL}}", "bold"), *parts)


def _facts_line(label: str, facts: Mapping[str, Any]) -> Text:
    return _line(label, formatted(LINES[label], facts))


def _engines(histories: Sequence[History], chosen: int, canvas: Canvas) -> Iterator[Text]:
    """Yield the list of engines when there are several."""
    if len(histories) < 2:
        return
    first = max(0, min(chosen - 1, len(histories) - MAX_ENGINES))
    for i, history in list(enumerate(histories))[first : first + MAX_ENGINES]:
        marker = "▶" if i == chosen else " "
        pace, memory = speed(history.rates.tokens_per_second), size(history.facts["memory.footprint"])
        name = model_name(history.latest.state) + ("" if history.ended is None else " (ended)")
        text = f"{marker} {history.latest.pid:<8} {pace:>16}  {memory:>8}  {name}"
        yield Text(text, "bold" if i == chosen else "")
    if len(histories) > MAX_ENGINES:
        yield Text(f"  {len(histories)} engines", "dim")


def _layers(history: History, canvas: Canvas) -> Iterator[Text]:
    """Yield the pass under way, and where the weights of each layer are."""
    found, failed = history.latest.state.get("units", []), history.facts["passes.num_failed"]
    words = pass_words(history.facts, history.latest.clock, history.rates.tokens_per_second, found)
    yield _line("pass", words, (f"; {failed:.0f} failed" if failed else "", "bold red"))
    rows = strip([unit["state"] for unit in found], canvas.columns, MAX_STRIP_ROWS)
    repeat = max(1, min(3, canvas.columns // len(rows[0]))) if len(rows) == 1 else 1
    for i, row in enumerate(rows):
        label = f"{sum(unit['kind'] == 'layer' for unit in found)} layers" if i == 0 else ""
        yield _line(label, *((STATES[state][0] * repeat, STATES[state][1]) for state in row))
    yield from _legend([(f"{glyph} {name}", style) for glyph, style, name in STATES.values()], canvas)


Series = tuple[str, float, str]
"""A series of the last minute: its name, the top of its scale, its style."""


def _numbers(history: History) -> Iterator[tuple[str, tuple[str, str], Series]]:
    """Yield a label, its numbers and their style, and the series of the chart beside them."""
    facts, rates, disk = history.facts, history.rates, history.facts["plan.disk_bytes_per_second"]
    words = f"{rate(rates.tokens_per_second)} now, mean {rate(rates.mean_tokens_per_second)}"
    words += f", prompt {rate(rates.mean_prompt_tokens_per_second)}"
    yield "tokens/s", (words, ""), ("tokens", 0.0, "green")
    now, reading = rates.read_bytes_per_second, rates.reading_bytes_per_second
    words = f"{'-' if now is None else f'{now / 1e9:.2f}'} of {disk / 1e9:.2f} probed"
    words += f" ({now / disk:.0%})" if now is not None and disk > 0 else ""
    words += "" if reading is None else f", {reading / 1e9:.2f} busy"
    yield "read GB/s", (words, ""), ("read", disk, "yellow")
    budget, used = budget_of(facts), facts["memory.footprint"]
    share = f" ({used / budget:.0%})" if budget > 0 else ""
    words = f"{size(used)} of {size(budget)}{share}, peak {size(facts['memory.peak_footprint'])}"
    yield "budget", (words, "bold red" if used > budget else ""), ("memory.footprint", budget, "magenta")


def _chart(label: str, words: tuple[str, str], series: Series, history: History, canvas: Canvas) -> Iterator[Text]:
    """Yield the chart of a series with numbers beside the first line. Empty lines at its top are left out."""
    name, top, colour = series
    values = history.series(name, max(1, canvas.columns - CHART_WORDS))
    highest = max([top, *(value for value in values if value is not None)])
    rows = chart(values, highest, canvas.chart_rows)
    first, *others = rows[next((i for i, row in enumerate(rows) if row.strip()), -1) :]
    yield _line(label, (first, colour), " ", words)
    yield from (_line("", (row, colour)) for row in others)


TIMES = (("disk wait", "yellow"), ("compute", "green"), ("other", "cyan"), ("between calls", "dim"))
"""Names and styles of the shares of the time."""


def _times(history: History, canvas: Canvas) -> Iterator[Text]:
    """Yield the shares of the time, the limit of the speed, and the rates of the expert pool."""
    rates, shares = history.rates, history.rates.shares
    if shares is not None:
        glyphs, named = (*PARTS[:3], REST), zip(TIMES, astuple(shares), strict=True)
        parts = [(glyph, name, n, style, f"{n:.0%}") for glyph, ((name, style), n) in zip(glyphs, named, strict=True)]
        yield from _bar("time", parts, 1.0, canvas)
        in_calls = 1 - shares.between
        if rates.reading_share is not None and in_calls >= SHORT_SHARE:
            limited, source = limit(shares.disk / in_calls, rates.cached_share)
            yield _line("limit", f"{limited}; the {source} is busy {rates.reading_share:.0%} of the time")
    if rates.experts is not None:
        slots, each = (history.facts.get(f"experts.{name}") for name in ("num_slots", "slot_bytes"))
        nbytes = None if slots is None or each is None else slots * each
        for label in ("pool", "experts"):
            yield _facts_line(label, {**history.facts, **asdict(rates.experts), "pool_bytes": nbytes})


def _parts(history: History, canvas: Canvas) -> Iterator[Text]:
    """Yield the budget as a bar of its parts now, and their sizes."""
    facts, parts = history.facts, PARTS
    budget, (used, cache, lent) = budget_of(facts), (facts[f"memory.{key}"] for key in ("footprint", "cache", "lent"))
    pinned = facts["plan.pinned_bytes"] + facts["plan.resident_bytes"] + lent
    slots, reserved = facts["plan.slots_bytes"], sum(facts[f"plan.{part}_bytes"] for part in RESERVED)
    pool, tokens, others = (facts[f"memory.{key}"] for key in ("pool", "kv_and_activations", "others"))
    base, free = max(0.0, used - facts["memory.active"] - cache), max(0.0, budget - used)
    shown = [
        (parts[0], "base", base, "magenta", ""),
        (parts[1], "pinned", pinned, "blue", f" ({size(lent)} lent)" if lent else ""),
        (parts[2], "slots", slots, "cyan", ""),
        *([(parts[5], "experts", pool, "bright_magenta", "")] if pool else []),
        (parts[3], "MLX cache", cache, "yellow", ""),
        (parts[4], "KV + activations", tokens, "green", f" of {size(reserved)}"),
        *([(parts[6], "other models", others, "red", "")] if others else []),
        (REST, "free", free, "dim", ""),
    ]
    whole = max(budget, sum(value for _, _, value, _, _ in shown))
    named = [(glyph, name, value, style, f"{size(value)}{more}") for glyph, name, value, style, more in shown]
    yield from _bar("", named, whole, canvas)


RESERVED = ("kv", "activation", "spare")
"""Parts of a plan that are reserved for tokens."""

Part = tuple[str, str, float, str, str]
"""A part of a bar: glyph, name, value, style, and its value in words."""


def _bar(label: str, parts: Sequence[Part], whole: float, canvas: Canvas) -> Iterator[Text]:
    """Yield a bar of parts, and their values in words."""
    columns = bar([value for _, _, value, _, _ in parts], whole, canvas.columns)
    yield _line(label, *((part[0] * n, part[3]) for part, n in zip(parts, columns, strict=True)))
    yield from _legend([(f"{glyph} {name} {words}", style) for glyph, name, _, style, words in parts], canvas)


def _legend(parts: Sequence[tuple[str, str]], canvas: Canvas) -> Iterator[Text]:
    """Yield lines of as many parts as fit."""
    line = _line("")
    for words, style in parts:
        if len(line) > LABEL and len(line) + len(words) > canvas.width:
            yield line
            line = _line("")
        line.append(f"{words}  ", style)
    yield line
