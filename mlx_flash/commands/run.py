"""``mlx-flash run`` and ``chat``: a model or a Modelfile, prompted or in conversation."""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.text import Text

from mlx_flash.commands.arguments import DEFAULT_MODEL
from mlx_flash.commands.common import Status, labelled, make_config, note, note_lines, print_rich
from mlx_flash.commands.dispatch import handling
from mlx_flash.commands.models import ask_to_download, fetched, is_remote
from mlx_flash.commands.report import Recorder, make_report, plan_to_json, render_run
from mlx_flash.commands.vision import is_vision
from mlx_flash.config import FlashConfig, did_you_mean
from mlx_flash.engine.prepare import resolve
from mlx_flash.errors import ConfigError, FlashError, WriteError
from mlx_flash.files import home_directory, make_private, write_atomically, write_errors
from mlx_flash.layout.hub import is_ollama_name
from mlx_flash.layout.names import known_models, repository_of
from mlx_flash.memory.footprint import footprint, peak_footprint
from mlx_flash.modelfile.parse import (
    DEFAULT_MAX_TOKENS,
    Modelfile,
    check_model_name,
    check_text,
    find_modelfile,
    named_models,
    parse_parameter,
    parse_stop,
    read_modelfile,
)
from mlx_flash.monitor.words import filled
from mlx_flash.ranks import launched_group
from mlx_flash.server.batch import BatchOptions, Job
from mlx_flash.server.catalog import Source, defaults_of, source_of
from mlx_flash.server.events import End, Event, Failed, Piece, Progress
from mlx_flash.server.loaded import LoadedModel, OwnCache
from mlx_flash.server.models import Models
from mlx_flash.server.request import (
    Defaults,
    GenerationRequest,
    Sampling,
    content_of,
    data_url,
    picture_part,
    with_pictures,
)

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'

Read = Callable[[], str]


def make_reader(words: Sequence[str]) -> Read:
    """Return a function that reads one message. It raises EOFError at the end of the input."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return read_plainly
    return _make_editor(words)


def read_plainly() -> str:
    """Read a line, or several ones between triple quotes."""
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
    """Read the first message now. Return a function that returns it, and reads the others."""
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

    path = state_folder() / "history"
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


LAST = "last"
"""The name of the conversation that had the last answer."""


def keep(name: str, conversation: Conversation) -> None:
    """Write a conversation to its file."""
    path = _path(name)
    base, described = Path(conversation.modelfile.base), conversation.modelfile.path
    model = described if described.is_file() else base
    found = {"model": str(model.absolute() if model.exists() else model), "messages": conversation.messages}
    with write_errors(f"the conversation is not kept in {path}", "or set XDG_STATE_HOME to another folder"):
        make_private(path.parent)
        write_atomically(path, json.dumps(found, ensure_ascii=False, indent=1))


def kept(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the model of a kept conversation, as the command line takes it, and the messages."""
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


