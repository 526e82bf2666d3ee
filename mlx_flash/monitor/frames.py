"""One frame of the monitor: lines of text that fit a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from mlx_flash.monitor.rates import ExpertRates, History, Shares, SystemMemory
from mlx_flash.monitor.words import (
    ALL_CACHED,
    DISK_LIMITS,
    STATES,
    Unit,
    amount,
    duration,
    entries,
    layer_runs,
    model_name,
    percent,
    printable,
    rate,
    section,
    size,
    speed,
    units,
)
from mlx_flash.telemetry import SCHEMA, SILENT_SECONDS, Facts, Json, budget_of, checked

STYLES = {
    "pinned": "blue",
    "waiting": "dim",
    "reading": "yellow",
    "resident": "cyan",
    "computing": "bold green",
    "done": "green",
}
WORDS = {"resident": "in slot"}

_MOST_TO_SEE = ("computing", "reading", "resident", "waiting", "done", "pinned")
"""A cell of several layers shows the first of these states."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """A set of characters, each one column wide.

    Attributes:
        states: of a unit, by state.
        parts: of a bar, from its first part on.
        rest: the rest of a bar.
        levels: of a sparkline, the lowest first.
        gap: of a sparkline, where no sample lies.
        marker: of the chosen engine.
    """

    states: dict[str, str]
    parts: str
    rest: str
    levels: str
    gap: str
    marker: str


UNICODE = Glyphs(
    states={"pinned": "█", "waiting": "·", "reading": "░", "resident": "▒", "computing": "▶", "done": "─"},
    parts="█▓▒░◆▚▞",
    rest="·",
    levels="▁▂▃▄▅▆▇█",
    gap=" ",
    marker="▶",
)
ASCII = Glyphs(
    states={"pinned": "#", "waiting": ".", "reading": "r", "resident": "s", "computing": ">", "done": "-"},
    parts="#=+~*%@",
    rest=".",
    levels="_.-:=+*#",
    gap=" ",
    marker=">",
)


def choose_glyphs(encoding: str) -> Glyphs:
    """Return the characters for an encoding."""
    return UNICODE if encoding.lower().replace("-", "").replace("_", "") in {"utf8", "utf8sig"} else ASCII


def sparkline(values: Sequence[float | None], top: float, glyphs: Glyphs) -> str:
    """Return one character for each value. Values are clamped to 0 and ``top``."""
    last = len(glyphs.levels) - 1
    scale = last / top if top > 0 else 0.0
    levels = (None if value is None else min(last, max(0, round(value * scale))) for value in values)
    return "".join(glyphs.gap if level is None else glyphs.levels[level] for level in levels)


def chart(values: Sequence[float | None], top: float, num_rows: int, glyphs: Glyphs) -> list[str]:
    """Return a bar chart of several rows, the highest first; of one row, a sparkline."""
    scale, rows = num_rows / top if top > 0 else 0.0, []
    for row in reversed(range(num_rows)):
        heights = (None if value is None else value * scale - row for value in values)
        shown = [None if height is None or (row and height <= 0) else height for height in heights]
        rows.append(sparkline(shown, 1.0, glyphs))
    return rows


def bar(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Return the columns of each part of a bar.

    Args:
        parts: sizes; together at most about ``whole``.
        whole: size of the full width.
        width: in columns.
    """
    columns, done, passed = [], 0, 0.0
    for part in parts:
        passed += max(part, 0.0)
        end = min(width, round(width * passed / whole)) if whole > 0 else 0
        columns.append(end - done)
        done = end
    return columns


def strip(units: Sequence[Unit], width: int, max_rows: int) -> list[list[str]]:
    """Return a strip of units as rows of states, one cell for each unit or, when there are too many, for several.

    Args:
        units: in calling order.
        width: cells in a row at most.
        max_rows: rows at most.
    """
    per_cell = max(1, -(-len(units) // max(1, width * max_rows)))
    states = [unit.state for unit in units]
    cells = [min(states[i : i + per_cell], key=_MOST_TO_SEE.index) for i in range(0, len(units), per_cell)]
    num_rows = max(1, -(-len(cells) // max(1, width)))
    in_row = -(-len(cells) // num_rows)
    return [cells[i : i + in_row] for i in range(0, len(cells), in_row)] if cells else []


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
        yield f"{rank}: layers {_runs(entry.get('layers'))}"
    if len(ranks) > MAX_RANKS:
        yield f"and {len(ranks) - MAX_RANKS} more"


def _runs(runs: object) -> str:
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
