"""``mlx-flash completion``: commands, flags and model names for the Tab key of bash, zsh and fish, by argcomplete."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, TextIO, cast

from mlx_flash.commands.arguments import COMMANDS, make_parser
from mlx_flash.errors import ConfigError

REQUEST_VARIABLE = "_ARGCOMPLETE"
"""Set by the shell when it asks for completions."""


def completion(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash completion``: print the code that a shell has to run.

    Raises:
        ConfigError: argcomplete is not installed.
    """
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError as error:
        raise ConfigError("completion needs argcomplete. Hint: pip install argcomplete.") from error
    print(shellcode(["mlx-flash"], shell=args.shell), file=out)
    return 0


def complete() -> None:
    """Answer the shell's request for completions, and end the process."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    parser, _ = make_parser(next((word for word in words[1:] if word in COMMANDS), None), is_whole=True)
    argcomplete.autocomplete(parser, default_completer=cast(Any, _values))


def _values(prefix: str, action: argparse.Action, **_: object) -> list[str]:
    """Return files and folders that begin like a word; for models, folders and what was downloaded."""
    folder = Path(prefix).expanduser() if prefix.endswith("/") else Path(prefix).expanduser().parent
    found = sorted(folder.glob("*")) if folder.is_dir() else []
    folders = [f"{path}/" for path in found if path.is_dir()]
    if action.dest not in ("model", "first"):
        return [*folders, *(str(path) for path in found if not path.is_dir())]
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return [*sorted(path.name[8:].replace("--", "/") for path in cache.glob("models--*")), *folders]
