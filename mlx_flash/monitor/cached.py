"""The part of the files that free memory of the machine holds, in words."""

from __future__ import annotations

from mlx_flash.monitor.history import History
from mlx_flash.monitor.state import count
from mlx_flash.monitor.words import percent, size


def cached_words(history: History) -> str:
    """Return the part of the files that is read through the page cache, and its part of the last reads; "" if none."""
    nbytes = count(history.latest.state, "read", "cached_file_bytes")
    if not nbytes:
        return ""
    return f"{size(nbytes)} of the files in free memory; {percent(history.rates.cached_share)} of reads now"
