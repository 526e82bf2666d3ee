"""The threads of models."""

from __future__ import annotations

import threading

from mlx_flash.forks import THREAD_PREFIX


def threads_of_models() -> list[threading.Thread]:
    """Return the threads that end with models: all but the engine thread, which stays for the next ones."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(THREAD_PREFIX) and thread.name != f"{THREAD_PREFIX}-engine"
    ]
