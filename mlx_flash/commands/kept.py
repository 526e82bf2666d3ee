"""Conversations that are kept: each a JSON file, with its model and its messages, in a folder of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_flash.commands.typedlines import state_folder
from mlx_flash.errors import ConfigError, WriteError
from mlx_flash.files import make_private, write_atomically
from mlx_flash.modelfile.conversation import Conversation
from mlx_flash.modelfile.namedfiles import check_model_name

LAST = "last"
"""The name of the conversation that had the last answer."""


def keep(name: str, conversation: Conversation) -> None:
    """Write a conversation to its file.

    Raises:
        ConfigError: the name is wrong.
        WriteError: the file cannot be written.
    """
    path = _path(name)
    base, described = Path(conversation.modelfile.base), conversation.modelfile.path
    model = described if described.is_file() else base
    found = {"model": str(model.absolute() if model.exists() else model), "messages": conversation.messages}
    try:
        make_private(path.parent)
        write_atomically(path, json.dumps(found, ensure_ascii=False, indent=1))
    except OSError as error:
        raise WriteError(
            f"the conversation is not kept: {error.strerror}: {path}. Hint: set XDG_STATE_HOME to another folder."
        ) from error


def kept(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the model of a kept conversation, as the command line takes it, and the messages.

    Raises:
        ConfigError: there is none of this name, or its file is damaged.
    """
    path = _path(name)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise ConfigError(f"there is no conversation {name!r}; there are: {names}. Hint: /save NAME keeps one.")
    try:
        found = json.loads(path.read_bytes())
        texts = [{name: str(message[name]) for name in ("role", "content")} for message in found["messages"]]
        return str(found["model"]), [message | text for message, text in zip(found["messages"], texts, strict=True)]
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no conversation: {error!r}. Hint: remove it.") from error


def _path(name: str) -> Path:
    check_model_name(name)
    return state_folder() / "conversations" / f"{name}.json"
