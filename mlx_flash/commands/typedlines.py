"""Messages that a user types: with history and editing by prompt_toolkit, or as plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlx_flash.commands.common import note
from mlx_flash.errors import ConfigError
from mlx_flash.files import make_private
from mlx_flash.folders import home_directory

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'

Read = Callable[[], str]


def make_reader(words: Sequence[str]) -> Read:
    """Return a function that reads one message. It raises EOFError at the end of the input.

    Args:
        words: commands that the Tab key completes.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return read_plainly
    return _make_editor(words)


def read_plainly() -> str:
    """Read a line, or several ones between triple quotes.

    Raises:
        EOFError: the input has ended.
        ConfigError: it ends within a message.
    """
    print(PROMPT, end="", file=sys.stderr, flush=True)
    text = input()
    while is_open(text):
        print(CONTINUED, end="", file=sys.stderr, flush=True)
        try:
            text += "\n" + input()
        except EOFError:
            raise ConfigError(
                f"the input ends within a message that begins with {QUOTES}, which was not sent. Hint: close it."
            ) from None
    return unquote(text)


def is_open(text: str) -> bool:
    """Return True for text that begins with triple quotes which are not closed yet."""
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def unquote(text: str) -> str:
    """Return a message without triple quotes around it."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and not is_open(stripped):
        return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def begun(read: Read) -> Read:
    """Read the first message now. Return a function that returns it, and reads the others.

    Raises:
        ConfigError: there is no message.
    """
    try:
        while not (first := read()).strip():
            pass
    except EOFError:
        raise ConfigError("there is no prompt: standard input is empty. Hint: mlx-flash run MODEL PROMPT") from None
    messages = iter([first])
    return lambda: next(messages, None) or read()


def state_folder() -> Path:
    """Return the folder of earlier messages and conversations. It need not exist."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else home_directory() / ".local" / "state") / "mlx-flash"


def history_file() -> Path:
    """Return the file of earlier messages. It need not exist."""
    return state_folder() / "history"


def open_history(path: Path) -> bool:
    """Make the file for this user alone. Return False where that fails."""
    try:
        make_private(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        os.close(fd)
    except OSError as error:
        note(f"mlx-flash: messages are not kept for the next time: {error.strerror}: {path}")
        return False
    return True


def _make_editor(words: Sequence[str]) -> Read:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    path = history_file()
    history: History = FileHistory(str(path)) if open_history(path) else InMemoryHistory()
    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: Any) -> None:
        """Empty the line, or interrupt the prompt where it is empty."""
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
        prompt_continuation=CONTINUED,
        history=history,
        key_bindings=keys,
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        enable_open_in_editor=True,
        output=create_output(stdout=sys.stderr),
    )
    return lambda: unquote(session.prompt())
