"""Short names of models: a table of those that people run, and the user's own."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from dataclasses import dataclass
from importlib import resources

from mlx_flash.config import own_names


@dataclass(frozen=True, slots=True)
class Known:
    """A model of the table ``models.toml``, which says where its numbers are from."""

    repository: str  # on Hugging Face
    bytes: int  # of its weights
    token: int  # bytes of the weights that compute one token
    licence: str  # of the model
    source: str  # of the numbers
    experts: int = 0  # bytes of all experts; 0 for a dense model
    chosen: tuple[int, int] = (0, 1)  # experts of a layer that compute a token, and all experts of a layer

    @property
    def chosen_bytes(self) -> int:
        """Bytes of the experts that compute one token."""
        return self.experts * self.chosen[0] // self.chosen[1]


@functools.cache
def known_models() -> dict[str, Known]:
    """Return the table by short name."""
    rows = tomllib.loads((resources.files(__package__) / "models.toml").read_text(encoding="utf-8"))
    return {name: Known(**{**row, "chosen": tuple(row.get("chosen", (0, 1)))}) for name, row in rows.items()}


def repository_of(name: str) -> str:
    """Return the repository, or the folder, that a short name or an address of Hugging Face stands for.

    Any other text is returned as it is. A folder wins. Raises: ConfigError: the user's names cannot be read.
    """
    name = re.sub(r"^(https?://)?(hf\.co|huggingface\.co)/", "", name)
    if "/" in name or os.path.exists(name):  # noqa: PTH110 - a text too long for a file is no error
        return name
    known = known_models().get(name.lower())
    return own_names().get(name) or (name if known is None else known.repository)
