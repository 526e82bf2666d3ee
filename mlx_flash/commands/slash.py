"""Commands inside a conversation: ``/set``, ``/show``, ``/clear`` and so on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from rich.text import Text

from mlx_flash.commands.common import note, print_rich
from mlx_flash.commands.kept import keep, kept
from mlx_flash.config import GB, did_you_mean
from mlx_flash.errors import ConfigError
from mlx_flash.memory.footprint import footprint, peak_footprint
from mlx_flash.model import FlashLLM
from mlx_flash.modelfile.conversation import Conversation
from mlx_flash.modelfile.parse import Parameters, read_text
from mlx_flash.modelfile.values import parse_parameter, parse_stop
from mlx_flash.monitor.words import size

BYE = ("/bye", "/exit", "/quit")
HELP = ("/?", "/help")
SETTINGS = ("parameter", "system", "verbose", "quiet", "normal")
VIEWS = ("info", "parameters", "system", "template", "license", "modelfile")

USAGES = {
    "/set parameter NAME VALUE": "such as: /set parameter temperature 0.7",
    "/set system TEXT": "change the system prompt",
    "/set verbose, /set quiet": "all measurements after an answer, or none; /set normal: one line",
    f"/show {' | '.join(VIEWS)}": "show it",
    "/clear": "forget the conversation",
    "/save NAME, /load NAME": "keep the conversation, go on with one; run --resume goes on with the last one",
    "/image FILE": "a picture for the next message, where the model sees",
    ", ".join(HELP): "show this",
    ", ".join(BYE): "end, as Ctrl-D does",
    '"""': "begins and ends a message of several lines; Alt-Enter adds a line",
}

WITH_NAMES = ("/save", "/load", "/image")

NAMES = ("/set", "/show", "/clear", *WITH_NAMES, *HELP, *BYE)
COMPLETIONS = (
    "/clear",
    *WITH_NAMES,
    *HELP,
    *BYE,
    *(f"/set {word}" for word in SETTINGS),
    *(f"/show {word}" for word in VIEWS),
)


class Bye(Exception):
    """The user ends the conversation."""


class Slash:
    """The commands of one conversation. They print to stderr.

    Args:
        conversation: the conversation.
        verbose: the state of ``/set verbose`` at the beginning.

    Attributes:
        is_verbose: print all measurements after an answer.
        is_quiet: print none.
    """

    def __init__(self, conversation: Conversation, verbose: bool) -> None:
        self._conversation = conversation
        self.is_verbose = verbose
        self.is_quiet = False

    def run(self, line: str) -> None:
        """Run a command.

        Raises:
            Bye: it ends the conversation.
            ConfigError: there is no such command, or its arguments are wrong.
        """
        name, _, rest = line.strip().partition(" ")
        if name in BYE:
            raise Bye
        if name in HELP:
            _print("\n".join(f"{usage}\n    {words}" for usage, words in USAGES.items()))
        elif name == "/clear":
            self._conversation.clear()
        elif name in WITH_NAMES:
            self._take(name, rest.strip())
        elif name == "/set":
            self._set(*_words(rest))
        elif name == "/show":
            self._show(rest.strip() or "info")
        else:
            raise ConfigError(
                f"there is no command {name}; there are {', '.join(NAMES)}{did_you_mean(name, NAMES) or '.'} "
                "Hint: put a blank before a message that begins with /"
            )

    def _take(self, name: str, what: str) -> None:
        """Keep, load, or show a picture."""
        conversation = self._conversation
        if not what:
            raise ConfigError(f"{name} needs a name. Hint: /? shows the commands.")
        if name == "/image":
            conversation.pictures = [*conversation.pictures, str(Path(what).expanduser().absolute())]
        elif name == "/save":
            keep(what, conversation)
        else:
            conversation.resume(kept(what)[1])
            note(f"{len(conversation.messages)} messages; the next answer goes on from there")

    def _set(self, what: str, rest: str) -> None:
        if what == "parameter":
            self._set_parameter(*_words(rest))
        elif what == "system":
            self._conversation.set_system(rest.strip().strip('"') or None)
        elif what in ("verbose", "quiet", "normal"):
            self.is_verbose, self.is_quiet = what == "verbose", what == "quiet"
        else:
            raise ConfigError(f"/set {what}: it must be one of {', '.join(SETTINGS)}{did_you_mean(what, SETTINGS)}")

    def _set_parameter(self, name: str, text: str) -> None:
        """Change a parameter of the Modelfile for the next answers."""
        described = self._conversation.modelfile
        if name == "stop":
            self._conversation.modelfile = replace(described, stop=(parse_stop(text.strip('"')),))
            return
        if name == "num_ctx":
            raise ConfigError("/set parameter num_ctx: memory for the context is reserved when the model is loaded")
        if not text:
            raise ConfigError(f"/set parameter {name}: there is no value")
        changed = {name: parse_parameter(name, text)}
        self._conversation.modelfile = replace(described, parameters=replace(described.parameters, **changed))  # type: ignore[arg-type]

    def _show(self, what: str) -> None:
        described = self._conversation.modelfile
        views: dict[str, Callable[[], str]] = {
            "info": lambda: "\n".join(self._info()),
            "parameters": lambda: "\n".join(_parameters(described.parameters, described.stop)),
            "system": lambda: described.system or "",
            "template": lambda: described.template or "the tokenizer's own",
            "license": lambda: "\n".join(described.licenses),
            "modelfile": lambda: read_text(described.path) if described.path.is_file() else f"FROM {described.base}",
        }
        if what not in views:
            raise ConfigError(f"/show {what}: it must be one of {', '.join(VIEWS)}{did_you_mean(what, VIEWS)}")
        _print(views[what]() or f"there is no {what}")

    def _info(self) -> Iterator[str]:
        conversation, model = self._conversation, self._conversation.model
        yield f"model       {conversation.modelfile.base}"
        if isinstance(model, FlashLLM):
            plan = model.plan
            read = size(plan.read_bytes) if plan.read_bytes else "nothing"
            yield f"weights     {size(plan.model_bytes)}; {read} is read for each token"
            yield f"budget      {plan.budget_bytes / GB:.3f} GB"
            yield f"context     memory reserved for {plan.context_length} tokens"
        yield f"messages    {len(conversation.messages)}, {conversation.num_cached} tokens in the KV cache"
        yield f"memory      {footprint() / GB:.3f} GB, peak {peak_footprint() / GB:.3f} GB"


def _parameters(parameters: Parameters, stop: tuple[str, ...]) -> Iterator[str]:
    for field in fields(parameters):
        if (value := getattr(parameters, field.name)) is not None:
            yield f"{field.name:15} {value}"
    for text in stop:
        yield f"{'stop':15} {text!r}"


def _words(text: str) -> tuple[str, str]:
    first, _, rest = text.strip().partition(" ")
    return first, rest.strip()


def _print(text: str) -> None:
    print_rich(Text(text), sys.stderr)
