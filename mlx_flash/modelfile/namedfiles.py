"""Modelfiles with names, in a folder of the user: ``mlx-flash create`` writes them, ``run`` and servers read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mlx_flash.errors import ConfigError, WriteError
from mlx_flash.files import make_private, write_atomically
from mlx_flash.folders import settings_file
from mlx_flash.modelfile.parse import FLASH_INSTRUCTIONS, Modelfile

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
            f"{name!r} is no name for a model or a conversation: it must have 1 to 100 letters, digits, and . : _ - "
            "(not at the start)"
        )


def create_model(name: str, modelfile: Modelfile) -> Path:
    """Write the contents of a Modelfile with a name. Return its path. Comments and what has no effect are left out.

    Raises:
        ConfigError: the name is wrong, or a text cannot be quoted.
        WriteError: it cannot be written.
    """
    check_model_name(name)
    path = models_folder() / name
    try:
        make_private(path.parent)
        write_atomically(path, "".join(f"{line}\n" for line in _lines(modelfile)))
    except OSError as error:
        raise WriteError(
            f"cannot write the Modelfile {path}: {error.strerror or error}. Hint: make room there, check who may write "
            "there, or set XDG_CONFIG_HOME to another folder."
        ) from error
    return path


def _lines(modelfile: Modelfile) -> Iterator[str]:
    """Yield the lines of a Modelfile with these contents."""
    yield f"FROM {modelfile.base}"
    if modelfile.adapter is not None:
        yield f"ADAPTER {modelfile.adapter}"
    for key, value in modelfile.parameters.given().items():
        yield f"PARAMETER {key} {value}"
    texts = [("SYSTEM", modelfile.system), ("TEMPLATE", modelfile.template)]
    texts += [("PARAMETER stop", stop) for stop in modelfile.stop]
    texts += [(f"MESSAGE {message.role}", message.content) for message in modelfile.messages]
    texts += [("LICENSE", text) for text in modelfile.licenses]
    yield from (f"{key} {quoted(text)}" for key, text in texts if text is not None)
    num_ctx = ("context_length", str(modelfile.parameters.num_ctx))  # which sets this, too
    for key, name in FLASH_INSTRUCTIONS.items():
        if name in modelfile.flash and (name, modelfile.flash[name]) != num_ctx:
            yield f"{key} {modelfile.flash[name]}"


def quoted(text: str) -> str:
    """Return a text as a Modelfile has it.

    Raises:
        ConfigError: no quotes can hold it.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if len(lines) == 1 and not text.startswith('"'):
        return f'"{text}"'
    if any(line.rstrip().endswith('"""') for line in lines):
        raise ConfigError(f'a line of a text ends with """, which ends a text in a Modelfile: {text[:50]!r}')
    return '"""' + "\n".join(lines) + '"""'