_WORDS = "\n(stopping after the pass under way; Ctrl-C again ends the program)\n"
_SEED_BITS = 63


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C in a block end an answer after the pass under way, and the second one the program.

    Yield a function that returns True once Ctrl-C was pressed. A process that ignores SIGINT, as background jobs do,
    goes on ignoring it.
    """
    pressed: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)
        os.write(2, _WORDS.encode())  # not print(), which fails in a handler that interrupts a print()

    with handling((signal.SIGINT,), handle):
        yield lambda: bool(pressed)


class _Listener:
    """The client of an answer: what the pipeline of the server sends it is read after each pass."""

    def __init__(self, on_prompt: Callable[[int, int], None], is_stopped: Callable[[], bool]) -> None:
        self.events: list[Event] = []
        self._on_prompt, self._is_stopped = on_prompt, is_stopped

    @property
    def open(self) -> Collection[int]:
        """The number of the answer, until the user stops it."""
        return () if self._is_stopped() else (0,)

    def put(self, number: int, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Progress):
            self._on_prompt(event.done, event.total)
        else:
            self.events.append(event)


class Conversation:
    """Turns of user and assistant. A model answers them as it answers requests of the server."""

    def __init__(
        self,
        loaded: LoadedModel,
        modelfile: Modelfile,
        sampling: Sampling | None = None,
        grammar: str | None = None,
    ) -> None:
        self.loaded, self.modelfile = loaded, modelfile
        self._sampling, self._grammar = sampling or Sampling(), grammar
        self._turns: list[dict[str, Any]] = [*modelfile.messages]  # pictures' files are their ``images``
        self.pictures: list[str] = []  # files for the next message
        self.job: Job | None = None  # the last answer
        self.finish_reason: str | None = None  # of the last answer; None if it did not end by itself

    def clear(self) -> None:
        """Forget everything but the messages that the Modelfile begins with."""
        self._turns = [*self.modelfile.messages]

    def resume(self, messages: list[dict[str, Any]]) -> None:
        """Go on with messages of another conversation, and with its system prompt."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.set_system(messages[0]["content"] if has_system else None)
        self._turns = messages[has_system:]

    def set_system(self, text: str | None) -> None:
        """Change the system prompt of this conversation; None removes it."""
        self.modelfile = replace(self.modelfile, system=text)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The system prompt, if there is one, and all turns."""
        system = self.modelfile.system
        return [*([] if system is None else [{"role": "system", "content": system}]), *self._turns]

    def answer(
        self,
        text: str,
        on_prompt: Callable[[int, int], None] = lambda done, total: None,
        on_token: Callable[[Job], None] = lambda job: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Generator[str, None, None]:
        """Yield the model's answer to a message, piece by piece.

        Closing the iterator keeps the answer so far. An answer that ends before its first piece leaves no trace.
        """
        pictures, self.pictures, said, self.finish_reason = self.pictures, [], "", None
        self._turns.append({"role": "user", "content": text, **({"images": pictures} if pictures else {})})
        try:
            for piece in self._pieces(_Listener(on_prompt, is_stopped), on_token):
                said += piece
                yield piece
        except FlashError:
            pictures = []
            raise
        finally:
            if said or self.finish_reason is not None:  # an empty answer is one, too
                self._turns.append({"role": "assistant", "content": said})
            else:
                self._turns.pop()
                self.pictures = pictures

    def _pieces(self, listener: _Listener, on_token: Callable[[Job], None]) -> Iterator[str]:
        loaded, parameters = self.loaded, self.modelfile.parameters
        job = self.job = Job(self._request(), loaded.source, listener)
        loaded.prepare(job)
        if parameters.get("num_predict") == -2 and "num_ctx" in parameters:  # it fills the context
            job.max_tokens = max(1, min(job.max_tokens, int(parameters["num_ctx"]) - len(job.prompt.tokens)))
        loaded.admits(job)
        loaded.begin(job)
        try:
            while not job.is_over and listener.open:
                num_tokens = len(job.tokens)
                loaded.advance()
                events, listener.events = listener.events, []
                if len(job.tokens) > num_tokens:
                    on_token(job)
                for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, End):
                        self.finish_reason = event.reason
                    elif isinstance(event, Piece) and event.text:
                        yield event.text
        finally:
            loaded.stop(job)

    def _request(self) -> GenerationRequest:
        """Return the request for the next answer."""
        described, messages = self.modelfile, list[dict[str, Any]]()
        for message in self.messages:
            check_text(message["content"], f"the message of the {message['role']}")
            parts = [_picture(file) for file in message.get("images", ())]
            content = content_of([*parts, {"type": "text", "text": message["content"]}])
            messages.append({"role": message["role"], "content": content})
        if not any(message["content"] for message in messages):
            raise ConfigError("the prompt is empty. Hint: give it in quotes, or on standard input.")
        seed = self._sampling.drawn_seed + sum(message["role"] == "assistant" for message in messages)
        asked = GenerationRequest(
            model=described.base,
            messages=messages,
            sampling=replace(self._sampling, drawn_seed=seed),
            grammar=self._grammar,
        )
        if not self.loaded.tokenizer.has_chat_template:
            asked = replace(asked, messages=None, prompt="\n".join(str(message["content"]) for message in messages))
        is_unlimited = described.parameters.get("num_predict", 0) < 0
        defaults = Defaults(max_tokens=2**31 - 1 if is_unlimited else DEFAULT_MAX_TOKENS)
        return with_pictures(asked.completed(defaults_of(described, defaults)))


def _picture(file: str) -> dict[str, str]:
    _check_picture(file)
    return picture_part(data_url(base64.b64encode(Path(file).read_bytes()).decode()), file)


def _check_picture(file: str) -> None:
    from mlx_flash.vision.pictures import size_of

    size_of(Path(file), file)  # whose errors name the file


INFO = """
Model: {model}
Weights: {plan.model_bytes:size}, {plan.read_bytes:size} read for each token
Budget: {plan.budget_bytes:GB}
Context: memory reserved for {plan.context_length:token}
Messages: {num_messages}, {num_cached} tokens in the KV cache
Memory: {footprint:GB}, peak {peak:GB}
System: {system}
Template: {template}
"""
"""A conversation in words."""

BRIEF = """
Answer: {generation_tokens:token}, {generation_tokens_per_second:speed}, \
prompt {prompt_tokens:token} in {time_to_first_token_seconds:duration}, \
memory {footprint:size}, peak {peak_memory_bytes:size} of {budget_bytes:size}
"""
"""An answer in words."""

BYE = ("/bye", "/exit", "/quit")
HELP = ("/?", "/help")
SETTINGS = ("parameter", "system", "verbose", "quiet", "normal")

USAGES = {
    "/set parameter NAME VALUE": "such as: /set parameter temperature 0.7",
    "/set system TEXT": "change the system prompt",
    "/set verbose, /set quiet": "all measurements after an answer, or none; /set normal: one line",
    "/show": "model, budget, memory, system prompt, parameters",
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
    *NAMES[1:],
    *(f"/set {word}" for word in SETTINGS),
)


HINT = "/? shows the commands, Ctrl-C stops an answer, Ctrl-D ends"
AGAIN = "(Ctrl-C again, Ctrl-D or /bye ends)"

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters of an answer that would control the terminal."""


