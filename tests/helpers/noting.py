from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, look: Callable[..., Any]) -> list[Any]:
    """Return what looks at the arguments of each call of a function find from now on; a look may find None."""
    found, function = list[Any](), getattr(owner, name)

    def noting(*args: Any, **options: Any) -> Any:
        if (seen := look(*args, **options)) is not None:
            found.append(seen)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, noting)
    return found
