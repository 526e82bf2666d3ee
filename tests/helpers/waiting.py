from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def eventually(condition: Callable[[], Value], seconds: float = 10.0) -> Value:
    """Return the condition's value once it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)
    return value
