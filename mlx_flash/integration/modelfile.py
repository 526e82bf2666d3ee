"""The settings of a Modelfile alone, for programs that read its other lines themselves."""

from __future__ import annotations

from mlx_flash.config import FlashConfig, parse_setting, warn_once
from mlx_flash.modelfile.parse import parse_modelfile


def parse_flash_directives(modelfile_text: str) -> FlashConfig:
    """Return the settings in a Modelfile; ``enabled=False`` if it has no line that begins with FLASH.

    Raises:
        ConfigError: an instruction is unknown, or a value is wrong.
    """
    lines = [line if line.strip().upper().startswith("FLASH") else "" for line in modelfile_text.splitlines()]
    if not any(lines):
        return FlashConfig(enabled=False)
    found = parse_modelfile("\n".join([*lines, "FROM unused/unused"]), "Modelfile")
    if found.notes:
        warn_once("; ".join(f"Modelfile, line {note.line}: {note.text}" for note in found.notes))
    return FlashConfig(**{name: parse_setting(name, text) for name, text in found.flash.items()})