class Talk:
    """A conversation in a terminal, or the answer to one prompt. All but the answers goes to stderr."""

    def __init__(
        self,
        conversation: Conversation,
        load_seconds: float,
        out: TextIO,
        verbose: bool,
        keeps: bool = False,
    ) -> None:
        self._conversation = conversation
        self._load_seconds = load_seconds
        self._out = out
        self._is_terminal = out.isatty()
        self._keeps = keeps
        self.is_verbose, self.is_quiet = verbose, False

    def converse(self, read: Read, is_typed: bool = False) -> int:
        """Answer messages until the user ends the conversation. An error of an answer does not end it."""
        note(HINT)
        is_interrupted, status = False, 0
        while True:
            try:
                text = read()
            except EOFError:
                return status
            except KeyboardInterrupt as error:
                if is_interrupted or not is_typed or type(error) is not KeyboardInterrupt:  # SIGTERM and SIGHUP
                    raise
                is_interrupted = True
                note(AGAIN)
                continue
            is_interrupted = False
            try:
                if text.partition(" ")[0].rstrip() in BYE:  # a blank before the slash makes it a message
                    return status
                if text.startswith("/"):
                    self.command(text)
                elif text.strip():
                    self.answer(text.strip())
                    self._print_footer()
            except FlashError as error:
                status = int(not is_typed)
                print_rich(Text(f"mlx-flash: error: {' '.join(str(error).split())}"), sys.stderr)

    def answer(self, text: str) -> None:
        """Print the answer to a message until it ends or the user presses Ctrl-C."""
        recorder = self._recorder = Recorder(self._conversation.loaded.model, 0, self._load_seconds)
        with stoppable() as is_stopped, Status("computing the prompt", self._is_terminal) as status:
            pieces = self._conversation.answer(
                text, status.show, lambda job: recorder.add_token(job.tokens[-1]), is_stopped
            )
            with closing(pieces):
                for piece in pieces:
                    status.stop()
                    shown = _CONTROLS.sub("", piece) if self._is_terminal else piece
                    print(shown, end="", file=self._out, flush=True)
        print(file=self._out, flush=True)
        if self._keeps:
            try:
                keep(LAST, self._conversation)
            except WriteError as error:
                self._keeps = False
                note(f"mlx-flash: {error}")
        job = self._conversation.job
        recorder.num_prompt_tokens = 0 if job is None else len(job.prompt.tokens) - job.num_cached
        recorder.finish_reason = self._conversation.finish_reason or recorder.finish_reason
        if self.is_verbose and recorder.tokens:
            print_rich(render_run(make_report(recorder, "")), sys.stderr)

    def _print_footer(self) -> None:
        if not (self.is_verbose or self.is_quiet) and self._recorder.tokens:
            facts = {**make_report(self._recorder, ""), "footprint": footprint()}
            ((_, words),) = filled(BRIEF, facts)
            print_rich(Text(words, style="dim"), sys.stderr)

    def command(self, line: str) -> None:
        """Run a command that begins with a slash."""
        name, _, rest = line.strip().partition(" ")
        if name in HELP:
            print_rich("\n".join(f"{usage}\n    {words}" for usage, words in USAGES.items()), sys.stderr)
        elif name == "/clear":
            self._conversation.clear()
        elif name in WITH_NAMES:
            self._take(name, rest.strip())
        elif name == "/set":
            self._set(rest)
        elif name == "/show":
            print_rich(labelled(self._shown()), sys.stderr)
        else:
            raise ConfigError(
                f"there is no command {name}; there are {', '.join(NAMES)}{did_you_mean(name, NAMES) or '.'} "
                "Hint: put a blank before a message that begins with /"
            )

    def _take(self, name: str, what: str) -> None:
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

    def _set(self, words: str) -> None:
        what, _, rest = words.strip().partition(" ")
        if what == "parameter":
            self._set_parameter(rest)
        elif what == "system":
            self._conversation.set_system(rest.strip().strip('"') or None)
        elif what in ("verbose", "quiet", "normal"):
            self.is_verbose, self.is_quiet = what == "verbose", what == "quiet"
        else:
            raise ConfigError(f"/set {what}: it must be one of {', '.join(SETTINGS)}{did_you_mean(what, SETTINGS)}")

    def _set_parameter(self, words: str) -> None:
        """Change a parameter of the Modelfile for the next answers."""
        (name, _, text), described = words.strip().partition(" "), self._conversation.modelfile
        text = text.strip()
        if name == "stop":
            self._conversation.modelfile = replace(described, stop=(parse_stop(text.strip('"')),))
            return
        if name == "num_ctx":
            raise ConfigError("/set parameter num_ctx: memory for the context is reserved when the model is loaded")
        if not text:
            raise ConfigError(f"/set parameter {name}: there is no value")
        changed = {**described.parameters, name: parse_parameter(name, text)}
        self._conversation.modelfile = replace(described, parameters=changed)

    def _shown(self) -> Iterator[tuple[str, str]]:
        conversation, model = self._conversation, self._conversation.loaded.model
        described, kept = conversation.modelfile, conversation.loaded.kept
        facts = {
            "model": described.base,
            "plan": plan_to_json(model.plan),
            "num_messages": str(len(conversation.messages)),
            "num_cached": str(len(kept.tokens) if isinstance(kept, OwnCache) else 0),
            "footprint": footprint(),
            "peak": peak_footprint(),
            "system": described.system,
            "template": described.chat_template,
        }
        yield from filled(INFO, facts)
        yield from ((name, str(value)) for name, value in described.parameters.items())
        yield from (("stop", repr(text)) for text in described.stop)


