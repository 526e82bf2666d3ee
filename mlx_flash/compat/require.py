"""The check that MLX and mlx-lm have what this package relies on."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from typing import Any

from mlx_flash.errors import CompatibilityError

TESTED = {"mlx-lm": ("0.32.1", "0.32.2"), "mlx": ("0.32.2", "0.32.4")}
"""The oldest and the newest release of each that the tests ran with; ``pyproject.toml`` has the same bounds."""


def require(owner: Any, name: str, *parameters: str) -> Any:
    """Return an attribute of a module, class or object, which takes some parameters if it is a function."""
    place = f"{_place(owner)}.{name}"
    found = getattr(owner, name, None)
    if found is None:
        raise incompatible(f"{place} is missing")
    if parameters:
        known = inspect.signature(found).parameters
        missing = [parameter for parameter in parameters if parameter not in known]
        if missing:
            raise incompatible(f"{place}() takes no parameter {missing[0]!r}")
    return found


def require_that(condition: bool, otherwise: str) -> None:
    """Check a property that :func:`require` cannot express."""
    if not condition:
        raise incompatible(otherwise)


def incompatible(what: str) -> CompatibilityError:
    """Return the error that says what is missing and which versions work."""
    here = " and ".join(f"{name} {_installed(name)}" for name in TESTED)
    works = " and ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())
    return CompatibilityError(f"{what} in the installed {here}: mlx-flash works with {works}.")


@functools.cache
def installed(package: str) -> str:
    """Return the version of an installed package. Finding it parses the package's metadata, so it is kept."""
    return importlib.metadata.version(package)


def _place(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _installed(name: str) -> str:
    try:
        return installed(name)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"
