"""The user's folders for settings and for data that can be computed again. A home that does not exist is never made."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from mlx_flash.logs import log


def home_directory() -> Path:
    """Return the user's home. Where there is none, as for many services, a folder that ends with this process."""
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an account
        home = Path(os.environ.get("HOME", "~"))
    return home if home.is_dir() else _temporary_home(home)


def cache_directory() -> Path:
    """Return the folder of data that mlx-flash can always compute again. It need not exist."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mlx-flash"
    home = home_directory()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "mlx-flash"


def settings_file() -> Path:
    """Return the path of the user's settings file."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else home_directory() / ".config") / "mlx-flash" / "config.toml"


@cache
def _temporary_home(missing: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mlx-flash-home-"))
    atexit.register(_remove, folder, os.getpid())
    log.warning(
        "the home %s is no folder: measured speeds and cached data go to %s, which is removed when this process ends. "
        "Hint: set HOME, or XDG_CACHE_HOME.",
        missing,
        folder,
    )
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
