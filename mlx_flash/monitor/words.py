"""Facts in words: numbers by their units, and the lines of text that every report fills with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from mlx_flash.telemetry import Json


def model_name(state: Json) -> str:
    """Return the model's name without unprintable characters."""
    return printable(state["model"]["name"]) if "model" in state else "?"


def printable(text: str) -> str:
    """Replace characters that move the cursor, turn the direction of writing, or show nothing."""
    return "".join(char if char.isprintable() else "?" for char in text)


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[+-]?(\d{1,15}(\.\d{0,9})?(ns|us|µs|ms|s|m|h)){1,10}")
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")

_LONG = 48 * 3600
"""Seconds from which on durations are in days."""


def size(nbytes: float) -> str:
    """Return a number of bytes in decimal units, with about three digits."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.{1 if nbytes >= 1e10 else 2}f} GB"
    return f"{nbytes / 1e6:.{0 if nbytes >= 1e7 else 1}f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds >= _LONG:
        return f"{seconds / 86_400:.1f} days"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def seconds_of(value: float | str) -> float:
    """Return a duration of Go, such as ``1h30m``, in seconds. Numbers are seconds."""
    if not isinstance(value, str):
        return float(value)
    text = value.strip()
    if re.fullmatch(r"[+-]?\d{1,15}(\.\d{0,9})?", text):
        return float(text)
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is no duration: it must be a number of seconds, or a text such as 5m or 1h30m")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return -seconds if text.startswith("-") else seconds


DISK_LIMITS = 0.2
"""Share of the time spent waiting for the disk from which on the disk is said to limit the speed."""

ALL_CACHED = 0.95
"""Share of reads through the page cache from which on reads are said to come from there."""


def limit(waiting: float, cached: float | None) -> tuple[str, str]:
    """Return what limits the speed, and the source of reads: the disk or the page cache.

    Given are the shares of the time spent waiting for reads, and of the reads that came from the page cache.
    """
    source = "page cache" if (cached or 0.0) >= ALL_CACHED else "disk"
    return source if waiting >= DISK_LIMITS else "computing", source


SLOW = 0.1
"""Speeds in tokens per second below this are shown as seconds for a token."""


def rate(per_second: float | None) -> str:
    """Return tokens per second, without the unit, for columns of such numbers."""
    if per_second is None:
        return "-"
    if 0 < per_second < SLOW:
        return f"{per_second:.2g}"
    return f"{per_second:.1f}" if per_second >= 9.995 else f"{per_second:.2f}"


def speed(per_second: float | None) -> str:
    """Return tokens per second with the unit; below one token in ten seconds, the seconds for a token."""
    if per_second and per_second < SLOW:
        return f"{1 / per_second:.1f} s per token"
    return f"{rate(per_second)} tokens/s"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def layer_runs(runs: Iterable[Sequence[int]]) -> str:
    """Return runs of layers, each from its first layer to the one after its last, in words: ``0-3, 8``."""
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in runs)


UNITS: dict[str, Callable[[Any], str]] = {
    "size": size,
    "bytes": lambda nbytes: size(nbytes) if nbytes else "nothing",
    "GB": lambda nbytes: f"{nbytes / 1e9:.3f} GB",
    "billions": lambda nbytes: f"{nbytes / 1e9:.3f}",
    "GB/s": lambda per_second: f"{per_second / 1e9:.2f} GB/s",
    "duration": duration,
    "speed": speed,
    "rate": rate,
    "percent": "{:.0%}".format,
    "whole": "{:.0f}".format,
    "amount": lambda number: f"{number:.1f}" if number < 99.95 else f"{number:.0f}",
}
"""The words of a fact by its unit."""


class _Places(Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a fact; one of an object in an object has the names of both, with a dot between them."""
        if key in kwargs:
            return kwargs[str(key)]
        section, _, name = str(key).partition(".")
        found = kwargs.get(section)
        return self.get_value(name, args, found) if isinstance(found, Mapping) else None

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.get_value(field_name, args, kwargs), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a fact in words; a dash where it is unknown."""
        if value is None:
            return "-"
        if not format_spec or value is True:
            return format_spec or str(value)
        if unit := UNITS.get(format_spec):
            return unit(value)
        return counted(value if isinstance(value, int) else len(value), format_spec)

    def is_known(self, part: str, facts: Mapping[str, Any]) -> bool:
        """Return whether all facts of a part are known."""
        return all(name is None or self.get_value(name, (), facts) for _, name, _, _ in self.parse(part))


_places = _Places()


def formatted(template: str, facts: Mapping[str, Any]) -> str:
    """Return a template filled with facts, as in :func:`filled`. Unknown facts are dashes."""
    return _places.vformat(template, (), facts)


def filled(template: str, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a report: a label, and a text in which facts have their places.

    Args:
        template: lines such as ``Read: {nbytes:size}, {num_reads:read}, {is_cached:from memory}``, of parts with commas
            between them. A place has the name of a fact, then its unit; or a noun for a number or list of things; or
            words for a fact that is True. A part is left out where a fact of it is missing, 0, empty or False, and the
            whole line where that is its first part.
        facts: by name.
    """
    for line in template.strip().splitlines():
        label, _, text = line.partition(": ")
        parts = text.split(", ")
        known = [part for part in parts if _places.is_known(part, facts)]
        if known[:1] == parts[:1]:
            yield label, ", ".join(_places.vformat(part, (), facts) for part in known)
