"""Modelfiles with names, in a folder of the user: ``mlx-flash create`` writes them, ``run`` and servers read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mlx_flash.errors import ConfigError, WriteError
from mlx_flash.files import make_private, write_atomically
from mlx_flash.folders import settings_file
from mlx_flash.modelfile.parse import parse_modelfile, read_text
from mlx_flash.modelfile.values import parse_base, parse_directory, unquote

_NAME = re.compile(r"\w[\w.:-]{0,99}", re.ASCII)


def models_folder() -> Path:
    """Return the folder of Modelfiles with names, beside the settings file. It need not exist."""
    return settings_file().parent / "models"


def named_models() -> dict[str, Path]:
    """Return the Modelfiles of the folder by name. Files with other names are left out."""
    folder = models_folder()
    if not folder.is_dir():
        return {}
    return {path.name: path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name) and path.is_file()}


def check_model_name(name: str) -> None:
    """Refuse a name that cannot be one of a Modelfile.

    Raises:
        ConfigError: it has other characters, or is too long.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a model: it must have 1 to 100 letters, digits, and . : _ - (not at the start)"
        )


def create_model(name: str, source: Path) -> Path:
    """Write a Modelfile with a name. Folders in it become absolute. Return its path.

    Raises:
        ConfigError: the name or the Modelfile is wrong.
        WriteError: it cannot be written.
    """
    check_model_name(name)
    text = read_text(source)
    parse_modelfile(text, source)
    path = models_folder() / name
    try:
        make_private(path.parent)
        write_atomically(path, "\n".join(_absolute(text, source.absolute().parent)))
    except OSError as error:
        raise WriteError(
            f"cannot write the Modelfile {path}: {error.strerror or error}. Hint: make room there, check who may write "
            "there, or set XDG_CONFIG_HOME to another folder."
        ) from error
    return path


def _absolute(text: str, folder: Path) -> Iterator[str]:
    """Yield the lines of a correct Modelfile, with absolute folders in FROM and ADAPTER."""
    lines = iter(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    for line in lines:
        name, *rest = line.split(None, 1) or [""]
        if name.startswith("#") or not rest:
            yield line
        elif name.upper() == "FROM":
            yield f"FROM {parse_base(unquote(rest[0], lines), folder)}"
        elif name.upper() == "ADAPTER":
            yield f"ADAPTER {parse_directory(unquote(rest[0], lines), folder)}"
        else:
            yield line
            if name.upper() in ("PARAMETER", "MESSAGE"):
                rest = rest[0].split(None, 1)[1:]
            taken: list[str] = []
            if rest:
                unquote(rest[0], _noting(lines, taken))
            yield from taken


def _noting(lines: Iterator[str], taken: list[str]) -> Iterator[str]:
    for line in lines:
        taken.append(line)
        yield line