def grammar_of_format(text: str) -> str:
    """Return the grammar of ``json``, or of a file with a JSON schema. Its library is in memory before the plan."""
    from mlx_flash.server.grammar import json_grammar

    try:
        return json_grammar(None if text == "json" else json.loads(Path(text).read_bytes()), "--format")
    except ModuleNotFoundError as error:
        raise ConfigError("--format needs llguidance. Hint: pip install llguidance") from error
    except (FileNotFoundError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--format {text}: {error}. Hint: json, or a file with a JSON schema.") from error


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Run ``mlx-flash run`` and ``chat``: answer a prompt, or hold a conversation."""
    if args.pipeline or launched_group() is not None:
        raise ConfigError(f"{args.command} is for one rank. Hint: mlx-flash exec -- mlx_lm.chat --model MODEL")
    last = kept(LAST) if args.resume else None
    modelfile, prompt = _described(args, None if last is None else last[0])
    note_lines(modelfile)
    config = make_config(args, modelfile.flash)
    ask_to_download(modelfile.base, args, modelfile.flash)
    if not is_remote(modelfile.base):
        resolve(modelfile.base)  # an error comes before a prompt is read
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty. Hint: give it in quotes, or - to read it from standard input.")
    read = make_reader(COMPLETIONS) if prompt is None else None  # before loading: libraries are in the budget, too
    is_typed = read is not None and sys.stdin.isatty()
    if read is not None and not is_typed:
        read = begun(read)
    began = time.perf_counter()
    grammar = None if args.format is None else grammar_of_format(args.format)
    sampling = Sampling(
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        drawn_seed=secrets.randbits(_SEED_BITS) if args.seed is None else args.seed,
    )
    source, options = _source(args, modelfile, config)
    with closing(Models(options)) as models:
        with Status(f"loading {modelfile.base}", is_shown=not args.quiet) as status:
            model = models.load(source, status.show_bytes, args.image or ())
        assert model is not None  # nothing else runs
        if not model.tokenizer.has_chat_template:
            note(f"mlx-flash: {modelfile.base} has no chat template: it continues a text of the messages' lines")
        conversation = Conversation(model, modelfile, sampling, grammar)
        if last is not None:
            conversation.resume(last[1])
        conversation.pictures = [str(file.absolute()) for file in args.image or ()]
        loading = time.perf_counter() - began
        talk = Talk(conversation, loading, out, bool(args.verbose), is_typed or args.resume)
        if read is None or prompt is not None:
            talk.answer(str(prompt))
            return 0
        return talk.converse(read, is_typed)


def _source(args: argparse.Namespace, modelfile: Modelfile, config: FlashConfig) -> tuple[Source, BatchOptions]:
    """Return the model of a conversation, and how it is computed."""
    sees = is_vision(args, fetched(modelfile.base), prefers=False)
    for file in args.image or ():
        _check_picture(str(file))
    if sees and (modelfile.chat_template is not None or args.max_kv_size):
        raise ConfigError(
            f"{modelfile.base} sees, and mlx-vlm takes no TEMPLATE or --max-kv-size. "
            "Hint: leave them out, or give --no-vision."
        )
    settings = {"trust_remote_code": bool(args.trust_remote_code)}
    config = replace(config, kv_prefixes=config.kv_prefixes or "off")
    source = source_of(modelfile, modelfile.base, Source(config=config, vision=sees, tokenizer_settings=settings))
    return source, BatchOptions(is_conversation=True, max_kv_size=args.max_kv_size)


def _described(args: argparse.Namespace, model: str | None) -> tuple[Modelfile, str | None]:
    """Return the Modelfile, or one that only names a model, with what flags say, and the prompt of the command line."""
    words = [*args.words, *([] if args.prompt is None else [args.prompt])]
    model = args.model or (model if args.file is None else None)
    if args.model is None and args.file is None and words and (len(words) > 1 or _names_model(words[0])):
        model = words.pop(0)
    if len(words) > 1:
        raise ConfigError(f"run takes one prompt, not {len(words)}. Hint: put a prompt of several words in quotes.")
    if model is None and args.command == "chat":
        model = DEFAULT_MODEL
    if model is not None and args.file is not None:
        raise ConfigError(f"run: both a model, {model}, and a Modelfile, {args.file}, are given. Hint: leave one out.")
    if model is None and args.file is None and not Path("Modelfile").exists():
        near = did_you_mean(words[0], known_models()) if words else ""
        raise ConfigError(
            'run found neither a model nor ./Modelfile. Hint: mlx-flash run DIR_OR_REPO "PROMPT", or a name that '
            f"`mlx-flash models` lists{near}"
        )
    found = read_modelfile(args.file or "Modelfile") if model is None else find_modelfile(model)
    given = {"temperature": args.temp, "top_p": args.top_p, "num_predict": args.max_tokens}
    parameters = {**found.parameters, **{name: value for name, value in given.items() if value is not None}}
    adapter = Path(args.adapter_path) if args.adapter_path else found.adapter
    system = args.system_prompt or found.system
    return replace(found, parameters=parameters, adapter=adapter, system=system), words[0] if words else None


def _names_model(word: str) -> bool:
    """Return True for a folder, a name, and for the form of a repository or of a name of Ollama."""
    is_repository = re.fullmatch(r"[\w.-]+/[\w.-]+", repository_of(word)) is not None
    is_folder = os.path.isdir(word)  # noqa: PTH112 - a prompt too long for a file is no error
    return is_folder or word in named_models() or is_repository or is_ollama_name(word)
