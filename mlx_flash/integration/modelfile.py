"""The settings of a Modelfile alone, for programs that read its other lines themselves."""

from __future__ import annotations

from mlx_flash.config import FlashConfig, parse_setting
from mlx_flash.errors import ConfigError
from mlx_flash.modelfile.parse import parse_modelfile

REFUSED = {
    "FLASH_PREFETCH_LAYERS": "the number of slots decides how far the reader is ahead. Hint: FLASH_NUM_SLOTS",
    "FLASH_TOP_K": "another number of experts changes the output. Hint: leave it out",
    "FLASH_EVICTION": "reads go past the page cache. Hint: FLASH_IO",
    "FLASH_QUANT_WARN_BELOW": "the checkpoint decides on the bits of weights. Hint: leave it out",
}
"""Instructions of other programs that have no counterpart, and what to write instead."""

ALIASES = {"FLASH_THREADS": "FLASH_QUEUE_DEPTH"}


def parse_flash_directives(modelfile_text: str) -> FlashConfig:
    """Return the settings in a Modelfile; ``enabled=False`` if it has no line that begins with FLASH.

    Raises:
        ConfigError: an instruction is unknown, or a value is wrong.
    """
    lines = []
    for line in modelfile_text.splitlines():
        name, _, value = line.strip().partition(" ")
        if not name.upper().startswith("FLASH"):
            continue
        if name.upper() in REFUSED:
            raise ConfigError(f"{name.upper()} is not available: {REFUSED[name.upper()]}.")
        lines.append(f"{ALIASES.get(name.upper(), name.upper())} {value}")
    if not lines:
        return FlashConfig(enabled=False)
    found = parse_modelfile("\n".join(["FROM unused/unused", *lines]), "Modelfile").flash
    return FlashConfig(**{name: parse_setting(name, text) for name, text in found.items()})
